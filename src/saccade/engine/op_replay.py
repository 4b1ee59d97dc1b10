"""Calls of ops that C++ replays (`saccade.native`), as compiled programs make them: below autograd, thousands of times."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from saccade import native
from saccade.engine import prepare
from saccade.engine.switch import is_disabled
from saccade.native.recording import Recorder
from saccade.recorder import ACTIVE

# keys of calls that C++ cannot replay
_REFUSED: set[tuple] = set()


class OpReplay(NamedTuple):
    """How C++ looks up the calls of an op, and how a call is described to it.

    call: the arguments of the op -> the call as C++ takes it, or None if C++ never replays such a call. layouts: of the results of a call, from which
    C++ allocates those of another: a tensor laid out like the result, or (such a tensor,) if the result begins as zeros.
    """

    call: Callable[[tuple], tuple | None]
    layouts: Callable[[tuple[Tensor, ...]], list]


def same_layouts(results: tuple[Tensor, ...]) -> list:
    """Results of a call that differs from this one only in its data."""
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in results]


def replayed(call: tuple | None) -> tuple[Tensor, ...] | None:
    """The results of a call that C++ replays; None if it does not know the call, and for an op of a call that is recorded: its recorder has to be told
    of the launches."""
    return None if native.calls is None or call is None or ACTIVE.recorder is not None else native.calls.compute(*call)


def may_record(call: tuple, query: Tensor) -> bool:
    """Whether to record the launches of a call that Python makes: not within another that is recorded, not during a capture, and not if C++ refused such
    a call."""
    if not query.is_cuda or ACTIVE.recorder is not None or torch.cuda.is_current_stream_capturing():
        return False
    if native.calls is None:
        native.start(prepare.forget)
        return False
    key = native.calls.key(call)
    return key is not None and key not in _REFUSED


def recorded(
    layouts: Callable[[tuple[Tensor, ...]], list],
    call: tuple,
    make: Callable[[], tuple[Tensor, ...]],
    limits: Callable[[], tuple] | None = None,
) -> tuple[Tensor, ...]:
    """The results of a call that Python makes, and that C++ will replay if it can. layouts: as of `OpReplay`. limits: those of a packed batch, as
    `Backend.limits` has them; None for other calls."""
    with Recorder() as recorder:
        results = make()
    if is_disabled():  # another thread may have disabled the library during the call, and forgotten all calls
        return results
    given = [x for x in call if isinstance(x, Tensor)]
    planned = recorder.planned((*given, *results), len(given))
    if planned is not None:
        native.calls.remember_op(call, layouts(results), planned, () if limits is None else limits())
    elif limits is None:  # else a smaller batch of the kind may be replayed
        if len(_REFUSED) >= 4096:  # only an endless stream of new shapes gets here
            _REFUSED.clear()
        _REFUSED.add(native.calls.key(call))
    return results
