"""Autograd of `attention_varlen`: one Function for separate inputs, one for packed ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.first_order import first_order
from saccade.engine.ranges import shown_as_ours
from saccade.engine.saved import save, saved
from saccade.exact.varlen import op
from saccade.exact.varlen.args import VarlenArgs


class Gradients(NamedTuple):
    """What `Varlen.backward` returns: one field for each argument of its forward, in that order."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    cu_seqlens_q: None = None
    cu_seqlens_k: None = None
    bias: Tensor | None = None
    seed: None = None
    max_q: None = None
    max_k: None = None
    dropout_p: None = None
    causal: None = None
    scale: None = None
    backend: None = None


class PackedGradients(NamedTuple):
    """The same for `VarlenPacked`."""

    qkv: Tensor | None = None
    cu_seqlens: None = None
    bias: Tensor | None = None
    seed: None = None
    max_q: None = None
    max_k: None = None
    dropout_p: None = None
    causal: None = None
    scale: None = None
    backend: None = None


_BIAS, _PACKED_BIAS = Gradients._fields.index("bias"), PackedGradients._fields.index("bias")


@shown_as_ours
class Varlen(torch.autograd.Function):
    """`(out, lse) = attention_varlen(query, key, value)` with the backend's own backward. cu_seqlens_k is None where it is cu_seqlens_q:
    torch.compile traces no Function that gets a tensor twice."""

    @staticmethod
    def forward(ctx, query, key, value, cu_seqlens_q, cu_seqlens_k, bias, seed, max_q, max_k, dropout_p, causal, scale, backend):
        offsets = (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
        out, lse = op.forward(
            VarlenArgs(query, key, value, *offsets, bias, seed, max_q, max_k, dropout_p, causal, scale), backend
        )
        save(ctx, query, key, value, cu_seqlens_q, cu_seqlens_k, bias, seed, out, lse)
        ctx.numbers, ctx.backend = (max_q, max_k, dropout_p, causal, scale), backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        query, key, value, cu_seqlens_q, cu_seqlens_k, bias, seed, out, lse = saved(ctx)
        if dout is None and dlse is None:
            return Gradients()
        if dout is None:
            dout = torch.zeros_like(out)
        offsets = (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
        args = VarlenArgs(query, key, value, *offsets, bias, seed, *ctx.numbers)
        bias_grad = bias is not None and ctx.needs_input_grad[_BIAS]
        dq, dk, dv, dbias = op.backward(args, dout, dlse, out, lse, bias_grad, ctx.backend)
        return Gradients(dq, dk, dv, bias=dbias if bias_grad else None)


@shown_as_ours
class VarlenPacked(torch.autograd.Function):
    """The same for `qkv` of shape `[T, 3, H, D]`; the gradient is one packed tensor, written in place of a concatenation."""

    @staticmethod
    def forward(ctx, qkv, cu_seqlens, bias, seed, max_q, max_k, dropout_p, causal, scale, backend):
        rest = (cu_seqlens, cu_seqlens, bias, seed, max_q, max_k, dropout_p, causal, scale)
        query, key, value = qkv.unbind(1)
        out, lse = op.forward(VarlenArgs(query, key, value, *rest), backend)
        save(ctx, qkv, cu_seqlens, bias, seed, out, lse)
        ctx.numbers, ctx.backend = (max_q, max_k, dropout_p, causal, scale), backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        qkv, cu_seqlens, bias, seed, out, lse = saved(ctx)
        if dout is None and dlse is None:
            return PackedGradients()
        if dout is None:
            dout = torch.zeros_like(out)
        query, key, value = qkv.unbind(1)
        args = VarlenArgs(query, key, value, cu_seqlens, cu_seqlens, bias, seed, *ctx.numbers)
        bias_grad = bias is not None and ctx.needs_input_grad[_PACKED_BIAS]
        dqkv, dbias = op.packed_backward(qkv, args, dout, dlse, out, lse, bias_grad, ctx.backend)
        return PackedGradients(dqkv, bias=dbias if bias_grad else None)
