"""FLOP formulas of the ops of `attention`: those that torch's counter has for its fused attention. Padding counts, as what a
mask hides does there."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.engine.flops import backward_flops, forward_flops, pairs_of


def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, out_val: Any = None, **options: Any) -> int:
    """Of `attention_forward`."""
    return forward_flops(pairs_of(query, key), query.shape[3], value.shape[3])


def backward(
    dout: Tensor,
    dlse: Any,
    out: Any,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    out_val: Any = None,
    **options: Any,
) -> int:
    """Of `attention_backward`."""
    return backward_flops(pairs_of(query, key), query.shape[3], value.shape[3])


def packed_backward(
    dout: Tensor, dlse: Any, out: Any, lse: Tensor, qkv: Tensor, *_: Any, out_val: Any = None, **options: Any
) -> int:
    """Of `attention_packed_backward`; qkv `[B, S, 3, H, D]`."""
    batch, tokens, _three, heads, dim = qkv.shape
    return backward_flops(batch * heads * tokens * tokens, dim, dim)


def lse_backward(
    dout: Any, dlse: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, out_val: Any = None, **options: Any
) -> int:
    """Of `lse_backward`."""
    return backward_flops(pairs_of(query, key), query.shape[3], value.shape[3])
