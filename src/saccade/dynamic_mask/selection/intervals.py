"""The queries that keep a key, as one interval of positions per key. Plain torch on any device, without an `[n, n]` tensor.

For a fixed order of the keys the causal rule "query i keeps the w best keys among those up to i" shows key j to the positions
`j <= i < expiry_j`, where

    expiry_j = min { i : #{ j' <= i, j' ranks above j } >= w }
             = the w-th smallest position among the keys that rank above j

Keys are ranked by (score, position) in float32, so ties go to the newer key. In a list by descending rank, the keys above j are a
prefix. One descent of a wavelet matrix finds the w-th smallest position of a prefix. This takes a sort, log2(n) stable bit
partitions and as many look-ups for each key, for all keys and heads in parallel. On a GPU `expiry_cuda.py` and `expiry_triton.py` compute the same.
Source: "Trainable Dynamic Mask Sparse Attention" (paper 004), Listing 1 (per-query causal top-w); the interval form and its computation are ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def causal_expiry(key_scores: Tensor, keep: int, lengths: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
    """int32 `[B, Hkv, Tk]`: key j is kept by the positions `j <= i < expiry_j`; `expiry_j = j` if no position keeps it.

    Args:
        key_scores: `[B, Hkv, Tk]`, floating and finite; ranked in float32.
        keep: keys that each query keeps, at least 1.
        lengths: `[B]`, keys at or beyond it never compete and are never kept.
        document_ids: `[B, Tk]`, not decreasing; keys compete, and are seen, within their document.
    """
    batch, heads, kv_len = key_scores.shape
    device = key_scores.device
    positions = torch.arange(kv_len, device=device)
    if kv_len == 0:
        return torch.zeros(batch, heads, 0, dtype=torch.int32, device=device)
    starts, ends = _documents(document_ids, batch, kv_len, device)  # [B, Tk]
    valid = positions < ends if lengths is None else positions < torch.minimum(ends, lengths.to(device, torch.int64)[:, None])
    order = _descending(key_scores.detach().float(), starts, valid, lengths is not None or document_ids is not None)
    above = torch.empty_like(order).scatter_(2, order, positions.expand_as(order))  # keys before j in the list
    # keys of earlier documents come before j in the list but do not compete with it, so they are skipped
    wanted = starts[:, None, :] + keep - 1
    found = _order_statistic(order, above, wanted.expand_as(order))
    # with fewer than w keys above it, a key is kept to the end
    expiry = torch.where(above > wanted, found, kv_len)
    expiry = torch.minimum(expiry, ends[:, None, :]).clamp_min_(0)
    return torch.maximum(torch.where(valid[:, None, :], expiry, 0), positions).to(torch.int32)


def causal_intervals(
    key_scores: Tensor, keep: int, lengths: Tensor | None = None, document_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(start, stop), int32 `[B, Hkv, Tk]`: start is a key's own position, stop its `causal_expiry`."""
    positions = torch.arange(key_scores.shape[2], device=key_scores.device, dtype=torch.int32)
    return positions.expand(key_scores.shape), causal_expiry(key_scores, keep, lengths, document_ids)


