"""Device functions shared by the masking kernels: slots and keys, scores, selection, its bits, dropout.

A tile is `[BLOCK_Q, BLOCK_S]`, queries by slots. Each group of M keys takes P slots, where P is the smallest power of two that is
at least M. So a tile can be reshaped into groups for any M. Key j has slot `j // M * P + j % M`, and slots with `s % P >= M` are
empty. For M = P slots and keys are the same.
"""

import triton
import triton.language as tl

from saccade.launch import constants

LOG2E = tl.constexpr(constants.LOG2E)
LN2 = tl.constexpr(constants.LN2)


@triton.jit
def keys_of(first_slot, kv_len, BLOCK_S: tl.constexpr, M: tl.constexpr, P: tl.constexpr):
    """(key, whether it is real) of each slot of a tile."""
    slots = first_slot + tl.arange(0, BLOCK_S)
    if M == P:
        keys = slots
        real = keys < kv_len
    else:
        keys = slots // P * M + slots % P
        real = (slots % P < M) & (keys < kv_len)
    return keys, real


@triton.jit
def slots_up_to(keys, M: tl.constexpr, P: tl.constexpr):
    """How many slots the first `keys` keys take, in whole groups."""
    return (keys + M - 1) // M * P


@triton.jit
def load_rows(tensor, strides, b, h, rows, inside, head_dim, BLOCK_D: tl.constexpr):
    """`[n, BLOCK_D]` rows of `[B, H, T, D]` at (b, h), 0 where not inside; 64-bit offsets."""
    dims = tl.arange(0, BLOCK_D)
    ptrs = tensor + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    ptrs += rows.to(tl.int64)[:, None] * strides[2] + dims[None, :]
    return tl.load(ptrs, mask=inside[:, None] & (dims < head_dim)[None, :], other=0.0)


@triton.jit
def store_rows(tensor, strides, b, h, rows, inside, head_dim, tile, BLOCK_D: tl.constexpr):
    """Write `[n, BLOCK_D]` rows in the dtype of the tensor."""
    dims = tl.arange(0, BLOCK_D)
    ptrs = tensor + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    ptrs += rows.to(tl.int64)[:, None] * strides[2] + dims[None, :]
    tl.store(ptrs, tile.to(tensor.dtype.element_ty), mask=inside[:, None] & (dims < head_dim)[None, :])


@triton.jit
def pair_pointers(tensor, strides, b, h, queries, keys):
    """Addresses of (query, key) pairs in `[B, H, Tq, Tk]`, any strides."""
    base = tensor + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    return base + queries.to(tl.int64)[:, None] * strides[2] + keys.to(tl.int64)[None, :] * strides[3]


@triton.jit
def scores_of(q, k, bias, bias_strides, where, inside, scale, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr):
    """`scale * Q K^T + bias`, float32. It is not in base 2, so that scores that tie by definition tie here."""
    b, h, queries, keys = where
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_BIAS:
        scores += tl.load(pair_pointers(bias, bias_strides, b, h, queries, keys), mask=inside, other=0.0).to(tl.float32)
    return scores


@triton.jit
def select(scores, N: tl.constexpr, P: tl.constexpr):
    """The scores that are kept, bool: of each P consecutive ones the N largest above -inf, ties to the lower index, NaN the largest.

    This takes N rounds. Each chooses the first of the largest remaining scores.
    """
    BLOCK_Q: tl.constexpr = scores.shape[0]
    GROUPS: tl.constexpr = scores.shape[1] // P
    left = tl.reshape(tl.where(scores != scores, float("inf"), scores), (BLOCK_Q, GROUPS, P))
    place = tl.arange(0, P)[None, None, :]
    visible = left > float("-inf")
    kept = left != left  # none
    for _ in tl.static_range(N):
        best = tl.max(left, 2)[:, :, None]
        # a chosen score is set to -inf, like invisible ones: choosing it again changes nothing
        first = tl.min(tl.where(left == best, place, P), 2)[:, :, None]
        chosen = place == first
        kept = kept | (chosen & visible)
        left = tl.where(chosen, float("-inf"), left)
    return tl.reshape(kept.to(tl.int8), (BLOCK_Q, GROUPS * P)) != 0


