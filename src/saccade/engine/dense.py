"""Exact softmax attention, written for readability. On float64 inputs it is the oracle of `attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.layout import repeat_heads
from saccade.engine.softmax import softmax


def visible(
    q_len: int, kv_len: int, mask: Tensor | None, lengths: Tensor | None, is_causal: bool, device: torch.device
) -> Tensor:
    """The keys that each query may see, bool, broadcastable to `[B, H, Tq, Tk]`; causal is upper-left: key j <= query i."""
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if is_causal:
        seen = seen.tril()
    if mask is not None:
        seen = seen & mask
    if lengths is not None:
        seen = seen & (torch.arange(kv_len, device=device) < lengths[:, None, None, None])
    return seen


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    is_causal: bool = False,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`out = dropout(softmax(scale * Q K^T + bias, over visible keys)) V` and its natural log-sum-exp.

    Args:
        query, key, value: `[B, H, Tq, D]`, `[B, Hkv, Tk, D]`, `[B, Hkv, Tk, Dv]`; H is a multiple of Hkv.
        mask: bool, True = attend, broadcastable to `[B, H, Tq, Tk]`. bias: added to the scaled scores, likewise.
        lengths: `[B]`, keys at or beyond it are invisible. keep: bool `[B, H, Tq, Tk]`, the dropout draw.

    Returns:
        out `[B, H, Tq, Dv]` and lse `[B, H, Tq]`, both in at least float32. A query that sees no key gets out 0 and lse -inf.
        A bias of -inf hides its key. A finite bias never does, however low: a row of equal scores gives the mean of the values.
        Keys and values that no query sees never matter, even if they are NaN; a NaN at a visible key propagates.
    """
    accumulate = torch.promote_types(query.dtype, torch.float32)
    query, key, value = (x.to(accumulate) for x in (query, key, value))
    group = query.shape[1] // key.shape[1] if key.shape[1] else 1
    key, value = (repeat_heads(x, group) for x in (key, value))

    seen = visible(query.shape[2], key.shape[2], mask, lengths, is_causal, query.device)
    seen_by_any = seen.any(dim=-2).unsqueeze(-1)  # [.., Tk, 1]
    key, value = (x.where(seen_by_any, 0.0) for x in (key, value))

    scores = scale * (query @ key.transpose(-1, -2))
    if bias is not None:
        scores = scores + bias.to(accumulate)
        seen = seen & (bias != float("-inf"))
    scores = scores.masked_fill(~seen, float("-inf"))

    weights, lse = softmax(scores)
    if keep is not None:
        weights = weights.where(keep, 0.0) / (1.0 - dropout_p)
    return weights @ value, lse
