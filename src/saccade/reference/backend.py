"""The references as backends: the last entry of every tuple; they can always run."""

from __future__ import annotations

from torch import Tensor

from saccade.kernels.contract import AttentionArgs, Backend
from saccade.problem import Problem
from saccade.problem_dynamic_mask import DynamicMaskProblem
from saccade.reference import dense, dynamic_mask
from saccade.reference.philox import dropout_keep


def _why_not(problem: Problem) -> list[str]:
    return [] if problem.rank == 4 else [f"needs query of rank 4, [B, H, T, D], got rank {problem.rank}"]


def _attend(args: AttentionArgs, problem: Problem) -> tuple[Tensor, Tensor]:
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
    attend=_attend,
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
