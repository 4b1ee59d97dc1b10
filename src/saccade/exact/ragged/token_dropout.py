"""Dropout of token tiles: which weights survive. It is drawn once a call: a bit for each pair of a query and a key of one sequence.

    bits[h, i, w] bit b = 1   if the weight of query i and of key 32 w + b of its sequence survives

A Philox call draws four keys that lie side by side in their sequence. In a tile of tokens the sequences begin at any column. A kernel that draws as
it computes calls Philox for each pair: four times too often, and also for pairs of two sequences. Measured with 5,181 tokens in 256 sequences, 12
heads of D = 64: forward took 52 us with dropout and 12 without, backward 220 and 43 (H100).

With a window the words of a row begin with that of the first key that it sees.
Bytes: T H ceil(longest / 32) words at most, and a row touches ceil(length / 32) of them; with a window T H (width / 32 + 2). Source: Salmon et al.,
Parallel random numbers (2011).
"""

import triton
import triton.language as tl


@triton.jit
def _survives(word, dropout_p):
    uniform = (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24: exact in float32
    return (uniform >= dropout_p).to(tl.int32)


@triton.jit
def _first_word(places, left, HAS_WINDOW: tl.constexpr):
    """The first word that is kept of rows at these places of their sequences. With a window it is the word of the first key that they see."""
    if HAS_WINDOW:
        return tl.maximum(places - left, 0) >> 5
    return 0 * places


@triton.jit(do_not_specialize=["total", "longest", "words", "left"])
def survivors_kernel(
    seed, bounds, bits, total, longest, words, left, dropout_p, HEADS: tl.constexpr, TILE: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """bits int32 `[H, total, words]`, the words of each row up to the end of its sequence: the draw of `saccade.engine.philox`."""
    h = tl.program_id(0) % HEADS
    rows = tl.program_id(0) // HEADS * TILE + tl.arange(0, TILE)
    exist = rows < total
    first = tl.load(bounds + rows, mask=exist, other=0)
    last = tl.load(bounds + total.to(tl.int64) + rows, mask=exist, other=0)
    problem = tl.load(bounds + 2 * total.to(tl.int64) + rows, mask=exist, other=0) * HEADS + h
    key = tl.load(seed)
    needed = tl.minimum((tl.max(last - first) + 31) // 32, words)
    groups = tl.arange(0, 8)[None, :]
    begin = _first_word(rows - first, left, HAS_WINDOW)[:, None]
    for word in tl.range(0, needed):
        counter = ((rows - first)[:, None] * ((longest + 3) // 4) + (begin + word) * 8 + groups).to(tl.uint32)
        zero = counter * 0
        r0, r1, r2, r3 = tl.philox(key, counter, zero + problem[:, None].to(tl.uint32), zero, zero)
        four = (
            _survives(r0, dropout_p) + 2 * _survives(r1, dropout_p) + 4 * _survives(r2, dropout_p) + 8 * _survives(r3, dropout_p)
        )
        whole = tl.sum(four << (4 * groups), 1)  # bits of different keys never overlap
        tl.store(bits + (h.to(tl.int64) * total + rows) * words + word, whole, mask=exist)


@triton.jit
def survived(bits, where, queries, exist, begins, left, KEYS: tl.constexpr, DOWN: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The weights that survive, bool `[queries, KEYS]`, or `[KEYS, queries]` with DOWN.

    queries: rows, with the first row of their sequence; start: the first of KEYS adjacent keys, a row too. Values for pairs of two sequences have
    no meaning. A row needs KEYS / 32 + 1 of its words. With a load for each pair forward took 99 us, more than with a draw for each pair.
    """
    h, total, words = where
    first, start = begins
    place = start - first  # of the first key, negative if the sequence begins behind it
    at = (place >> 5) - _first_word(queries - first, left, HAS_WINDOW)
    row = bits + (h.to(tl.int64) * total + queries) * words + at
    columns = tl.arange(0, KEYS)
    low = tl.load(row, mask=exist & (at >= 0) & (at < words), other=0)
    kept = None
    for i in tl.static_range((KEYS + 31) // 32):
        high = tl.load(row + (i + 1), mask=exist & (at + (i + 1) >= 0) & (at + (i + 1) < words), other=0)
        both = (high.to(tl.uint32).to(tl.uint64) << 32) | low.to(tl.uint32).to(tl.uint64)
        of_32 = (both >> (place & 31).to(tl.uint64)).to(tl.uint32)  # bit 0: key 32 i of the tile
        if DOWN:
            bit = (of_32[None, :] >> (columns % 32).to(tl.uint32)[:, None]) & 1
        else:
            bit = (of_32[:, None] >> (columns % 32).to(tl.uint32)[None, :]) & 1
        if i == 0:
            kept = bit
        elif DOWN:
            kept = tl.where((columns >= 32 * i)[:, None], bit, kept)
        else:
            kept = tl.where((columns >= 32 * i)[None, :], bit, kept)
        low = high
    return kept != 0
