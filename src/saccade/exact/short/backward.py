"""Backward: recomputes the scores from q, k and lse, then computes every gradient of the problem completely on chip.

    S = Q K^T, P = exp2(S - lse), rounded        [BLOCK_Q, BLOCK_KV]
    dV = P^T dO, dP = dO V^T
    delta = rowsum(P * dP)                       (so out is never read)
    dS = P * (dP - delta + dlse)
    dK = scale * dS^T Q, dQ = scale * dS K, dbias = sum of dS over the problems that share the bias

P is rounded before dP exists: if both were alive in float32, each thread would need 64 more registers at S = 128.
Memory traffic is minimal: q, k, v, dout and lse are read; dq, dk and dv are written. There are no atomics: a program owns all
queries of its keys, so every gradient is complete on chip and the result is deterministic. Source: paper 002 ("recalculate scores
using lse"). `_bwd_chunked_kernel` streams the head dim where whole tiles do not fit, and reads q and k twice (the second time
from L2).
"""

import triton
import triton.language as tl

from saccade.exact.short.tiles import (
    LOG2E,
    SHARED,
    clear_unseen,
    dropout_keep,
    expand,
    load_bias,
    load_tile,
    masked_scores,
    prefetch_tile,
    problem_of,
    softmax_rows,
    store_tile,
    transpose,
    walk,
)


@triton.jit
def load_rows(rows, problem, q_len, first_query, other, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, MASK_Q: tl.constexpr):
    """A float32 row vector of a problem (lse or dlse, `[B, H, Tq]` contiguous), `other` beyond the last query.

    Masked only where needed, because a masked load in the pipelined loop takes 45 registers at S = 128, D = 32.
    """
    queries = first_query + tl.arange(0, BLOCK_Q)
    ptrs = rows + problem.to(tl.int64) * q_len + queries
    inside = queries < q_len
    if HEADS > 1:
        ptrs = ptrs[None, :] + (tl.arange(0, HEADS).to(tl.int64) * q_len)[:, None]
        inside = inside[None, :]
    if MASK_Q:
        values = tl.load(ptrs, mask=inside, other=other)
    else:
        values = tl.load(ptrs)
    return values


@triton.jit
def shift_of(lse_rows, MAY_BE_EMPTY: tl.constexpr):
    """Base-2 shift of the scores: +inf where lse is -inf (no visible key, or past Tq), so that the weights are 0 and not NaN."""
    shift = lse_rows * LOG2E
    return tl.where(lse_rows == float("-inf"), float("inf"), shift) if MAY_BE_EMPTY else shift


@triton.jit
def weights_of(scores, shift, scale, HAS_BIAS: tl.constexpr, FLOAT32: tl.constexpr):
    """The weights of whole rows, computed from the base-2 log-sum-exp that forward stored.

    With a bias the rows are normalised by their own sum: next to a score of 1e9 the logarithm of the sum is lost in lse, and the
    weights would add up to Tk. In float32 too: the rounding of S and lse scales a whole row, and dP - delta cancels in a peaked one. With
    scores of 60 that was 50 times the error of torch's function; 16-bit operands round more than that anyway.
    """
    if HAS_BIAS:
        weights, inverse, _ = softmax_rows(scores, 1.0, True)
        weights = weights * expand(inverse, 1)
    else:
        weights = tl.exp2(scores * (scale * LOG2E) - expand(shift, 1))
        if FLOAT32:
            total = tl.sum(weights, axis=len(weights.shape) - 1)
            weights *= expand(tl.where(total == 0.0, 0.0, 1.0 / total), 1)
    return weights


@triton.jit
def score_gradient(
    weights, dweights, seen, dlse, place, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_DLSE: tl.constexpr, MASK_Q: tl.constexpr,
):  # fmt: skip
    """dS from P (rounded to the working dtype) and dP, the gradient of P with dropout undone."""
    problem, q_len, first = place
    if HAS_MASK:
        dweights = tl.where(seen, dweights, 0.0)
    weights = weights.to(tl.float32)
    delta = tl.sum(weights * dweights, axis=len(weights.shape) - 1)  # [.., BLOCK_Q]
    if HAS_DLSE:
        delta -= load_rows(dlse, problem, q_len, first, 0.0, BLOCK_Q, HEADS, MASK_Q)
    return weights * (dweights - expand(delta, 1))


