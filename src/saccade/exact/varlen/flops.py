"""FLOP formulas of the ops of `attention_varlen`: those of `attention`, added over the sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.engine.flops import backward_flops, forward_flops


def forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, bias: Any, seed: Any, max_q: int, max_k: int,
    *_: Any, out_val: Any = None, **options: Any,
) -> int:  # fmt: skip
    """Of `attention_varlen_forward`."""
    heads, dim = query.shape[1:]
    return forward_flops(heads * _pairs(cu_seqlens_q, cu_seqlens_k, max_q, max_k), dim, value.shape[2])


def backward(
    dout: Tensor, dlse: Any, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    bias: Any, seed: Any, max_q: int, max_k: int, *_: Any, out_val: Any = None, **options: Any,
) -> int:  # fmt: skip
    """Of `attention_varlen_backward`."""
    heads, dim = query.shape[1:]
    return backward_flops(heads * _pairs(cu_seqlens_q, cu_seqlens_k, max_q, max_k), dim, value.shape[2])


def packed_backward(
    dout: Tensor, dlse: Any, out: Tensor, lse: Tensor, qkv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, bias: Any, seed: Any,
    max_q: int, max_k: int, *_: Any, out_val: Any = None, **options: Any,
) -> int:  # fmt: skip
    """Of `attention_varlen_packed_backward`; qkv `[T, 3, H, D]`."""
    heads, dim = qkv.shape[2:]
    return backward_flops(heads * _pairs(cu_seqlens_q, cu_seqlens_k, max_q, max_k), dim, dim)


def _pairs(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int) -> int:
    """Pairs of a query and a key of one sequence; every sequence has the greatest length where its length has no value, as in
    torch."""
    known = all(type(ends) in (Tensor, torch.nn.Parameter) and not ends.is_meta for ends in (cu_seqlens_q, cu_seqlens_k))
    if not known:
        return (cu_seqlens_q.shape[0] - 1) * max_q * max_k
    return int((cu_seqlens_q.diff().long() * cu_seqlens_k.diff().long()).sum())
