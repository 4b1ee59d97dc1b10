"""Backward of N:M attention for a stored selection, whichever forward made it. It uses masked dense products; only bits have size
Tq * Tk. It runs the calls that `backward_sm90` does not support: other architectures, D above 128, float32, patterns other than "2:4"
and "1:2". The gradient of a bias is made here for all calls.

    S = scale * Q K^T + bias    P = exp(S - lse) where the bit is set, else 0      dP = dO V^T (and dropout)
        with a bias P = exp(S - shift) * inverse: next to a large score the logarithm of the sum is lost in lse
    dS = P (dP - delta)         delta = rowsum(dO O) - dlse
    dQ = scale dS K             by blocks of queries, over slots
    dK = scale dS^T Q, dV = dropout(P)^T dO   by tiles of slots, over the queries of all heads of a group, in order
    dbias = dS, summed over the axes that the bias broadcasts, in order

The bits combine masks, causality and pruning, so no mask is read again. There are no atomics, so every run gives the same bits.
"""

import triton
import triton.language as tl

from saccade.nm_sparse.masked.tiles import (
    LOG2E,
    any_bit,
    kept_rows,
    keys_of,
    load_bits,
    load_rows,
    scores_of,
    slots_up_to,
    store_rows,
    survives,
)

# an lse beyond this has lost more than 3e-5 of the logarithm of the sum
_FAR = tl.constexpr(1024.0)


