"""The references as backends: the last entry of every tuple; they can always run."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels.contract import AttentionArgs, Backend, NMSparseArgs
from saccade.problem import Problem
from saccade.problem_dynamic_mask import DynamicMaskProblem
from saccade.problem_nm_sparse import BLOCK, NMSparseProblem
from saccade.reference import dense, dynamic_mask, nm_sparse
from saccade.reference.philox import dropout_keep


def _why_not(problem: Problem) -> list[str]:
    return [] if problem.rank == 4 else [f"needs query of rank 4, [B, H, T, D], got rank {problem.rank}"]


def attend(args: AttentionArgs, problem: Problem | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) of `attention`."""
    batch, heads, q_len, _ = args.query.shape
    keep = None
    if args.seed is not None:
        keep = dropout_keep(args.seed, args.dropout_p, batch, heads, q_len, args.key.shape[2])
    out, lse = dense.attend(
        args.query,
        args.key,
        args.value,
        scale=args.scale,
        mask=args.mask,
        bias=args.bias,
        lengths=args.lengths,
        is_causal=args.is_causal,
        keep=keep,
        dropout_p=args.dropout_p,
    )
    return out.to(args.query.dtype), lse


ATTENTION = Backend(
    name="reference",
    operation="attention",
    summary="plain torch, any device; the meaning of the operation, O(Tq * Tk) memory",
    why_not=_why_not,
    prefers=lambda problem: False,
    attend=attend,
)


def _attend_dynamic_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scores: Tensor,
    lengths: Tensor | None,
    document_ids: Tensor | None,
    problem: DynamicMaskProblem,
) -> tuple[Tensor, Tensor]:
    mask = dynamic_mask.kept(key_scores, problem.keep, problem.q_len, problem.is_causal, lengths, document_ids)
    return dynamic_mask.attend(query, key, value, key_scores, mask, scale=problem.scale, add_scores=problem.add_scores)


DYNAMIC_MASK = Backend(
    name="reference",
    operation="dynamic_mask_attention",
    summary="plain torch, any device; the meaning of the operation, O(Tq * Tk) memory and a loop over queries",
    why_not=lambda problem: [],
    prefers=lambda problem: False,
    attend=_attend_dynamic_mask,
)


def _attend_nm_sparse(args: NMSparseArgs, problem: NMSparseProblem) -> tuple[Tensor, Tensor]:
    batch, heads, q_len, _ = args.query.shape
    survivors = None
    if args.seed is not None:
        survivors = dropout_keep(args.seed, args.dropout_p, batch, heads, q_len, args.key.shape[2])
    bias = None if args.bias is None else args.bias.detach()
    scores = nm_sparse.visible_scores(
        args.query.detach(),
        args.key.detach(),
        scale=args.scale,
        mask=args.mask,
        bias=bias,
        block_mask=args.block_mask,
        block=BLOCK,
        is_causal=args.is_causal,
    )
    kept = nm_sparse.select(scores, args.keep, args.group)
    out, lse = nm_sparse.attend(
        args.query,
        args.key,
        args.value,
        kept,
        scale=args.scale,
        bias=args.bias,
        survivors=survivors,
        dropout_p=args.dropout_p,
    )
    return out.to(args.query.dtype), lse


NM_SPARSE = Backend(
    name="reference",
    operation="nm_sparse_attention",
    summary="plain torch, any device; the meaning of the operation, O(Tq * Tk) memory",
    why_not=lambda problem: [],
    prefers=lambda problem: False,
    attend=_attend_nm_sparse,
)
