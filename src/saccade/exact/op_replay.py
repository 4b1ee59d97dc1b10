"""Calls of ops that C++ replays (`saccade.native`), as compiled programs make them: below autograd, thousands of times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import native
from saccade.engine import prepare
from saccade.engine.backend import Backend
from saccade.launch.disabled import failure_of
from saccade.native.described import Place, Planned

# keys of calls that C++ cannot replay
_REFUSED: set[tuple] = set()


class OpReplay(NamedTuple):
    """How C++ looks up the calls of an op, and what it is told of one.

    call: the arguments of the op -> the call as C++ takes it, or None if C++ never replays such a call. names: of the items of a call, in its order.
    results: names of the results, and of scratch memory. layouts: of the results of a call, from which C++ allocates those of another.
    """

    call: Callable[[tuple], tuple | None]
    names: tuple[str, ...]
    results: tuple[str, ...]
    layouts: Callable[[tuple[Tensor, ...]], list]

    def places(self, call: tuple) -> dict[str, Place]:
        """The places in C++ of the tensors of a call and of its results."""
        given = [name for name, x in zip(self.names, call, strict=False) if isinstance(x, Tensor)]
        return {name: (slot, 0) for slot, name in enumerate((*given, *self.results))}


def same_layouts(results: tuple[Tensor, ...]) -> list:
    """Results of a call that differs from this one only in its data."""
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in results]


def replayed(call: tuple | None) -> tuple[Tensor, ...] | None:
    """The results of a call that C++ replays; None if it does not know the call."""
    return None if native.calls is None or call is None else native.calls.compute(*call)


def may_record(call: tuple, query: Tensor) -> bool:
    """Whether the launches of a call that Python makes are to be described: not while a graph is captured, nor what was refused."""
    if not query.is_cuda or torch.cuda.is_current_stream_capturing():
        return False
    if native.calls is None:
        native.start(prepare.forget)
        return False
    return native.calls.key(call) not in _REFUSED


def record(
    replay: OpReplay, call: tuple, results: tuple[Tensor, ...], chosen: Backend, args: Any, planned: Planned | None
) -> None:
    """Describe a call that Python has made; planned: its launches, None if C++ cannot replay them."""
    if planned is not None:
        limits = () if chosen.limits is None else chosen.limits(args)
        layouts = replay.layouts(results)
        native.calls.remember_op(call, layouts, planned, limits)
        return
    if len(_REFUSED) >= 4096:  # only a stream of ever new shapes gets here
        _REFUSED.clear()
    _REFUSED.add(native.calls.key(call))


def ran(chosen: Backend, query: Any, key: Any) -> bool:
    """Whether the launchers ran this backend, and no other in its place."""
    return failure_of((chosen.operation, chosen.name, tuple(query.shape), tuple(key.shape), query.dtype)) is None
