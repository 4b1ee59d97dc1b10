"""FLOP formulas of the ops of `nm_sparse_attention`: every score is computed, and all other products over the kept keys alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.engine.flops import backward_flops, pairs_of


def forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any, block_mask: Any, seed: Any, pattern_n: int, pattern_m: int,
    dropout_p: float, is_causal: bool, scale: float, stores: bool, backend: str, dense_first: int = 0, dense_recent: int = 0,
    *, out_val: Any = None, **options: Any,
) -> int:  # fmt: skip
    """Of `nm_sparse_forward`."""
    every, kept = pairs_of(query, key), _kept(query, key, pattern_n, pattern_m, dense_first, dense_recent)
    return 2 * every * query.shape[3] + 2 * kept * value.shape[3]


def backward(
    dout: Tensor, dlse: Any, out: Tensor, lse: Tensor, kept: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any,
    block_mask: Any, seed: Any, pattern_n: int, pattern_m: int, dropout_p: float, is_causal: bool, scale: float, bias_grad: bool,
    backend: str, dense_first: int = 0, dense_recent: int = 0, *, out_val: Any = None, **options: Any,
) -> int:  # fmt: skip
    """Of `nm_sparse_backward`."""
    return backward_flops(_kept(query, key, pattern_n, pattern_m, dense_first, dense_recent), query.shape[3], value.shape[3])


def _kept(query: Tensor, key: Tensor, pattern_n: int, pattern_m: int, dense_first: int, dense_recent: int) -> int:
    """Pairs of a query and a key that it keeps: N of each group of M, of the rest of a row at most N, and all of a group that is
    never pruned. Causality and masks do not count, as in torch's formulas."""
    batch, heads, q_len, _ = query.shape
    groups, rest = divmod(key.shape[2], pattern_m)
    kept = q_len * (groups * pattern_n + min(pattern_n, rest))
    if dense_first or dense_recent:
        for first in range(0, key.shape[2], pattern_m):
            pruned = max(0, min(pattern_m, key.shape[2] - first) - pattern_n)
            kept += pruned * _queries_that_keep_all(first, q_len, pattern_m, dense_first, dense_recent)
    return batch * heads * kept


def _queries_that_keep_all(first: int, q_len: int, group: int, dense_first: int, dense_recent: int) -> int:
    """How many queries never prune the group that begins at key `first`."""
    if first < dense_first:
        return q_len
    return max(0, min(q_len, first + group + dense_recent - 1) - first) if dense_recent else 0
