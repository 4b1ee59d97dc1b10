"""Device fragments of the family: tiles of rows and of the bias, which keys exist, and the gradient of a tile of scores."""

import triton
import triton.language as tl

from saccade.launch import constants
from saccade.launch.survivors import of_four_keys

LOG2E = tl.constexpr(constants.LOG2E)
LN2 = tl.constexpr(constants.LN2)
# beyond it neighbouring float32 numbers are more than 1e30 apart, so weights are 0 or 1 for any factor
EXTREME = tl.constexpr(1e37)


@triton.jit
def base_of(tensor, strides, b, h):
    """Pointer to the first row of `[B, H, T, D]` at (b, h). strides: (batch, head, row); the last one is 1."""
    return tensor + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def tile_of(base, stride, first, TILE: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Pointers to the rows `first` to `first + TILE - 1`, `[TILE, BLOCK_D]`. WIDE: 32 bits do not hold a distance inside of a tile."""
    rows = tl.arange(0, TILE)
    if WIDE:
        rows = rows.to(tl.int64)
    # a loop's counter is a plain int under the interpreter
    start = base + (tl.zeros((), tl.int64) + first) * stride
    return start + rows[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_rows(
    base, stride, first, limit, head_dim,
    TILE: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, MASK_D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of rows. MASKED: rows from `limit` on are zeros; they may hold NaN, or not exist."""
    ptrs = tile_of(base, stride, first, TILE, BLOCK_D, WIDE)
    if MASKED:
        inside = (first + tl.arange(0, TILE) < limit)[:, None]
        if MASK_D:
            inside &= (tl.arange(0, BLOCK_D) < head_dim)[None, :]
        tile = tl.load(ptrs, mask=inside, other=0.0)
    elif MASK_D:
        tile = tl.load(ptrs, mask=(tl.arange(0, BLOCK_D) < head_dim)[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def store_rows(
    base, stride, first, limit, head_dim, tile, TILE: tl.constexpr, BLOCK_D: tl.constexpr, MASK_D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the rows below `limit`, in the dtype of the tensor."""
    inside = (first + tl.arange(0, TILE) < limit)[:, None]
    if MASK_D:
        inside &= (tl.arange(0, BLOCK_D) < head_dim)[None, :]
    tl.store(tile_of(base, stride, first, TILE, BLOCK_D, WIDE), tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def bias_of(bias, strides, b, h, windows):
    """Pointer to the bias of a row and head. strides: (row, head, query, key), 0 where the bias is shared."""
    return bias + (b % windows).to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def load_bias(
    base, strides, where, lengths, SHAPE: tl.constexpr, MASKED: tl.constexpr, TURNED: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr, BOUNDED: tl.constexpr = True,
):  # fmt: skip
    """A tile of the bias in its own dtype, `[TILE_Q, TILE_K]`, or keys down if TURNED.

    Queries that do not exist read the last one that does: their results are never used. MASKED: keys may not exist, and read as 0. UNIT divides the
    stride of queries: the compiler recognises only factors of 16 in an argument, but 8 numbers are one load of 16 bytes. BOUNDED: False for a copy
    that has rows for all queries of a tile.
    """
    first_query, first_key = where
    q_len, kv_len = lengths
    TILE_Q: tl.constexpr = SHAPE[0]
    TILE_K: tl.constexpr = SHAPE[1]
    queries, keys = tl.arange(0, TILE_Q), tl.arange(0, TILE_K)
    if BOUNDED:
        queries = tl.minimum(queries, q_len - 1 - first_query)
    exist = first_key + keys < kv_len
    of_query = strides[2] * UNIT
    if WIDE:
        queries, keys = queries.to(tl.int64), keys.to(tl.int64)
    # a loop's counter is a plain int under the interpreter
    zero = tl.zeros((), tl.int64)
    start = base + (zero + first_query) * of_query + (zero + first_key) * strides[3]
    if TURNED:
        ptrs, exist = start + (queries[None, :] * of_query + keys[:, None] * strides[3]), exist[:, None]
    else:
        ptrs, exist = start + (queries[:, None] * of_query + keys[None, :] * strides[3]), exist[None, :]
    return tl.load(ptrs, mask=exist, other=0.0) if MASKED else tl.load(ptrs)


@triton.jit
def seen_keys(
    visible, visible_stride, b, first, limit, TILE: tl.constexpr, HAS_VISIBLE: tl.constexpr,
):  # fmt: skip
    """The keys of a tile that exist and are visible to the row, `[TILE]`. visible: int8 `[B, Tk]`."""
    keys = first + tl.arange(0, TILE)
    seen = keys < limit
    if HAS_VISIBLE:
        seen = tl.load(visible + b.to(tl.int64) * visible_stride + keys, mask=seen, other=0) != 0
    return seen


@triton.jit
def length_of(lengths, b, kv_len, HAS_LENGTHS: tl.constexpr):
    """Keys of a row. Lengths come from the device, so they are clamped to what the tensors hold."""
    limit = kv_len
    if HAS_LENGTHS:
        limit = tl.minimum(tl.maximum(tl.load(lengths + b), 0), kv_len).to(tl.int32)
    return limit


@triton.jit
def factor_of(inverse):
    """The factor of scores before an exponential in base 2, by the sign of `inverse`, see `rows_kernel`."""
    return tl.where(inverse < 0.0, 0.25, LOG2E)


@triton.jit
def survivors(drop, first_query, first_key, kv_len, TILE_Q: tl.constexpr, TILE_K: tl.constexpr):
    """The weights of a tile that survive dropout, int8 `[TILE_Q, TILE_K]`: the draw of `saccade.engine.philox`. drop: (seed, number of the row and
    head, probability). One Philox call yields the words of four adjacent keys; first_key is a multiple of 4."""
    seed, problem, dropout_p = drop
    groups = first_key // 4 + tl.arange(0, TILE_K // 4)
    queries = first_query + tl.arange(0, TILE_Q)
    counter = (queries[:, None] * ((kv_len + 3) // 4) + groups[None, :]).to(tl.uint32)
    zero = counter * 0
    words = tl.philox(tl.load(seed), counter, zero + problem.to(tl.uint32), zero, zero)
    return tl.reshape(of_four_keys(words, dropout_p, TILE_K), (TILE_Q, TILE_K))


@triton.jit
def score_gradients(
    tiles, rows, seen, scale, drop, where, SHAPE: tl.constexpr, MASKED: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dS of a tile of queries and one of keys, float32 `[queries, keys]`.

    S = scale Q K^T + bias, P = exp2(factor S + shift) |inverse|, dS = P * (dP - delta), where terms = -delta |inverse|
    """
    q, k, v, do, bias = tiles
    shift, inverse, terms = rows
    first_query, first_key, kv_len = where
    TILE_Q: tl.constexpr = SHAPE[0]
    TILE_K: tl.constexpr = SHAPE[1]
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias.to(tl.float32)
    weights = tl.exp2(scores * factor_of(inverse)[:, None] + shift[:, None])
    if MASKED:
        weights = tl.where(seen[None, :], weights, 0.0)
    dweights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    if HAS_DROPOUT:
        kept = survivors(drop, first_query, first_key, kv_len, TILE_Q, TILE_K)
        dweights = tl.where(kept != 0, dweights / (1.0 - drop[2]), 0.0)
    return weights * (dweights * tl.abs(inverse)[:, None] + terms[:, None])


@triton.jit
def load_numbers(numbers, place, step, first, q_len, TILE: tl.constexpr):
    """(shift, inverse, terms) of a tile of queries, see `rows_kernel`; of queries that do not exist those of one that sees no key."""
    queries = first + tl.arange(0, TILE)
    ptrs, exist = numbers + place.to(tl.int64) * q_len + queries, queries < q_len
    shift = tl.load(ptrs, mask=exist, other=float("-inf"))
    inverse = tl.load(ptrs + step, mask=exist, other=1.0)
    terms = tl.load(ptrs + 2 * step, mask=exist, other=0.0)
    return shift, inverse, terms
