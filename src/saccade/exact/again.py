"""Calls of `attention` that C++ makes again (`saccade.native`): which calls qualify, and how Python describes them to C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade import native
from saccade.engine import prepare
from saccade.engine.layout import shares_memory, strides_like_heads, unpack
from saccade.engine.prepare import Prepared
from saccade.engine.problem import made_again
from saccade.exact.args import AttentionArgs
from saccade.exact.op import OPS
from saccade.exact.problem import by_window, in_one_batch
from saccade.native.described import Place


def offer(
    prepared: Prepared, call: tuple, inputs: tuple[Tensor, ...], args: AttentionArgs, out: Tensor, lse: Tensor | None
) -> None:
    """Describe a call that Python has made to C++, once per prepared call.

    call: all arguments of the public function, in their order. inputs: the tensors among them, query, key and value or one packed
        tensor, then the mask or bias if there is one, then the lengths.
    """
    if native.calls is None:
        native.start(prepare.forget)
        return
    prepared.offered = True
    problem, chosen = prepared.problem, prepared.backend
    if not made_again(problem) or (inputs[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if chosen.own_dropout and args.lengths is None:
        _offer_torch(prepared, call, inputs, args)
    elif chosen.describe_launches is not None and lse is not None and (args.bias is None or not shares_memory(args.bias)):
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
    native.calls.remember_torch(call, float(problem.dropout_p), problem.is_causal, problem.scale, grouped, seen, hidden)


def _offer_ours(
    prepared: Prepared, call: tuple, inputs: tuple[Tensor, ...], args: AttentionArgs, out: Tensor, lse: Tensor
) -> None:
    """Describe a call that one launch of our own kernel computes."""
    problem, chosen = prepared.problem, prepared.backend
    assert chosen.describe_launches is not None
    if problem.windows and any(x.data_ptr() != given.data_ptr() for x, given in zip(args[:3], inputs[:3], strict=True)):
        return  # images and windows were copied to be one batch, but C++ launches with the tensors as they are given
    packed, drops = problem.packed, args.seed is not None
    # what the kernel took in the place of what was given: lengths of another dtype as int32, of an expanded mask one row
    wide = args.lengths is not None and args.lengths is not inputs[-1]
    mask = 1 if packed else 3
    expanded = mask if args.mask is not None and args.mask is not inputs[mask] else -1
    taken = [x for x in (args.mask, args.bias, args.lengths) if x is not None]
    inputs, given = (*inputs[: len(inputs) - len(taken)], *taken), inputs
    forward = chosen.describe_launches(args, out, lse, _forward_places(inputs, args, packed))
    if forward is None:
        return
    empty = [_like(x, packed) for x in (inputs[:1] if packed else args[:3])] if problem.needs_grad else []
    if problem.bias_grad and args.bias is not None:
        empty.append(torch.empty(args.bias.shape, dtype=args.bias.dtype, device="meta"))
    if problem.windows:
        empty = [by_window(problem, x) for x in empty[:3]] + [x.view(given[3].shape) for x in empty[3:]]
    lengths = -1 if args.lengths is None else len(inputs) - 1
    form = (packed, chosen.saves_output, drops, lengths, problem.kv_len, wide, expanded)
    backward = _backward_by_python(prepared, native.calls.key(call), args, packed)
    native.calls.remember(call, out.transpose(1, 2) if packed else out, lse, forward, empty, backward, form)


def _like(tensor: Tensor, packed: bool) -> Tensor:
    """A tensor without data that has the layout of a gradient."""
    if packed:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.shape, strides_like_heads(tensor), dtype=tensor.dtype, device="meta")


def _places(inputs: tuple[Tensor, ...], args: AttentionArgs, packed: bool) -> dict[str, Place]:
    """The places of the inputs of a call."""
    if packed:
        found = _thirds(0, inputs[0], ("query", "key", "value"))
    else:
        found = {name: (i, 0) for i, name in enumerate(("query", "key", "value"))}
    names = [name for name, x in (("mask", args.mask), ("bias", args.bias), ("lengths", args.lengths)) if x is not None]
    return found | {name: (len(inputs) - len(names) + i, 0) for i, name in enumerate(names)}


def _thirds(slot: int, packed: Tensor, names: tuple[str, ...]) -> dict[str, Place]:
    """The three tensors in a packed one."""
    return {name: (slot, i * packed.stride(2) * packed.element_size()) for i, name in enumerate(names)}


def _behind(first: int, *names: str) -> dict[str, Place]:
    return {name: (first + i, 0) for i, name in enumerate(names)}


def _forward_places(inputs: tuple[Tensor, ...], args: AttentionArgs, packed: bool) -> dict[str, Place]:
    """Where C++ puts the tensors of a forward call."""
    return _places(inputs, args, packed) | _behind(len(inputs), "out", "lse", *["seed"] * (args.seed is not None))


def _backward_places(
    inputs: tuple[Tensor, ...], args: AttentionArgs, saves_out: bool, packed: bool, bias_grad: bool
) -> dict[str, Place]:
    """Where C++ puts the tensors of a backward call; pieces of scratch memory begin at "scratch"."""
    names = ["lse", "dout", *["out"] * saves_out, *["seed"] * (args.seed is not None)]
    found = _places(inputs, args, packed) | _behind(len(inputs), *names)
    first, gradients = len(inputs) + len(names), ("dquery", "dkey", "dvalue")
    behind = (*["dbias"] * bias_grad, "scratch")
    if packed:
        return found | _thirds(first, torch.empty_like(inputs[0], device="meta"), gradients) | _behind(first + 1, *behind)
    return found | _behind(first, *gradients, *behind)


def _backward_by_python(prepared: Prepared, key: Any, made: AttentionArgs, packed: bool) -> Callable[..., tuple[Tensor, ...]]:
    """What C++ calls for an incoming gradient with a layout not seen before: computes the gradients, and describes the launch for
    later calls. made: the arguments of the forward call."""
    problem, launches, chosen = prepared.problem, prepared.launches, prepared.backend
    has_mask, has_bias = made.mask is not None, made.bias is not None
    has_lengths, has_seed = made.lengths is not None, made.seed is not None
    count = (1 if packed else 3) + has_mask + has_bias + has_lengths

    def backward(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, (lse, dout, *others) = tensors[:count], tensors[count:]
        out = others[0] if chosen.saves_output else None
        query, key_, value = unpack(inputs[0]) if packed else inputs[:3]
        added = inputs[count - 1 - has_lengths]  # a mask or a bias, if there is one
        folded = dout
        if problem.windows:
            query, key_, value, added, folded = map(in_one_batch, (query, key_, value, added, dout))
            lse = lse.flatten(0, 1)
        args = AttentionArgs(
            query, key_, value, added if has_mask else None, added if has_bias else None, inputs[-1] if has_lengths else None,
            others[-1] if has_seed else None, problem.dropout_p, problem.is_causal, problem.scale, launches,
        )  # fmt: skip
        into = torch.empty_like(inputs[0]) if packed else None
        with torch.no_grad():
            dq, dk, dv, dbias = OPS.launchers(prepared.asked).backward(
                args, folded, None, out, lse, bias_grad=problem.bias_grad, packed=into
            )
        places = _backward_places(inputs, args, chosen.saves_output, packed, problem.bias_grad)
        planned = chosen.describe_backward and chosen.describe_backward(args, folded, out, lse, (dq, dk, dv), places)
        if planned is not None and native.calls is not None and folded.data_ptr() == dout.data_ptr():
            native.calls.remember_backward(key, dout, *planned)
        if problem.windows:
            dq, dk, dv = (by_window(problem, x) for x in (dq, dk, dv))
            dbias = None if dbias is None else dbias.view(inputs[3].shape)
        return tuple([x for x in ((into, dbias) if into is not None else (dq, dk, dv, dbias)) if x is not None])

    return backward
