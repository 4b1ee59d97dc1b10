"""Calls of `attention` that C++ makes again (`saccade.native`): which calls qualify, and how Python describes them to C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade import native
from saccade.engine import prepare
from saccade.engine.layout import strides_like_heads, unpack
from saccade.engine.prepare import Prepared
from saccade.engine.problem import made_again
from saccade.exact import op
from saccade.exact.args import AttentionArgs


def offer(
    prepared: Prepared, call: tuple, inputs: tuple[Tensor, ...], args: AttentionArgs, out: Tensor, lse: Tensor | None
) -> None:
    """Describe a call that Python has made to C++, once per prepared call.

    call: all arguments of the public function, in their order. inputs: the tensors among them, query, key and value or one packed
        tensor, then the mask or bias if there is one.
    """
    if native.calls is None:
        native.start(prepare.forget)
        return
    prepared.offered = True
    problem, chosen = prepared.problem, prepared.backend
    if not made_again(problem) or (inputs[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if chosen.own_dropout:
        _offer_torch(prepared, call, inputs, args)
    elif chosen.describe_launches is not None and lse is not None and args.bias is None:
        _offer_ours(prepared, call, inputs, args, out, lse)


def _offer_torch(prepared: Prepared, call: tuple, inputs: tuple[Tensor, ...], args: AttentionArgs) -> None:
    """Describe a call that torch's own function computes."""
    problem, added = prepared.problem, args.mask if args.bias is None else args.bias
    grouped = problem.heads != problem.kv_heads
    if inputs[0].dim() == 5 or not prepared.backend.takes_as_it_is(args) or (grouped and added is not None):
        return
    seen = hidden = None
    if args.mask is not None:
        seen, hidden = (torch.tensor(x, dtype=args.query.dtype, device=args.query.device) for x in (0.0, float("-inf")))
    native.calls.remember_torch(call, problem.is_causal, problem.scale, grouped, seen, hidden)


def _offer_ours(
    prepared: Prepared, call: tuple, inputs: tuple[Tensor, ...], args: AttentionArgs, out: Tensor, lse: Tensor
) -> None:
    """Describe a call that one launch of our own kernel computes."""
    problem, chosen = prepared.problem, prepared.backend
    assert chosen.describe_launches is not None
    forward = chosen.describe_launches(args, _places(inputs, args), len(inputs))
    if forward is None:
        return
    key = native.calls.key(call)
    packed = inputs[0].dim() == 5
    gradients = [inputs[0]] if packed else list(inputs[:3])
    empty = [_like(x) for x in gradients] if problem.needs_grad else []
    backward = _backward_by_python(prepared, key, args.mask is not None, packed)
    native.calls.remember(call, out.transpose(1, 2) if packed else out, lse, [forward], empty, backward, packed)


def _like(tensor: Tensor) -> Tensor:
    """A tensor without data that has the layout of a gradient."""
    if tensor.dim() == 5:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.shape, strides_like_heads(tensor), dtype=tensor.dtype, device="meta")


def _places(inputs: tuple[Tensor, ...], args: AttentionArgs) -> dict[str, tuple[int, int]]:
    """For each tensor of a call: its slot among the inputs, and its offset there in bytes."""
    if inputs[0].dim() == 5:
        step = inputs[0].stride(2) * inputs[0].element_size()
        found = {name: (0, i * step) for i, name in enumerate(("query", "key", "value"))}
    else:
        found = {name: (i, 0) for i, name in enumerate(("query", "key", "value"))}
    return found if args.mask is None else {**found, "mask": (len(inputs) - 1, 0)}


def _backward_by_python(prepared: Prepared, key: Any, masked: bool, packed: bool) -> Callable[..., tuple[Tensor, ...]]:
    """What C++ calls for an incoming gradient with a layout not seen before: computes the gradients, and describes the launch for
    later calls."""
    problem, launches = prepared.problem, prepared.launches

    def backward(*tensors: Tensor) -> tuple[Tensor, ...]:
        *inputs, lse, dout = tensors
        mask = inputs.pop() if masked else None
        query, key_, value = unpack(inputs[0]) if packed else inputs
        args = AttentionArgs(query, key_, value, mask, None, None, None, 0.0, problem.is_causal, problem.scale, launches)
        into = torch.empty_like(inputs[0]) if packed else None
        with torch.no_grad():
            dq, dk, dv, _ = op.launchers(prepared.asked).backward(args, dout, None, None, lse, bias_grad=False, packed=into)
        kept = tuple(inputs) if mask is None else (*inputs, mask)
        describe = prepared.backend.describe_backward
        described = None if describe is None else describe(args, dout, lse, packed, _places(kept, args), len(kept))
        if described is not None and native.calls is not None:
            native.calls.remember_backward(key, dout, [described])
        return (into,) if into is not None else (dq, dk, dv)

    return backward