@triton.jit
def _anchor(q, tensors, strides, where, numbers, SHAPE: tl.constexpr, PRECISION: tl.constexpr):
    """(shift, inverse) of rows, `P = exp(S - shift) * inverse`: lse and 1, or the maximum and 1 / sum where lse is too coarse."""
    key, bias, bits, lse = tensors
    key_strides, bias_strides = strides
    b, h, queries, rows, rows_in = where
    slots, kv_len, head_dim, words, scale = numbers
    HEADS_PER_KEY: tl.constexpr = SHAPE[0]
    BLOCK_S: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    M: tl.constexpr = SHAPE[3]
    P: tl.constexpr = SHAPE[4]
    log_sum = tl.load(lse + rows, mask=rows_in, other=0.0)
    shift = tl.where(log_sum == float("-inf"), 0.0, log_sum)
    inverse = shift * 0.0 + 1.0
    if tl.max(tl.abs(shift), 0) > _FAR:
        row_max = shift * 0.0 + float("-inf")
        row_sum = shift * 0.0
        for first in tl.range(0, slots, BLOCK_S):
            keys, real = keys_of(first, kv_len, BLOCK_S, M, P)
            k = load_rows(key, key_strides, b, h // HEADS_PER_KEY, keys, real, head_dim, BLOCK_D)
            inside = rows_in[:, None] & real[None, :]
            scores = scores_of(q, k, bias, bias_strides, (b, h, queries, keys), inside, scale, True, PRECISION)
            scores = tl.where(load_bits(bits, rows, rows_in, first, words, BLOCK_S), scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            row_sum = row_sum * tl.exp2((row_max - shift) * LOG2E) + tl.sum(tl.exp2((scores - shift[:, None]) * LOG2E), 1)
            row_max = new_max
        inverse = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    return shift, inverse


@triton.jit
def load_anchor(shifts, inverses, rows, rows_in):
    """(shift, inverse) of rows. Calls without a bias use only lse, which is returned twice: their weights need no inverse."""
    shift = tl.load(shifts + rows, mask=rows_in, other=0.0)
    inverse = tl.load(inverses + rows, mask=rows_in, other=0.0)
    return tl.where(shift == float("-inf"), 0.0, shift), inverse


@triton.jit
def _bwd_tile(
    tiles, tensors, bias_strides, anchor, where, numbers, SHAPE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(weights after dropout, dS, kept) of a tile, `[BLOCK_Q, BLOCK_S]`."""
    q, k, v, do = tiles
    bias, seed, bits, delta = tensors
    shift, inverse = anchor
    b, h, problem, queries, rows, rows_in, first, keys, real = where
    kv_len, words, scale, dropout_p = numbers
    BLOCK_S: tl.constexpr = SHAPE[0]
    M: tl.constexpr = SHAPE[1]
    P: tl.constexpr = SHAPE[2]
    inside = rows_in[:, None] & real[None, :]
    kept = load_bits(bits, rows, rows_in, first, words, BLOCK_S)
    scores = scores_of(q, k, bias, bias_strides, (b, h, queries, keys), inside, scale, HAS_BIAS, PRECISION)
    # the shift first: a score near the largest float32 times log2(e) would overflow
    probs = tl.exp2((scores - shift[:, None]) * LOG2E)
    if HAS_BIAS:
        probs *= inverse[:, None]
    probs = tl.where(kept, probs, 0.0)
    dprobs = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    dropped = probs
    if HAS_DROPOUT:
        spared = survives(tl.load(seed), problem, dropout_p, queries, first, keys, kv_len, BLOCK_S, M, P)
        dropped = tl.where(spared, probs / (1.0 - dropout_p), 0.0)
        dprobs = tl.where(spared, dprobs / (1.0 - dropout_p), 0.0)
    sums = tl.load(delta + rows, mask=rows_in, other=0.0)
    # `where` again, because a key that is not kept may hold NaN, and 0 * NaN is NaN
    dscores = tl.where(kept, probs * (dprobs - sums[:, None]), 0.0)
    return dropped, dscores, kept


@triton.jit
def _masked_dq_kernel(
    query, key, value, bias, seed, bits, dout, lse, delta, shifts, inverses, dquery,
    query_strides, key_strides, value_strides, dout_strides, bias_strides, dquery_strides,
    heads, q_len, kv_len, head_dim, words, blocks, scale, dropout_p,
    HEADS_PER_KEY: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BLOCKS: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = blocks - 1 - tl.program_id(0) % blocks
    problem = tl.program_id(0) // blocks
    b, h = problem // heads, problem % heads
    queries = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    rows_in = queries < q_len
    rows = problem.to(tl.int64) * q_len + queries
    q = load_rows(query, query_strides, b, h, queries, rows_in, head_dim, BLOCK_D)
    do = load_rows(dout, dout_strides, b, h, queries, rows_in, head_dim, BLOCK_D)
    limit = tl.minimum(kv_len, (block + 1) * BLOCK_Q) if CAUSAL else kv_len
    if HAS_BIAS:
        shift, inverse = _anchor(
            q, (key, bias, bits, lse), (key_strides, bias_strides), (b, h, queries, rows, rows_in),
            (slots_up_to(limit, M, P), kv_len, head_dim, words, scale), (HEADS_PER_KEY, BLOCK_S, BLOCK_D, M, P), PRECISION,
        )  # fmt: skip
        tl.store(shifts + rows, shift, mask=rows_in)  # for the next kernels
        tl.store(inverses + rows, inverse, mask=rows_in)
    else:
        shift, inverse = load_anchor(lse, lse, rows, rows_in)
    dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for first in tl.range(0, slots_up_to(limit, M, P), BLOCK_S):
        wanted = True
        if HAS_BLOCKS:
            wanted = any_bit(bits, rows, rows_in, first, words, BLOCK_S // 32)
        if wanted:
            keys, real = keys_of(first, kv_len, BLOCK_S, M, P)
            k = load_rows(key, key_strides, b, h // HEADS_PER_KEY, keys, real, head_dim, BLOCK_D)
            v = load_rows(value, value_strides, b, h // HEADS_PER_KEY, keys, real, head_dim, BLOCK_D)
            _, ds, kept = _bwd_tile(
                (q, k, v, do), (bias, seed, bits, delta), bias_strides, (shift, inverse),
                (b, h, problem, queries, rows, rows_in, first, keys, real), (kv_len, words, scale, dropout_p), (BLOCK_S, M, P),
                HAS_BIAS, HAS_DROPOUT, PRECISION,
            )  # fmt: skip
            dq = tl.dot(ds.to(k.dtype), kept_rows(k, kept), dq, input_precision=PRECISION)
    store_rows(dquery, dquery_strides, b, h, queries, rows_in, head_dim, dq * scale, BLOCK_D)


@triton.jit
def _masked_dkv_kernel(
    query, key, value, bias, seed, bits, dout, lse, delta, shifts, inverses, dkey, dvalue,
    query_strides, key_strides, value_strides, dout_strides, bias_strides, dkey_strides, dvalue_strides,
    heads, q_len, kv_len, head_dim, words, tiles, scale, dropout_p,
    HEADS_PER_KEY: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BLOCKS: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % tiles
    owner = tl.program_id(0) // tiles
    kv_heads = heads // HEADS_PER_KEY
    b, kv_head = owner // kv_heads, owner % kv_heads
    first = tile * BLOCK_S
    keys, real = keys_of(first, kv_len, BLOCK_S, M, P)
    k = load_rows(key, key_strides, b, kv_head, keys, real, head_dim, BLOCK_D)
    v = load_rows(value, value_strides, b, kv_head, keys, real, head_dim, BLOCK_D)
    dk = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    # query i sees keys up to i, so the first query that sees this tile has the index of its first key
    begin = first // P * M // BLOCK_Q if CAUSAL else 0
    stretch = tl.maximum(tl.cdiv(q_len, BLOCK_Q) - begin, 0)
    for step in tl.range(0, HEADS_PER_KEY * stretch):
        h = kv_head * HEADS_PER_KEY + step // stretch
        problem = b * heads + h
        queries = (begin + step % stretch) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        rows_in = queries < q_len
        rows = problem.to(tl.int64) * q_len + queries
        wanted = True
        if HAS_BLOCKS:
            wanted = any_bit(bits, rows, rows_in, first, words, BLOCK_S // 32)
        if wanted:
            q = load_rows(query, query_strides, b, h, queries, rows_in, head_dim, BLOCK_D)
            do = load_rows(dout, dout_strides, b, h, queries, rows_in, head_dim, BLOCK_D)
            shift, inverse = load_anchor(shifts, inverses, rows, rows_in)
            dropped, ds, _ = _bwd_tile(
                (q, k, v, do), (bias, seed, bits, delta), bias_strides, (shift, inverse),
                (b, h, problem, queries, rows, rows_in, first, keys, real), (kv_len, words, scale, dropout_p), (BLOCK_S, M, P),
                HAS_BIAS, HAS_DROPOUT, PRECISION,
            )  # fmt: skip
            dv = tl.dot(tl.trans(dropped.to(do.dtype)), do, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_rows(dkey, dkey_strides, b, kv_head, keys, real, head_dim, dk * scale, BLOCK_D)
    store_rows(dvalue, dvalue_strides, b, kv_head, keys, real, head_dim, dv, BLOCK_D)


@triton.jit
def _masked_dbias_kernel(
    query, key, value, bias, seed, bits, dout, lse, delta, shifts, inverses, dbias,
    query_strides, key_strides, value_strides, dout_strides, bias_strides, dbias_strides,
    heads, q_len, kv_len, head_dim, words, bias_heads, q_programs, s_programs, batch_steps, head_steps, q_steps, s_steps,
    scale, dropout_p,
    HEADS_PER_KEY: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
    ONE_QUERY: tl.constexpr, ONE_KEY: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of the bias, at (batch row, head, query block, slot tile); an axis that the bias broadcasts is
    summed in steps."""
    place = tl.program_id(0)
    s_tile = place % s_programs
    q_block = place // s_programs % q_programs
    bias_head = place // (s_programs * q_programs) % bias_heads
    bias_row = place // (s_programs * q_programs * bias_heads)
    acc = tl.zeros((BLOCK_Q, BLOCK_S), tl.float32)
    for step in tl.range(0, batch_steps * head_steps * q_steps * s_steps):
        first = (s_tile + step % s_steps) * BLOCK_S
        queries = (q_block + step // s_steps % q_steps) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        member = step // (s_steps * q_steps)
        h, b = bias_head + member % head_steps, bias_row + member // head_steps
        problem = b * heads + h
        rows_in = queries < q_len
        rows = problem.to(tl.int64) * q_len + queries
        if any_bit(bits, rows, rows_in, first, words, BLOCK_S // 32):
            keys, real = keys_of(first, kv_len, BLOCK_S, M, P)
            q = load_rows(query, query_strides, b, h, queries, rows_in, head_dim, BLOCK_D)
            do = load_rows(dout, dout_strides, b, h, queries, rows_in, head_dim, BLOCK_D)
            k = load_rows(key, key_strides, b, h // HEADS_PER_KEY, keys, real, head_dim, BLOCK_D)
            v = load_rows(value, value_strides, b, h // HEADS_PER_KEY, keys, real, head_dim, BLOCK_D)
            shift, inverse = load_anchor(shifts, inverses, rows, rows_in)
            _, ds, _ = _bwd_tile(
                (q, k, v, do), (bias, seed, bits, delta), bias_strides, (shift, inverse),
                (b, h, problem, queries, rows, rows_in, first, keys, real), (kv_len, words, scale, dropout_p), (BLOCK_S, M, P),
                True, HAS_DROPOUT, PRECISION,
            )  # fmt: skip
            acc += ds
    queries = q_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    keys, real = keys_of(s_tile * BLOCK_S, kv_len, BLOCK_S, M, P)
    rows_in = queries < q_len
    ptrs = dbias + bias_row.to(tl.int64) * dbias_strides[0] + bias_head.to(tl.int64) * dbias_strides[1]
    if ONE_QUERY and ONE_KEY:
        tl.store(ptrs, tl.sum(tl.sum(acc, 1), 0).to(dbias.dtype.element_ty))
    elif ONE_QUERY:
        ptrs += keys.to(tl.int64) * dbias_strides[3]
        tl.store(ptrs, tl.sum(acc, 0).to(dbias.dtype.element_ty), mask=real)
    elif ONE_KEY:
        ptrs += queries.to(tl.int64) * dbias_strides[2]
        tl.store(ptrs, tl.sum(acc, 1).to(dbias.dtype.element_ty), mask=rows_in)
    else:
        ptrs = ptrs + queries.to(tl.int64)[:, None] * dbias_strides[2] + keys.to(tl.int64)[None, :] * dbias_strides[3]
        tl.store(ptrs, acc.to(dbias.dtype.element_ty), mask=rows_in[:, None] & real[None, :])
