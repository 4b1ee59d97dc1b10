"""Autograd of `attention`: one Function for separate inputs and one for packed inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.first_order import first_order
from saccade.engine.layout import unpack
from saccade.engine.ranges import shown_as_ours
from saccade.engine.saved import save, saved
from saccade.exact import op
from saccade.exact.args import AttentionArgs


class Gradients(NamedTuple):
    """The gradients that `Attention.backward` returns: one field for each argument of its forward, in that order."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    mask: None = None
    bias: Tensor | None = None
    lengths: None = None
    seed: None = None
    dropout_p: None = None
    is_causal: None = None
    scale: None = None
    launches: None = None
    backend: None = None
    saves_output: None = None


class PackedGradients(NamedTuple):
    """The gradients that `AttentionPacked.backward` returns."""

    qkv: Tensor | None = None
    mask: None = None
    bias: Tensor | None = None
    lengths: None = None
    seed: None = None
    dropout_p: None = None
    is_causal: None = None
    scale: None = None
    launches: None = None
    backend: None = None
    saves_output: None = None


# indices of the bias in `ctx.needs_input_grad`
_BIAS, _PACKED_BIAS = Gradients._fields.index("bias"), PackedGradients._fields.index("bias")


@shown_as_ours
class Attention(torch.autograd.Function):
    """`(out, lse) = attention(query, key, value)` with the backend's own backward."""

    @staticmethod
    def forward(ctx, query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, launches, backend, saves_output):
        args = AttentionArgs(query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, launches)
        out, lse = op.forward(args, backend)
        save(ctx, query, key, value, mask, bias, lengths, seed, lse, out if saves_output else None)
        ctx.numbers = dropout_p, is_causal, scale, launches
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        query, key, value, mask, bias, lengths, seed, lse, out = saved(ctx)
        if dout is None and dlse is None:
            return Gradients()
        if dout is None:
            dout = query.new_zeros(()).expand(*query.shape[:3], value.shape[3])
        bias_grad = bias is not None and ctx.needs_input_grad[_BIAS]
        args = AttentionArgs(query, key, value, mask, bias, lengths, seed, *ctx.numbers)
        dq, dk, dv, dbias = op.backward(args, dout, dlse, out, lse, bias_grad, ctx.backend)
        return Gradients(dq, dk, dv, bias=dbias if bias_grad else None)


@shown_as_ours
class AttentionPacked(torch.autograd.Function):
    """The same for `qkv` of shape `[B, S, 3, H, D]`; the gradient is written as one packed tensor, without a concatenation."""

    @staticmethod
    def forward(ctx, qkv, mask, bias, lengths, seed, dropout_p, is_causal, scale, launches, backend, saves_output):
        args = AttentionArgs(*unpack(qkv), mask, bias, lengths, seed, dropout_p, is_causal, scale, launches)
        out, lse = op.forward(args, backend)
        save(ctx, qkv, mask, bias, lengths, seed, lse, out if saves_output else None)
        ctx.numbers = dropout_p, is_causal, scale, launches
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        qkv, mask, bias, lengths, seed, lse, out = saved(ctx)
        if dout is None and dlse is None:
            return PackedGradients()
        if dout is None:
            batch, time, _, heads, dim = qkv.shape
            dout = qkv.new_zeros(()).expand(batch, heads, time, dim)
        bias_grad = bias is not None and ctx.needs_input_grad[_PACKED_BIAS]
        args = AttentionArgs(*unpack(qkv), mask, bias, lengths, seed, *ctx.numbers)
        dqkv, dbias = op.packed_backward(args, dout, dlse, out, lse, qkv, bias_grad, ctx.backend)
        return PackedGradients(dqkv, bias=dbias if bias_grad else None)
