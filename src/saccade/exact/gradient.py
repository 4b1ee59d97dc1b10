"""Autograd of `attention`: one Function for separate inputs, one for packed ones."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.first_order import first_order
from saccade.engine.layout import unpack
from saccade.engine.saved import save, saved
from saccade.exact import op
from saccade.exact.args import AttentionArgs


class Attention(torch.autograd.Function):
    """`(out, lse) = attention(query, key, value)` with the backend's own backward."""

    @staticmethod
    def forward(ctx, query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, launches, backend, saves_output):
        args = AttentionArgs(query, key, value, mask, bias, lengths, seed, dropout_p, is_causal, scale, launches)
        out, lse = op.forward(args, backend)
        save(ctx, query, key, value, mask, bias, lengths, seed, lse, out if saves_output else None)
        ctx.numbers = args[7:]
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        query, key, value, mask, bias, lengths, seed, lse, out = saved(ctx)
        if dout is None and dlse is None:
            return (None,) * 13
        if dout is None:
            dout = query.new_zeros(()).expand(*query.shape[:3], value.shape[3])
        bias_grad = bias is not None and ctx.needs_input_grad[4]
        args = AttentionArgs(query, key, value, mask, bias, lengths, seed, *ctx.numbers)
        dq, dk, dv, dbias = op.backward(args, dout, dlse, out, lse, bias_grad, ctx.backend)
        return dq, dk, dv, None, dbias if bias_grad else None, *(None,) * 8


class AttentionPacked(torch.autograd.Function):
    """The same for `qkv` of shape `[B, S, 3, H, D]`; the gradient is one packed tensor, written in place of a concatenation."""

    @staticmethod
    def forward(ctx, qkv, mask, bias, lengths, seed, dropout_p, is_causal, scale, launches, backend, saves_output):
        args = AttentionArgs(*unpack(qkv), mask, bias, lengths, seed, dropout_p, is_causal, scale, launches)
        out, lse = op.forward(args, backend)
        save(ctx, qkv, mask, bias, lengths, seed, lse, out if saves_output else None)
        ctx.numbers = args[7:]
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        qkv, mask, bias, lengths, seed, lse, out = saved(ctx)
        if dout is None and dlse is None:
            return (None,) * 11
        if dout is None:
            batch, time, _, heads, dim = qkv.shape
            dout = qkv.new_zeros(()).expand(batch, heads, time, dim)
        bias_grad = bias is not None and ctx.needs_input_grad[2]
        args = AttentionArgs(*unpack(qkv), mask, bias, lengths, seed, *ctx.numbers)
        dqkv, dbias = op.packed_backward(args, dout, dlse, out, lse, qkv, bias_grad, ctx.backend)
        return dqkv, None, dbias if bias_grad else None, *(None,) * 8