@triton.jit
def never_pruned(queries, keys, M: tl.constexpr, DENSE_FIRST: tl.constexpr, DENSE_RECENT: tl.constexpr):
    """The pairs of a tile that belong to a group that its query keeps whole, bool; the rule of `reference.never_pruned`."""
    dense = (keys < DENSE_FIRST)[None, :]
    if DENSE_RECENT > 0:
        first = (keys // M * M)[None, :]
        dense = dense | ((first <= queries[:, None]) & (first + M > queries[:, None] + 1 - DENSE_RECENT))
    return dense


@triton.jit
def store_bits(bits, row, inside, first_slot, words, kept):
    """Write a tile of the selection, one bit per slot; row: the index among the B * H * Tq rows, int64."""
    BLOCK_Q: tl.constexpr = kept.shape[0]
    WORDS: tl.constexpr = kept.shape[1] // 32
    tile = tl.reshape(kept.to(tl.int32), (BLOCK_Q, WORDS, 32)) << tl.arange(0, 32)[None, None, :]
    packed = tl.sum(tile, 2).to(tl.int32)
    at = first_slot // 32 + tl.arange(0, WORDS)
    tl.store(bits + row[:, None] * words + at[None, :], packed, mask=inside[:, None] & (at < words)[None, :])


@triton.jit
def load_bits(bits, row, inside, first_slot, words, BLOCK_S: tl.constexpr):
    """The tile of the selection that `store_bits` wrote, bool; False outside."""
    slots = first_slot + tl.arange(0, BLOCK_S)
    present = inside[:, None] & (slots // 32 < words)[None, :]
    packed = tl.load(bits + row[:, None] * words + (slots // 32)[None, :], mask=present, other=0)
    return ((packed >> (slots % 32)[None, :]) & 1) != 0


@triton.jit
def any_bit(bits, row, inside, first_slot, words, WORDS: tl.constexpr):
    """Whether a tile of the selection keeps anything."""
    at = first_slot // 32 + tl.arange(0, WORDS)
    packed = tl.load(bits + row[:, None] * words + at[None, :], mask=inside[:, None] & (at < words)[None, :], other=0)
    return tl.max(tl.max((packed != 0).to(tl.int32), 1), 0) != 0


@triton.jit
def kept_rows(tile, kept):
    """A key or value tile with zeros at keys that no query of the tile keeps. Otherwise a NaN there would leak, as a weight of 0
    times NaN is NaN."""
    return tl.where((tl.max(kept.to(tl.int32), 0) != 0)[:, None], tile, 0.0)


@triton.jit
def survives(
    seed, problem, dropout_p, queries, first_slot, keys, kv_len, BLOCK_S: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The weights that dropout spares, bool: word j % 4 of counter (i * ceil(Tk / 4) + j // 4, problem), see
    `saccade.engine.philox`."""
    BLOCK_Q: tl.constexpr = queries.shape[0]
    if M == P:
        # four adjacent keys share one call of Philox
        counter = queries[:, None] * ((kv_len + 3) // 4) + (first_slot // 4 + tl.arange(0, BLOCK_S // 4))[None, :]
        r0, r1, r2, r3 = _draw(seed, counter, problem)
        even = tl.join(_spared(r0, dropout_p), _spared(r2, dropout_p))
        odd = tl.join(_spared(r1, dropout_p), _spared(r3, dropout_p))
        spared = tl.reshape(tl.join(even, odd), (BLOCK_Q, BLOCK_S))
    else:
        counter = queries[:, None] * ((kv_len + 3) // 4) + (keys // 4)[None, :]
        r0, r1, r2, r3 = _draw(seed, counter, problem)
        word = (keys % 4)[None, :]
        drawn = tl.where(word == 0, r0, tl.where(word == 1, r1, tl.where(word == 2, r2, r3)))
        spared = _spared(drawn, dropout_p)
    return spared != 0


@triton.jit
def _draw(seed, counter, problem):
    zero = (counter * 0).to(tl.uint32)
    return tl.philox(seed, counter.to(tl.uint32), (counter * 0 + problem).to(tl.uint32), zero, zero)


@triton.jit
def _spared(word, dropout_p):
    uniform = (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24: exact in float32
    return (uniform >= dropout_p).to(tl.int8)
