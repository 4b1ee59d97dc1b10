"""Autograd of `nm_sparse_attention`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.first_order import first_order
from saccade.engine.ranges import shown_as_ours
from saccade.engine.saved import save, saved
from saccade.nm_sparse import op
from saccade.nm_sparse.args import NMSparseArgs


class Gradients(NamedTuple):
    """The gradients that `NMSparse.backward` returns: one field for each argument of its forward, in that order."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    mask: None = None
    bias: Tensor | None = None
    block_mask: None = None
    seed: None = None
    pattern_n: None = None
    pattern_m: None = None
    dropout_p: None = None
    is_causal: None = None
    scale: None = None
    dense_first: None = None
    dense_recent: None = None
    backend: None = None
    stores: None = None
    bias_grad: None = None


@shown_as_ours
class NMSparse(torch.autograd.Function):
    """`(out, lse) = nm_sparse_attention(query, key, value)`, differentiated with the selection that this forward made."""

    @staticmethod
    def forward(
        ctx,
        query,
        key,
        value,
        mask,
        bias,
        block_mask,
        seed,
        pattern_n,
        pattern_m,
        dropout_p,
        is_causal,
        scale,
        dense_first,
        dense_recent,
        backend,
        stores,
        bias_grad,
    ):
        numbers = pattern_n, pattern_m, dropout_p, is_causal, scale, dense_first, dense_recent
        args = NMSparseArgs(query, key, value, mask, bias, block_mask, seed, *numbers)
        out, lse, kept = op.forward(args, stores, backend)
        save(ctx, query, key, value, mask, bias, block_mask, seed, out, lse, kept if stores else None)
        ctx.numbers = numbers
        ctx.backend, ctx.bias_grad = backend, bias_grad
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        *tensors, out, lse, kept = saved(ctx)
        if dout is None and dlse is None:
            return Gradients()
        if dout is None:
            dout = torch.zeros_like(out)
        args = NMSparseArgs(*tensors, *ctx.numbers)
        if kept is None:
            *_, kept = op.forward(args, True, ctx.backend)
        dq, dk, dv, dbias = op.backward(args, dout, dlse, out, lse, kept, ctx.bias_grad, ctx.backend)
        return Gradients(dq, dk, dv, bias=dbias if ctx.bias_grad else None)
