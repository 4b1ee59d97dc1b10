"""`Backend`: how a family of kernels presents itself to the dispatcher. Imports nothing from any family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from saccade.engine.rule import Rule
from saccade.engine.switch import is_disabled


class Launchers(NamedTuple):
    """The entry points of a family of kernels of `attention` or `attention_varlen`. args: the record of the operation.

    forward:  `args -> (out, lse)`
    backward: `(args, dout, dlse | None, out | None, lse, *, bias_grad, packed) -> (dq, dk, dv, dbias | None)`; dq, dk and dv are written into
              views of `packed`, an empty tensor of the shape of the packed input, if one is given.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True)
class Backend:
    """One way to compute an operation.

    `why_not` and `prefers` take the description of a call (`Problem`, or the operation's own).
    `why_not` lists the obstacles to running this call, one sentence each with the actual value; an empty list means it can run.
    `prefers` says whether `backend="auto"` should pick it; it must follow the measured tables in `benchmarks/results`.
    `by_name_only` says in a few words why `auto` never chooses it for such a problem; empty if it may.
    `spares_reference`: in spite of `by_name_only`, `auto` takes it for a call that only the reference could run else.
    `rule` says in a sentence why `prefers` says what it says, and names the rows of a committed table that show it, for `explain`.
    `own_dropout`: it draws its dropout itself, so no Philox key is drawn for it and no reference can reproduce its draw.
    `is_reference`: it defines the meaning of the operation; it is slow and takes O(Tq * Tk) memory.
    `is_torch`: it uses only torch's operations, so it runs while saccade is disabled.
    `form` gives the kernels and configurations that run a call; `explain` prints it, and the launchers call the same function.
    `replays`: C++ may replay its launches, which are noted while Python makes them (`saccade.native.recording`).
    `limits` gives the sizes up to which a batch of packed tokens takes one launch, and whether this batch does; `saccade.native`
    checks them.
    `takes_as_it_is` says whether torch's function may be called with the tensors unchanged.
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
    is_torch: bool = False
    form: Callable[[Any], Any] | None = None
    by_name_only: Callable[[Any], str] = lambda problem: ""
    spares_reference: bool = False
    rule: Callable[[Any], Rule | None] = lambda problem: None
    replays: bool = False
    limits: Callable[[Any], tuple[int, int, int, bool, bool]] | None = None
    takes_as_it_is: Callable[[Any], bool] = lambda args: False

    @property
    def may_run(self) -> bool:
        """Whether the process's switch lets it run."""
        return self.is_torch or self.is_reference or not is_disabled()
