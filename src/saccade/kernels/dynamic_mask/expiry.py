"""Expiry of every key on a GPU, in Triton: O(n * keep) work, no sort of the whole row, no `[n, n]` tensor.

    expiry_j = min { i : #{ j' <= i, j' ranks above j } >= keep }          (`saccade.selection`, which this must equal bit for bit)

Positions are cut into chunks of CHUNK. Only keys that are among the best `keep` at the start of a chunk, or belong to it, can expire
in it, so that
    best:    the best `keep` keys of each chunk, then of all chunks up to each: "the best of two lists" is associative, so this is a
             scan, log2(n / CHUNK) launches that each choose `keep` of `2 * keep`
    admit:   the keys of a chunk that not all survivors of its past beat
    expire:  each survivor and each admitted key counts who ranks above it: among the survivors, then along the chunk, where it may
             reach `keep`
Work: n / CHUNK * (2 * keep * 32 for each step of the scan + (keep + admitted)^2) comparisons; a row of 32,768 is 16 chunks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch import launch

CHUNK = 2048
MAX_KEEP = 8192  # a program holds two lists of this length


@triton.jit
def _ranks(score):
    """float32 scores as uint32 of the same order, -0.0 equal to 0.0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _store_best(position, score, inside, keep, out, out_scores, out_count):
    """The `keep` best of entries in order of position, of equals the newest, as a list in that order."""
    rank = _ranks(score)
    wanted = tl.minimum(keep, tl.sum(inside.to(tl.int32), 0))
    threshold = tl.full((), 0, tl.uint32)  # the `wanted`-th best, a bit at a time
    bit = tl.full((), 2147483648, tl.uint32)
    for _ in range(32):
        trial = threshold | bit
        bit = bit >> 1
        enough = tl.sum((inside & (rank >= trial)).to(tl.int32), 0) >= wanted
        threshold = tl.where(enough, trial, threshold)
    above = inside & (rank > threshold)
    equal = (inside & (rank == threshold)).to(tl.int32)
    needed = wanted - tl.sum(above.to(tl.int32), 0)
    take = above | ((equal == 1) & (tl.cumsum(equal, 0) > tl.sum(equal, 0) - needed))
    place = tl.cumsum(take.to(tl.int32), 0) - 1
    tl.store(out + place, position, mask=take)
    tl.store(out_scores + place, score, mask=take)
    tl.store(out_count, wanted)


