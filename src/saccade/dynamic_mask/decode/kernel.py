"""One decoded token against the kept entries of each key head, in one launch: rank, attend, replace.

    lowest = argmin over the `size` places of (score, position), where unused places rank lowest
    the new token replaces that entry if it ranks above it; ties go to the newer token
    out = softmax(scale * q K^T + score) V over the resulting entries

With sinks and a window `size` is `keep + sinks + window`. The first and the newest tokens, the new one among them, are never the
lowest. The query keeps the first, the newest and the `keep` best of all, and there are more entries than these. So each other entry
counts how many rank above it, in `size` comparisons.

A program owns one key head of one batch row and 1 / SPLITS of its places; the query heads of the group are the rows of its
products. Every program scans all scores itself (8 bytes a place) and starts to load its keys and values before that scan ends. It
inserts the new token into its tile on chip. No program writes the entries until all have read them. The program that arrives last
at the counter of its head combines the parts, writes the output and the new token, and resets the counter.

Source: paper 004, Eq. 5 to 10 and Listing 1; that eviction is final is ours (`saccade.dynamic_mask.selection.intervals`).

Estimate for B = 1, Hkv = 8, group 4, D = 128, keep = 1024, bfloat16 on 132 multiprocessors (not a measurement):
    one program per head   8 multiprocessors read 512 KB each at 60 to 100 bytes a clock: 3 to 5 us for the bytes,
                           10 us with latencies
    16 splits per head     128 programs read 32 KB each (8 KB more of scores, from L2): about 0.3 us for the bytes.
                           Latencies decide: launch 2, first loads and scan 1.5, two products and softmax 1,
                           parts, counter and combining 2.5, in all 6 to 8 us.

The time depends only on `keep`, not on the length of the history.
"""

import triton
import triton.language as tl

from saccade.dynamic_mask.log2 import LN2, to_log2

_LOWEST = tl.constexpr(-(2**63))
_NOWHERE = tl.constexpr(2**31 - 1)
# Entries with which those of a tile are compared at a time. All of the tile's would take nearly all registers of a thread.
_OTHERS = tl.constexpr(16)


@triton.jit
def rank_of(score, position, place):
    """int64 ranks in the order of (score, position). Unused places (position -1) rank below every token, in the order of their
    indices."""
    score = tl.where(score == 0.0, 0.0, score)  # -0 and 0 are equal, but their bits are not
    score = tl.where(score != score, float("inf"), score)
    bits = score.to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return tl.where(position >= 0, order * 4294967296 + position, place.to(tl.int64) + _LOWEST)


@triton.jit
def always_kept(position, now, sinks, window):
    """Whether tokens are kept whatever their scores when the one at `now` is the newest."""
    return (position >= 0) & ((position < sinks) | (position > now - window))


@triton.jit
def lowest_place(scores, position, now, size, sinks, window, SCAN: tl.constexpr, ALWAYS: tl.constexpr):
    """(rank, place) of the entry of one head that ranks lowest; of those that need not be kept with the newest token at `now`."""
    lowest = tl.full((), 2**63 - 1, tl.int64)
    place = tl.full((), 0, tl.int32)
    for first in tl.range(0, size, SCAN, num_stages=1):
        places = first + tl.arange(0, SCAN)
        there = places < size
        score = tl.load(scores + places, mask=there, other=0.0)
        at = tl.load(position + places, mask=there, other=0)
        rank = rank_of(score, at, places)
        if ALWAYS:
            there = there & (always_kept(at, now, sinks, window) == 0)
        rank = tl.where(there, rank, 2**63 - 1)
        least = tl.min(rank, 0)
        at = tl.min(tl.where(rank == least, places, _NOWHERE), 0)
        place = tl.where(least < lowest, at, place)
        lowest = tl.minimum(least, lowest)
    return lowest, place


@triton.jit
def entries_after(scores, position, places, size, score_new, now, evicted, admitted):
    """(rank, position) of entries of one head once the new token has replaced the evicted one."""
    there = places < size
    taken = (places == evicted) & admitted & there
    score = tl.where(taken, score_new, tl.load(scores + places, mask=there, other=0.0))
    at = tl.where(taken, now.to(tl.int32), tl.load(position + places, mask=there, other=-1))
    return rank_of(score, at, places), at


