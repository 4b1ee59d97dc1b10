"""Calls of `attention_varlen` that C++ makes again (`saccade.native`): which calls qualify, and how Python describes them to C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade import native
from saccade.engine import prepare
from saccade.engine.prepare import Prepared
from saccade.env import check_lengths
from saccade.exact.varlen import op
from saccade.exact.varlen.args import VarlenArgs
from saccade.native.described import Place

_ALIGNMENTS = ("full", "upper", "lower")
_INPUTS = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
_GRADIENTS = ("dquery", "dkey", "dvalue")


def call_of(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, causal: int, scale: float | None, enable_gqa: bool, return_lse: bool, backend: str,
) -> tuple:  # fmt: skip
    """A call as C++ looks it up: the longest lengths first, which are no part of what it is remembered by."""
    return (
        max_seqlen_q, max_seqlen_k, query, key, value, cu_seqlens_q, cu_seqlens_k, dropout_p, _ALIGNMENTS[causal], scale, enable_gqa,
        return_lse, backend,
    )  # fmt: skip


def made(call: tuple) -> Tensor | None:
    """The output of a call of a kind that C++ knows; None of any other, and where lengths are to be checked."""
    if native.calls is None or check_lengths():
        return None
    return native.calls.run_ragged(*call)


def offer(prepared: Prepared, call: tuple, args: VarlenArgs, out: Tensor, lse: Tensor | None) -> None:
    """Describe a call that Python has made to C++, once for each layout of its tensors."""
    if native.calls is None:
        native.start(prepare.forget)
        return
    chosen, inputs = prepared.backend, args[:5]
    if chosen.describe_launches is None or chosen.limits is None or lse is None or prepared.problem.return_lse:
        return
    if not all(x is y for x, y in zip(inputs, call[2:7], strict=True)) or any(x.stride(-1) != 1 for x in inputs):
        return  # offsets of another dtype were converted; tensors of another layout were copied
    if inputs[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return
    layout = ("offered", *[(x.stride(), x.data_ptr() % 16) for x in inputs], inputs[3] is inputs[4])
    if prepared.launches.get(layout) is not None:
        return
    names = (*_INPUTS, "out", "lse", *["seed"] * (args.seed is not None))
    launches = chosen.describe_launches(args, out, lse, _places(names))
    if launches is None:
        return
    prepared.launches.remember(layout, True)
    empty = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in args[:3]] if prepared.problem.needs_grad else []
    backward = _backward_by_python(prepared, native.calls.key(call), args)
    form = (chosen.saves_output, args.seed is not None, *chosen.limits(args))
    native.calls.remember_ragged(call, out, lse, launches, empty, backward, form)


def _places(names: tuple[str, ...]) -> dict[str, Place]:
    return {name: (slot, 0) for slot, name in enumerate(names)}


def _backward_by_python(prepared: Prepared, key: Any, first: VarlenArgs) -> Callable[..., tuple[Tensor, ...]]:
    """What C++ calls for an incoming gradient with a layout not seen before: computes the gradients, and describes the launch for later calls.

    first: the arguments of the forward call that was described, of which only the numbers hold for all calls.
    """
    chosen, has_seed = prepared.backend, first.seed is not None

    def backward(*given: Any) -> tuple[Tensor, ...]:
        query, key_, value, offsets_q, offsets_k, lse, dout, *others, max_q, max_k = given
        out, seed = others[0] if chosen.saves_output else None, others[-1] if has_seed else None
        args = VarlenArgs(
            query, key_, value, offsets_q, offsets_k, None, seed, max_q, max_k, first.dropout_p, first.causal, first.scale
        )  # fmt: skip
        with torch.no_grad():
            gradients = op.launchers(prepared.asked).backward(args, dout, None, out, lse, bias_grad=False, packed=None)[:3]
        names = (*_INPUTS, "lse", "dout", *["out"] * chosen.saves_output, *["seed"] * has_seed, *_GRADIENTS, "scratch")
        described = chosen.describe_backward and chosen.describe_backward(args, dout, out, lse, gradients, _places(names))
        if described is not None and native.calls is not None:
            native.calls.remember_backward(key, dout, *described)
        return gradients

    return backward
