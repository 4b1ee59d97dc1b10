"""Calls of the ops of `attention` that C++ makes again (`saccade.native`), as compiled programs make them: below autograd, thousands of times."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade import native
from saccade.engine import prepare
from saccade.engine.backend import Backend
from saccade.exact.args import AttentionArgs
from saccade.launch.aside import failure_of
from saccade.launch.cache import LaunchCache
from saccade.native.described import Described, Place

_FORWARD = ("query", "key", "value", "mask", "bias", "lengths", "seed")
_BACKWARD = ("dout", "dlse", "out", "lse", *_FORWARD)
# keys of calls that C++ cannot make
_REFUSED: set[tuple] = set()


def made(call: tuple) -> tuple[Tensor, ...] | None:
    """The results of a call that C++ knows."""
    return None if native.calls is None else native.calls.compute(*call)


def launches_for(call: tuple) -> LaunchCache | None:
    """Where launchers note what they work out for a call that is to be described; None where they keep it for themselves."""
    query = call[0]
    if not query.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    if native.calls is None:
        native.start(prepare.forget)
        return None
    return None if native.calls.key(call) in _REFUSED else LaunchCache()


def offer_forward(chosen: Backend, call: tuple, args: AttentionArgs, results: tuple[Tensor, Tensor]) -> None:
    """Describe a forward call that Python has made; args.launches from `launches_for`."""
    launches = None
    if chosen.describe_launches is not None and _ran(chosen, args):
        launches = chosen.describe_launches(args, _places(_FORWARD, call, "out", "lse"))
    _remember(call, args, results, launches, ())


def offer_backward(chosen: Backend, call: tuple, args: AttentionArgs, results: tuple[Tensor, ...]) -> None:
    """Describe a backward call that Python has made; args.launches from `launches_for`."""
    (dout, dlse, out, lse), (bias_grad, _, _) = call[:4], call[-3:]
    planned = None
    if chosen.describe_backward is not None and dlse is None and not bias_grad and _ran(chosen, args):
        places = _places(_BACKWARD, call, "dquery", "dkey", "dvalue", "none", "scratch")
        planned = chosen.describe_backward(args, dout, out, lse, False, places)
    _remember(call, args, results, planned and planned.launches, planned and planned.scratch)


def _ran(chosen: Backend, args: AttentionArgs) -> bool:
    """Whether the launchers ran this backend, and the call is to be described."""
    shapes = tuple(args.query.shape), tuple(args.key.shape)
    return args.launches is not None and failure_of((chosen.operation, chosen.name, *shapes, args.query.dtype)) is None


def _places(names: tuple[str, ...], call: tuple, *behind: str) -> dict[str, Place]:
    given = [name for name, x in zip(names, call, strict=False) if x is not None]
    return {name: (slot, 0) for slot, name in enumerate((*given, *behind))}


def _remember(
    call: tuple, args: AttentionArgs, results: tuple[Tensor, ...], launches: list[Described] | None, scratch: tuple[int, ...] | None
) -> None:  # fmt: skip
    if args.launches is None:
        return
    if launches is None:
        if len(_REFUSED) >= 4096:  # only a stream of ever new shapes gets here
            _REFUSED.clear()
        _REFUSED.add(native.calls.key(call))
        return
    empty = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in results]
    native.calls.remember_op(call, empty, launches, scratch, (), ())