@triton.jit
def _best_of_chunk_kernel(
    scores, lengths, best, best_scores, counts, heads, kv_len, chunks, keep, CHUNK: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row = slot // chunks
    end = tl.load(lengths + row // heads) if HAS_LENGTHS else kv_len
    position = (tl.program_id(0) % chunks) * CHUNK + tl.arange(0, CHUNK)
    score = tl.load(scores + row * kv_len + position, mask=position < end, other=0.0)
    _store_best(position, score, position < end, keep, best + slot * keep, best_scores + slot * keep, counts + slot)


@triton.jit
def _scan_kernel(
    best, best_scores, counts, out, out_scores, out_counts, chunks, keep, distance, KEEP: tl.constexpr,
):  # fmt: skip
    """The best of the lists of chunk c - distance and chunk c: one step of an inclusive scan. KEEP: power of two, at least keep."""
    slot = tl.program_id(0).to(tl.int64)
    along = tl.arange(0, 2 * KEEP)
    entry = along % KEEP
    source = tl.where(along < KEEP, slot - distance, slot)
    exists = (along >= KEEP) | (tl.program_id(0) % chunks >= distance)
    inside = exists & (entry < tl.load(counts + source, mask=exists, other=0))
    position = tl.load(best + source * keep + entry, mask=inside, other=0)
    score = tl.load(best_scores + source * keep + entry, mask=inside, other=0.0)
    _store_best(position, score, inside, keep, out + slot * keep, out_scores + slot * keep, out_counts + slot)


@triton.jit
def _admit_kernel(
    scores, lengths, best_scores, counts, own, own_scores, own_counts, stop, heads, kv_len, chunks, keep,
    CHUNK: tl.constexpr, KEEP: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """own `[rows, chunks, CHUNK]`: the keys that are kept by their own position at least, ascending. stop: n for these, j for others."""
    slot = tl.program_id(0).to(tl.int64)
    row = slot // chunks
    chunk = tl.program_id(0) % chunks
    end = tl.load(lengths + row // heads) if HAS_LENGTHS else kv_len
    past = tl.load(counts + slot - 1, mask=chunk > 0, other=0)
    entry = tl.arange(0, KEEP)
    rank = _ranks(tl.load(best_scores + (slot - 1) * keep + entry, mask=entry < past, other=0.0)).to(tl.int64)
    lowest = tl.min(tl.where(entry < past, rank, 4294967295), 0)
    position = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = position < kv_len
    score = tl.load(scores + row * kv_len + position, mask=inside, other=0.0)
    # a key that equals the lowest survivor is newer, and so ranks above it
    take = inside & (position < end) & ((_ranks(score).to(tl.int64) >= lowest) | (past < keep))
    place = slot * CHUNK + tl.cumsum(take.to(tl.int32), 0) - 1
    tl.store(own + place, position, mask=take)
    tl.store(own_scores + place, score, mask=take)
    tl.store(own_counts + slot, tl.sum(take.to(tl.int32), 0))
    tl.store(stop + row * kv_len + position, tl.where(take, kv_len, position), mask=inside)


@triton.jit
def _load_keys(lists, list_scores, first, count, BLOCK: tl.constexpr):
    """(positions, scores, listed) of BLOCK entries of a list."""
    along = first + tl.arange(0, BLOCK)
    listed = along < count
    return tl.load(lists + along, mask=listed, other=0), tl.load(list_scores + along, mask=listed, other=0.0), listed


@triton.jit
def _above(score, position, rival_score, rival, listed):
    """[keys, rivals]: whether the rival ranks above the key."""
    higher = rival_score[None, :] > score[:, None]
    newer = (rival_score[None, :] == score[:, None]) & (rival[None, :] > position[:, None])
    return ((higher | newer) & listed[None, :]).to(tl.int32)


@triton.jit
def _expire_kernel(
    survivors, survivor_scores, survivor_counts, own, own_scores, own_counts, stop, kv_len, chunks, keep,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, RIVALS: tl.constexpr,
):  # fmt: skip
    """KEYS keys that may expire in a chunk: the first position at which `keep` rank above each."""
    slot = tl.program_id(1).to(tl.int64)
    row = slot // chunks
    # the survivors of a chunk's past are the best up to the chunk before
    survivors += (slot - 1) * keep
    survivor_scores += (slot - 1) * keep
    own += slot * CHUNK
    own_scores += slot * CHUNK
    past = tl.load(survivor_counts + slot - 1, mask=slot % chunks > 0, other=0)
    admitted = tl.load(own_counts + slot)
    first = tl.program_id(0) * KEYS
    # nobody expires before `keep` keys are there
    if (first < past + admitted) & (past + admitted > keep):
        along = first + tl.arange(0, KEYS)
        mine = along < past + admitted
        from_past, from_own = mine & (along < past), mine & (along >= past)
        position = tl.load(survivors + along, mask=from_past, other=0) + tl.load(own + along - past, mask=from_own, other=0)
        score = tl.load(survivor_scores + along, mask=from_past, other=0.0)
        score += tl.load(own_scores + along - past, mask=from_own, other=0.0)
        # rivals are asked for a tile ahead: a tile is counted in less time than a load takes
        above = tl.zeros((KEYS,), tl.int32)
        rival, rival_score, listed = _load_keys(survivors, survivor_scores, 0, past, RIVALS)
        for begin in range(0, past, RIVALS):
            following = _load_keys(survivors, survivor_scores, begin + RIVALS, past, RIVALS)
            above += tl.sum(_above(score, position, rival_score, rival, listed), 1)
            rival, rival_score, listed = following
        # along the chunk, tile by tile: in which tile is `keep` reached, and with how many before it
        reached_in = tl.full((KEYS,), -1, tl.int32)
        before = above
        begin = 0
        rival, rival_score, listed = _load_keys(own, own_scores, 0, admitted, RIVALS)
        while (begin < admitted) & (tl.min(tl.where(mine, above, keep), 0) < keep):
            following = _load_keys(own, own_scores, begin + RIVALS, admitted, RIVALS)
            after = above + tl.sum(_above(score, position, rival_score, rival, listed), 1)
            crosses = (above < keep) & (after >= keep)
            reached_in = tl.where(crosses, begin, reached_in)
            before = tl.where(crosses, above, before)
            above = after
            begin += RIVALS
            rival, rival_score, listed = following
        # then where in that tile, each key in its own
        found = mine & (reached_in >= 0)
        place = reached_in[:, None] + tl.arange(0, RIVALS)[None, :]
        inside = found[:, None] & (place < admitted)
        rivals = tl.load(own + place, mask=inside, other=0)
        scores = tl.load(own_scores + place, mask=inside, other=0.0)
        higher = (scores > score[:, None]) | ((scores == score[:, None]) & (rivals > position[:, None]))
        counted = before[:, None] + tl.cumsum((higher & inside).to(tl.int32), 1)
        expires = tl.min(tl.where(inside & (counted >= keep), rivals, 2147483647), 1)
        # a key that was beaten before it came is never admitted; an own key beaten by survivors alone is not listed
        tl.store(stop + row * kv_len + position, tl.maximum(expires, position), mask=found)


def causal_expiry(key_scores: Tensor, keep: int, lengths: Tensor | None = None) -> Tensor | None:
    """int32 `[B, Hkv, Tk]`, as `saccade.selection.causal_expiry` without documents; None where min(keep, Tk) exceeds MAX_KEEP."""
    batch, heads, kv_len = key_scores.shape
    if min(keep, kv_len) > MAX_KEEP:
        return None
    scores = key_scores.detach().float().contiguous()
    stop = torch.empty(scores.shape, dtype=torch.int32, device=scores.device)
    if stop.numel() == 0:
        return stop
    keep = min(keep, kv_len)
    rows, chunks = batch * heads, -(-kv_len // CHUNK)
    has_lengths = lengths is not None
    lengths = scores if lengths is None else lengths.to(torch.int32)
    pad = triton.next_power_of_2(max(16, keep))
    warps = 4 if pad <= 512 else 8 if pad <= 2048 else 16

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=scores.device)

    def lists(length: int) -> tuple[Tensor, Tensor, Tensor]:
        floats = torch.empty(rows, chunks, length, dtype=torch.float32, device=scores.device)
        return integers(rows, chunks, length), floats, integers(rows, chunks)

    best, other, own = lists(keep), lists(keep), lists(CHUNK)
    numbers = (heads, kv_len, chunks, keep, CHUNK)
    launch(_best_of_chunk_kernel, rows * chunks, (scores, lengths, *best), (*numbers, has_lengths), num_warps=8)
    distance = 1
    while distance < chunks:
        launch(_scan_kernel, rows * chunks, (*best, *other), (chunks, keep, distance, pad), num_warps=warps)
        best, other = other, best
        distance *= 2
    admit = (scores, lengths, *best[1:], *own, stop)
    launch(_admit_kernel, rows * chunks, admit, (*numbers, pad, has_lengths), num_warps=8)
    keys, rivals = 32, 128
    programs = (triton.cdiv(keep + CHUNK, keys), rows * chunks)
    launch(_expire_kernel, programs, (*best, *own, stop), (kv_len, chunks, keep, CHUNK, keys, rivals), num_warps=4)
    return stop
