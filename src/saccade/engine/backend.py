"""`Backend`: what a kernel family hands to the dispatcher. Imports nothing from any family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Backend:
    """One way to compute an operation.

    `why_not` and `prefers` take the description of a call (`Problem`, or that of the operation).
    `why_not` lists what makes this call impossible, one sentence each with the actual value; an empty list means it can run.
    `prefers` says whether `backend="auto"` should pick it; it must follow the measured tables in `benchmarks/results`.
    `by_name_only` gives a few words on why `auto` never takes it for such a problem; empty if it may.
    `unpreferred` says in a sentence why `prefers` says no, for `explain`.
    `own_dropout`: it draws its dropout itself, so that no key is drawn for it and no reference can follow it.
    `is_reference`: it is the meaning of the operation, slow, and O(Tq * Tk) in memory.
    `describe_launches` and `describe_backward` describe what runs a call that was made, so that C++ can make it again; None where it cannot.
    `takes_as_it_is` says whether torch's function may be called with the tensors as they are.
    A backend has either `attend` (plain torch, differentiated by torch) or `launchers` (imported at first use).
    """

    name: str
    operation: str
    summary: str
    why_not: Callable[[Any], list[str]]
    prefers: Callable[[Any], bool]
    attend: Callable[..., tuple[Tensor, Tensor | None]] | None = None
    launchers: Callable[[], Any] | None = None
    saves_output: bool = False
    own_dropout: bool = False
    is_reference: bool = False
    describe_config: Callable[[Any], str] | None = None
    by_name_only: Callable[[Any], str] = lambda problem: ""
    unpreferred: Callable[[Any], str] = lambda problem: ""
    describe_launches: Callable[..., Any] | None = None
    describe_backward: Callable[..., Any] | None = None
    takes_as_it_is: Callable[[Any], bool] = lambda args: False

    def asked(self, backend: str) -> str:
        """How the ops name it: "auto:" before its name where a call left the choice to us, so that another may take its place."""
        return f"auto:{self.name}" if backend == "auto" else self.name
