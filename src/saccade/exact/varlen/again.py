"""Calls of `attention_varlen` that C++ makes again (`saccade.native`): which calls qualify, and how Python describes them to C++."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from saccade import native
from saccade.engine import prepare
from saccade.engine.prepare import Prepared
from saccade.env import check_lengths
from saccade.exact.varlen.args import ALIGNMENTS, VarlenArgs, VarlenCall
from saccade.exact.varlen.op import OPS
from saccade.native.described import Place

_INPUTS = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
_NAMES = VarlenCall._fields
# what follows the probability of dropout
_options = itemgetter(*[i for i, name in enumerate(_NAMES) if i > _NAMES.index("dropout_p") and name != "attn_bias"])
_GRADIENTS = ("dquery", "dkey", "dvalue")


def call_of(call: tuple, qkv: Tensor | None) -> tuple:
    """A call in the order of `VarlenCall`, without a bias, as C++ looks it up: the longest lengths first, which are no part of what it is remembered
    by; then its tensors, or `qkv` and one cu_seqlens; then its options."""
    causal, *options = _options(call)
    tensors = call[:5] if qkv is None else (qkv, call[3])
    return (*call[5:7], *tensors, call[7], ALIGNMENTS[causal], *options)


def made(call: tuple) -> Tensor | None:
    """The output of a call of a kind that C++ knows; None of any other, and where lengths are to be checked."""
    if native.calls is None or check_lengths():
        return None
    return native.calls.run_ragged(*call)


def offer(prepared: Prepared, call: tuple, args: VarlenArgs, out: Tensor, lse: Tensor | None, qkv: Tensor | None) -> None:
    """Describe a call that Python has made to C++, once for each layout of its tensors. qkv: what query, key and value are views of."""
    if native.calls is None:
        native.start(prepare.forget)
        return
    chosen, inputs = prepared.backend, args[:5] if qkv is None else (qkv, args[3])
    if chosen.describe_launches is None or chosen.limits is None or lse is None or prepared.problem.return_lse:
        return
    if not all(x is y for x, y in zip(inputs, call[2:], strict=False)) or any(x.stride(-1) != 1 for x in inputs):
        return  # offsets of another dtype were converted; tensors of another layout were copied
    if inputs[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return
    layout = ("offered", *[(x.stride(), x.data_ptr() % 16) for x in inputs], args[3] is args[4])
    if prepared.launches.get(layout) is not None:
        return
    launches = chosen.describe_launches(args, out, lse, _places(qkv, "out", "lse", *["seed"] * (args.seed is not None)))
    if launches is None:
        return
    prepared.launches.remember(layout, True)
    differentiable = (args[:3] if qkv is None else (qkv,)) if prepared.problem.needs_grad else ()
    empty = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in differentiable]
    numbers = args.dropout_p, args.causal, args.scale
    backward = _backward_by_python(prepared, native.calls.key(call), numbers, args.seed is not None, qkv is not None)
    form = (chosen.saves_output, args.seed is not None, *chosen.limits(args))
    native.calls.remember_ragged(call, out, lse, launches, empty, backward, form)


def _places(qkv: Tensor | None, *names: str) -> dict[str, Place]:
    """Where C++ has the tensors of a call, and behind them others."""
    if qkv is None:
        return _behind(0, *_INPUTS, *names)
    return _thirds(0, qkv, *_INPUTS[:3]) | _behind(1, "cu_seqlens_q") | _behind(1, "cu_seqlens_k") | _behind(2, *names)


def _behind(first: int, *names: str) -> dict[str, Place]:
    return {name: (first + i, 0) for i, name in enumerate(names)}


def _thirds(slot: int, qkv: Tensor, *names: str) -> dict[str, Place]:
    """The three tensors in one `[T, 3, H, D]`."""
    return {name: (slot, i * qkv.stride(1) * qkv.element_size()) for i, name in enumerate(names)}


def _backward_by_python(
    prepared: Prepared, key: Any, numbers: tuple, has_seed: bool, packed: bool
) -> Callable[..., tuple[Tensor, ...]]:
    """What C++ calls for an incoming gradient with a layout not seen before: computes the gradients, and describes the launch for later calls.

    It lives as long as the process, so it holds no tensor of the call that was described. numbers: (dropout_p, causal, scale), which hold for
    all calls of the kind. packed: of one tensor.
    """
    chosen = prepared.backend
    names = ("lse", "dout", *["out"] * chosen.saves_output, *["seed"] * has_seed)

    def backward(*given: Any) -> tuple[Tensor, ...]:
        *tensors, max_q, max_k = given
        count = 2 if packed else len(_INPUTS)
        lse, dout, *others = tensors[count:]
        out, seed = others[0] if chosen.saves_output else None, others[-1] if has_seed else None
        qkv = tensors[0] if packed else None
        query, key_, value, offsets_q, offsets_k = tensors[:count] if qkv is None else (*qkv.unbind(1), tensors[1], tensors[1])
        args = VarlenArgs(query, key_, value, offsets_q, offsets_k, None, seed, max_q, max_k, *numbers)
        into = None if qkv is None else torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        with torch.no_grad():
            gradients = OPS.launchers(prepared.asked).backward(args, dout, None, out, lse, bias_grad=False, packed=into)[:3]
        places = _places(qkv, *names) | _places_of_gradients(count + len(names), into)
        described = chosen.describe_backward and chosen.describe_backward(args, dout, out, lse, gradients, places)
        if described is not None and native.calls is not None:
            native.calls.remember_backward(key, dout, *described)
        return gradients if into is None else (into,)

    return backward


def _places_of_gradients(first: int, into: Tensor | None) -> dict[str, Place]:
    """From slot `first` on: three tensors or one, then scratch memory."""
    if into is None:
        return _behind(first, *_GRADIENTS, "scratch")
    return _thirds(first, into, *_GRADIENTS) | _behind(first + 1, "scratch")
