"""Expiry of every key on a GPU, in two Triton kernels: O(n * keep) work, no sort of the whole row, no `[n, n]` tensor.

    expiry_j = min { i : #{ j' <= i, j' ranks above j } >= keep }          (`saccade.selection`, which this must equal bit for bit)

Positions are cut into chunks of CHUNK. Only keys that are among the best `keep` at the start of a chunk, or belong to it, can expire
in it, so that
    survivors: for each chunk, the best `keep` keys before it (a radix select by 11, 11 and 10 bits, then one pass in order of position), and
               those of its own keys that are not beaten by all of them
    expire:    each of these keys counts who ranks above it: among the survivors, then along the chunk, where it may reach `keep`
Time at n = 32,768 on a row: a chunk reads its past four times (n^2 / (2 * CHUNK) * 4 keys in all, from L2), then compares
(keep + admitted)^2 pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048


@triton.jit
def _load_ranks(scores, position, inside):
    """float32 scores as uint32 of the same order, -0.0 equal to 0.0."""
    bits = (tl.load(scores + position, mask=inside, other=0.0) + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _digit(rank, DIGIT: tl.constexpr):
    """(bits above, bits of) the digit: 11, 11 and 10 bits from the top."""
    if DIGIT == 0:
        return rank * 0, rank >> 21
    elif DIGIT == 1:
        return rank >> 21, (rank >> 10) & 2047
    else:
        return rank >> 10, rank & 1023


@triton.jit
def _survivors_kernel(
    scores, lengths, survivors, survivor_counts, own, own_counts, stop, heads, kv_len, chunks, keep,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """survivors `[rows, chunks, keep]` and own `[rows, chunks, CHUNK]`: positions, ascending. stop: n for admitted keys, j for others."""
    # long pasts first
    chunk = chunks - 1 - tl.program_id(0) % chunks
    row = (tl.program_id(0) // chunks).to(tl.int64)
    end = tl.load(lengths + row // heads) if HAS_LENGTHS else kv_len
    past = tl.minimum(chunk * CHUNK, end)
    row_scores = scores + row * kv_len
    slot = row * chunks + chunk
    along = tl.arange(0, BLOCK)
    # the keep-th best score of the past, a digit at a time: `high` are the bits known so far
    bins = tl.arange(0, 2048)
    high = tl.full((), 0, tl.uint32)
    wanted = tl.minimum(keep, past)  # how many are still to be taken from the bin
    equal_total = tl.full((), 0, tl.int32)
    for digit in tl.static_range(3):
        histogram = tl.zeros((2048,), tl.int32)
        for first in range(0, past, BLOCK):
            inside = first + along < past
            prefix, value = _digit(_load_ranks(row_scores, first + along, inside), digit)
            histogram += tl.histogram(value.to(tl.int32), 2048, mask=inside & (prefix == high))
        above = tl.sum(histogram, 0) - tl.cumsum(histogram, 0)  # entries in better bins
        found = tl.min(tl.where((above < wanted) | (wanted == 0), bins, 2047), 0)
        found = tl.where(wanted > 0, found, 0)
        wanted -= tl.sum(tl.where(bins == found, above, 0), 0)
        equal_total = tl.sum(tl.where(bins == found, histogram, 0), 0)
        high = (high << (11 if digit < 2 else 10)) | found.to(tl.uint32)
    threshold = high
    # `wanted` of the `equal_total` keys that equal the threshold are kept: the newest
    kept = tl.full((), 0, tl.int32)
    equal_before = tl.full((), 0, tl.int32)
    for first in range(0, past, BLOCK):
        inside = first + along < past
        rank = _load_ranks(row_scores, first + along, inside)
        equal = (inside & (rank == threshold)).to(tl.int32)
        nth = equal_before + tl.cumsum(equal, 0)
        take = inside & ((rank > threshold) | ((equal == 1) & (nth > equal_total - wanted)))
        place = kept + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(survivors + slot * keep + place, first + along, mask=take)
        kept += tl.sum(take.to(tl.int32), 0)
        equal_before += tl.sum(equal, 0)
    tl.store(survivor_counts + slot, kept)
    # keys of the chunk: one that equals the threshold is newer, and so ranks above
    admitted = tl.full((), 0, tl.int32)
    full = past >= keep
    for first in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, kv_len), BLOCK):
        position = first + along
        inside = (position < kv_len) & (position < chunk * CHUNK + CHUNK)
        rank = _load_ranks(row_scores, position, inside)
        take = inside & (position < end) & ((rank >= threshold) | (full == 0))
        place = admitted + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(own + slot * CHUNK + place, position, mask=take)
        tl.store(stop + row * kv_len + position, tl.where(take, kv_len, position), mask=inside)
        admitted += tl.sum(take.to(tl.int32), 0)
    tl.store(own_counts + slot, admitted)


@triton.jit
def _load_keys(lists, scores, first, count, BLOCK: tl.constexpr):
    """(positions, scores, listed) of BLOCK entries of a list."""
    along = first + tl.arange(0, BLOCK)
    listed = along < count
    position = tl.load(lists + along, mask=listed, other=0)
    return position, tl.load(scores + position, mask=listed, other=0.0), listed


@triton.jit
def _above(score, position, rival_score, rival, listed):
    """[keys, rivals]: whether the rival ranks above the key."""
    higher = rival_score[None, :] > score[:, None]
    newer = (rival_score[None, :] == score[:, None]) & (rival[None, :] > position[:, None])
    return ((higher | newer) & listed[None, :]).to(tl.int32)


@triton.jit
def _expire_kernel(
    scores, survivors, survivor_counts, own, own_counts, stop, kv_len, chunks, keep,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, RIVALS: tl.constexpr,
):  # fmt: skip
    """KEYS keys that may expire in a chunk: the first position at which `keep` rank above each."""
    slot = tl.program_id(1).to(tl.int64)
    row = slot // chunks
    row_scores = scores + row * kv_len
    past, admitted = tl.load(survivor_counts + slot), tl.load(own_counts + slot)
    first = tl.program_id(0) * KEYS
    # nobody expires before `keep` keys are there
    if (first < past + admitted) & (past + admitted > keep):
        along = first + tl.arange(0, KEYS)
        mine = along < past + admitted
        is_own = along >= past
        position = tl.load(survivors + slot * keep + along, mask=mine & (is_own == 0), other=0)
        position += tl.load(own + slot * CHUNK + along - past, mask=mine & is_own, other=0)
        score = tl.load(row_scores + position, mask=mine, other=0.0)
        above = tl.zeros((KEYS,), tl.int32)
        for begin in range(0, past, RIVALS):
            rival, rival_score, listed = _load_keys(survivors + slot * keep, row_scores, begin, past, RIVALS)
            above += tl.sum(_above(score, position, rival_score, rival, listed), 1)
        # along the chunk, tile by tile: in which tile is `keep` reached, and with how many before it
        reached_in = tl.full((KEYS,), -1, tl.int32)
        before = above
        begin = 0
        while (begin < admitted) & (tl.min(tl.where(mine, above, keep), 0) < keep):
            rival, rival_score, listed = _load_keys(own + slot * CHUNK, row_scores, begin, admitted, RIVALS)
            after = above + tl.sum(_above(score, position, rival_score, rival, listed), 1)
            crosses = (above < keep) & (after >= keep)
            reached_in = tl.where(crosses, begin, reached_in)
            before = tl.where(crosses, above, before)
            above = after
            begin += RIVALS
        # then where in that tile, each key in its own
        found = mine & (reached_in >= 0)
        place = reached_in[:, None] + tl.arange(0, RIVALS)[None, :]
        listed = found[:, None] & (place < admitted)
        rival = tl.load(own + slot * CHUNK + place, mask=listed, other=0)
        rival_score = tl.load(row_scores + rival, mask=listed, other=0.0)
        higher = (rival_score > score[:, None]) | ((rival_score == score[:, None]) & (rival > position[:, None]))
        counted = before[:, None] + tl.cumsum((higher & listed).to(tl.int32), 1)
        expires = tl.min(tl.where(listed & (counted >= keep), rival, 2147483647), 1)
        # a key that was beaten before it came is never admitted; an own key beaten by survivors alone is not listed
        tl.store(stop + row * kv_len + position, tl.maximum(expires, position), mask=found)


def causal_expiry(key_scores: Tensor, keep: int, lengths: Tensor | None = None) -> Tensor:
    """int32 `[B, Hkv, Tk]`, as `saccade.selection.causal_expiry` without documents."""
    batch, heads, kv_len = key_scores.shape
    scores = key_scores.detach().float().contiguous()
    stop = torch.empty(scores.shape, dtype=torch.int32, device=scores.device)
    if stop.numel() == 0:
        return stop
    keep = min(keep, kv_len)
    rows, chunks = batch * heads, -(-kv_len // CHUNK)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=scores.device)

    survivors, own = integers(rows, chunks, keep), integers(rows, chunks, CHUNK)
    survivor_counts, own_counts = integers(rows, chunks), integers(rows, chunks)
    tile = min(4096, max(16, triton.next_power_of_2(kv_len)))
    _survivors_kernel[(rows * chunks,)](
        scores, scores if lengths is None else lengths, survivors, survivor_counts, own, own_counts, stop,
        heads, kv_len, chunks, keep, CHUNK, tile, lengths is not None, num_warps=16,
    )  # fmt: skip
    keys = 32
    _expire_kernel[(triton.cdiv(keep + CHUNK, keys), rows * chunks)](
        scores, survivors, survivor_counts, own, own_counts, stop, kv_len, chunks, keep, CHUNK, keys, 128, num_warps=4
    )
    return stop
