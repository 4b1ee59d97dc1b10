"""The textbook formula as a backend. It is the last of the tuple because it can always run."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine import dense
from saccade.engine.backend import Backend
from saccade.engine.philox import dropout_keep
from saccade.engine.problem import Problem
from saccade.engine.window import has_window, in_window
from saccade.exact.args import AttentionArgs, repeated


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
        mask=args.mask if args.mask is not None else _window_of(args),
        bias=None if args.bias is None else repeated(args.bias, batch),
        lengths=args.lengths,
        is_causal=args.is_causal,
        keep=keep,
        dropout_p=args.dropout_p,
    )
    return out.to(args.query.dtype), lse


def _window_of(args: AttentionArgs) -> Tensor | None:
    """The mask of a window, `[Tq, Tk]`; a call with one has no other."""
    if not has_window(args):
        return None
    rows, keys = (torch.arange(x.shape[2], device=x.device) for x in args[:2])
    return in_window(rows[:, None], keys, args.window_left, args.window_right)


REFERENCE = Backend(
    name="reference",
    is_reference=True,
    operation="attention",
    summary="plain torch, any device; the meaning of the operation, O(Tq * Tk) memory",
    why_not=_why_not,
    prefers=lambda problem: False,
    attend=attend,
)
