"""Autograd of `nm_sparse_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.first_order import first_order
from saccade.engine.saved import save, saved
from saccade.nm_sparse import op
from saccade.nm_sparse.args import NMSparseArgs


class NMSparse(torch.autograd.Function):
    """`(out, lse) = nm_sparse_attention(query, key, value)`, differentiated for the selection that this forward made."""

    @staticmethod
    def forward(
        ctx, query, key, value, mask, bias, block_mask, seed, keep, group, dropout_p, is_causal, scale, backend, stores, bias_grad
    ):
        args = NMSparseArgs(query, key, value, mask, bias, block_mask, seed, keep, group, dropout_p, is_causal, scale)
        out, lse, kept = op.forward(args, stores, backend)
        save(ctx, query, key, value, mask, bias, block_mask, seed, out, lse, kept if stores else None)
        ctx.numbers = args[7:]
        ctx.backend, ctx.bias_grad = backend, bias_grad
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        *tensors, out, lse, kept = saved(ctx)
        if dout is None and dlse is None:
            return (None,) * 15
        if dout is None:
            dout = torch.zeros_like(out)
        args = NMSparseArgs(*tensors, *ctx.numbers)
        if kept is None:
            *_, kept = op.forward(args, True, ctx.backend)
        dq, dk, dv, dbias = op.backward(args, dout, dlse, out, lse, kept, ctx.bias_grad, ctx.backend)
        return dq, dk, dv, None, dbias if ctx.bias_grad else None, *(None,) * 10