@triton.jit
def still_kept(scores, position, places, sizes, token, BLOCK_N: tl.constexpr):
    """Whether the new token keeps the entries at `places` `[BLOCK_N]`: by their position, or as those that fewer than `keep` outrank."""
    size, keep, sinks, window = sizes
    score_new, now, evicted, admitted = token
    rank, at = entries_after(scores, position, places, size, score_new, now, evicted, admitted)
    above = tl.zeros((BLOCK_N,), tl.int32)
    for first in tl.range(0, size, _OTHERS, num_stages=1):
        others = first + tl.arange(0, _OTHERS)
        other, _ = entries_after(scores, position, others, size, score_new, now, evicted, admitted)
        # [BLOCK_N, _OTHERS]; unused places are below every token
        above += tl.sum((other[None, :] > rank[:, None]).to(tl.int32), 1)
    return always_kept(at, now, sinks, window) | (above < keep)


@triton.jit
def load_places(entries, places, stop, dims, head_dim):
    """`[n, D]` rows of the entries of one head, 0 at and beyond `stop`."""
    inside = (places < stop)[:, None] & (dims < head_dim)[None, :]
    return tl.load(entries + places.to(tl.int64)[:, None] * head_dim + dims[None, :], mask=inside, other=0.0)


@triton.jit
def combined(tensors, first_part, members, dims, head_dim, SHAPE: tl.constexpr):
    """(out `[GROUP_PAD, D]`, log-sum-exp in base 2 `[GROUP_PAD]`) of the parts of all splits of one head, AT_ONCE splits at a
    time."""
    parts, maxima, sums = tensors
    GROUP: tl.constexpr = SHAPE[0]
    GROUP_PAD: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    SPLITS: tl.constexpr = SHAPE[3]
    AT_ONCE: tl.constexpr = SHAPE[4]
    # .cg: other multiprocessors wrote these, so the L1 cache must be bypassed
    rows = (first_part + tl.arange(0, SPLITS))[:, None] * GROUP + members[None, :]
    inside = tl.broadcast_to((members < GROUP)[None, :], (SPLITS, GROUP_PAD))
    maximum = tl.load(maxima + rows, mask=inside, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(maximum, 0)
    # without any entry this would be -inf - -inf
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(maximum - shift[None, :]) * tl.load(sums + rows, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    acc = tl.zeros((GROUP_PAD, BLOCK_D), tl.float32)
    for first in tl.range(0, SPLITS, AT_ONCE, num_stages=1):
        some = (first_part + first + tl.arange(0, AT_ONCE))[:, None] * GROUP + members[None, :]
        there = tl.broadcast_to((members < GROUP)[None, :], (AT_ONCE, GROUP_PAD))
        weights = tl.exp2(tl.load(maxima + some, mask=there, other=float("-inf"), cache_modifier=".cg") - shift[None, :])
        within = there[:, :, None] & (dims < head_dim)[None, None, :]
        part = tl.load(parts + some[:, :, None] * head_dim + dims[None, None, :], mask=within, other=0.0, cache_modifier=".cg")
        acc += tl.sum(part * weights[:, :, None], 0)
    out = acc * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    return out, tl.where(total == 0.0, float("-inf"), tl.log2(total) + shift)


@triton.jit(do_not_specialize=["step"])
def _decode_kernel(
    query, new_key, new_value, new_score, lengths, key, value, scores, position, seen, parts, maxima, sums, arrived, out, lse, step,
    query_b, query_h, query_t, key_b, key_h, key_t, value_b, value_h, value_t, score_b, score_h, score_t, out_b, out_h, out_t,
    kv_heads, q_len, size, per_split, head_dim, qk_scale, keep, sinks, window,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
    SCAN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LENGTHS: tl.constexpr, ADD_SCORES: tl.constexpr, HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr, ALWAYS: tl.constexpr,
):  # fmt: skip
    """Decode the new token number `step`. Entries are dense `[B, Hkv, size, D]`; parts `[B, Hkv, SPLITS, GROUP, D]` float32."""
    split = tl.program_id(0) % SPLITS
    owner = (tl.program_id(0) // SPLITS).to(tl.int64)
    b, h = owner // kv_heads, owner % kv_heads
    dims = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, ROWS)
    first_entry = owner * size
    key += first_entry * head_dim
    value += first_entry * head_dim
    scores += first_entry
    position += first_entry
    # the first tile is loaded during the scan, because it does not depend on the evicted entry
    first = split * per_split
    stop = tl.minimum(first + per_split, size)
    places = first + tl.arange(0, BLOCK_N)
    k = load_places(key, places, stop, dims, head_dim)
    v = load_places(value, places, stop, dims, head_dim)
    wide = dims < head_dim
    q_ptrs = query + b * query_b + (h * GROUP + rows)[:, None] * query_h + step * query_t + dims[None, :]
    q = tl.load(q_ptrs, mask=(rows < GROUP)[:, None] & wide[None, :], other=0.0)
    k_new = tl.load(new_key + b * key_b + h * key_h + step * key_t + dims, mask=wide, other=0.0)
    v_new = tl.load(new_value + b * value_b + h * value_h + step * value_t + dims, mask=wide, other=0.0)
    score_new = tl.load(new_score + b * score_b + h * score_h + step * score_t).to(tl.float32)
    now = tl.load(seen + owner)
    real = step < tl.load(lengths + b) if HAS_LENGTHS else step >= 0
    lowest, evicted = lowest_place(scores, position, now, size, sinks, window, SCAN, ALWAYS)
    above_lowest = rank_of(score_new, now.to(tl.int32), evicted) > lowest
    if ALWAYS:
        above_lowest = above_lowest | always_kept(now, now, sinks, window)
    admitted = real & above_lowest
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for _ in tl.range(first, stop, BLOCK_N, num_stages=1):
        taken = (places == evicted) & admitted & (places < stop)
        used = taken | (tl.load(position + places, mask=places < stop, other=-1) >= 0)
        if ALWAYS:
            used = used & still_kept(
                scores, position, places, (size, keep, sinks, window), (score_new, now, evicted, admitted), BLOCK_N
            )
        k = tl.where(taken[:, None], k_new[None, :], k)
        v = tl.where(taken[:, None], v_new[None, :], v)
        # unused places may hold a NaN from padding, and 0 times NaN is NaN
        v = tl.where(used[:, None], v, 0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale
        if ADD_SCORES:
            s += to_log2(tl.where(taken, score_new, tl.load(scores + places, mask=places < stop, other=0.0)))[None, :]
        s = tl.where(used[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
        places += BLOCK_N
        # for the next round; after the last one nothing is read
        k = load_places(key, places, stop, dims, head_dim)
        v = load_places(value, places, stop, dims, head_dim)
    part = (owner * SPLITS + split) * GROUP + rows
    tl.store(parts + part[:, None] * head_dim + dims[None, :], acc, mask=(rows < GROUP)[:, None] & wide[None, :])
    tl.store(maxima + part, row_max, mask=rows < GROUP)
    tl.store(sums + part, row_sum, mask=rows < GROUP)
    # one thread increments the counter for the whole program, so all its reads and writes must come first
    tl.debug_barrier()
    if tl.atomic_add(arrived + owner, 1, sem="acq_rel") == SPLITS - 1:
        members = tl.arange(0, GROUP_PAD)
        inside = (members < GROUP)[:, None] & wide[None, :]
        result, log_sum = combined(
            (parts, maxima, sums), owner * SPLITS, members, dims, head_dim, (GROUP, GROUP_PAD, BLOCK_D, SPLITS, AT_ONCE)
        )
        heads = h * GROUP + members
        out_ptrs = out + b * out_b + heads[:, None] * out_h + step * out_t + dims[None, :]
        tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=inside)
        if HAS_LSE:
            tl.store(lse + (b * kv_heads * GROUP + heads) * q_len + step, log_sum * LN2, mask=members < GROUP)
        if admitted:
            tl.store(key + evicted.to(tl.int64) * head_dim + dims, k_new, mask=wide)
            tl.store(value + evicted.to(tl.int64) * head_dim + dims, v_new, mask=wide)
            tl.store(scores + evicted, score_new)
            tl.store(position + evicted, now.to(tl.int32))
        tl.store(seen + owner, now + real.to(tl.int64))
        tl.store(arrived + owner, 0)
