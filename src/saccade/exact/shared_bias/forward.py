"""Forward: out = softmax(scale Q K^T + bias) V over tiles of keys, with a running maximum and sum.

    program -> (row, head, tile of queries)
        Q [TILE_Q, D]
        for each tile of keys
            S = scale Q K^T + bias      [TILE_Q, TILE_K], the tile of the bias from L2, in which all rows of a head find it
            m' = max(m, max S), P = exp(S - m'), O = exp(m - m') O + P V

Scores stay in base e: in base 2 a bias of finfo.min would overflow. exp(S - m) is computed as exp2(factor S - factor m): one multiplication and
addition, and one exponential. factor is log2(e), or 1/4 in a row whose maximum is so large that its weights are 0 or 1.

Source: the running sums after FlashAttention-2 (Dao 2023, algorithm 1).
"""

import triton
import triton.language as tl

from saccade.exact.shared_bias.tiles import (
    EXTREME,
    LN2,
    LOG2E,
    base_of,
    bias_of,
    length_of,
    load_bias,
    load_rows,
    seen_keys,
    store_rows,
    survivors,
)


@triton.jit
def row_step(scores, row_max, row_sum):
    """(P, new maximum, new sum, what sums are multiplied by) after a tile of scores."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # a query that has seen no key yet: -inf - -inf would be NaN
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    factor = tl.where(tl.abs(shift) > EXTREME, 0.25, LOG2E)
    weights = tl.exp2(scores * factor[:, None] - (shift * factor)[:, None])
    rescale = tl.exp2((row_max - shift) * LOG2E)
    return weights, new_max, row_sum * rescale + tl.sum(weights, 1), rescale


@triton.jit
def masked_scores(q, tensors, strides, where, lengths, scale, SHAPE: tl.constexpr, FORM: tl.constexpr, PRECISION: tl.constexpr):
    """S of a tile, in base e; -inf of keys that the row does not see. MASKED: it may hold keys from `limit` on. PADDED: the bias has columns for them."""
    key, bias, visible = tensors
    key_stride, bias_strides, visible_stride = strides
    b, first, start = where
    q_len, kv_len, limit, head_dim = lengths
    TILE_Q: tl.constexpr = SHAPE[0]
    TILE_K: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    MASKED: tl.constexpr = FORM[0]
    HAS_VISIBLE: tl.constexpr = FORM[1]
    PADDED: tl.constexpr = FORM[2]
    UNIT: tl.constexpr = FORM[3]
    MASK_D: tl.constexpr = FORM[4]
    WIDE: tl.constexpr = FORM[5]
    WIDE_BIAS: tl.constexpr = FORM[6]
    k = load_rows(key, key_stride, start, limit, head_dim, TILE_K, BLOCK_D, MASKED, MASK_D, WIDE)
    pairs = load_bias(
        bias, bias_strides, (first, start), (q_len, kv_len), (TILE_Q, TILE_K), MASKED and not PADDED, False, UNIT, WIDE_BIAS
    )
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + pairs.to(tl.float32)
    if MASKED or HAS_VISIBLE:
        seen = seen_keys(visible, visible_stride, b, start, limit, TILE_K, HAS_VISIBLE)
        scores = tl.where(seen[None, :], scores, float("-inf"))
    return scores


@triton.jit
def _key_tile(
    q, state, tensors, strides, where, lengths, numbers, SHAPE: tl.constexpr, FORM: tl.constexpr, PRECISION: tl.constexpr
):
    """One step over a tile of keys."""
    acc, row_max, row_sum = state
    key, value, bias, visible = tensors
    key_stride, value_stride, bias_strides, visible_stride = strides
    b, first, start = where
    q_len, kv_len, limit, head_dim = lengths
    scale, drop = numbers
    TILE_Q: tl.constexpr = SHAPE[0]
    TILE_K: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    MASKED: tl.constexpr = FORM[0]
    HAS_VISIBLE: tl.constexpr = FORM[1]
    HAS_DROPOUT: tl.constexpr = FORM[2]
    PADDED: tl.constexpr = FORM[3]
    UNIT: tl.constexpr = FORM[4]
    MASK_D: tl.constexpr = FORM[5]
    WIDE: tl.constexpr = FORM[6]
    WIDE_BIAS: tl.constexpr = FORM[7]
    scores = masked_scores(
        q, (key, bias, visible), (key_stride, bias_strides, visible_stride), (b, first, start),
        (q_len, kv_len, limit, head_dim), scale, (TILE_Q, TILE_K, BLOCK_D),
        (MASKED, HAS_VISIBLE, PADDED, UNIT, MASK_D, WIDE, WIDE_BIAS), PRECISION,
    )  # fmt: skip
    weights, row_max, row_sum, rescale = row_step(scores, row_max, row_sum)
    if HAS_DROPOUT:
        weights = tl.where(survivors(drop, first, start, kv_len, TILE_Q, TILE_K) != 0, weights / (1.0 - drop[2]), 0.0)
    v = load_rows(value, value_stride, start, limit, head_dim, TILE_K, BLOCK_D, MASKED, MASK_D, WIDE)
    # O = rescale O + P V
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit
def forward_kernel(
    query, key, value, bias, lengths, visible, seed, out, lse, q_strides, k_strides, v_strides, out_strides, bias_strides, visible_stride, windows,
    heads, q_len, kv_len, head_dim, scale, dropout_p,
    GROUP: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_VISIBLE: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PADDED: tl.constexpr, UNIT: tl.constexpr, MASK_D: tl.constexpr, WIDE: tl.constexpr, WIDE_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of a tile of queries. Tiles of one head are adjacent, and share its keys and values in L2."""
    tiles = tl.cdiv(q_len, TILE_Q)
    first, pair = tl.program_id(0) % tiles * TILE_Q, tl.program_id(0) // tiles
    b, h = pair // heads, pair % heads
    limit = length_of(lengths, b, kv_len, HAS_LENGTHS)
    keys, values = base_of(key, k_strides, b, h // GROUP), base_of(value, v_strides, b, h // GROUP)
    pairs = bias_of(bias, bias_strides, b, h, windows)
    q = load_rows(base_of(query, q_strides, b, h), q_strides[2], first, q_len, head_dim, TILE_Q, BLOCK_D, True, MASK_D, WIDE)
    acc = tl.zeros((TILE_Q, BLOCK_D), tl.float32)
    row_max = tl.full((TILE_Q,), float("-inf"), tl.float32)
    row_sum = tl.zeros((TILE_Q,), tl.float32)
    drop = (seed, pair, dropout_p)
    whole = limit // TILE_K * TILE_K
    for start in tl.range(0, whole, TILE_K):
        acc, row_max, row_sum = _key_tile(
            q, (acc, row_max, row_sum), (keys, values, pairs, visible),
            (k_strides[2], v_strides[2], bias_strides, visible_stride), (b, first, start), (q_len, kv_len, limit, head_dim),
            (scale, drop), (TILE_Q, TILE_K, BLOCK_D), (False, HAS_VISIBLE, HAS_DROPOUT, PADDED, UNIT, MASK_D, WIDE, WIDE_BIAS),
            PRECISION,
        )  # fmt: skip
    if whole < limit:
        acc, row_max, row_sum = _key_tile(
            q, (acc, row_max, row_sum), (keys, values, pairs, visible),
            (k_strides[2], v_strides[2], bias_strides, visible_stride), (b, first, whole), (q_len, kv_len, limit, head_dim),
            (scale, drop), (TILE_Q, TILE_K, BLOCK_D), (True, HAS_VISIBLE, HAS_DROPOUT, PADDED, UNIT, MASK_D, WIDE, WIDE_BIAS),
            PRECISION,
        )  # fmt: skip
    inverse = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    store_rows(
        base_of(out, out_strides, b, h),
        out_strides[2],
        first,
        q_len,
        head_dim,
        acc * inverse[:, None],
        TILE_Q,
        BLOCK_D,
        MASK_D,
        WIDE,
    )
    queries = first + tl.arange(0, TILE_Q)
    log_sum = tl.log2(row_sum) * LN2 + tl.where(row_max == float("-inf"), 0.0, row_max)
    tl.store(lse + pair.to(tl.int64) * q_len + queries, log_sum, mask=queries < q_len)
