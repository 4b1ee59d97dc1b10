"""FLOP formulas of the ops of `nm_sparse_attention`: every score is computed, and all other products over the kept keys alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.engine.flops import backward_flops, pairs_of


def forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any, block_mask: Any, seed: Any, pattern_n: int, pattern_m: int,
    *_: Any, out_val: Any = None, **options: Any,
) -> int:  # fmt: skip
    """Of `nm_sparse_forward`."""
    every, kept = pairs_of(query, key), _kept(query, key, pattern_n, pattern_m)
    return 2 * every * query.shape[3] + 2 * kept * value.shape[3]


def backward(
    dout: Tensor, dlse: Any, out: Tensor, lse: Tensor, kept: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any,
    block_mask: Any, seed: Any, pattern_n: int, pattern_m: int, *_: Any, out_val: Any = None, **options: Any,
) -> int:  # fmt: skip
    """Of `nm_sparse_backward`."""
    return backward_flops(_kept(query, key, pattern_n, pattern_m), query.shape[3], value.shape[3])


def _kept(query: Tensor, key: Tensor, pattern_n: int, pattern_m: int) -> int:
    """Pairs of a query and a key that it keeps: N of each group of M, and of the rest of a row at most N."""
    batch, heads, q_len, _ = query.shape
    groups, rest = divmod(key.shape[2], pattern_m)
    return batch * heads * q_len * (groups * pattern_n + min(pattern_n, rest))
