"""Calls of `attention` that C++ makes again (`saccade.native`): which may be, and what it is told of one that Python has made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade import native
from saccade.engine import prepare
from saccade.engine.layout import unpack
from saccade.engine.prepare import Prepared
from saccade.exact import op
from saccade.exact.args import AttentionArgs

# by backend, is_causal, enable_gqa and whether the input is packed
_FLAGS = {
    (backend, causal, grouped, packed): number
    for number, (backend, causal, grouped, packed) in enumerate(
        (backend, causal, grouped, packed)
        for backend in ("auto", "short")
        for causal in (False, True)
        for grouped in (False, True)
        for packed in (False, True)
    )
}


def flags_of(
    attn_mask: Any,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
    lengths: Any,
    return_lse: Any,
    packed: bool,
    backend: Any,
) -> int | None:
    """A number for the options of a call that C++ may make; None of one that Python looks at every time."""
    if torch.compiler.is_compiling() or lengths is not None or scale is not None or return_lse is not False:
        return None
    if type(dropout_p) is not float or dropout_p != 0.0 or type(is_causal) is not bool or type(enable_gqa) is not bool:
        return None
    if attn_mask is not None and (is_causal or not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool):
        return None
    return _FLAGS.get((backend, is_causal, enable_gqa, packed)) if isinstance(backend, str) else None


def offer(
    prepared: Prepared, flags: int, inputs: tuple[Tensor, ...], args: AttentionArgs, out: Tensor, lse: Tensor | None
) -> None:
    """Tell C++ of a call that Python has made, once. inputs: query, key and value or one packed tensor, and the mask if there is one."""
    if native.calls is None:
        native.start(prepare.forget)
        return
    prepared.offered = True
    problem, chosen = prepared.problem, prepared.backend
    if chosen.own_dropout:  # torch's own function
        if args.mask is None and len(inputs) == 3 and problem.heads == problem.kv_heads and chosen.takes_as_it_is(args):
            native.calls.remember_torch((flags, *inputs), problem.is_causal)
        return
    if chosen.describe_launches is None or lse is None:
        return
    forward = chosen.describe_launches(args, _places(inputs, args), len(inputs))
    if forward is None:
        return
    key = native.calls.key((flags, *inputs))
    packed = inputs[0].dim() == 5
    gradients = [inputs[0]] if packed else list(inputs[:3])
    empty = [_like(x) for x in gradients] if problem.needs_grad else []
    backward = _backward_by_python(prepared, key, args.mask is not None, packed)
    native.calls.remember((flags, *inputs), out.transpose(1, 2) if packed else out, lse, [forward], empty, backward, packed)


def _like(tensor: Tensor) -> Tensor:
    """A gradient's layout: without data."""
    if tensor.dim() == 5:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    from saccade.engine.layout import strides_like_heads

    return torch.empty_strided(tensor.shape, strides_like_heads(tensor), dtype=tensor.dtype, device="meta")


def _places(inputs: tuple[Tensor, ...], args: AttentionArgs) -> dict[str, tuple[int, int]]:
    """Slot and offset in bytes of each tensor of a call among its inputs."""
    if inputs[0].dim() == 5:
        step = inputs[0].stride(2) * inputs[0].element_size()
        found = {name: (0, i * step) for i, name in enumerate(("query", "key", "value"))}
    else:
        found = {name: (i, 0) for i, name in enumerate(("query", "key", "value"))}
    return found if args.mask is None else {**found, "mask": (len(inputs) - 1, 0)}


def _backward_by_python(prepared: Prepared, key: Any, masked: bool, packed: bool) -> Callable[..., tuple[Tensor, ...]]:
    """What C++ calls for an incoming gradient that lies as none before: the gradients, and how to launch them from then on."""
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
