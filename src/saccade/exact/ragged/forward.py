"""Forward of ragged batches: out = softmax(scale * Q K^T + bias) V of each sequence and head, only on its real tokens.

`forward_tile_kernel` takes the sequences of one bucket of lengths, which fit a tile whole:

    program -> every n-th (sequence, head) of the bucket
        Q, K, V [TILE, BLOCK_D]
        S = scale Q K^T + bias   [TILE, TILE]  -> max, exp2, sum -> P
        O = P V

`forward_long_kernel` takes sequences of any length, a tile of queries at a time, over tiles of keys with a running maximum and sum.

Minimum traffic: the real rows of q, k, v in, of out and lse out. Source: paper 002, forward listing; the running sums of the long form
after FlashAttention-2 (Dao 2023, algorithm 1).
"""

import triton
import triton.language as tl

from saccade.exact.ragged.tiles import (
    BOTTOM_RIGHT,
    FULL,
    LN2,
    LOG2E,
    VARYING,
    clear_rest,
    load_rows,
    lse_of,
    pairs_of,
    rows_of,
    store_rows,
    survivors,
)


@triton.jit
def _whole_sequence(
    tensors, strides, where, numbers, ROWS: tl.constexpr, SHAPE: tl.constexpr, CAUSAL: tl.constexpr, HAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of a sequence that a tile holds, for one head."""
    heads, head_dim, scale, dropout_p, max_k = numbers
    GROUP: tl.constexpr = SHAPE[0]
    TILE: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    HAS_BIAS: tl.constexpr = HAS[0]
    HAS_DROPOUT: tl.constexpr = HAS[1]
    MASK_D: tl.constexpr = HAS[2]
    query, key, value, bias, seed, out, lse = tensors
    query_strides, key_strides, value_strides, out_strides, bias_strides, lse_stride = strides
    s, h, q_first, q_len, k_first, k_len = where
    lines = tl.arange(0, TILE)
    q = load_rows(query, query_strides, ROWS[0], (s, q_first, h), 0, (q_len, head_dim), TILE, BLOCK_D, MASK_D)
    k = load_rows(key, key_strides, ROWS[1], (s, k_first, h // GROUP), 0, (k_len, head_dim), TILE, BLOCK_D, MASK_D)
    v = load_rows(value, value_strides, ROWS[2], (s, k_first, h // GROUP), 0, (k_len, head_dim), TILE, BLOCK_D, MASK_D)
    # S = scale Q K^T, in base e with a bias: in base 2 it would overflow from 2.4e38 on
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale if HAS_BIAS else scale * LOG2E)
    if HAS_BIAS:
        pairs = h.to(tl.int64) * bias_strides[0] + lines[:, None] * bias_strides[1] + lines[None, :] * bias_strides[2]
        exists = (lines[:, None] < q_len) & (lines[None, :] < k_len)
        scores += tl.load(bias + pairs, mask=exists, other=0.0).to(tl.float32)
    seen = lines[None, :] < k_len
    if CAUSAL != FULL:
        seen &= lines[None, :] <= lines[:, None] + (k_len - q_len if CAUSAL == BOTTOM_RIGHT else 0)
    scores = tl.where(seen, scores, float("-inf"))
    row_max = tl.max(scores, 1)
    # for a query that sees no key, -inf - -inf would be NaN
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    weights = tl.exp2((scores - shift[:, None]) * LOG2E) if HAS_BIAS else tl.exp2(scores - shift[:, None])
    total = tl.sum(weights, 1)
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)
    if HAS_DROPOUT:
        kept = survivors(tl.load(seed), s * heads + h, dropout_p, 0, 0, max_k, TILE, TILE)
        weights = tl.where(kept != 0, weights / (1.0 - dropout_p), 0.0)
    # O = P V / sum
    o = tl.dot(weights.to(q.dtype), v, input_precision=PRECISION) * inverse[:, None]
    store_rows(out, out_strides, ROWS[3], (s, q_first, h), o, 0, (q_len, head_dim), TILE, BLOCK_D, MASK_D)
    log_sum = tl.log2(total) * LN2 + (shift if HAS_BIAS else shift * LN2)
    tl.store(lse_of(lse, (0, lse_stride), s, q_first, h) + lines, log_sum, mask=lines < q_len)


@triton.jit(do_not_specialize=VARYING)
def forward_tile_kernel(
    query, key, value, bias, seed, cu_q, cu_k, members, count, out, lse, total_q, total_k, sequences, lse_stride, max_q, max_k,
    query_strides, key_strides, value_strides, out_strides, bias_strides, heads, head_dim, scale, dropout_p,
    ROWS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SMALL: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, MASK_D: tl.constexpr, CLEARS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of the sequences of one bucket of lengths. SMALL: a smaller tile, for those that it holds; 0 for none."""
    if CLEARS:
        clear_rest(out, out_strides, ROWS[3], cu_q, sequences, total_q, heads, BLOCK_D, head_dim)
    for item in tl.range(tl.program_id(0), tl.load(count) * heads, tl.num_programs(0), num_stages=STAGES):
        s, h = tl.load(members + item // heads), item % heads
        q_first, q_len = rows_of(cu_q, s, total_q, max_q, False, True)
        k_first, k_len = rows_of(cu_k, s, total_k, max_k, False, False)
        tensors = (query, key, value, bias, seed, out, lse)
        strides = (query_strides, key_strides, value_strides, out_strides, bias_strides, lse_stride)
        where = (s, h, q_first, q_len, k_first, k_len)
        is_small = False
        if SMALL:
            is_small = tl.maximum(q_len, k_len) <= SMALL
            if is_small:
                _whole_sequence(
                    tensors, strides, where, (heads, head_dim, scale, dropout_p, max_k), ROWS, (GROUP, SMALL, BLOCK_D), CAUSAL,
                    (HAS_BIAS, HAS_DROPOUT, MASK_D), PRECISION,
                )  # fmt: skip
        if not is_small:
            _whole_sequence(
                tensors, strides, where, (heads, head_dim, scale, dropout_p, max_k), ROWS, (GROUP, TILE, BLOCK_D), CAUSAL,
                (HAS_BIAS, HAS_DROPOUT, MASK_D), PRECISION,
            )  # fmt: skip


@triton.jit
def masked_scores(
    q, k, beside, beside_strides, where, numbers, SHAPE: tl.constexpr, SEEN: tl.constexpr, HAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of a tile, -inf where a pair is not seen: in base e with a bias, for which in base 2 they would overflow from 2.4e38 on, else in base 2.

    MASKED: it may hold keys that do not exist or are not seen. reach: keys that query 0 sees beyond its own. beside: (mask, bias).
    """
    s, h, first_query, start, q_len, k_len, reach = where
    factor, windows = numbers
    TILE_Q: tl.constexpr = SHAPE[0]
    TILE_K: tl.constexpr = SHAPE[1]
    MASKED: tl.constexpr = SEEN[0]
    CAUSAL: tl.constexpr = SEEN[1]
    HAS_MASK: tl.constexpr = HAS[0]
    HAS_BIAS: tl.constexpr = HAS[1]
    WIDE: tl.constexpr = HAS[2]
    mask, bias = beside
    lines, columns = tl.arange(0, TILE_Q)[:, None], tl.arange(0, TILE_K)[None, :]
    exists = (lines < q_len - first_query) & (columns < k_len - start)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
    if HAS_BIAS:
        ptrs = pairs_of(bias, beside_strides[1], s % windows, h, first_query, start, lines, columns, WIDE)
        scores += tl.load(ptrs, mask=exists, other=0.0).to(tl.float32)
    if MASKED:
        keys = start + tl.arange(0, TILE_K)
        seen = (keys < k_len)[None, :]
        if CAUSAL != FULL:
            seen &= keys[None, :] <= (first_query + tl.arange(0, TILE_Q))[:, None] + reach
        scores = tl.where(seen, scores, float("-inf"))
    if HAS_MASK:
        ptrs = pairs_of(mask, beside_strides[0], s, h, first_query, start, lines, columns, WIDE)
        scores = tl.where(tl.load(ptrs, mask=exists, other=0) != 0, scores, float("-inf"))
    return scores


@triton.jit
def _key_tile(
    q, state, tensors, strides, where, numbers, ROWS: tl.constexpr, SHAPE: tl.constexpr, HAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One step over a tile of keys."""
    o, row_max, row_sum = state
    key, value, seed, beside = tensors
    key_strides, value_strides, beside_strides = strides
    s, h, problem, owner, k_first, start, q_len, k_len, reach, max_k, first_query = where
    head_dim, factor, windows, dropout_p = numbers
    TILE_Q: tl.constexpr = SHAPE[0]
    TILE_K: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    MASKED: tl.constexpr = HAS[0]
    CAUSAL: tl.constexpr = HAS[1]
    HAS_MASK: tl.constexpr = HAS[2]
    HAS_BIAS: tl.constexpr = HAS[3]
    WIDE: tl.constexpr = HAS[4]
    HAS_DROPOUT: tl.constexpr = HAS[5]
    MASK_D: tl.constexpr = HAS[6]
    limit = k_len if MASKED else start + TILE_K
    k = load_rows(key, key_strides, ROWS[1], (s, k_first, owner), start, (limit, head_dim), TILE_K, BLOCK_D, MASK_D)
    scores = masked_scores(
        q, k, beside, beside_strides, (s, h, first_query, start, q_len, k_len, reach), (factor, windows), (TILE_Q, TILE_K),
        (MASKED, CAUSAL), (HAS_MASK, HAS_BIAS, WIDE), PRECISION,
    )  # fmt: skip
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # a query that has seen no key yet: -inf - -inf would be NaN
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    base = LOG2E if HAS_BIAS else 1.0
    weights = tl.exp2((scores - shift[:, None]) * base)
    rescale = tl.exp2((row_max - shift) * base)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    if HAS_DROPOUT:
        kept = survivors(tl.load(seed), problem, dropout_p, first_query, start, max_k, TILE_Q, TILE_K)
        weights = tl.where(kept != 0, weights / (1.0 - dropout_p), 0.0)
    v = load_rows(value, value_strides, ROWS[2], (s, k_first, owner), start, (limit, head_dim), TILE_K, BLOCK_D, MASK_D)
    # O = rescale O + P V
    o = tl.dot(weights.to(q.dtype), v, o * rescale[:, None], input_precision=PRECISION)
    return o, new_max, row_sum


@triton.jit
def keys_of(first, k_len, reach, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, CAUSAL: tl.constexpr):
    """(whole, end) from causality: every query of a tile from `first` on sees all tiles of keys up to `whole`, and no query sees a key from `end` on."""
    end, whole = k_len, k_len // TILE_K * TILE_K
    if CAUSAL != FULL:
        end = tl.maximum(tl.minimum(k_len, first + TILE_Q + reach), 0)
        whole = tl.minimum(whole, tl.maximum(first + 1 + reach, 0) // TILE_K * TILE_K)
    return whole, end


@triton.jit(do_not_specialize=VARYING)
def forward_long_kernel(
    query, key, value, seed, mask, bias, cu_q, cu_k, members, count, out, lse, total_q, total_k, sequences, lse_stride, max_q, max_k,
    query_strides, key_strides, value_strides, out_strides, beside_strides, lse_batch_stride, heads, head_dim, windows, scale, dropout_p,
    ROWS: tl.constexpr, GROUP: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, WIDE: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    MASK_D: tl.constexpr, DENSE: tl.constexpr, CLEARS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of sequences of any length."""
    if CLEARS:
        clear_rest(out, out_strides, ROWS[3], cu_q, sequences, total_q, heads, BLOCK_D, head_dim)
    tiles = tl.cdiv(max_q, TILE_Q)
    number = sequences if DENSE else tl.load(count)
    factor = scale if HAS_BIAS else scale * LOG2E
    for item in tl.range(tl.program_id(0), number * heads * tiles, tl.num_programs(0)):
        # tiles of one head run at the same time and share its keys and values in L2; the longest of a causal one first
        tile, pair = tiles - 1 - item % tiles, item // tiles
        s, h = pair // heads, pair % heads
        if not DENSE:
            s = tl.load(members + s)
        q_first, q_len = rows_of(cu_q, s, total_q, max_q, DENSE, True)
        first = tile * TILE_Q
        if first < q_len:
            k_first, k_len = rows_of(cu_k, s, total_k, max_k, DENSE, False)
            reach = (k_len - q_len) if CAUSAL == BOTTOM_RIGHT else 0
            q = load_rows(query, query_strides, ROWS[0], (s, q_first, h), first, (q_len, head_dim), TILE_Q, BLOCK_D, MASK_D)
            o = tl.zeros((TILE_Q, BLOCK_D), tl.float32)
            row_max = tl.full((TILE_Q,), float("-inf"), tl.float32)
            row_sum = tl.zeros((TILE_Q,), tl.float32)
            whole, end = keys_of(first, k_len, reach, TILE_Q, TILE_K, CAUSAL)
            for start in tl.range(0, whole, TILE_K, num_stages=STAGES):
                o, row_max, row_sum = _key_tile(
                    q, (o, row_max, row_sum), (key, value, seed, (mask, bias)), (key_strides, value_strides, beside_strides),
                    (s, h, s * heads + h, h // GROUP, k_first, start, q_len, k_len, reach, max_k, first),
                    (head_dim, factor, windows, dropout_p), ROWS, (TILE_Q, TILE_K, BLOCK_D),
                    (False, CAUSAL, HAS_MASK, HAS_BIAS, WIDE, HAS_DROPOUT, MASK_D), PRECISION,
                )  # fmt: skip
            for start in tl.range(whole, end, TILE_K, num_stages=1):
                o, row_max, row_sum = _key_tile(
                    q, (o, row_max, row_sum), (key, value, seed, (mask, bias)), (key_strides, value_strides, beside_strides),
                    (s, h, s * heads + h, h // GROUP, k_first, start, q_len, k_len, reach, max_k, first),
                    (head_dim, factor, windows, dropout_p), ROWS, (TILE_Q, TILE_K, BLOCK_D),
                    (True, CAUSAL, HAS_MASK, HAS_BIAS, WIDE, HAS_DROPOUT, MASK_D), PRECISION,
                )  # fmt: skip
            inverse = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
            store_rows(
                out,
                out_strides,
                ROWS[3],
                (s, q_first, h),
                o * inverse[:, None],
                first,
                (q_len, head_dim),
                TILE_Q,
                BLOCK_D,
                MASK_D,
            )
            lines = first + tl.arange(0, TILE_Q)
            shift = tl.where(row_sum == 0.0, 0.0, row_max)
            log_sum = tl.log2(row_sum) * LN2 + shift if HAS_BIAS else (tl.log2(row_sum) + shift) * LN2
            tl.store(lse_of(lse, (lse_batch_stride, lse_stride), s, q_first, h) + lines, log_sum, mask=lines < q_len)
