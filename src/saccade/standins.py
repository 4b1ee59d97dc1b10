"""The references in the form of a family of kernels, with gradients by torch: what takes over where a kernel does not compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.kernels.contract import AttentionArgs, Launchers, NMSparseArgs, NMSparseLaunchers
from saccade.ops import empty_like_heads, unpack
from saccade.problem_nm_sparse import BLOCK
from saccade.reference import nm_sparse
from saccade.reference.backend import attend
from saccade.reference.philox import dropout_keep


def _forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        out, lse = attend(args)
    return empty_like_heads(args.query, out.shape[3]).copy_(out), lse.to(torch.float32)


def _backward(
    args: AttentionArgs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    *,
    bias_grad: bool,
    packed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    found = _gradients(args, attend, dout, dlse, bias_grad)
    into = [empty_like_heads(x) for x in args[:3]] if packed is None else unpack(packed)
    dq, dk, dv = (to.copy_(gradient) for to, gradient in zip(into, found, strict=False))
    return dq, dk, dv, found[3] if bias_grad else None


def _gradients(args: Any, call: Any, dout: Tensor, dlse: Tensor | None, bias_grad: bool) -> tuple[Tensor, ...]:
    """Of query, key, value and, with `bias_grad`, of bias."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in args[:3]]
        bias = args.bias.detach().requires_grad_(bias_grad) if args.bias is not None else None
        out, lse = call(args._replace(query=leaves[0], key=leaves[1], value=leaves[2], bias=bias))
        leaves += [bias] if bias_grad and bias is not None else []
        results, directions = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse.to(lse.dtype)])
        return torch.autograd.grad(results, leaves, directions)


ATTENTION = Launchers(_forward, _backward)


def _attend_kept(args: NMSparseArgs, kept: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, q_len, _ = args.query.shape
    survivors = None
    if args.seed is not None:
        survivors = dropout_keep(args.seed, args.dropout_p, batch, heads, q_len, args.key.shape[2])
    out, lse = nm_sparse.attend(
        args.query, args.key, args.value, kept, scale=args.scale, bias=args.bias, survivors=survivors, dropout_p=args.dropout_p
    )
    return out.to(args.query.dtype), lse


def _forward_nm_sparse(args: NMSparseArgs, stores: bool) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        scores = nm_sparse.visible_scores(
            args.query, args.key, scale=args.scale, mask=args.mask, bias=args.bias, block_mask=args.block_mask, block=BLOCK,
            is_causal=args.is_causal,
        )  # fmt: skip
        kept = nm_sparse.select(scores, args.keep, args.group)
        out, lse = _attend_kept(args, kept)
    bits = nm_sparse.pack_selection(kept, args.group) if stores else out.new_empty(0, dtype=torch.int32)
    return empty_like_heads(args.query).copy_(out), lse.to(torch.float32), bits


def _backward_nm_sparse(
    args: NMSparseArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, kept: Tensor, *, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    selection = nm_sparse.unpack_selection(kept, args.group, args.key.shape[2])
    found = _gradients(args, lambda given: _attend_kept(given, selection), dout, dlse, bias_grad)
    dq, dk, dv = (empty_like_heads(x).copy_(gradient) for x, gradient in zip(args[:3], found, strict=False))
    return dq, dk, dv, found[3] if bias_grad else None


NM_SPARSE = NMSparseLaunchers(_forward_nm_sparse, _backward_nm_sparse)
