"""Backward of ragged batches: recomputes the scores from q, k and lse, then computes every gradient of a sequence and head.

Scores are held transposed, keys down and queries across, so that P and dS stay in registers as the left factors of dV and dK:

    S^T = K Q^T, P^T = exp2(scale S^T - lse)     [keys, queries]
    dV = P^T dO, dP^T = V dO^T
    dS^T = P^T * (dP^T - delta)                  delta = rowsum(P * dP) - dlse, one number a query
    dK = scale dS^T Q, dQ = scale dS K, dbias = sum of dS over the sequences

`backward_tile_kernel` holds a whole sequence. So delta is a sum on chip, out is never read, and all gradients come from one pass.
Sequences beyond a tile take three kernels: delta from out, then dK and dV for each tile of keys, then dQ for each tile of queries; the scores
are formed twice. A bias takes two more, in bias.py. No atomics: every sum is complete in one program, and results are deterministic.

Minimum traffic: q, k, v, dout, lse in, dq, dk, dv out. Source: paper 002 ("recalculate scores using lse").
"""

import triton
import triton.language as tl

from saccade.exact.ragged.tiles import (
    BOTTOM_RIGHT,
    FULL,
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
def _weights(scores, shift, HAS_BIAS: tl.constexpr, FLOAT32: tl.constexpr):
    """P^T from scores in base 2 and the log-sum-exp of forward; with a bias from scores in base e and their own sum.

    Beside a score of 1e9 the logarithm of the sum is lost in lse, and the weights would add up to the number of keys. In float32 rows are
    normalised too: the rounding of S and lse scales a whole row, and dP - delta of a peaked row would magnify that error.
    """
    if HAS_BIAS:
        row_max = tl.max(scores, 0)
        row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
        weights = tl.exp2((scores - row_max[None, :]) * LOG2E)
        total = tl.sum(weights, 0)
        weights *= tl.where(total == 0.0, 0.0, 1.0 / total)[None, :]
    else:
        weights = tl.exp2(scores - shift[None, :])
        if FLOAT32:
            total = tl.sum(weights, 0)
            weights *= tl.where(total == 0.0, 0.0, 1.0 / total)[None, :]
    return weights


@triton.jit
def _whole_sequence(
    tensors, strides, written, where, numbers, bias_sum, ROWS: tl.constexpr, SHAPE: tl.constexpr, HAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a sequence that a tile holds, for a key head and the query heads of its group; bias_sum with dS added."""
    heads, head_dim, scale, dropout_p, max_k = numbers
    GROUP: tl.constexpr = SHAPE[0]
    TILE: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    CAUSAL: tl.constexpr = HAS[0]
    HAS_BIAS: tl.constexpr = HAS[1]
    BIAS_GRAD: tl.constexpr = HAS[2]
    HAS_DROPOUT: tl.constexpr = HAS[3]
    HAS_DLSE: tl.constexpr = HAS[4]
    MASK_D: tl.constexpr = HAS[5]
    query, key, value, bias, seed, dout, lse, dlse, dquery, dkey, dvalue = tensors
    query_strides, key_strides, value_strides, dout_strides, bias_strides, lse_stride = strides
    dquery_strides, dkey_strides, dvalue_strides = written
    s, owner, q_first, q_len, k_first, k_len = where
    lines = tl.arange(0, TILE)
    k = load_rows(key, key_strides, ROWS[1], (s, k_first, owner), 0, (k_len, head_dim), TILE, BLOCK_D, MASK_D)
    v = load_rows(value, value_strides, ROWS[2], (s, k_first, owner), 0, (k_len, head_dim), TILE, BLOCK_D, MASK_D)
    dk = tl.zeros((TILE, BLOCK_D), tl.float32)
    dv = tl.zeros((TILE, BLOCK_D), tl.float32)
    for member in tl.static_range(GROUP):
        h = owner * GROUP + member
        q = load_rows(query, query_strides, ROWS[0], (s, q_first, h), 0, (q_len, head_dim), TILE, BLOCK_D, MASK_D)
        do = load_rows(dout, dout_strides, ROWS[3], (s, q_first, h), 0, (q_len, head_dim), TILE, BLOCK_D, MASK_D)
        log_sum = tl.load(lse_of(lse, (0, lse_stride), s, q_first, h) + lines, mask=lines < q_len, other=float("-inf"))
        # a query that sees no key, or does not exist: weights of 0, not NaN
        shift = tl.where(log_sum == float("-inf"), float("inf"), log_sum * LOG2E)

        # S^T = K Q^T
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale if HAS_BIAS else scale * LOG2E)
        if HAS_BIAS:
            pairs = h.to(tl.int64) * bias_strides[0] + lines[None, :] * bias_strides[1] + lines[:, None] * bias_strides[2]
            exists = (lines[None, :] < q_len) & (lines[:, None] < k_len)
            scores += tl.load(bias + pairs, mask=exists, other=0.0).to(tl.float32)
        seen = (lines[:, None] < k_len) & (lines[None, :] < q_len)
        if CAUSAL != FULL:
            seen &= lines[:, None] <= lines[None, :] + (k_len - q_len if CAUSAL == BOTTOM_RIGHT else 0)
        weights = _weights(tl.where(seen, scores, float("-inf")), shift, HAS_BIAS, q.dtype == tl.float32)
        dropped = weights
        if HAS_DROPOUT:
            kept = tl.trans(survivors(tl.load(seed), s * heads + h, dropout_p, 0, 0, max_k, TILE, TILE)) != 0
            dropped = tl.where(kept, weights / (1.0 - dropout_p), 0.0)
        # dV = P^T dO
        dv = tl.dot(dropped.to(q.dtype), do, dv, input_precision=PRECISION)
        # dP^T = V dO^T
        dweights = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        if HAS_DROPOUT:
            dweights = tl.where(kept, dweights / (1.0 - dropout_p), 0.0)
        delta = tl.sum(weights * dweights, 0)
        if HAS_DLSE:
            delta -= tl.load(lse_of(dlse, (0, lse_stride), s, q_first, h) + lines, mask=lines < q_len, other=0.0)
        # dS^T = P^T * (dP^T - delta)
        dscores = weights * (dweights - delta[None, :])
        if BIAS_GRAD:
            bias_sum += dscores
        rounded = dscores.to(q.dtype)
        # dK = scale dS^T Q, dQ = scale dS K
        dk = tl.dot(rounded, q, dk, input_precision=PRECISION)
        dq = tl.dot(tl.trans(rounded), k, input_precision=PRECISION) * scale
        store_rows(dquery, dquery_strides, ROWS[4], (s, q_first, h), dq, 0, (q_len, head_dim), TILE, BLOCK_D, MASK_D)
    store_rows(dvalue, dvalue_strides, ROWS[6], (s, k_first, owner), dv, 0, (k_len, head_dim), TILE, BLOCK_D, MASK_D)
    store_rows(dkey, dkey_strides, ROWS[5], (s, k_first, owner), dk * scale, 0, (k_len, head_dim), TILE, BLOCK_D, MASK_D)
    return bias_sum


@triton.jit(do_not_specialize=VARYING)
def backward_tile_kernel(
    query, key, value, bias, seed, cu_q, cu_k, members, count, dout, lse, dlse, dquery, dkey, dvalue, dbias,
    total_q, total_k, sequences, lse_stride, max_q, max_k,
    query_strides, key_strides, value_strides, dout_strides, dquery_strides, dkey_strides, dvalue_strides, bias_strides,
    heads, head_dim, scale, dropout_p,
    ROWS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SMALL: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr, BIAS_GRAD: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_DLSE: tl.constexpr, MASK_D: tl.constexpr,
    CLEARS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Every gradient of the sequences of one bucket of lengths. SMALL: as in forward; not beside a gradient of the bias."""
    owners = heads // GROUP
    if CLEARS:
        clear_rest(dquery, dquery_strides, ROWS[4], cu_q, sequences, total_q, heads, BLOCK_D, head_dim)
        clear_rest(dkey, dkey_strides, ROWS[5], cu_k, sequences, total_k, owners, BLOCK_D, head_dim)
        clear_rest(dvalue, dvalue_strides, ROWS[6], cu_k, sequences, total_k, owners, BLOCK_D, head_dim)
    lines = tl.arange(0, TILE)
    bias_sum = 0.0
    if BIAS_GRAD:
        bias_sum = tl.zeros((TILE, TILE), tl.float32)
    # with a gradient of the bias the number of programs is a multiple of `heads`, so a program has a single head
    for item in tl.range(tl.program_id(0), tl.load(count) * owners, tl.num_programs(0), num_stages=STAGES):
        s, owner = tl.load(members + item // owners), item % owners
        q_first, q_len = rows_of(cu_q, s, total_q, max_q, False, True)
        k_first, k_len = rows_of(cu_k, s, total_k, max_k, False, False)
        tensors = (query, key, value, bias, seed, dout, lse, dlse, dquery, dkey, dvalue)
        strides = (query_strides, key_strides, value_strides, dout_strides, bias_strides, lse_stride)
        written = (dquery_strides, dkey_strides, dvalue_strides)
        where = (s, owner, q_first, q_len, k_first, k_len)
        is_small = False
        if SMALL:
            is_small = tl.maximum(q_len, k_len) <= SMALL
            if is_small:
                _whole_sequence(
                    tensors, strides, written, where, (heads, head_dim, scale, dropout_p, max_k), bias_sum, ROWS,
                    (GROUP, SMALL, BLOCK_D), (CAUSAL, HAS_BIAS, BIAS_GRAD, HAS_DROPOUT, HAS_DLSE, MASK_D), PRECISION,
                )  # fmt: skip
        if not is_small:
            bias_sum = _whole_sequence(
                tensors, strides, written, where, (heads, head_dim, scale, dropout_p, max_k), bias_sum, ROWS,
                (GROUP, TILE, BLOCK_D), (CAUSAL, HAS_BIAS, BIAS_GRAD, HAS_DROPOUT, HAS_DLSE, MASK_D), PRECISION,
            )  # fmt: skip
    if BIAS_GRAD:
        # this program's share, `[queries, keys]`
        ptrs = dbias + tl.program_id(0).to(tl.int64) * (TILE * TILE) + lines[None, :] * TILE + lines[:, None]
        tl.store(ptrs, bias_sum)


@triton.jit(do_not_specialize=VARYING)
def delta_kernel(
    dout, out, dlse, cu_q, members, count, delta, total_q, total_k, sequences, lse_stride, max_q, max_k,
    dout_strides, out_strides, lse_batch_stride, heads, head_dim,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr, HAS_DLSE: tl.constexpr, MASK_D: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) - dlse, float32, laid out like lse."""
    tiles = tl.cdiv(max_q, TILE)
    number = sequences if DENSE else tl.load(count)
    for item in tl.range(tl.program_id(0), number * heads * tiles, tl.num_programs(0)):
        first, pair = item % tiles * TILE, item // tiles
        s, h = pair // heads, pair % heads
        if not DENSE:
            s = tl.load(members + s)
        q_first, q_len = rows_of(cu_q, s, total_q, max_q, DENSE, True)
        if first < q_len:
            lines = first + tl.arange(0, TILE)
            o = load_rows(out, out_strides, ROWS[1], (s, q_first, h), first, (q_len, head_dim), TILE, BLOCK_D, MASK_D)
            do = load_rows(dout, dout_strides, ROWS[0], (s, q_first, h), first, (q_len, head_dim), TILE, BLOCK_D, MASK_D)
            rows = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
            strides = (lse_batch_stride, lse_stride)
            if HAS_DLSE:
                rows -= tl.load(lse_of(dlse, strides, s, q_first, h) + lines, mask=lines < q_len, other=0.0)
            tl.store(lse_of(delta, strides, s, q_first, h) + lines, rows, mask=lines < q_len)


@triton.jit
def pair_gradients(
    tiles, tensors, strides, where, numbers, SHAPE: tl.constexpr, CAUSAL: tl.constexpr, HAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(P^T after dropout, dS^T without its factor) of a tile of keys and one of queries.

    With a bias, `lse` holds the largest score of each row, and `inverse` one over the sum of its weights. A true lse may lose the logarithm
    of that sum.
    """
    q, k, v, do = tiles
    lse, inverse, delta, seed, beside = tensors
    lse_strides, beside_strides = strides
    s, h, problem, q_first, q_len, k_len, reach, max_k, first_query, first_key = where
    factor, windows, dropout_p = numbers
    TILE_Q: tl.constexpr = SHAPE[0]
    TILE_K: tl.constexpr = SHAPE[1]
    HAS_MASK: tl.constexpr = HAS[0]
    HAS_BIAS: tl.constexpr = HAS[1]
    WIDE: tl.constexpr = HAS[2]
    HAS_DROPOUT: tl.constexpr = HAS[3]
    mask, bias = beside
    queries, keys = first_query + tl.arange(0, TILE_Q), first_key + tl.arange(0, TILE_K)
    log_sum = tl.load(lse_of(lse, lse_strides, s, q_first, h) + queries, mask=queries < q_len, other=float("-inf"))
    rows = tl.load(lse_of(delta, lse_strides, s, q_first, h) + queries, mask=queries < q_len, other=0.0)
    shift = tl.where(log_sum == float("-inf"), float("inf"), log_sum if HAS_BIAS else log_sum * LOG2E)
    # S^T = K Q^T, P^T = exp2(scale S^T - lse)
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor
    seen = (keys < k_len)[:, None]
    if CAUSAL != FULL:
        seen &= keys[:, None] <= queries[None, :] + reach
    lines, columns = tl.arange(0, TILE_K)[:, None], tl.arange(0, TILE_Q)[None, :]
    exists = (keys < k_len)[:, None] & (queries < q_len)[None, :]
    if HAS_MASK:
        ptrs = pairs_of(mask, beside_strides[0], s, h, first_query, first_key, columns, lines, WIDE)
        seen &= tl.load(ptrs, mask=exists, other=0) != 0
    if HAS_BIAS:
        ptrs = pairs_of(bias, beside_strides[1], s % windows, h, first_query, first_key, columns, lines, WIDE)
        scores += tl.load(ptrs, mask=exists, other=0.0).to(tl.float32)
        total = tl.load(lse_of(inverse, lse_strides, s, q_first, h) + queries, mask=queries < q_len, other=0.0)
        weights = tl.exp2(tl.where(seen, (scores - shift[None, :]) * LOG2E, float("-inf"))) * total[None, :]
    else:
        weights = tl.exp2(tl.where(seen, scores - shift[None, :], float("-inf")))
    # dP^T = V dO^T
    dweights = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    dropped = weights
    if HAS_DROPOUT:
        kept = tl.trans(survivors(tl.load(seed), problem, dropout_p, first_query, first_key, max_k, TILE_Q, TILE_K)) != 0
        dropped = tl.where(kept, weights / (1.0 - dropout_p), 0.0)
        dweights = tl.where(kept, dweights / (1.0 - dropout_p), 0.0)
    # dS^T = P^T * (dP^T - delta)
    return dropped.to(q.dtype), weights * (dweights - rows[None, :])


@triton.jit(do_not_specialize=VARYING)
def backward_keys_kernel(
    query, key, value, seed, mask, bias, cu_q, cu_k, members, count, dout, lse, inverse, delta, dkey, dvalue, total_q, total_k, sequences,
    lse_stride, max_q, max_k, query_strides, key_strides, value_strides, dout_strides, dkey_strides, dvalue_strides, beside_strides,
    lse_batch_stride, heads, head_dim, windows, scale, dropout_p,
    ROWS: tl.constexpr, GROUP: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, WIDE: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    MASK_D: tl.constexpr, DENSE: tl.constexpr, CLEARS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys, over all queries of all heads of its group."""
    owners = heads // GROUP
    if CLEARS:
        clear_rest(dkey, dkey_strides, ROWS[5], cu_k, sequences, total_k, owners, BLOCK_D, head_dim)
        clear_rest(dvalue, dvalue_strides, ROWS[6], cu_k, sequences, total_k, owners, BLOCK_D, head_dim)
    tiles = tl.cdiv(max_k, TILE_K)
    number = sequences if DENSE else tl.load(count)
    factor = scale if HAS_BIAS else scale * LOG2E
    for item in tl.range(tl.program_id(0), number * owners * tiles, tl.num_programs(0)):
        tile, pair = item % tiles, item // tiles
        s, owner = pair // owners, pair % owners
        if not DENSE:
            s = tl.load(members + s)
        k_first, k_len = rows_of(cu_k, s, total_k, max_k, DENSE, False)
        # keys of a dense row beyond its length get gradients of zero, which this kernel must write
        limit = max_k if DENSE else k_len
        first = tile * TILE_K
        if first < limit:
            q_first, q_len = rows_of(cu_q, s, total_q, max_q, DENSE, True)
            reach = (k_len - q_len) if CAUSAL == BOTTOM_RIGHT else 0
            k = load_rows(key, key_strides, ROWS[1], (s, k_first, owner), first, (k_len, head_dim), TILE_K, BLOCK_D, MASK_D)
            v = load_rows(value, value_strides, ROWS[2], (s, k_first, owner), first, (k_len, head_dim), TILE_K, BLOCK_D, MASK_D)
            dk = tl.zeros((TILE_K, BLOCK_D), tl.float32)
            dv = tl.zeros((TILE_K, BLOCK_D), tl.float32)
            # the first query that sees the first key of the tile
            begin = tl.maximum(first - reach, 0) // TILE_Q * TILE_Q if CAUSAL != FULL else 0
            begin = tl.where(first < k_len, begin, q_len)
            for member in range(GROUP):
                h = owner * GROUP + member
                for start in tl.range(begin, q_len, TILE_Q, num_stages=STAGES):
                    q = load_rows(
                        query, query_strides, ROWS[0], (s, q_first, h), start, (q_len, head_dim), TILE_Q, BLOCK_D, MASK_D
                    )
                    do = load_rows(
                        dout, dout_strides, ROWS[3], (s, q_first, h), start, (q_len, head_dim), TILE_Q, BLOCK_D, MASK_D
                    )
                    dropped, dscores = pair_gradients(
                        (q, k, v, do), (lse, inverse, delta, seed, (mask, bias)),
                        ((lse_batch_stride, lse_stride), beside_strides),
                        (s, h, s * heads + h, q_first, q_len, k_len, reach, max_k, start, first), (factor, windows, dropout_p),
                        (TILE_Q, TILE_K), CAUSAL, (HAS_MASK, HAS_BIAS, WIDE, HAS_DROPOUT), PRECISION,
                    )  # fmt: skip
                    # dV += P^T dO, dK += dS^T Q
                    dv = tl.dot(dropped, do, dv, input_precision=PRECISION)
                    dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)
            store_rows(
                dvalue, dvalue_strides, ROWS[6], (s, k_first, owner), dv, first, (limit, head_dim), TILE_K, BLOCK_D, MASK_D
            )
            store_rows(
                dkey, dkey_strides, ROWS[5], (s, k_first, owner), dk * scale, first, (limit, head_dim), TILE_K, BLOCK_D, MASK_D
            )


@triton.jit(do_not_specialize=VARYING)
def backward_queries_kernel(
    query, key, value, seed, mask, bias, cu_q, cu_k, members, count, dout, lse, inverse, delta, dquery, total_q, total_k, sequences, lse_stride,
    max_q, max_k, query_strides, key_strides, value_strides, dout_strides, dquery_strides, beside_strides, lse_batch_stride,
    heads, head_dim, windows, scale, dropout_p,
    ROWS: tl.constexpr, GROUP: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, WIDE: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    MASK_D: tl.constexpr, DENSE: tl.constexpr, CLEARS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries, over the keys that it sees."""
    if CLEARS:
        clear_rest(dquery, dquery_strides, ROWS[4], cu_q, sequences, total_q, heads, BLOCK_D, head_dim)
    tiles = tl.cdiv(max_q, TILE_Q)
    number = sequences if DENSE else tl.load(count)
    factor = scale if HAS_BIAS else scale * LOG2E
    for item in tl.range(tl.program_id(0), number * heads * tiles, tl.num_programs(0)):
        # the longest of a causal one first
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
            do = load_rows(dout, dout_strides, ROWS[3], (s, q_first, h), first, (q_len, head_dim), TILE_Q, BLOCK_D, MASK_D)
            dq = tl.zeros((TILE_Q, BLOCK_D), tl.float32)
            end = tl.maximum(tl.minimum(k_len, first + TILE_Q + reach), 0) if CAUSAL != FULL else k_len
            for start in tl.range(0, end, TILE_K, num_stages=STAGES):
                k = load_rows(
                    key, key_strides, ROWS[1], (s, k_first, h // GROUP), start, (k_len, head_dim), TILE_K, BLOCK_D, MASK_D
                )
                v = load_rows(
                    value, value_strides, ROWS[2], (s, k_first, h // GROUP), start, (k_len, head_dim), TILE_K, BLOCK_D, MASK_D
                )
                _, dscores = pair_gradients(
                    (q, k, v, do), (lse, inverse, delta, seed, (mask, bias)), ((lse_batch_stride, lse_stride), beside_strides),
                    (s, h, s * heads + h, q_first, q_len, k_len, reach, max_k, first, start), (factor, windows, dropout_p),
                    (TILE_Q, TILE_K), CAUSAL, (HAS_MASK, HAS_BIAS, WIDE, HAS_DROPOUT), PRECISION,
                )  # fmt: skip
                # dQ += dS K
                dq = tl.dot(tl.trans(dscores.to(q.dtype)), k, dq, input_precision=PRECISION)
            store_rows(
                dquery, dquery_strides, ROWS[4], (s, q_first, h), dq * scale, first, (q_len, head_dim), TILE_Q, BLOCK_D, MASK_D
            )
