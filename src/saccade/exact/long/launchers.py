"""Launchers of the backend `long`: dense rows `[B, H, T, D]`, with or without lengths, on the kernels of `sm90.py`.

The first call of a signature works out everything that depends only on metadata: a plan, and the layout of the results.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from saccade.engine.layout import empty_like_heads, unpack
from saccade.exact.args import AttentionArgs
from saccade.exact.long import bias_gradient, sm90
from saccade.exact.long.bias import readable
from saccade.exact.varlen.args import of_dense
from saccade.native.recording import refuse, scratch

if TYPE_CHECKING:
    from saccade.exact.shared_bias.launchers import Rows


def _mask_of(args: AttentionArgs) -> Tensor | None:
    return None if args.mask is None else of_dense(args).mask


def _bias_of(args: AttentionArgs) -> tuple[Tensor, ...]:
    """The bias as the copy engine reads it, if there is one."""
    bias = of_dense(args).bias
    if bias is None:
        return ()
    return (readable(bias),)


class _Known(NamedTuple):
    """The parts that are worked out once for calls that differ only in their data."""

    plan: sm90.Plan
    shapes: tuple[tuple[torch.Size, tuple[int, ...]], ...]  # sizes and strides of out, or of the gradients

    def results(self, like: Tensor) -> list[Tensor]:
        return [torch.empty_strided(size, strides, dtype=like.dtype, device=like.device) for size, strides in self.shapes]


def _known(args: AttentionArgs, key: Hashable, *moved: Tensor) -> _Known | None:
    """The known parts of a call if the copy engine can address its tensors. Their layout is that of the first call, but their addresses may be odd."""
    found = None if args.launches is None else args.launches.get(key)
    bias = () if args.bias is None else (args.bias,)
    return None if found is None or any(x.data_ptr() % 16 for x in (*moved, *bias)) else found


_FORWARD = "long forward"


def _backward_key(dout: Tensor, out: Tensor, lse: Tensor, packed: bool) -> tuple:
    return "long backward", dout.stride(), out.stride(), lse.stride(), packed


def _movable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if the copy engine cannot address it: an odd address or stride, or a stride of 0."""
    return tensor if tensor.stride(-1) == 1 and sm90.movable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _lengths_at(args: AttentionArgs) -> tuple[int, int, int, int]:
    return 0, 0 if args.lengths is None else args.lengths.data_ptr(), 0, 0


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """out laid out like query, lse float32 `[B, H, Tq]`. Raises as `sm90.forward`."""
    query = args.query
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    known = _known(args, _FORWARD, *args[:3])
    if known is not None:
        (out,) = known.results(query)
        sm90.run_forward(known.plan, (*args[:3], out, *_bias_of(args)), _lengths_at(args), lse, _mask_of(args), args.seed)
        return out, lse
    call, bias = of_dense(args), _bias_of(args)
    moved = [_movable(x) for x in call[:3]]
    out = empty_like_heads(moved[0])
    if out.numel() == 0 or moved[1].numel() == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    plan = sm90.plan_forward(call._replace(query=moved[0], key=moved[1], value=moved[2], bias=next(iter(bias), None)), out)
    if args.launches is not None and all(x is y for x, y in zip(moved, call, strict=False)) and _at_units(args.bias):
        args.launches.remember(_FORWARD, _Known(plan, ((out.shape, out.stride()),)))
    sm90.run_forward(plan, (*moved, out, *bias), _lengths_at(args), lse, call.mask, args.seed)
    return out, lse


def _at_units(bias: Tensor | None) -> bool:
    """Whether a bias, if there is one, begins at an address that the copy engine can read."""
    return bias is None or bias.data_ptr() % 16 == 0


def backward(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *, bias_grad: bool, packed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk and dv, views of `packed` if it is given, and dbias. Raises as `sm90.forward`."""
    key = _backward_key(dout, out, lse, packed is not None)
    known = _known(args, key, *args[:3], dout, out)
    query, key_, value, dlse = *args[:3], None if dlse is None else dlse.contiguous()
    if known is None:
        query, key_, value, dout, out = [_movable(x) for x in (query, key_, value, dout, out)]
        lse = lse.contiguous()
    dq, dk, dv = gradients = _gradients(known, (query, key_, value), packed)
    if query.numel() == 0 or key_.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), torch.zeros_like(args.bias) if args.bias is not None and bias_grad else None
    bias = _bias_of(args)
    if known is None:
        call = of_dense(args)._replace(query=query, key=key_, value=value, bias=next(iter(bias), None))
        known = _Known(sm90.plan_backward(call, dout, out, gradients), tuple([(x.shape, x.stride()) for x in gradients]))
        as_it_is = (dout.stride(), out.stride(), lse.stride()) == key[1:4] and all(map(operator.is_, call[:3], args[:3]))
        if args.launches is not None and as_it_is and _at_units(args.bias):
            args.launches.remember(key, known)
    moved = query, key_, value, dout, out, *bias
    if args.bias is not None:
        from saccade.exact.shared_bias import launchers as of_bias  # Triton, which no other call needs

        by_triton = bias_grad and _is_expanded(args.bias, bias[0])
        rows = of_bias.rows_of(args, dout, dlse, out, lse, bias_grad=bias_grad, may_copy=by_triton)
        shift, inverse, delta = rows.numbers
        sm90.run_backward(known.plan, moved, _lengths_at(args), None, shift, delta, gradients, _mask_of(args), args.seed, inverse)
        return dq, dk, dv, _bias_gradient(args, moved, rows) if bias_grad else None
    if sm90.owns_delta(query.shape[-1]):
        delta = scratch(lse.shape, lse.dtype, lse.device)
    else:
        refuse()  # computed by another kernel: `auto` counts the host time of these calls as Python's
        delta = _row_sums(dout, out, dlse)
    mask = _mask_of(args)
    sm90.run_backward(known.plan, moved, _lengths_at(args), dlse, lse, delta, gradients, mask, args.seed)
    return dq, dk, dv, None


def _is_expanded(bias: Tensor, found: Tensor) -> bool:
    """Whether a bias was expanded over rows or heads; `readable` returns only one of them then."""
    return bias[(None,) * (4 - bias.dim())].shape[:2] != found.shape[:2]


def _bias_gradient(args: AttentionArgs, moved: tuple[Tensor, ...], rows: Rows) -> Tensor:
    """dbias, in the shape and dtype of the bias. One that was expanded over rows or heads, whose gradient is that of each, is left to `shared_bias`."""
    from saccade.exact.shared_bias import launchers as of_bias

    query, key, value, dout, _, bias = moved
    assert args.bias is not None, "the call has a bias"
    if _is_expanded(args.bias, bias):
        return of_bias.gradient_of(rows, args.bias)
    call = of_dense(args)._replace(query=query, key=key, value=value, bias=bias)
    return of_bias.in_shape_of(bias_gradient.gradient(call, dout, rows.numbers), args.bias)


def _gradients(known: _Known | None, moved: tuple[Tensor, ...], packed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if packed is not None:
        return unpack(packed)
    return tuple([empty_like_heads(x) for x in moved[:3]] if known is None else known.results(moved[0]))  # type: ignore[return-value]


def _row_sums(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    from saccade.launch.delta import delta_of

    return delta_of(dout, out, dlse)
