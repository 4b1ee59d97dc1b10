"""`Operation`: one row of the table of operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from saccade.engine.backend import Backend


@dataclass(frozen=True)
class Operation:
    """One operation, as the command line and the benchmarks see it.

    describe: the function that checks the arguments of a call and describes it.
    cases: its named problems. check: `(case, dtype, device, backend, lse=True) -> results`; each result is compared with float64.
    decoding: backends that attend one token at a time over a cache of keys.
    everyday: arguments that an everyday call needs beside its tensors.
    tables: prefixes of the names of its benchmark tables.
    """

    name: str
    backends: tuple[Backend, ...]
    describe: Callable[..., Any]
    cases: tuple[Any, ...]
    check: Callable[..., list[Any]]
    tables: tuple[str, ...]
    decoding: tuple[Backend, ...] = ()
    everyday: dict[str, Any] = field(default_factory=dict)
