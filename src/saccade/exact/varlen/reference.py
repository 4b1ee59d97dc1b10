"""The textbook formula over a padded copy of a packed batch: the meaning of `attention_varlen`, and its oracle on float64."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine import dense
from saccade.engine.backend import Backend
from saccade.engine.philox import dropout_keep
from saccade.engine.window import has_window, in_window
from saccade.exact.varlen.args import ALIGNED_LAST, FULL, HIDE_LATER, VarlenArgs
from saccade.exact.varlen.problem import VarlenProblem


def attend(args: VarlenArgs, problem: VarlenProblem | None = None) -> tuple[Tensor, Tensor]:
    """out like query, lse `[H, Tq]` of at least float32; tokens behind the last sequence get out 0 and lse -inf."""
    heads = args.query.shape[1]
    q_rows, q_len = _rows(args.cu_seqlens_q, args.max_q)
    k_rows, k_len = _rows(args.cu_seqlens_k, args.max_k)
    query, key, value = _padded(args.query, q_rows, q_len), _padded(args.key, k_rows, k_len), _padded(args.value, k_rows, k_len)
    mask = torch.arange(args.max_q, device=query.device)[:, None] < q_len[:, None, None, None]  # [B, 1, Tq, 1]
    mask = mask & (torch.arange(args.max_k, device=query.device) < k_len[:, None, None, None])
    windowed = has_window(args)
    if args.causal != FULL or windowed:
        i, j = torch.arange(args.max_q, device=query.device)[:, None], torch.arange(args.max_k, device=query.device)
        i = i + (k_len - q_len)[:, None, None, None] if args.causal in ALIGNED_LAST else i
        mask = mask & (j <= i) if args.causal in HIDE_LATER else mask
        mask = mask & in_window(i, j, args.window_left, args.window_right) if windowed else mask
    keep = None
    if args.seed is not None:
        keep = dropout_keep(args.seed, args.dropout_p, q_len.shape[0], heads, args.max_q, args.max_k)
    bias = None if args.bias is None else args.bias.unsqueeze(0)
    out, lse = dense.attend(query, key, value, scale=args.scale, mask=mask, bias=bias, keep=keep, dropout_p=args.dropout_p)
    return _packed(out.transpose(1, 2), args, 0.0).to(args.query.dtype), _packed(lse.transpose(1, 2), args, float("-inf")).t()


def _rows(offsets: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """(token of each place of a padded batch, `[B, longest]`; lengths `[B]`)."""
    starts = offsets[:-1].long()
    return starts[:, None] + torch.arange(longest, device=offsets.device), (offsets[1:] - offsets[:-1]).clamp(max=longest).long()


def _padded(tokens: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """`[B, H, longest, D]` with zeros in the padding."""
    if tokens.shape[0] == 0:  # one row to look up; a tensor of zeros would cut the gradient's path to `tokens`
        tokens = torch.cat((tokens, tokens.new_zeros((1, *tokens.shape[1:]))))
    real = torch.arange(rows.shape[1], device=tokens.device) < lengths[:, None]
    padded = tokens[rows.clamp(max=tokens.shape[0] - 1)]
    return padded.where(real[:, :, None, None], 0.0).transpose(1, 2)


def _packed(padded: Tensor, args: VarlenArgs, other: float) -> Tensor:
    """The real rows of `[B, longest, ...]` one behind another, `other` for tokens of no sequence."""
    tokens = torch.arange(args.query.shape[0], device=padded.device)
    ends = args.cu_seqlens_q[1:].contiguous()
    if ends.numel() == 0 or args.max_q == 0:
        # an empty sum is 0 and keeps the gradient's path
        return padded.new_full((tokens.shape[0], *padded.shape[2:]), other) + padded.sum()
    # how many sequences end at or before each token; searchsorted and clamp would make a symbolic number of sequences a constant
    ended = tokens.new_zeros(tokens.shape[0] + 1).index_add(0, ends.long(), torch.ones_like(ends, dtype=torch.long))
    real = tokens < ends[-1]
    sequence = ended.cumsum(0)[:-1].where(real, 0)
    place = (tokens - args.cu_seqlens_q[:-1][sequence]).clamp(max=args.max_q - 1)
    found = padded[sequence, place]
    return found.where(real.view(-1, *[1] * (found.dim() - 1)), other)


REFERENCE = Backend(
    name="reference",
    is_reference=True,
    operation="attention_varlen",
    summary="plain torch over a padded copy, any device; the meaning of the operation, O(B * max_q * max_k) memory",
    why_not=lambda problem: [],
    prefers=lambda problem: False,
    attend=attend,
)
