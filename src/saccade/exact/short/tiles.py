"""Device functions shared by the short family: tile loads and stores, visibility, dropout.

A tile is `[ROWS, COLS]`, or `[HEADS, ROWS, COLS]` when a program handles several adjacent heads. At D = 32 one head's row is
64 bytes, half a cache line. One warp per head then needs no exchange with the others.
`AXIS` counts axes from the end: 2 is the row axis of a tile, 1 its column axis.
"""

import triton
import triton.language as tl

from saccade.launch import constants
from saccade.launch.survivors import of_four_keys

LOG2E = tl.constexpr(constants.LOG2E)
LN2 = tl.constexpr(constants.LN2)


@triton.jit
def along(x, AXIS: tl.constexpr, HEADS: tl.constexpr):
    """A vector broadcastable along the row (2) or column (1) axis of a tile."""
    y = x[:, None] if AXIS == 2 else x[None, :]
    return y[None, :, :] if HEADS > 1 else y


@triton.jit
def expand(x, AXIS: tl.constexpr):
    """A reduced tile, `[n]` or `[HEADS, n]`, with the axis (from the end) restored that the reduction removed."""
    return tl.expand_dims(x, len(x.shape) - (AXIS - 1))


@triton.jit
def transpose(x):
    """Rows and columns of a tile exchanged."""
    return tl.permute(x, (0, 2, 1)) if len(x.shape) == 3 else tl.trans(x)


@triton.jit
def head_offsets(stride_head, AXES: tl.constexpr, HEADS: tl.constexpr):
    """Offsets of the adjacent heads of a program, shaped to broadcast over AXES further axes; 0 for a single head."""
    if HEADS == 1:
        offsets = 0
    elif AXES == 2:
        offsets = (tl.arange(0, HEADS).to(tl.int64) * stride_head)[:, None, None]
    else:
        offsets = (tl.arange(0, HEADS).to(tl.int64) * stride_head)[:, None]
    return offsets


@triton.jit
def row_stride(strides, ROW: tl.constexpr):
    """The constant ROW, or the third of the strides if there are three."""
    return strides[2] if len(strides) == 3 else ROW


@triton.jit
def tile_offsets(strides, ROW: tl.constexpr, first_row, first_col, ROWS: tl.constexpr, COLS: tl.constexpr, HEADS: tl.constexpr):
    """Offsets of a tile; strides are (batch, head) with the row stride ROW, or (batch, head, row), and the column stride is 1.

    The row stride is a property of the model (H * D, or 3 * H * D when packed). As a constant it lets tensors of the same layout
    share one set of addresses: with seven run-time strides backward at S = 128, D = 64 spilled. In `[T, B, H, D]` it holds the
    batch, and a constant would mean a compilation for each number of sequences. Offsets are int64 only where int32 would
    overflow.
    """
    rows = first_row + tl.arange(0, ROWS)
    if ROW * 256 >= 2147483648:  # no tile reaches beyond row 256
        rows = rows.to(tl.int64)
    cols = first_col + tl.arange(0, COLS)
    return along(rows * row_stride(strides, ROW), 2, HEADS) + along(cols, 1, HEADS) + head_offsets(strides[1], 2, HEADS)


@triton.jit
def load_tile(
    tensor, strides, ROW: tl.constexpr, problem, rows, cols, SHAPE: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr = False,
):  # fmt: skip
    """A tile of batch row b and head h, zero where its row or column is at or beyond the limit.

    With TMA `tensor` is a descriptor of `[B, T, H, D]` and the limits are those of the tensor itself.
    """
    b, h = problem
    first_row, row_limit = rows
    first_col, col_limit = cols
    ROWS: tl.constexpr = SHAPE[0]
    COLS: tl.constexpr = SHAPE[1]
    HEADS: tl.constexpr = SHAPE[2]
    MASK_ROWS: tl.constexpr = MASKED[0]
    MASK_COLS: tl.constexpr = MASKED[1]
    if TMA:
        tile = tl.reshape(tensor.load([b, first_row, h, first_col]), (ROWS, COLS))
    else:
        ptrs = tensor + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        ptrs += tile_offsets(strides, ROW, first_row, first_col, ROWS, COLS, HEADS)
        if MASK_ROWS or MASK_COLS:
            inside = along(first_row + tl.arange(0, ROWS) < row_limit, 2, HEADS)
            inside &= along(first_col + tl.arange(0, COLS) < col_limit, 1, HEADS)
            tile = tl.load(ptrs, mask=inside, other=0.0)
        else:
            tile = tl.load(ptrs)
    return tile