def intervals(
    key_scores: Tensor,
    keep: int,
    q_len: int,
    is_causal: bool,
    lengths: Tensor | None,
    document_ids: Tensor | None,
    causal: Callable[..., tuple[Tensor, Tensor]] = causal_intervals,
    sinks: int = 0,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """(start, stop), int32 `[B, Hkv, Tk]`: the positions that keep each key; query i is at position `Tk - q_len + i`.

    Without `is_causal` all queries (of a document) keep the same w keys. `causal` may replace `causal_intervals`. sinks, window: how many
    of the first keys (of a document), and of the last ones before a query, are kept besides, whatever their scores.
    """
    if is_causal:
        start, stop = causal(key_scores, keep, lengths, document_ids)
        return start, with_always(stop, sinks, window, lengths, document_ids)
    batch, heads, kv_len = key_scores.shape
    device = key_scores.device
    positions = torch.arange(kv_len, device=device, dtype=torch.int32)
    starts, ends = _documents(document_ids, batch, kv_len, device)
    valid = positions < ends if lengths is None else positions < torch.minimum(ends, lengths.to(device, torch.int64)[:, None])
    order = _descending(key_scores.detach().float(), starts, valid, lengths is not None or document_ids is not None)
    rank = torch.empty_like(order).scatter_(2, order, torch.arange(kv_len, device=device).expand_as(order)) - starts[:, None, :]
    kept = (rank < keep) & valid[:, None, :]
    first = starts if document_ids is not None else torch.full_like(starts, min(0, kv_len - q_len))
    if sinks:
        kept = kept | ((positions - starts < sinks) & valid)[:, None, :]
    start = first[:, None, :].expand(batch, heads, kv_len).to(torch.int32)
    return start, torch.where(kept, ends[:, None, :].to(torch.int32), start)


def with_always(stop: Tensor, sinks: int, window: int, lengths: Tensor | None, document_ids: Tensor | None) -> Tensor:
    """The ends of causal intervals, int32 `[B, Hkv, Tk]`, extended by sinks and a window. Whatever their scores, the first `sinks` keys of a document
    are kept to its end, and each key for at least `window` positions, its own included.

    A key that is kept for several reasons is kept until the last of them ends, so it still has one interval.
    """
    if not sinks and not window:
        return stop
    batch, _, kv_len = stop.shape
    positions = torch.arange(kv_len, device=stop.device, dtype=torch.int32)
    if document_ids is None:
        starts, ends = positions.new_zeros(()), positions.new_full((), kv_len)
    else:
        starts, ends = (x.to(torch.int32) for x in _documents(document_ids, batch, kv_len, stop.device))
    always = positions
    if window:
        # not position + window, which might not fit an int32
        always = torch.minimum(positions, ends - window) + window
    if sinks:
        always = torch.where(positions - starts < sinks, ends, always)
    if lengths is not None:  # padding is never kept: the intervals of its keys are empty
        always = torch.where(positions < lengths[:, None], always, positions)
    return torch.maximum(stop, always if always.dim() == 1 else always[:, None, :])


def block_lists(start: Tensor, stop: Tensor, q_len: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """The keys that each block of `block` queries keeps, as rows of indices: at most w + block - 1 of them, however scattered.

    Returns:
        (keys, count, whole): keys int64 `[B, Hkv, blocks, longest]`, padded with Tk. The first `whole` keys are seen by every
        query of the block, the rest of the `count` keys only by some; both int64 `[B, Hkv, blocks]`.
    """
    batch, heads, kv_len = start.shape
    device = start.device
    base = kv_len - q_len
    blocks = -(-q_len // block)
    rows = batch * heads
    first = torch.clamp(start.reshape(-1).to(torch.int64) - base, min=0)  # in queries
    last = stop.reshape(-1).to(torch.int64) - base  # one past
    alive = last > first
    first_block = first // block
    visits = torch.where(alive, (last - 1) // block - first_block + 1, 0)
    source = torch.repeat_interleave(torch.arange(rows * kv_len, device=device), visits)
    turn = torch.arange(source.numel(), device=device) - (visits.cumsum(0) - visits)[source]
    query_block = first_block[source] + turn
    slot = source // kv_len * blocks + query_block
    begins, ends = query_block * block, torch.clamp((query_block + 1) * block, max=q_len)
    partial = (first[source] > begins) | (last[source] < ends)
    # stable, so that keys of a block stay in the order of their positions and a gather walks forward through memory
    order = torch.argsort(slot * 2 + partial, stable=True)
    count = torch.bincount(slot, minlength=rows * blocks)
    whole = torch.bincount(slot[~partial], minlength=rows * blocks)
    slot = slot[order]
    column = torch.arange(source.numel(), device=device) - (count.cumsum(0) - count)[slot]
    longest = int(count.max()) if count.numel() else 0
    keys = torch.full((rows * blocks, longest), kv_len, dtype=torch.int64, device=device)
    keys[slot, column] = source[order] % kv_len
    shape = (batch, heads, blocks)
    return keys.view(*shape, longest), count.view(shape), whole.view(shape)


def ranked_by_document(key_scores: Tensor, document_ids: Tensor) -> Tensor:
    """float32 `[B, Hkv, Tk]` in the order of (document, score, position), for kernels that know no documents.

    A key of a later document then ranks above every key of an earlier one. So the keys above a key lie in its own document, or behind the end of
    that document. `causal_expiry` of these numbers, cut off at that end, is the expiry within documents. The numbers are ranks as bits of normal
    floats, distinct up to 2^31 keys.
    """
    batch, _, kv_len = key_scores.shape
    starts, _ = _documents(document_ids, batch, kv_len, key_scores.device)
    bits = (key_scores.detach().float() + 0.0).contiguous().view(torch.int32)  # -0 and 0 are equal, but their bits are not
    ascending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) + 2**31
    order = torch.argsort((starts[:, None, :] << 32) + ascending, dim=-1, stable=True)
    places = torch.arange(kv_len, device=order.device, dtype=torch.int32) + _LEAST_NORMAL
    return torch.empty_like(order, dtype=torch.int32).scatter_(2, order, places.expand_as(order)).view(torch.float32)


_LEAST_NORMAL = 0x00800000  # as bits of a float32; below it a kernel may take a number for 0


def within_documents(stop: Tensor, document_ids: Tensor) -> Tensor:
    """The ends of intervals, cut off at the ends of their documents."""
    _, ends = _documents(document_ids, stop.shape[0], stop.shape[2], stop.device)
    return torch.minimum(stop, ends[:, None, :].to(torch.int32))


def _documents(document_ids: Tensor | None, batch: int, kv_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First position and one past the last of each key's document, int64 `[B, Tk]`."""
    if document_ids is None:
        zeros = torch.zeros(batch, kv_len, dtype=torch.int64, device=device)
        return zeros, torch.full_like(zeros, kv_len)
    ids = document_ids.contiguous()
    return torch.searchsorted(ids, ids), torch.searchsorted(ids, ids, right=True)


def _descending(scores: Tensor, starts: Tensor, valid: Tensor, grouped: bool) -> Tensor:
    """Positions by document, then valid before padding, then descending (score, position); int64 `[B, Hkv, Tk]`. grouped: whether there may be
    documents or padding."""
    kv_len = scores.shape[2]
    # stable sorts from the least to the most important criterion; flipped so that of equal scores the newer comes first
    order = kv_len - 1 - torch.argsort(scores.flip(-1), dim=-1, descending=True, stable=True)
    if not grouped:
        return order
    group = 2 * starts + (~valid).to(torch.int64)
    # one document, no padding; on a GPU the answer would need a wait, which a capture forbids
    if not group.is_cuda and bool((group == 0).all()):
        return order
    by_group = torch.argsort(group[:, None, :].expand_as(order).gather(2, order), dim=-1, stable=True)
    return order.gather(2, by_group)


def _order_statistic(order: Tensor, prefix: Tensor, index: Tensor) -> Tensor:
    """The `index`-th smallest value (from 0) among the first `prefix` entries of `order`; undefined where `prefix <= index`.

    order, prefix, index: int64 `[B, Hkv, n]`; `order` is a permutation of 0..n-1. This descends a wavelet tree. At level `bit`
    the entries are sorted stably by their bits above it, so that those with the prefix `value` start at index `value`. All
    integers are int32 except the indices of gathers. That takes a third less time than int64 on a CPU.
    """
    count = order.shape[2]
    small = torch.int32
    # within: the number of entries of the prefix in the node
    entries, within, index = order.to(small), prefix.to(small), index.to(small)
    value = torch.zeros_like(within)
    along = torch.arange(count, device=order.device, dtype=small)
    # entries before each whose bit is 0
    zeros = torch.zeros(*order.shape[:2], count + 1, dtype=small, device=order.device)
    for bit in range(max(1, (count - 1).bit_length()) - 1, -1, -1):
        ones = (entries >> bit) & 1
        torch.cumsum(1 - ones, 2, dtype=small, out=zeros[..., 1:])
        # entries of the prefix in the node whose bit is 0
        here = zeros.gather(2, (value + within).long()) - zeros.gather(2, value.long())
        # the second condition holds wherever there is an answer; otherwise it keeps indices in range
        up = (index >= here) & (within > here)
        index = index - here * up
        within = torch.where(up, within - here, here)
        value = value + (up.to(small) << bit)
        if bit:
            node = entries >> (bit + 1) << (bit + 1)
            rank = zeros[..., :-1] - zeros.gather(2, node.long())
            target = torch.where(ones == 1, along + (1 << bit) - rank, node + rank)
            entries = torch.empty_like(entries).scatter_(2, target.long(), entries)
    return value.long()
