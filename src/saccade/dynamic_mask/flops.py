"""FLOP formulas of the ops of `dynamic_mask_attention`: those of dense attention over `keep` keys a query. Selection ranks and
multiplies nothing, so it counts nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.engine.flops import backward_flops, forward_flops


def forward(
    query: Tensor, key: Tensor, value: Tensor, key_scores: Any, start: Tensor, stop: Tensor, keep: int,
    *_: Any, out_val: Any = None, **options: Any,
) -> int:  # fmt: skip
    """Of `dynamic_mask_forward`."""
    return forward_flops(_pairs(query, key, keep), query.shape[3], value.shape[3])


def backward(
    dout: Tensor, dlse: Any, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, key_scores: Any, start: Tensor, stop: Tensor,
    keep: int, *_: Any, out_val: Any = None, **options: Any,
) -> int:  # fmt: skip
    """Of `dynamic_mask_backward`."""
    return backward_flops(_pairs(query, key, keep), query.shape[3], value.shape[3])


def _pairs(query: Tensor, key: Tensor, keep: int) -> int:
    """Pairs of a query and a key that it keeps; the first queries of a causal mask count like the others, as in torch."""
    batch, heads, q_len, _ = query.shape
    return batch * heads * q_len * min(keep, key.shape[2])