@triton.jit
def store_tile(
    tensor, strides, ROW: tl.constexpr, problem, tile, rows, cols, SHAPE: tl.constexpr, MASKED: tl.constexpr,
    TMA: tl.constexpr = False,
):  # fmt: skip
    """Write a tile in the dtype of the tensor, only where its row and column are inside the limits."""
    b, h = problem
    first_row, row_limit = rows
    first_col, col_limit = cols
    ROWS: tl.constexpr = SHAPE[0]
    COLS: tl.constexpr = SHAPE[1]
    HEADS: tl.constexpr = SHAPE[2]
    MASK_ROWS: tl.constexpr = MASKED[0]
    MASK_COLS: tl.constexpr = MASKED[1]
    if TMA:
        tensor.store([b, first_row, h, first_col], tl.reshape(tile.to(tensor.dtype), (1, ROWS, 1, COLS)))
    else:
        ptrs = tensor + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        ptrs += tile_offsets(strides, ROW, first_row, first_col, ROWS, COLS, HEADS)
        tile = tile.to(tensor.dtype.element_ty)
        if MASK_ROWS or MASK_COLS:
            inside = along(first_row + tl.arange(0, ROWS) < row_limit, 2, HEADS)
            inside &= along(first_col + tl.arange(0, COLS) < col_limit, 1, HEADS)
            tl.store(ptrs, tile, mask=inside)
        else:
            tl.store(ptrs, tile)


