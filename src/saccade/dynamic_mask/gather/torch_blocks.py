"""Dynamic mask attention in plain torch, on any device: each block of queries gathers its kept keys and attends to them densely.

    for each block of queries (all heads at once)
        Kg, Vg = K[list], V[list]                      [.., L, D],  L <= w + block - 1
        S = scale * Q Kg^T + score
        mask the keys that some query of the block does not see, softmax, times Vg

This takes O(n * w) operations, and memory of O(n * D) plus one block of scores. Backward recomputes the scores as [scale * Q, 1] [Kg, score]^T, so
that the gradient of the score is one more column of dK. It adds dK, dV and dscore in place. Forward gathers from the tensors themselves: copies with
that column took a fifth of its time.
Source: paper 004, Eq. 6 to 10 (gradients of dense attention restricted to the kept set).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.dynamic_mask.selection.intervals import block_lists

# on two cores (n = 8192, w = 256, 8 heads, D = 64): 64 queries 88 ms, 128 61 ms, 256 75 ms
BLOCK = 128


class Blocks(NamedTuple):
    """The lists of all blocks, and for each block the longest list and the shortest unmasked part over batch and heads."""

    keys: Tensor
    longest: list[int]
    whole: list[int]

    @classmethod
    def of(cls, start: Tensor, stop: Tensor, q_len: int) -> Blocks:
        """The lists of all blocks, made from the interval of every key."""
        keys, count, whole = block_lists(start, stop, q_len, BLOCK)
        return cls(keys, count.amax((0, 1)).tolist(), whole.amin((0, 1)).tolist())


class Rows(NamedTuple):
    """Tensors as rows to gather from: `[B * Hkv * (Tk + 1), width]`. The last row of each head is a key that no query sees."""

    key: Tensor
    value: Tensor
    start: Tensor
    stop: Tensor
    offsets: Tensor


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scores: Tensor | None,
    start: Tensor,
    stop: Tensor,
    max_new_keys: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out `[B, H, Tq, D]` in the dtype of query and lse `[B, H, Tq]` (float32, or float64 for float64)."""
    working = torch.promote_types(query.dtype, torch.float32)
    if 0 in (*query.shape[:3], key.shape[2]):
        lse = query.new_full(query.shape[:3], float("-inf"), dtype=working)
        return query.new_zeros(*query.shape[:3], value.shape[3]), lse
    heads, group, q_len = key.shape[0] * key.shape[1], query.shape[1] // key.shape[1], query.shape[2]
    queries = query.reshape(heads, group, q_len, query.shape[3]).to(working)
    gathered = Gathered.of(key, value, key_scores, start, stop)
    blocks = Blocks.of(start, stop, q_len)
    out = queries.new_empty(heads, group, q_len, value.shape[3])
    lse = queries.new_empty(heads, group, q_len)
    # allocating it for each block would cost a third more
    memory = queries.new_empty(heads * group * BLOCK * max(blocks.longest, default=0))
    for c in range(len(blocks.longest)):
        block = slice(c * BLOCK, min((c + 1) * BLOCK, q_len))
        if blocks.longest[c] == 0:
            out[:, :, block], lse[:, :, block] = 0.0, float("-inf")
            continue
        keys = blocks.keys[:, :, c, : blocks.longest[c]].flatten(0, 1)  # [heads, L]
        found, log_sum = _attend_block(queries[:, :, block], gathered, keys, blocks.whole[c], q_len, block, scale, memory)
        out[:, :, block], lse[:, :, block] = found, log_sum
    return out.view(*query.shape[:3], value.shape[3]).to(query.dtype), lse.view(query.shape[:3])


class Gathered(NamedTuple):
    """The tensors from which forward gathers rows: key, value and scores `[heads * Tk, ..]`, without a copy if they are dense; start and stop
    `[heads * (Tk + 1)]`, where the last entry of a head is a key that no query sees, with which lists are padded."""

    key: Tensor
    value: Tensor
    scores: Tensor | None
    start: Tensor
    stop: Tensor
    kv_len: int

    @classmethod
    def of(cls, key: Tensor, value: Tensor, scores: Tensor | None, start: Tensor, stop: Tensor) -> Gathered:
        """The tensors of a call, in the working dtype."""
        working = torch.promote_types(key.dtype, torch.float32)
        keys, values = (x.reshape(x.shape[:3].numel(), x.shape[3]).to(working) for x in (key, value))
        pad = torch.nn.functional.pad
        first, last = pad(start, (0, 1)).flatten(), pad(stop, (0, 1), value=torch.iinfo(torch.int32).min).flatten()
        return cls(keys, values, None if scores is None else scores.reshape(-1).to(working), first, last, key.shape[2])


