"""Forward: out = softmax(scale * Q K^T + mask) V with whole rows of scores on chip, so it needs no online softmax and no
rescaling.

    program -> problem (b, h), or HEADS adjacent heads
        K, V [BLOCK_KV, BLOCK_D] loaded once, then for each block of queries
            S = Q K^T   [BLOCK_Q, BLOCK_KV]  -> mask -> max, exp2, sum -> P
            O = P V     [BLOCK_Q, BLOCK_D]

Memory traffic is minimal: q, k and v are read, o and lse are written. Source: paper 002, forward listing. There are two schedules
of the
same mathematics: `_fwd_kernel` holds the whole head dim, `_fwd_chunked_kernel` streams it where q, k and v leave no room for a
second program.
"""

import triton
import triton.language as tl

from saccade.exact.short.tiles import (
    LN2,
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
def store_lse(
    lse, problem, q_len, first_query, log_sum, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, MASK_Q: tl.constexpr,
):  # fmt: skip
    """Natural log-sum-exp rows of a problem, float32 `[B, H, Tq]` contiguous."""
    queries = first_query + tl.arange(0, BLOCK_Q)
    ptrs = lse + problem.to(tl.int64) * q_len + queries
    inside = queries < q_len
    if HEADS > 1:
        ptrs = ptrs[None, :] + (tl.arange(0, HEADS).to(tl.int64) * q_len)[:, None]
        inside = inside[None, :]
    if MASK_Q:
        tl.store(ptrs, log_sum, mask=inside)
    else:
        tl.store(ptrs, log_sum)


@triton.jit
def prefetch_problem(tensors, strides, ROW_STRIDES: tl.constexpr, problem, sizes, SHAPE: tl.constexpr):
    """Prefetch into L2 q, k and v of the problem that this multiprocessor will reach next (ungrouped heads only)."""
    query, key, value = tensors
    query_strides, key_strides, value_strides = strides
    batch, heads, q_len, kv_len = sizes
    ROWS_Q: tl.constexpr = SHAPE[0]
    ROWS_KV: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    HEADS: tl.constexpr = SHAPE[3]
    b, h = problem_of(tl.minimum(problem, batch * heads - HEADS), batch, heads, False)
    prefetch_tile(query, query_strides, ROW_STRIDES[0], b, h, q_len, ROWS_Q, BLOCK_D, HEADS)
    prefetch_tile(key, key_strides, ROW_STRIDES[1], b, h, kv_len, ROWS_KV, BLOCK_D, HEADS)
    prefetch_tile(value, value_strides, ROW_STRIDES[2], b, h, kv_len, ROWS_KV, BLOCK_D, HEADS)


@triton.jit
def _fwd_kernel(
    query, key, value, bias, mask, lengths, seed, out, lse,
    query_strides, key_strides, value_strides, out_strides, bias_strides, mask_strides,
    batch, heads, q_len, kv_len, head_dim, qk_scale, dropout_p, num_sms,
    ROW_STRIDES: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, Q_BLOCKS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, MASK_Q: tl.constexpr, MASK_KEYS: tl.constexpr, MASK_D: tl.constexpr,
    PREFETCH: tl.constexpr, PERSISTENT: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    total = batch * heads // HEADS
    first_index, end_index, step_index = walk(total, PERSISTENT)
    if HAS_BIAS == SHARED:
        b, h = problem_of(first_index * HEADS, batch, heads, False)
        bias_tile = load_bias(bias, bias_strides, (b, h), 0, (q_len, kv_len), (BLOCK_Q, BLOCK_KV, HEADS), HAS_BIAS)
    for index in tl.range(first_index, end_index, step_index, num_stages=STAGES if PERSISTENT else 1):
        problem = index * HEADS
        b, h = problem_of(problem, batch, heads, False)
        kv_limit = tl.minimum(tl.load(lengths + b), kv_len) if HAS_LENGTHS else kv_len

        k = load_tile(
            key, key_strides, ROW_STRIDES[1], (b, h // GROUP), (0, kv_limit), (0, head_dim), (BLOCK_KV, BLOCK_D, HEADS),
            (MASK_KEYS, MASK_D), TMA,
        )  # fmt: skip
        v = load_tile(
            value, value_strides, ROW_STRIDES[2], (b, h // GROUP), (0, kv_limit), (0, head_dim), (BLOCK_KV, BLOCK_D, HEADS),
            (MASK_KEYS, MASK_D), TMA,
        )  # fmt: skip
        if PREFETCH:
            prefetch_problem(
                (query, key, value), (query_strides, key_strides, value_strides), ROW_STRIDES,
                problem + PREFETCH * num_sms * HEADS, (batch, heads, q_len, kv_len),
                (BLOCK_Q * Q_BLOCKS, BLOCK_KV, BLOCK_D, HEADS),
            )  # fmt: skip

        for block in tl.range(0, Q_BLOCKS, num_stages=1 if PERSISTENT else STAGES):
            first = block * BLOCK_Q
            q = load_tile(
                query, query_strides, ROW_STRIDES[0], (b, h), (first, q_len), (0, head_dim), (BLOCK_Q, BLOCK_D, HEADS),
                (MASK_Q, MASK_D), TMA,
            )  # fmt: skip
            scores = tl.dot(q, transpose(k), input_precision=PRECISION)  # [.., BLOCK_Q, BLOCK_KV]
            if HAS_BIAS:
                if HAS_BIAS != SHARED:
                    bias_tile = load_bias(
                        bias, bias_strides, (b, h), first, (q_len, kv_len), (BLOCK_Q, BLOCK_KV, HEADS), HAS_BIAS
                    )
                scores = scores * (qk_scale * LN2) + bias_tile
            scores, seen = masked_scores(
                scores, mask, mask_strides, (b, h), first, (q_len, kv_len, kv_limit), (BLOCK_Q, BLOCK_KV, HEADS), CAUSAL,
                HAS_MASK, MASK_KEYS,
            )  # fmt: skip
            weights, inverse, log_sum = softmax_rows(scores, qk_scale, HAS_BIAS)
            store_lse(lse, problem, q_len, first, log_sum, BLOCK_Q, HEADS, MASK_Q)
            if HAS_DROPOUT:
                keep = dropout_keep(tl.load(seed), problem, dropout_p, first, kv_len, BLOCK_Q, BLOCK_KV, HEADS)
                weights = tl.where(keep, weights, 0.0)
                inverse = inverse / (1.0 - dropout_p)
            values = clear_unseen(v, seen) if HAS_MASK else v
            acc = tl.dot(weights.to(v.dtype), values, input_precision=PRECISION)  # [.., BLOCK_Q, BLOCK_D]
            acc = acc * expand(inverse, 1)
            store_tile(
                out, out_strides, ROW_STRIDES[3], (b, h), acc, (first, q_len), (0, head_dim), (BLOCK_Q, BLOCK_D, HEADS),
                (MASK_Q, MASK_D), TMA,
            )  # fmt: skip


@triton.jit
def _fwd_chunked_kernel(
    query, key, value, bias, mask, lengths, seed, out, lse,
    query_strides, key_strides, value_strides, out_strides, bias_strides, mask_strides,
    batch, heads, q_len, kv_len, head_dim, qk_scale, dropout_p,
    ROW_STRIDES: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, MASK_Q: tl.constexpr, MASK_KEYS: tl.constexpr, MASK_D: tl.constexpr,
    PREFETCH: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = value.dtype if TMA else value.dtype.element_ty
    problem = tl.program_id(0)
    b, h = problem_of(problem, batch, heads, False)
    kv_limit = tl.minimum(tl.load(lengths + b), kv_len) if HAS_LENGTHS else kv_len
    if PREFETCH:
        # the values are needed only after the softmax, so they are prefetched into L2 (S = 128, D = 128: 4.33 -> 3.96 ms)
        prefetch_tile(value, value_strides, ROW_STRIDES[2], b, h // GROUP, kv_len, BLOCK_KV, BLOCK_D, 1)

    scores = tl.zeros((BLOCK_Q, BLOCK_KV), tl.float32)
    for d in tl.range(0, BLOCK_D, CHUNK, num_stages=STAGES):
        q = load_tile(
            query, query_strides, ROW_STRIDES[0], (b, h), (0, q_len), (d, head_dim), (BLOCK_Q, CHUNK, 1), (MASK_Q, MASK_D), TMA
        )
        k = load_tile(
            key, key_strides, ROW_STRIDES[1], (b, h // GROUP), (0, kv_limit), (d, head_dim), (BLOCK_KV, CHUNK, 1),
            (MASK_KEYS, MASK_D), TMA,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION)
    if HAS_BIAS:
        bias_tile = load_bias(bias, bias_strides, (b, h), 0, (q_len, kv_len), (BLOCK_Q, BLOCK_KV, 1), HAS_BIAS)
        scores = scores * (qk_scale * LN2) + bias_tile
    scores, seen = masked_scores(
        scores, mask, mask_strides, (b, h), 0, (q_len, kv_len, kv_limit), (BLOCK_Q, BLOCK_KV, 1), CAUSAL, HAS_MASK, MASK_KEYS
    )
    weights, inverse, log_sum = softmax_rows(scores, qk_scale, HAS_BIAS)
    store_lse(lse, problem, q_len, 0, log_sum, BLOCK_Q, 1, MASK_Q)
    if HAS_DROPOUT:
        keep = dropout_keep(tl.load(seed), problem, dropout_p, 0, kv_len, BLOCK_Q, BLOCK_KV, 1)
        weights = tl.where(keep, weights, 0.0)
        inverse = inverse / (1.0 - dropout_p)
    weights = (weights * expand(inverse, 1)).to(DTYPE)
    for d in tl.range(0, BLOCK_D, CHUNK, num_stages=STAGES):
        v = load_tile(
            value, value_strides, ROW_STRIDES[2], (b, h // GROUP), (0, kv_limit), (d, head_dim), (BLOCK_KV, CHUNK, 1),
            (MASK_KEYS, MASK_D), TMA,
        )  # fmt: skip
        v = clear_unseen(v, seen) if HAS_MASK else v
        acc = tl.dot(weights, v, input_precision=PRECISION)
        store_tile(
            out, out_strides, ROW_STRIDES[3], (b, h), acc, (0, q_len), (d, head_dim), (BLOCK_Q, CHUNK, 1), (MASK_Q, MASK_D), TMA
        )