@triton.jit
def prefetch_tile(
    ptr, strides, ROW: tl.constexpr, b, h, row_limit, ROWS: tl.constexpr, COLS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Prefetch into L2 the tile of problem (b, h) that a later program will read, with one request for each 128-byte line."""
    WIDTH: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    # assumes that adjacent heads are adjacent in memory; a wrong address is harmless, because this is only a hint
    LINES: tl.constexpr = max(COLS * WIDTH * HEADS // 128, 1)
    ptr += b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    rows = tl.minimum(tl.arange(0, ROWS), row_limit - 1).to(tl.int64) * row_stride(strides, ROW)
    lines = tl.arange(0, LINES) * (128 // WIDTH)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr + rows[:, None] + lines[None, :]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def walk(total, PERSISTENT: tl.constexpr):
    """Range of problem indices of this program: only its own, or every `num_programs`-th.

    A single step is written as [p, p + 1) so that the compiler sees one iteration and removes the loop: with a loop it hoists the
    addresses of every tensor out of it, and the registers of backward grow from 140 to 250.
    """
    first = tl.program_id(0)
    if PERSISTENT:
        end, step = total, tl.num_programs(0)
    else:
        end, step = first + 1, 1
    return first, end, step


@triton.jit
def problem_of(index, batch, heads, BATCH_INNER: tl.constexpr):
    """(batch row, head) of problem `index`: heads run fastest, or the batch does when only the heads share a bias."""
    if BATCH_INNER:
        b, h = index % batch, index // batch
    else:
        b, h = index // heads, index % heads
    return b, h


@triton.jit
def dropout_keep(
    seed, problem, dropout_p, first_query, kv_len,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The weights that survive, bool `[BLOCK_Q, BLOCK_KV]` or `[HEADS, BLOCK_Q, BLOCK_KV]`: see `saccade.engine.philox`.

    One Philox call yields four words for four adjacent keys; only the resulting bits, as bytes, are converted to another layout.
    """
    GROUPS: tl.constexpr = BLOCK_KV // 4
    queries = first_query + tl.arange(0, BLOCK_Q)
    groups = tl.arange(0, GROUPS)
    counter = along(queries, 2, HEADS) * ((kv_len + 3) // 4) + along(groups, 1, HEADS)
    if HEADS > 1:
        problems = (problem + tl.arange(0, HEADS))[:, None, None]
        counter += tl.zeros([HEADS, 1, 1], tl.int32)
    else:
        problems = problem
    c1 = (counter * 0 + problems).to(tl.uint32)
    zero = (counter * 0).to(tl.uint32)
    words = tl.philox(seed, counter.to(tl.uint32), c1, zero, zero)
    keep = of_four_keys(words, dropout_p, BLOCK_KV)
    if HEADS > 1:
        keep = tl.reshape(keep, (HEADS, BLOCK_Q, BLOCK_KV))
    else:
        keep = tl.reshape(keep, (BLOCK_Q, BLOCK_KV))
    return keep != 0


# How a mask or bias is read. ABSENT: not at all. TILE: as a tile for each problem. ROW: as one row for all queries (query stride 0).
# SHARED, a bias only: as a tile that all problems of a persistent program share, loaded once before its loop.
ABSENT, TILE, ROW, SHARED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def pair_offsets(strides, first_query, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, HEADS: tl.constexpr, KIND: tl.constexpr):
    """Offsets into a mask or bias, relative to its batch row and first head; strides are (batch, head, query, key)."""
    offsets = along(tl.arange(0, BLOCK_KV), 1, HEADS).to(tl.int64) * strides[3]
    if KIND != ROW:
        offsets += along(first_query + tl.arange(0, BLOCK_Q), 2, HEADS).to(tl.int64) * strides[2]
    return offsets + head_offsets(strides[1], 2, HEADS)


@triton.jit
def bias_row(b, strides):
    """The batch row of a bias that batch row b reads. Strides of a bias for each window have a fifth number, of windows: in a launch
    without, nothing is computed, and its machine code knows nothing of windows."""
    if len(strides) == 5:
        row = b % strides[4]
    else:
        row = b
    return row


@triton.jit
def inside_pairs(
    first_query, q_len, kv_len, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, HEADS: tl.constexpr, KIND: tl.constexpr
):
    """The query-key pairs that exist; for a single row, the keys that exist."""
    inside = along(tl.arange(0, BLOCK_KV) < kv_len, 1, HEADS)
    if KIND != ROW:
        inside &= along(first_query + tl.arange(0, BLOCK_Q) < q_len, 2, HEADS)
    return inside


@triton.jit
def load_bias(bias, strides, problem, first_query, lengths, SHAPE: tl.constexpr, KIND: tl.constexpr):
    """The bias of problem (b, h), float32, broadcastable to the scores. It is not in base 2, where 2.4e38 would overflow."""
    b, h = problem
    q_len, kv_len = lengths
    BLOCK_Q: tl.constexpr = SHAPE[0]
    BLOCK_KV: tl.constexpr = SHAPE[1]
    HEADS: tl.constexpr = SHAPE[2]
    ptrs = bias + bias_row(b, strides).to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    ptrs += pair_offsets(strides, first_query, BLOCK_Q, BLOCK_KV, HEADS, KIND)
    inside = inside_pairs(first_query, q_len, kv_len, BLOCK_Q, BLOCK_KV, HEADS, KIND)
    return tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def masked_scores(
    scores, mask, mask_strides, problem, first_query, lengths, SHAPE: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, MASK_KEYS: tl.constexpr,
):  # fmt: skip
    """Scores with -inf where the key is invisible, and (with HAS_MASK) the visible pairs of the mask, broadcastable to the
    scores."""
    b, h = problem
    q_len, kv_len, kv_limit = lengths
    BLOCK_Q: tl.constexpr = SHAPE[0]
    BLOCK_KV: tl.constexpr = SHAPE[1]
    HEADS: tl.constexpr = SHAPE[2]
    keys = along(tl.arange(0, BLOCK_KV), 1, HEADS)
    seen = scores
    if HAS_MASK:
        ptrs = mask + b.to(tl.int64) * mask_strides[0] + h.to(tl.int64) * mask_strides[1]
        ptrs += pair_offsets(mask_strides, first_query, BLOCK_Q, BLOCK_KV, HEADS, HAS_MASK)
        inside = inside_pairs(first_query, q_len, kv_len, BLOCK_Q, BLOCK_KV, HEADS, HAS_MASK)
        seen = tl.load(ptrs, mask=inside, other=0) != 0
        scores = tl.where(seen, scores, float("-inf"))
    if MASK_KEYS:
        scores = tl.where(keys < kv_limit, scores, float("-inf"))
    if CAUSAL:
        queries = along(first_query + tl.arange(0, BLOCK_Q), 2, HEADS)
        scores = tl.where(keys <= queries, scores, float("-inf"))
    return scores, seen


@triton.jit
def clear_unseen(tile, seen):
    """Zero the rows of a key or value tile that no query of the block sees. Otherwise a NaN there would leak, as a weight of 0
    times NaN is NaN."""
    any_query = tl.max(seen.to(tl.int32), axis=len(seen.shape) - 2)  # [.., BLOCK_KV]
    # Bit operations in place of `where`. For a matrix operand of 16 columns Triton 3.8 and 3.9 pass the booleans of `where`
    # through shared memory, which does not accept single bits.
    BITS: tl.constexpr = tl.int32 if tile.dtype == tl.float32 else tl.int16
    ones = (0 - any_query).to(BITS)
    return (tile.to(BITS, bitcast=True) & expand(ones, 1)).to(tile.dtype, bitcast=True)


@triton.jit
def softmax_rows(scores, factor, NATURAL: tl.constexpr):
    """Softmax over the last axis: unnormalised weights, 1 / sum, natural log-sum-exp.

    `factor * scores` is in base 2 with factor > 0, and the factor is applied inside the exponent: one fused multiply-add per
    element.
    NATURAL: the scores are in base e, whatever the factor. A bias may bring them up to the largest float32, so the maximum is
    subtracted first, which overflows to -inf at worst.
    """
    row_max = tl.max(scores, axis=len(scores.shape) - 1)
    # replaces -inf: a row without a visible key would compute -inf - -inf = NaN
    if NATURAL:
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
        weights = tl.exp2((scores - expand(shift, 1)) * LOG2E)
    else:
        shift = tl.where(row_max == float("-inf"), 0.0, row_max * factor)
        weights = tl.exp2(scores * factor - expand(shift, 1))
        shift *= LN2
    row_sum = tl.sum(weights, axis=len(scores.shape) - 1)
    # compared with 0 and not tested by > 0: a NaN sum must stay NaN
    inverse = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    return weights, inverse, tl.log2(row_sum) * LN2 + shift