def _attend_block(
    queries: Tensor, gathered: Gathered, keys: Tensor, whole: int, q_len: int, block: slice, scale: float, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries `[heads, G, m, D]` of a block. keys: int64 `[heads, L]`, padded with Tk; all queries see the first `whole`.

    memory: for the scores.
    """
    heads, group, count, _ = queries.shape
    length, kv_len = keys.shape[1], gathered.kv_len
    offsets = torch.arange(heads, device=keys.device)[:, None]
    # Padding is read at the first key of the list, whose weight is 0 there: a key that is in no list may hold a NaN, and 0 times NaN is NaN
    rows = (torch.where(keys < kv_len, keys, keys[:, :1].clamp(max=kv_len - 1)) + offsets * kv_len).flatten()
    left, right = queries.flatten(1, 2), gathered.key.index_select(0, rows).view(heads, length, queries.shape[3]).mT
    scores = memory[: heads * group * count * length].view(heads, group * count, length)
    if gathered.scores is None:
        torch.bmm(left, right, out=scores).mul_(scale)
    else:
        torch.baddbmm(gathered.scores.index_select(0, rows).view(heads, 1, length), left, right, alpha=scale, out=scores)
    if whole < length:
        at = torch.arange(block.start, block.stop, device=keys.device, dtype=torch.int32)[:, None] + (kv_len - q_len)
        some = (keys[:, whole:] + offsets * (kv_len + 1)).flatten()
        first, last = (x.index_select(0, some).view(heads, 1, 1, -1) for x in (gathered.start, gathered.stop))
        scores.view(heads, group, count, length)[..., whole:].masked_fill_((at < first) | (at >= last), float("-inf"))
    largest = scores.amax(-1, keepdim=True)
    empty = largest == float("-inf")
    some_are_empty = bool(empty.any())
    if some_are_empty:  # -inf - -inf would be NaN
        largest = largest.masked_fill(empty, 0.0)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    values = gathered.value.index_select(0, rows).view(heads, length, gathered.value.shape[1])
    out = torch.bmm(weights, values).div_(total)
    if some_are_empty:
        out.masked_fill_(empty, 0.0)
    return out.view(heads, group, count, values.shape[2]), (total.log_().add_(largest)).view(heads, group, count)


def attend_blocks_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scores: Tensor | None,
    start: Tensor,
    stop: Tensor,
    max_new_keys: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dscores) in the dtypes of their tensors; dscores is empty without `key_scores`."""
    if 0 in (*query.shape[:3], key.shape[2]):
        dscores = query.new_empty(0) if key_scores is None else torch.zeros_like(key_scores)
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), dscores
    queries = _queries(query, key, scale)
    rows = _rows(key, value, key_scores, start, stop)
    blocks = Blocks.of(start, stop, query.shape[2])
    heads, group, q_len, _ = queries.shape
    douts = dout.to(queries.dtype).reshape(heads, group, q_len, value.shape[3])
    delta = (douts * out.to(queries.dtype).reshape(douts.shape)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(queries.dtype).reshape(delta.shape)
    sums = _Sums(torch.zeros_like(queries), torch.zeros_like(rows.key), torch.zeros_like(rows.value))
    memory = queries.new_empty(2, heads * group * BLOCK * max(blocks.longest, default=0))
    lse = lse.reshape(heads, group, q_len)
    for c in range(len(blocks.longest)):
        if blocks.longest[c]:
            _add_block(sums, c, blocks, rows, queries, douts, lse, delta, key.shape[2], memory)
    dim, kv_len = key.shape[3], key.shape[2]
    dkeys = sums.dkeys.view(*key.shape[:2], kv_len + 1, dim + 1)[:, :, :kv_len]
    dvalue = sums.dvalues.view(*key.shape[:2], kv_len + 1, value.shape[3])[:, :, :kv_len]
    return (
        (sums.dqueries[..., :dim] * scale).view(query.shape).to(query.dtype),
        dkeys[..., :dim].to(key.dtype),
        dvalue.to(value.dtype),
        dkeys.new_empty(0) if key_scores is None else dkeys[..., dim].to(key_scores.dtype),
    )


class _Sums(NamedTuple):
    """The gradients of `_queries` and of the rows of `_rows`, summed block by block."""

    dqueries: Tensor
    dkeys: Tensor
    dvalues: Tensor


def _add_block(
    sums: _Sums,
    c: int,
    blocks: Blocks,
    rows: Rows,
    queries: Tensor,
    douts: Tensor,
    lse: Tensor,
    delta: Tensor,
    kv_len: int,
    memory: Tensor,
) -> None:
    """Add the contribution of the queries of block `c`. delta: rowsum(dout * out) - dlse. memory: buffers for scores and for
    weights."""
    q_len = queries.shape[2]
    block = slice(c * BLOCK, min((c + 1) * BLOCK, q_len))
    index = _index(blocks, c, rows)
    flat = index.flatten()
    q_block = queries[:, :, block]
    scores = _scores(q_block, rows, index, blocks.whole[c], kv_len, q_len, block, memory[0])
    # not exp(scores - lse): next to a large score the logarithm of the sum is lost in lse
    weights = torch.softmax(scores, dim=-1, out=memory[1][: scores.numel()].view_as(scores))
    empty = lse[:, :, block] == float("-inf")
    if bool(empty.any()):
        weights.masked_fill_(empty[..., None], 0.0)
    values = rows.value.index_select(0, flat).view(*index.shape, rows.value.shape[1])
    dout_rows, weight_rows = douts[:, :, block].flatten(1, 2), weights.flatten(1, 2)
    sums.dvalues.index_add_(0, flat, (weight_rows.mT @ dout_rows).flatten(0, 1))
    dscores = weight_rows * (dout_rows @ values.mT - delta[:, :, block].flatten(1, 2)[..., None])
    keys = rows.key.index_select(0, flat).view(*index.shape, -1)
    sums.dqueries[:, :, block] = (dscores @ keys).view(q_block.shape)
    sums.dkeys.index_add_(0, flat, (dscores.mT @ q_block.flatten(1, 2)).flatten(0, 1))


def _queries(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """`[B * Hkv, G, Tq, D + 1]`: scaled queries and a column of ones, in the working dtype."""
    batch, heads, q_len, dim = query.shape
    working = torch.promote_types(query.dtype, torch.float32)
    group = heads // key.shape[1]
    rows = query.new_empty(batch * key.shape[1], group, q_len, dim + 1, dtype=working)
    rows[..., :dim] = query.reshape(batch * key.shape[1], group, q_len, dim)
    rows[..., :dim] *= scale
    rows[..., dim] = 1.0
    return rows


def _rows(key: Tensor, value: Tensor, key_scores: Tensor | None, start: Tensor, stop: Tensor) -> Rows:
    batch, heads, kv_len, _ = key.shape
    working = torch.promote_types(key.dtype, torch.float32)
    # one more row in each head, of zeros and seen by no query: the lists are padded with it
    keys = key.new_empty(batch, heads, kv_len + 1, key.shape[3] + 1, dtype=working)
    keys[:, :, :kv_len, :-1] = key
    keys[:, :, :kv_len, -1] = 0.0 if key_scores is None else key_scores
    values = value.new_empty(batch, heads, kv_len + 1, value.shape[3], dtype=working)
    values[:, :, :kv_len] = value
    keys[:, :, kv_len], values[:, :, kv_len] = 0.0, 0.0
    pad = torch.nn.functional.pad
    start, stop = pad(start, (0, 1)), pad(stop, (0, 1), value=torch.iinfo(torch.int32).min)
    offsets = torch.arange(batch * heads, device=key.device)[:, None] * (kv_len + 1)
    return Rows(keys.flatten(0, 2), values.flatten(0, 2), start.flatten(), stop.flatten(), offsets)


def _index(blocks: Blocks, block: int, rows: Rows) -> Tensor:
    """Rows to gather for a block, `[B * Hkv, L]`."""
    return blocks.keys[:, :, block, : blocks.longest[block]].flatten(0, 1) + rows.offsets


def _scores(
    queries: Tensor, rows: Rows, index: Tensor, whole: int, kv_len: int, q_len: int, block: slice, memory: Tensor
) -> Tensor:
    """Scores of a block, written to `memory`: `[B * Hkv, G, queries, L]`, -inf where a query does not see a key. All queries see
    the first `whole` keys."""
    heads, group, count, _ = queries.shape
    length = index.shape[1]
    keys = rows.key.index_select(0, index.flatten()).view(heads, length, -1)
    scores = memory[: heads * group * count * length].view(heads, group * count, length)
    scores = torch.bmm(queries.flatten(1, 2), keys.mT, out=scores).view(heads, group, count, length)
    if whole < index.shape[1]:
        at = torch.arange(block.start, block.stop, device=index.device, dtype=torch.int32)[:, None] + (kv_len - q_len)
        some = index[:, whole:].flatten()
        start = rows.start[some].view(heads, 1, 1, -1)
        stop = rows.stop[some].view(heads, 1, 1, -1)
        scores[..., whole:].masked_fill_((at < start) | (at >= stop), float("-inf"))
    return scores
