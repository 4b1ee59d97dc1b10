"""Expiry of every key on a GPU, in Triton: O(n * keep) work, no sort of the whole row, no `[n, n]` tensor.

    expiry_j = min { i : #{ j' <= i, j' ranks above j } >= keep }

The result must equal that of `saccade.dynamic_mask.selection.intervals`, bit for bit.

Positions are cut into chunks of CHUNK. The survivors of a chunk's past are the best `keep` keys before it. Only these and the keys
of the chunk itself can expire in the chunk. There are three kinds of launches:
    best:    finds the best `keep` keys of each chunk, then of all chunks up to each. "The best of two lists" is associative, so
             this is a scan: log2(n / CHUNK) launches that each choose `keep` of `2 * keep`.
    admit:   drops the keys of a chunk that all survivors of its past beat.
    expire:  for each survivor and each admitted key, counts the keys that rank above it: among the survivors, then along the
             chunk, where the count may reach `keep`.
Work: n / CHUNK * (2 * keep * 32 for each step of the scan + (keep + admitted)^2) comparisons; a row of 32,768 is 16 chunks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.launch.triton import launch, pow2

CHUNK = 2048
MAX_KEEP = 8192  # a program holds two lists of this length
EXPIRE = (64, 32, 4)  # keys per program, rivals at a time, warps


@triton.jit
def _entries(score, position):
    """Keys as uint64 in the order of (score, position), -0.0 equal to 0.0; 0 is below every key."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ -2147483648).to(tl.uint32, bitcast=True)
    return (rank.to(tl.uint64) << 32) | position.to(tl.uint64)


