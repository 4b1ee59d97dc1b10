"""`Operation`: one row of the table of operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from saccade.engine.backend import Backend


@dataclass(frozen=True)
class Operation:
    """What the command line and the benchmarks loop over.

    describe: the function that checks the arguments of a call and describes it.
    cases: its named problems. check: `(case, dtype, device, backend, lse=True) -> results`, each compared with float64.
    decoding: backends that attend one token at a time over a cache of its keys.
    everyday: arguments that an everyday call needs beside its tensors.
    tables: how the names of its benchmark tables begin.
    """

    name: str
    backends: tuple[Backend, ...]
    describe: Callable[..., Any]
    cases: tuple[Any, ...]
    check: Callable[..., list[Any]]
    tables: tuple[str, ...]
    decoding: tuple[Backend, ...] = ()
    everyday: dict[str, Any] = field(default_factory=dict)
