"""Dropout of token tiles: which weights survive, drawn once a call, a bit for each pair of a query and a key of one sequence.

    bits[h, i, w] bit b = 1   if the weight of query i and of key 32 w + b of its sequence survives

A Philox call draws four keys that lie side by side in their sequence. In a tile of tokens the sequences begin at any column, so a kernel that draws
where it computes calls Philox for each pair: four times too often, and for pairs of two sequences too. At 5,181 tokens in 256 sequences, 12 heads of
D = 64, that took 40 of forward's 52 us and some 170 of backward's 220 (H100).

Bytes: T H ceil(longest / 32) words at most, of which a row touches ceil(length / 32). Source: Salmon et al., Parallel random numbers (2011).
"""

import triton
import triton.language as tl


@triton.jit
def _survives(word, dropout_p):
    uniform = (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24: exact in float32
    return (uniform >= dropout_p).to(tl.int32)


@triton.jit(do_not_specialize=["total", "longest", "words"])
def survivors_kernel(seed, bounds, bits, total, longest, words, dropout_p, HEADS: tl.constexpr, TILE: tl.constexpr):
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
    for word in tl.range(0, needed):
        counter = ((rows - first)[:, None] * ((longest + 3) // 4) + word * 8 + groups).to(tl.uint32)
        zero = counter * 0
        r0, r1, r2, r3 = tl.philox(key, counter, zero + problem[:, None].to(tl.uint32), zero, zero)
        four = (
            _survives(r0, dropout_p) + 2 * _survives(r1, dropout_p) + 4 * _survives(r2, dropout_p) + 8 * _survives(r3, dropout_p)
        )
        whole = tl.sum(four << (4 * groups), 1)  # no two bits meet
        tl.store(bits + (h.to(tl.int64) * total + rows) * words + word, whole, mask=exist)


@triton.jit
def survived(bits, h, total, words, queries, places, seen):
    """Which weights survive. queries: rows, `[.., 1]` or `[1, ..]`; places: of the keys in the sequence of their query; seen: pairs of one sequence."""
    row = (h.to(tl.int64) * total + queries) * words
    word = tl.load(bits + row + places // 32, mask=seen & (places < 32 * words), other=0)
    return ((word >> (places % 32)) & 1) != 0
