"""Device fragments of the ragged family: the rows of a sequence, their loads and stores, and which pairs are visible.

A batch is ragged in one of two ways, which differ in addresses alone:

    packed  `[T, H, D]`: sequence s holds the rows cu_seqlens[s] to cu_seqlens[s + 1] - 1; the batch stride is 0
    dense   `[B, H, T, D]`: sequence s is batch row s, with all its queries and the first lengths[s] of its keys, or all of them

Lengths come from the device unchecked, so they are clamped to what the tensors hold. A wrong length gives a wrong result for its own sequence,
never a read outside of the tensors.
"""

import triton
import triton.language as tl

from saccade.launch import constants
from saccade.launch.survivors import of_four_keys

LOG2E = tl.constexpr(constants.LOG2E)
LN2 = tl.constexpr(constants.LN2)
# arguments that change from batch to batch; a plain list, which `triton.jit` reads when a kernel is defined
VARYING = ["total_q", "total_k", "sequences", "lse_stride", "max_q", "max_k"]
# which keys a query sees: all; key j <= query i; key j <= query i + Tk - Tq of its sequence
FULL, UPPER_LEFT, BOTTOM_RIGHT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# DENSE of the kernels: packed, dense with lengths, dense whole rows
WHOLE = tl.constexpr(2)


@triton.jit
def rows_of(offsets, sequence, total, longest, DENSE: tl.constexpr, QUERIES: tl.constexpr):
    """(first row, number of rows) of a sequence. offsets: cu_seqlens, or with DENSE the lengths, which queries do not have."""
    if DENSE:
        first = sequence * 0
        rows = first + longest
        if not QUERIES and DENSE != WHOLE:
            rows = tl.minimum(tl.maximum(tl.load(offsets + sequence), 0), longest)
    else:
        first = tl.minimum(tl.maximum(tl.load(offsets + sequence), 0), total)
        end = tl.minimum(tl.load(offsets + sequence + 1), total)
        rows = tl.minimum(tl.maximum(end - first, 0), longest)
    return first, rows


@triton.jit
def tile_of(tensor, strides, ROW: tl.constexpr, sequence, first, h, start, TILE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to the rows `start` to `start + TILE - 1` of a sequence. strides: (batch, head); the last one is 1."""
    base = tensor + sequence.to(tl.int64) * strides[0] + (first + start).to(tl.int64) * ROW + h.to(tl.int64) * strides[1]
    rows = tl.arange(0, TILE)
    if ROW * TILE >= 2147483648:
        rows = rows.to(tl.int64)
    return base + rows[:, None] * ROW + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def inside_of(start, limit, head_dim, TILE: tl.constexpr, BLOCK_D: tl.constexpr, MASK_D: tl.constexpr):
    """The numbers of a tile that exist."""
    inside = (start + tl.arange(0, TILE) < limit)[:, None]
    if MASK_D:
        inside &= (tl.arange(0, BLOCK_D) < head_dim)[None, :]
    return inside


@triton.jit
def load_rows(
    tensor, strides, ROW: tl.constexpr, place, start, limits, TILE: tl.constexpr, BLOCK_D: tl.constexpr, MASK_D: tl.constexpr
):
    """A tile of a sequence, with zeros beyond its last row: the memory there belongs to another sequence and may hold NaN.

    place: (sequence, its first row, head). limits: (rows, head dim).
    """
    inside = inside_of(start, limits[0], limits[1], TILE, BLOCK_D, MASK_D)
    return tl.load(tile_of(tensor, strides, ROW, place[0], place[1], place[2], start, TILE, BLOCK_D), mask=inside, other=0.0)


@triton.jit
def store_rows(
    tensor,
    strides,
    ROW: tl.constexpr,
    place,
    tile,
    start,
    limits,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASK_D: tl.constexpr,
):
    """Write the rows of a tile that belong to the sequence, in the dtype of the tensor. place, limits: as in `load_rows`."""
    inside = inside_of(start, limits[0], limits[1], TILE, BLOCK_D, MASK_D)
    ptrs = tile_of(tensor, strides, ROW, place[0], place[1], place[2], start, TILE, BLOCK_D)
    tl.store(ptrs, tile.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def pairs_of(tensor, strides, row, h, first_query, first_key, queries, keys, WIDE: tl.constexpr):
    """Pointers to pairs of a mask or bias, strides (batch, head, query, key). queries, keys: places in a tile, as its lines and columns in either order.

    WIDE: 32 bits do not hold a distance inside of a tile. If 32 bits do hold it, WIDE would make twice as many registers spill.
    """
    base = tensor + row.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    # a loop's counter is a plain int under the interpreter
    base += (row * 0 + first_query).to(tl.int64) * strides[2] + (row * 0 + first_key).to(tl.int64) * strides[3]
    if WIDE:
        queries, keys = queries.to(tl.int64), keys.to(tl.int64)
    return base + (queries * strides[2] + keys * strides[3])


@triton.jit
def lse_of(lse, strides, sequence, first, h):
    """Pointer to the log-sum-exp of the first query of a sequence; `[H, T]` if packed, `[B, H, T]` if dense."""
    return lse + sequence.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1] + first


@triton.jit
def clear_rest(tensor, strides, ROW: tl.constexpr, offsets, sequences, total, heads, BLOCK_D: tl.constexpr, head_dim):
    """Zero the rows behind the last sequence: tokens that pad a packed batch to a fixed size. One program takes every n-th of them."""
    end = tl.minimum(tl.maximum(tl.load(offsets + sequences), 0), total)
    dims = tl.arange(0, BLOCK_D)
    for row in tl.range(end + tl.program_id(0), total, tl.num_programs(0)):
        for h in tl.range(0, heads):
            # a loop's counter is a plain int under the interpreter
            numbers = (tl.zeros((BLOCK_D,), tl.int64) + row) * ROW + h * strides[1] + dims
            tl.store(tensor + numbers, tl.zeros((BLOCK_D,), tensor.dtype.element_ty), mask=dims < head_dim)


@triton.jit(do_not_specialize=VARYING)
def clear_kernel(
    first, second, third, cu_q, cu_k, total_q, total_k, sequences, lse_stride, max_q, max_k, first_strides, second_strides, third_strides,
    heads, owners, head_dim, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    """`clear_rest` of out, or of dq, dk and dv."""
    clear_rest(first, first_strides, ROWS[0], cu_q, sequences, total_q, heads, BLOCK_D, head_dim)
    if GRADIENTS:
        clear_rest(second, second_strides, ROWS[1], cu_k, sequences, total_k, owners, BLOCK_D, head_dim)
        clear_rest(third, third_strides, ROWS[2], cu_k, sequences, total_k, owners, BLOCK_D, head_dim)


@triton.jit
def survivors(
    seed, problem, dropout_p, first_query, first_key, longest_key, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """The weights of a tile that survive dropout, int8 `[TILE_Q, TILE_K]`: the draw of `saccade.engine.philox` for rows of `longest_key` keys.

    One Philox call yields the words of four adjacent keys; first_key is a multiple of 4.
    """
    groups = first_key // 4 + tl.arange(0, TILE_K // 4)
    queries = first_query + tl.arange(0, TILE_Q)
    counter = (queries[:, None] * ((longest_key + 3) // 4) + groups[None, :]).to(tl.uint32)
    zero = counter * 0
    words = tl.philox(seed, counter, zero + problem.to(tl.uint32), zero, zero)
    return tl.reshape(of_four_keys(words, dropout_p, TILE_K), (TILE_Q, TILE_K))
