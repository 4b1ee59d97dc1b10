"""The reference with the interface of a family of kernels and gradients by torch. It takes over where a kernel does not
compile."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.by_torch import gradients_by_torch
from saccade.engine.layout import empty_like_heads
from saccade.engine.philox import dropout_keep
from saccade.nm_sparse import reference
from saccade.nm_sparse.args import NMSparseArgs, NMSparseLaunchers
from saccade.nm_sparse.problem import BLOCK


def _attend_kept(args: NMSparseArgs, kept: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, q_len, _ = args.query.shape
    survivors = None
    if args.seed is not None:
        survivors = dropout_keep(args.seed, args.dropout_p, batch, heads, q_len, args.key.shape[2])
    out, lse = reference.attend(
        args.query, args.key, args.value, kept, scale=args.scale, bias=args.bias, survivors=survivors, dropout_p=args.dropout_p
    )
    return out.to(args.query.dtype), lse


def _forward(args: NMSparseArgs, stores: bool) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        scores = reference.visible_scores(
            args.query, args.key, scale=args.scale, mask=args.mask, bias=args.bias, block_mask=args.block_mask, block=BLOCK,
            is_causal=args.is_causal,
        )  # fmt: skip
        kept = reference.select(scores, args.pattern_n, args.pattern_m, args.dense_first, args.dense_recent)
        out, lse = _attend_kept(args, kept)
    bits = reference.pack_selection(kept, args.pattern_m) if stores else out.new_empty(0, dtype=torch.int32)
    return empty_like_heads(args.query).copy_(out), lse.to(torch.float32), bits


def _backward(
    args: NMSparseArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, kept: Tensor, *, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    selection = reference.unpack_selection(kept, args.pattern_m, args.key.shape[2])
    found = gradients_by_torch(args, lambda given: _attend_kept(given, selection), dout, dlse, bias_grad)
    dq, dk, dv = (empty_like_heads(x).copy_(gradient) for x, gradient in zip(args[:3], found, strict=False))
    return dq, dk, dv, found[3] if bias_grad else None


REFERENCE_LAUNCHERS = NMSparseLaunchers(_forward, _backward)