@triton.jit
def _position(entry):
    return (entry & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _store_best(entry, inside, keep, out, out_count):
    """Stores the `keep` best entries in order of position; of equal ones the newest."""
    rank = (entry >> 32).to(tl.uint32)
    wanted = tl.minimum(keep, tl.sum(inside.to(tl.int32), 0))
    threshold = tl.full((), 0, tl.uint32)  # the `wanted`-th best, found bit by bit
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
    tl.store(out + place, entry, mask=take)
    tl.store(out_count, wanted)


@triton.jit
def _best_of_chunk_kernel(
    scores, lengths, best, counts, heads, kv_len, chunks, keep, CHUNK: tl.constexpr, HAS_LENGTHS: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64)
    row = slot // chunks
    end = tl.load(lengths + row // heads) if HAS_LENGTHS else kv_len
    position = (tl.program_id(0) % chunks) * CHUNK + tl.arange(0, CHUNK)
    score = tl.load(scores + row * kv_len + position, mask=position < end, other=0.0)
    _store_best(_entries(score, position), position < end, keep, best + slot * keep, counts + slot)


@triton.jit
def _scan_kernel(best, counts, out, out_counts, chunks, keep, distance, KEEP: tl.constexpr):
    """The best of the lists of chunk c - distance and chunk c: one step of an inclusive scan. KEEP: power of two, at least
    keep."""
    slot = tl.program_id(0).to(tl.int64)
    along = tl.arange(0, 2 * KEEP)
    place = along % KEEP
    source = tl.where(along < KEEP, slot - distance, slot)
    exists = (along >= KEEP) | (tl.program_id(0) % chunks >= distance)
    inside = exists & (place < tl.load(counts + source, mask=exists, other=0))
    entry = tl.load(best + source * keep + place, mask=inside, other=0)
    _store_best(entry, inside, keep, out + slot * keep, out_counts + slot)


@triton.jit
def _admit_kernel(
    scores, lengths, best, counts, own, own_counts, stop, heads, kv_len, chunks, keep,
    CHUNK: tl.constexpr, KEEP: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """own `[rows, chunks, CHUNK]`: the keys that at least their own position keeps, ascending. stop: n for these, j for the
    others."""
    slot = tl.program_id(0).to(tl.int64)
    row = slot // chunks
    chunk = tl.program_id(0) % chunks
    end = tl.load(lengths + row // heads) if HAS_LENGTHS else kv_len
    past = tl.load(counts + slot - 1, mask=chunk > 0, other=0)
    place = tl.arange(0, KEEP)
    # every key is admitted while fewer than `keep` survive
    survivor = tl.load(best + (slot - 1) * keep + place, mask=place < past, other=0xFFFFFFFFFFFFFFFF)
    lowest = tl.where(past < keep, 0, tl.min(survivor, 0))
    position = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = position < kv_len
    entry = _entries(tl.load(scores + row * kv_len + position, mask=inside, other=0.0), position)
    take = inside & (position < end) & (entry > lowest)
    place = slot * CHUNK + tl.cumsum(take.to(tl.int32), 0) - 1
    tl.store(own + place, entry, mask=take)
    tl.store(own_counts + slot, tl.sum(take.to(tl.int32), 0))
    tl.store(stop + row * kv_len + position, tl.where(take, kv_len, position), mask=inside)


@triton.jit
def _load_rivals(entries, first, count, RIVALS: tl.constexpr):
    """RIVALS entries of a list; 0 beyond its end, which ranks above no key."""
    along = first + tl.arange(0, RIVALS)
    return tl.load(entries + along, mask=along < count, other=0)


@triton.jit
def _expire_kernel(
    survivors, survivor_counts, own, own_counts, stop, kv_len, chunks, keep,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, RIVALS: tl.constexpr,
):  # fmt: skip
    """KEYS keys that may expire in a chunk: the first position at which `keep` rank above each."""
    slot = tl.program_id(1).to(tl.int64)
    row = slot // chunks
    # from the chunk's past: the best keys up to the chunk before
    survivors += (slot - 1) * keep
    own += slot * CHUNK
    past = tl.load(survivor_counts + slot - 1, mask=slot % chunks > 0, other=0)
    admitted = tl.load(own_counts + slot)
    first = tl.program_id(0) * KEYS
    # no key expires before there are `keep` keys
    if (first < past + admitted) & (past + admitted > keep):
        along = first + tl.arange(0, KEYS)
        mine = along < past + admitted
        from_past = mine & (along < past)
        entry = tl.load(survivors + along, mask=from_past, other=0) | tl.load(
            own + along - past, mask=mine & (along >= past), other=0
        )
        # Rivals are loaded one tile ahead, because a load takes longer than a tile. So does a sum per row: counts are summed per
        # lane first.
        higher = tl.zeros((KEYS, RIVALS), tl.int32)
        rivals = _load_rivals(survivors, 0, past, RIVALS)
        for begin in range(0, past, RIVALS):
            following = _load_rivals(survivors, begin + RIVALS, past, RIVALS)
            higher += (rivals[None, :] > entry[:, None]).to(tl.int32)
            rivals = following
        above = tl.where(mine, tl.sum(higher, 1), keep)
        # along the chunk, until `keep` keys rank above every key
        expires = tl.full((KEYS,), -1, tl.int32)
        begin = 0
        rivals = _load_rivals(own, 0, admitted, RIVALS)
        while (begin < admitted) & (tl.min(above, 0) < keep):
            following = _load_rivals(own, begin + RIVALS, admitted, RIVALS)
            beats = (rivals[None, :] > entry[:, None]).to(tl.int32)
            after = above + tl.sum(beats, 1)
            crosses = (above < keep) & (after >= keep)
            if tl.max(crosses.to(tl.int32), 0) > 0:
                reached = (above[:, None] + tl.cumsum(beats, 1) >= keep) & (rivals[None, :] > 0)
                at = tl.min(tl.where(reached, _position(rivals)[None, :], 2147483647), 1)
                expires = tl.where(crosses, at, expires)
            above = after
            begin += RIVALS
            rivals = following
        # a key that was outranked before its position is never admitted; a key of the chunk that survivors outrank by themselves is not listed
        position = _position(entry)
        tl.store(stop + row * kv_len + position, tl.maximum(expires, position), mask=expires >= 0)


def causal_intervals(key_scores: Tensor, keep: int, lengths: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """(start, stop), int32 `[B, Hkv, Tk]`; None if min(keep, Tk) exceeds MAX_KEEP."""
    stop = causal_expiry(key_scores, keep, lengths)
    if stop is None:
        return None
    return torch.arange(stop.shape[2], dtype=torch.int32, device=stop.device).expand(stop.shape), stop


def causal_expiry(key_scores: Tensor, keep: int, lengths: Tensor | None = None) -> Tensor | None:
    """int32 `[B, Hkv, Tk]`, as `saccade.dynamic_mask.selection.intervals.causal_expiry` without documents; None if min(keep,
    Tk) exceeds MAX_KEEP."""
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
    pad = pow2(max(16, keep))
    warps = 4 if pad <= 512 else 8 if pad <= 2048 else 16

    def lists(length: int) -> tuple[Tensor, Tensor]:
        entries = torch.empty(rows, chunks, length, dtype=torch.uint64, device=scores.device)
        return entries, torch.empty(rows, chunks, dtype=torch.int32, device=scores.device)

    best, other, own = lists(keep), lists(keep), lists(CHUNK)
    numbers = (heads, kv_len, chunks, keep, CHUNK)
    launch(_best_of_chunk_kernel, rows * chunks, (scores, lengths, *best), (*numbers, has_lengths), num_warps=8)
    distance = 1
    while distance < chunks:
        launch(_scan_kernel, rows * chunks, (*best, *other), (chunks, keep, distance, pad), num_warps=warps)
        best, other = other, best
        distance *= 2
    admit = (scores, lengths, *best, *own, stop)
    launch(_admit_kernel, rows * chunks, admit, (*numbers, pad, has_lengths), num_warps=8)
    keys, rivals, warps = EXPIRE
    programs = (triton.cdiv(keep + CHUNK, keys), rows * chunks)
    launch(_expire_kernel, programs, (*best, *own, stop), (kv_len, chunks, keep, CHUNK, keys, rivals), num_warps=warps)
    return stop
