"""FLOP formulas of the ops of `nm_sparse_attention`: every score is computed; all other products cover only the kept keys."""

from __future__ import annotations

from saccade.nm_sparse.args import NMSparseArgs


def kept_pairs(args: NMSparseArgs) -> int:
    """Pairs of a query and a key that it keeps: N of each group of M, of the rest of a row at most N, and all of a group that is
    never pruned. Causality and masks do not count, as in torch's formulas."""
    query, key, (pattern_n, pattern_m) = args.query, args.key, (args.pattern_n, args.pattern_m)
    dense_first, dense_recent = args.dense_first, args.dense_recent
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