@triton.jit
def prefetch_problem(tensors, strides, ROW_STRIDES: tl.constexpr, problem, sizes, SHAPE: tl.constexpr):
    """Prefetch into L2 q, k, v and dout of the problem that this multiprocessor will reach next (ungrouped heads only)."""
    query, key, value, dout = tensors
    query_strides, key_strides, value_strides, dout_strides = strides
    batch, heads, q_len, kv_len = sizes
    ROWS_Q: tl.constexpr = SHAPE[0]
    ROWS_KV: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    HEADS: tl.constexpr = SHAPE[3]
    b, h = problem_of(tl.minimum(problem, batch * heads - HEADS), batch, heads, False)
    prefetch_tile(key, key_strides, ROW_STRIDES[1], b, h, kv_len, ROWS_KV, BLOCK_D, HEADS)
    prefetch_tile(query, query_strides, ROW_STRIDES[0], b, h, q_len, ROWS_Q, BLOCK_D, HEADS)
    prefetch_tile(value, value_strides, ROW_STRIDES[2], b, h, kv_len, ROWS_KV, BLOCK_D, HEADS)
    prefetch_tile(dout, dout_strides, ROW_STRIDES[3], b, h, q_len, ROWS_Q, BLOCK_D, HEADS)


@triton.jit
def store_bias_gradient(
    dbias, strides, tile, program, q_len, kv_len, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """One program's share of dbias; strides are (program, query, key)."""
    queries = tl.arange(0, BLOCK_Q)[:, None]
    keys = tl.arange(0, BLOCK_KV)[None, :]
    ptrs = dbias + program.to(tl.int64) * strides[0] + queries.to(tl.int64) * strides[1] + keys * strides[2]
    tl.store(ptrs, tile.to(dbias.dtype.element_ty), mask=(keys < kv_len) & (queries < q_len))


@triton.jit
def _bwd_kernel(
    query, key, value, bias, mask, lengths, seed, dout, lse, dlse, dquery, dkey, dvalue, dbias,
    query_strides, key_strides, value_strides, bias_strides, mask_strides, dout_strides,
    dquery_strides, dkey_strides, dvalue_strides, dbias_strides,
    batch, heads, q_len, kv_len, head_dim, scale, dropout_p, num_sms,
    ROW_STRIDES: tl.constexpr, GROUP: tl.constexpr, KV_SHARE: tl.constexpr, HEADS: tl.constexpr, BLOCK_Q: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_DLSE: tl.constexpr, BIAS_GRAD: tl.constexpr,
    BATCH_INNER: tl.constexpr, MASK_Q: tl.constexpr, MASK_KEYS: tl.constexpr, MASK_D: tl.constexpr, PREFETCH: tl.constexpr,
    PERSISTENT: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # a problem is GROUP query heads on one key head (or HEADS adjacent heads); its dK and dV are summed over heads and query
    # blocks without mask, bias or lengths every query sees a key
    MAY_BE_EMPTY: tl.constexpr = HAS_MASK or HAS_BIAS or HAS_LENGTHS or MASK_Q
    STEPS: tl.constexpr = GROUP * Q_BLOCKS
    owners = heads // GROUP
    DTYPE: tl.constexpr = query.dtype if TMA else query.dtype.element_ty
    FLOAT32: tl.constexpr = tl.float32 == DTYPE
    # Each row of dS adds up to 0, so a dbias summed over keys is only the rounding error of that. Rounded weights would leave
    # more of it.
    WEIGHTS: tl.constexpr = tl.float32 if BIAS_GRAD else DTYPE
    if BIAS_GRAD:
        bias_sum = tl.zeros((BLOCK_Q, BLOCK_KV), tl.float32)
    first_index, end_index, step_index = walk(batch * owners // HEADS, PERSISTENT)
    if HAS_BIAS == SHARED:
        b, h = problem_of(first_index, batch, owners, BATCH_INNER)
        bias_tile = load_bias(bias, bias_strides, (b, h), 0, (q_len, kv_len), (BLOCK_Q, BLOCK_KV, HEADS), HAS_BIAS)
    for index in tl.range(first_index, end_index, step_index, num_stages=STAGES if PERSISTENT else 1):
        b, owner = problem_of(index * HEADS, batch, owners, BATCH_INNER)
        kv_limit = tl.minimum(tl.load(lengths + b), kv_len) if HAS_LENGTHS else kv_len
        k = load_tile(
            key, key_strides, ROW_STRIDES[1], (b, owner // KV_SHARE), (0, kv_limit), (0, head_dim), (BLOCK_KV, BLOCK_D, HEADS),
            (MASK_KEYS, MASK_D), TMA,
        )  # fmt: skip
        v = load_tile(
            value, value_strides, ROW_STRIDES[2], (b, owner // KV_SHARE), (0, kv_limit), (0, head_dim),
            (BLOCK_KV, BLOCK_D, HEADS), (MASK_KEYS, MASK_D), TMA,
        )  # fmt: skip
        dk = tl.zeros(k.shape, tl.float32)
        dv = tl.zeros(k.shape, tl.float32)
        for step in tl.range(0, STEPS, num_stages=1 if PERSISTENT else STAGES):
            h = owner * GROUP + step // Q_BLOCKS
            problem = b * heads + h
            first = (step % Q_BLOCKS) * BLOCK_Q
            q = load_tile(
                query, query_strides, ROW_STRIDES[0], (b, h), (first, q_len), (0, head_dim), (BLOCK_Q, BLOCK_D, HEADS),
                (MASK_Q, MASK_D), TMA,
            )  # fmt: skip
            do = load_tile(
                dout, dout_strides, ROW_STRIDES[3], (b, h), (first, q_len), (0, head_dim), (BLOCK_Q, BLOCK_D, HEADS),
                (MASK_Q, MASK_D), TMA,
            )  # fmt: skip
            shift = shift_of(load_rows(lse, problem, q_len, first, float("-inf"), BLOCK_Q, HEADS, MASK_Q), MAY_BE_EMPTY)
            if PREFETCH:
                prefetch_problem(
                    (query, key, value, dout), (query_strides, key_strides, value_strides, dout_strides), ROW_STRIDES,
                    (index + PREFETCH * num_sms) * HEADS, (batch, heads, q_len, kv_len),
                    (BLOCK_Q * Q_BLOCKS, BLOCK_KV, BLOCK_D, HEADS),
                )  # fmt: skip

            scores = tl.dot(q, transpose(k), input_precision=PRECISION)  # [.., BLOCK_Q, BLOCK_KV]
            if HAS_BIAS:
                if HAS_BIAS != SHARED:
                    bias_tile = load_bias(
                        bias, bias_strides, (b, h), first, (q_len, kv_len), (BLOCK_Q, BLOCK_KV, HEADS), HAS_BIAS
                    )
                scores = scores * scale + bias_tile
            scores, seen = masked_scores(
                scores, mask, mask_strides, (b, h), first, (q_len, kv_len, kv_limit), (BLOCK_Q, BLOCK_KV, HEADS), CAUSAL,
                HAS_MASK, MASK_KEYS,
            )  # fmt: skip
            # P is rounded before dP exists, and each gradient is stored before the next product: all alive together they would
            # take 250 registers at S = 128, and a second program would not fit on the multiprocessor
            weights = weights_of(scores, shift, scale, HAS_BIAS, FLOAT32).to(WEIGHTS)
            dropped = weights.to(DTYPE)
            if HAS_DROPOUT:
                keep = dropout_keep(tl.load(seed), problem, dropout_p, first, kv_len, BLOCK_Q, BLOCK_KV, HEADS)
                dropped = tl.where(keep, weights / (1.0 - dropout_p), 0.0).to(DTYPE)
            dv = tl.dot(transpose(dropped), do, dv, input_precision=PRECISION)
            if STEPS == 1:
                store_tile(
                    dvalue, dvalue_strides, ROW_STRIDES[6], (b, owner), dv, (0, kv_len), (0, head_dim),
                    (BLOCK_KV, BLOCK_D, HEADS), (MASK_KEYS, MASK_D), TMA,
                )  # fmt: skip
            dweights = tl.dot(do, transpose(v), input_precision=PRECISION)
            if HAS_DROPOUT:
                dweights = tl.where(keep, dweights / (1.0 - dropout_p), 0.0)
            dscores = score_gradient(
                weights, dweights, seen, dlse, (problem, q_len, first), BLOCK_Q, HEADS, HAS_MASK, HAS_DLSE, MASK_Q
            )
            if BIAS_GRAD:
                bias_sum += dscores
            dscores = dscores.to(DTYPE)
            dk = tl.dot(transpose(dscores), q, dk, input_precision=PRECISION)
            if STEPS == 1:
                store_tile(
                    dkey, dkey_strides, ROW_STRIDES[5], (b, owner), dk * scale, (0, kv_len), (0, head_dim),
                    (BLOCK_KV, BLOCK_D, HEADS), (MASK_KEYS, MASK_D), TMA,
                )  # fmt: skip
            keys = clear_unseen(k, seen) if HAS_MASK else k
            dq = tl.dot(dscores, keys, input_precision=PRECISION) * scale
            store_tile(
                dquery, dquery_strides, ROW_STRIDES[4], (b, h), dq, (first, q_len), (0, head_dim), (BLOCK_Q, BLOCK_D, HEADS),
                (MASK_Q, MASK_D), TMA,
            )  # fmt: skip
        if STEPS > 1:
            store_tile(
                dvalue, dvalue_strides, ROW_STRIDES[6], (b, owner), dv, (0, kv_len), (0, head_dim), (BLOCK_KV, BLOCK_D, HEADS),
                (MASK_KEYS, MASK_D), TMA,
            )  # fmt: skip
            store_tile(
                dkey, dkey_strides, ROW_STRIDES[5], (b, owner), dk * scale, (0, kv_len), (0, head_dim),
                (BLOCK_KV, BLOCK_D, HEADS), (MASK_KEYS, MASK_D), TMA,
            )  # fmt: skip
    if BIAS_GRAD:
        store_bias_gradient(dbias, dbias_strides, bias_sum, tl.program_id(0), q_len, kv_len, BLOCK_Q, BLOCK_KV)


@triton.jit
def _bwd_chunked_kernel(
    query, key, value, bias, mask, lengths, seed, dout, lse, dlse, dquery, dkey, dvalue, dbias,
    query_strides, key_strides, value_strides, bias_strides, mask_strides, dout_strides,
    dquery_strides, dkey_strides, dvalue_strides, dbias_strides,
    batch, heads, q_len, kv_len, head_dim, scale, dropout_p,
    ROW_STRIDES: tl.constexpr, KV_SHARE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_DLSE: tl.constexpr, BIAS_GRAD: tl.constexpr, BATCH_INNER: tl.constexpr, MASK_Q: tl.constexpr,
    MASK_KEYS: tl.constexpr, MASK_D: tl.constexpr,
    PERSISTENT: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = query.dtype if TMA else query.dtype.element_ty
    FLOAT32: tl.constexpr = tl.float32 == DTYPE
    # Each row of dS adds up to 0, so a dbias summed over keys is only the rounding error of that. Rounded weights would leave
    # more of it.
    WEIGHTS: tl.constexpr = tl.float32 if BIAS_GRAD else DTYPE
    # without mask, bias or lengths every query sees a key
    MAY_BE_EMPTY: tl.constexpr = HAS_MASK or HAS_BIAS or HAS_LENGTHS or MASK_Q
    if BIAS_GRAD:
        bias_sum = tl.zeros((BLOCK_Q, BLOCK_KV), tl.float32)
    first_index, end_index, step_index = walk(batch * heads, PERSISTENT)
    if HAS_BIAS == SHARED:
        b, h = problem_of(first_index, batch, heads, BATCH_INNER)
        bias_tile = load_bias(bias, bias_strides, (b, h), 0, (q_len, kv_len), (BLOCK_Q, BLOCK_KV, 1), HAS_BIAS)
    for index in tl.range(first_index, end_index, step_index, num_stages=1):
        b, h = problem_of(index, batch, heads, BATCH_INNER)
        problem = b * heads + h
        kv_limit = tl.minimum(tl.load(lengths + b), kv_len) if HAS_LENGTHS else kv_len
        shift = shift_of(load_rows(lse, problem, q_len, 0, float("-inf"), BLOCK_Q, 1, MASK_Q), MAY_BE_EMPTY)

        # pass 1: S, summed over chunks of the head dim
        scores = tl.zeros((BLOCK_Q, BLOCK_KV), tl.float32)
        for d in tl.range(0, BLOCK_D, CHUNK, num_stages=STAGES):
            q = load_tile(
                query, query_strides, ROW_STRIDES[0], (b, h), (0, q_len), (d, head_dim), (BLOCK_Q, CHUNK, 1), (MASK_Q, MASK_D),
                TMA,
            )  # fmt: skip
            k = load_tile(
                key, key_strides, ROW_STRIDES[1], (b, h // KV_SHARE), (0, kv_limit), (d, head_dim), (BLOCK_KV, CHUNK, 1),
                (MASK_KEYS, MASK_D), TMA,
            )  # fmt: skip
            scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION)
        if HAS_BIAS:
            if HAS_BIAS != SHARED:
                bias_tile = load_bias(bias, bias_strides, (b, h), 0, (q_len, kv_len), (BLOCK_Q, BLOCK_KV, 1), HAS_BIAS)
            scores = scores * scale + bias_tile
        scores, seen = masked_scores(
            scores, mask, mask_strides, (b, h), 0, (q_len, kv_len, kv_limit), (BLOCK_Q, BLOCK_KV, 1), CAUSAL, HAS_MASK,
            MASK_KEYS,
        )  # fmt: skip
        weights = weights_of(scores, shift, scale, HAS_BIAS, FLOAT32).to(WEIGHTS)
        dropped = weights.to(DTYPE)
        if HAS_DROPOUT:
            keep = dropout_keep(tl.load(seed), problem, dropout_p, 0, kv_len, BLOCK_Q, BLOCK_KV, 1)
            dropped = tl.where(keep, weights / (1.0 - dropout_p), 0.0).to(DTYPE)

        # pass 2: dP, summed over chunks of v and dout, and dV, complete for each chunk
        dweights = tl.zeros((BLOCK_Q, BLOCK_KV), tl.float32)
        for d in tl.range(0, BLOCK_D, CHUNK, num_stages=STAGES):
            do = load_tile(
                dout, dout_strides, ROW_STRIDES[3], (b, h), (0, q_len), (d, head_dim), (BLOCK_Q, CHUNK, 1), (MASK_Q, MASK_D),
                TMA,
            )  # fmt: skip
            v = load_tile(
                value, value_strides, ROW_STRIDES[2], (b, h // KV_SHARE), (0, kv_limit), (d, head_dim), (BLOCK_KV, CHUNK, 1),
                (MASK_KEYS, MASK_D), TMA,
            )  # fmt: skip
            dweights = tl.dot(do, tl.trans(v), dweights, input_precision=PRECISION)
            dv = tl.dot(tl.trans(dropped), do, input_precision=PRECISION)
            store_tile(
                dvalue, dvalue_strides, ROW_STRIDES[6], (b, h), dv, (0, kv_len), (d, head_dim), (BLOCK_KV, CHUNK, 1),
                (MASK_KEYS, MASK_D), TMA,
            )  # fmt: skip
        if HAS_DROPOUT:
            dweights = tl.where(keep, dweights / (1.0 - dropout_p), 0.0)
        dscores = score_gradient(weights, dweights, seen, dlse, (problem, q_len, 0), BLOCK_Q, 1, HAS_MASK, HAS_DLSE, MASK_Q)
        if BIAS_GRAD:
            bias_sum += dscores
        dscores = (dscores * scale).to(DTYPE)

        # pass 3: q and k again, from L2, for dK and dQ
        for d in tl.range(0, BLOCK_D, CHUNK, num_stages=STAGES):
            q = load_tile(
                query, query_strides, ROW_STRIDES[0], (b, h), (0, q_len), (d, head_dim), (BLOCK_Q, CHUNK, 1), (MASK_Q, MASK_D),
                TMA,
            )  # fmt: skip
            k = load_tile(
                key, key_strides, ROW_STRIDES[1], (b, h // KV_SHARE), (0, kv_limit), (d, head_dim), (BLOCK_KV, CHUNK, 1),
                (MASK_KEYS, MASK_D), TMA,
            )  # fmt: skip
            k = clear_unseen(k, seen) if HAS_MASK else k
            dk = tl.dot(tl.trans(dscores), q, input_precision=PRECISION)
            store_tile(
                dkey, dkey_strides, ROW_STRIDES[5], (b, h), dk, (0, kv_len), (d, head_dim), (BLOCK_KV, CHUNK, 1),
                (MASK_KEYS, MASK_D), TMA,
            )  # fmt: skip
            dq = tl.dot(dscores, k, input_precision=PRECISION)
            store_tile(
                dquery, dquery_strides, ROW_STRIDES[4], (b, h), dq, (0, q_len), (d, head_dim), (BLOCK_Q, CHUNK, 1),
                (MASK_Q, MASK_D), TMA,
            )  # fmt: skip
    if BIAS_GRAD:
        store_bias_gradient(dbias, dbias_strides, bias_sum, tl.program_id(0), q_len, kv_len, BLOCK_Q, BLOCK_KV)
