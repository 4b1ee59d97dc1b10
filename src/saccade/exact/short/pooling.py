"""A single query (Tq = 1), such as that of a CLS token: a weighted mean of the values, without matrix units, in both directions.

    forward    s = scale * K q, p = softmax(s), o = p V
    backward   dV = p dO^T, dp = V dO, ds = p * (dp - sum(p * dp) + dlse), dK = scale * ds q^T, dq = scale * ds K

At one FLOP per byte only the memory traffic counts: k and v are read, and backward also writes dk and dv. A program takes HEADS
adjacent heads of one batch row as one `[HEADS, BLOCK_KV, CHUNK]` tile, so that at D = 32 neighbouring 64-byte rows are read
together. The head dim is streamed in chunks where a whole K and V would spill. Only backward then reads anything twice: K, the
second time from L2.
Source: paper 002, "separate fwd/bwd kernels for a case where len(q)=1".
"""

import triton
import triton.language as tl

from saccade.exact.short.tiles import LN2, LOG2E, bias_row, dropout_keep, load_tile, problem_of, softmax_rows, store_tile, walk


@triton.jit
def load_vector(ptr, strides, first_col, head_dim, CHUNK: tl.constexpr, HEADS: tl.constexpr, MASK_D: tl.constexpr):
    """A chunk of the single row of HEADS adjacent heads, float32 `[HEADS, CHUNK]`."""
    heads = tl.arange(0, HEADS).to(tl.int64) * strides[1]
    cols = first_col + tl.arange(0, CHUNK)
    ptrs = ptr + heads[:, None] + cols[None, :]
    if MASK_D:
        x = tl.load(ptrs, mask=(cols < head_dim)[None, :], other=0.0)
    else:
        x = tl.load(ptrs)
    return x.to(tl.float32)


@triton.jit
def store_vector(ptr, strides, x, first_col, head_dim, CHUNK: tl.constexpr, HEADS: tl.constexpr, MASK_D: tl.constexpr):
    """Write `[HEADS, CHUNK]` as a chunk of the single row of HEADS adjacent heads."""
    heads = tl.arange(0, HEADS).to(tl.int64) * strides[1]
    cols = first_col + tl.arange(0, CHUNK)
    ptrs = ptr + heads[:, None] + cols[None, :]
    x = x.to(ptr.dtype.element_ty)
    if MASK_D:
        tl.store(ptrs, x, mask=(cols < head_dim)[None, :])
    else:
        tl.store(ptrs, x)


@triton.jit
def load_heads(tensor, strides, ROW: tl.constexpr, problem, limit, cols, SHAPE: tl.constexpr, MASKED: tl.constexpr):
    """A `[HEADS, BLOCK_KV, CHUNK]` tile for any HEADS, including 1."""
    b, h = problem
    first_col, head_dim = cols
    BLOCK_KV: tl.constexpr = SHAPE[0]
    CHUNK: tl.constexpr = SHAPE[1]
    HEADS: tl.constexpr = SHAPE[2]
    MASK_KEYS: tl.constexpr = MASKED[0]
    MASK_D: tl.constexpr = MASKED[1]
    tile = load_tile(
        tensor, strides, ROW, (b, h), (0, limit), (first_col, head_dim), (BLOCK_KV, CHUNK, HEADS), (MASK_KEYS, MASK_D)
    )
    return tile if HEADS > 1 else tile[None, :, :]


@triton.jit
def store_heads(tensor, strides, ROW: tl.constexpr, problem, tile, limit, cols, SHAPE: tl.constexpr, MASKED: tl.constexpr):
    """The inverse of `load_heads`."""
    b, h = problem
    first_col, head_dim = cols
    BLOCK_KV: tl.constexpr = SHAPE[0]
    CHUNK: tl.constexpr = SHAPE[1]
    HEADS: tl.constexpr = SHAPE[2]
    MASK_KEYS: tl.constexpr = MASKED[0]
    MASK_D: tl.constexpr = MASKED[1]
    tile = tile.to(tensor.dtype.element_ty)
    tile = tile if HEADS > 1 else tl.reshape(tile, (BLOCK_KV, CHUNK))
    store_tile(
        tensor, strides, ROW, (b, h), tile, (0, limit), (first_col, head_dim), (BLOCK_KV, CHUNK, HEADS), (MASK_KEYS, MASK_D)
    )


@triton.jit
def row_dot(tile, vector):
    """Inner products of the rows of `[HEADS, BLOCK_KV, CHUNK]` with `[HEADS, CHUNK]`, float32 `[HEADS, BLOCK_KV]`."""
    return tl.sum(tile.to(tl.float32) * vector[:, None, :], axis=2)


@triton.jit
def weighted_sum(weights, tile):
    """Sum of the rows of `[HEADS, BLOCK_KV, CHUNK]` weighted by `[HEADS, BLOCK_KV]`, float32 `[HEADS, CHUNK]`."""
    return tl.sum(weights[:, :, None] * tile.to(tl.float32), axis=1)


@triton.jit
def pooled_scores(
    scores, tensors, strides, lengths, BLOCK_KV: tl.constexpr, HEADS: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, MASK_KEYS: tl.constexpr,
):  # fmt: skip
    """Scores `[HEADS, BLOCK_KV]` plus the bias, -inf where the key is invisible, and which keys are visible."""
    bias, mask = tensors
    bias_strides, mask_strides = strides
    kv_len, kv_limit = lengths
    keys = tl.arange(0, BLOCK_KV)
    heads = tl.arange(0, HEADS).to(tl.int64)
    seen = scores == scores
    if HAS_BIAS:
        ptrs = bias + heads[:, None] * bias_strides[1] + (keys.to(tl.int64) * bias_strides[3])[None, :]
        scores += tl.load(ptrs, mask=(keys < kv_len)[None, :], other=0.0).to(tl.float32)
    if HAS_MASK:
        ptrs = mask + heads[:, None] * mask_strides[1] + (keys.to(tl.int64) * mask_strides[3])[None, :]
        seen = tl.load(ptrs, mask=(keys < kv_len)[None, :], other=0) != 0
        scores = tl.where(seen, scores, float("-inf"))
    if MASK_KEYS:
        scores = tl.where((keys < kv_limit)[None, :], scores, float("-inf"))
    # upper-left: the only query sees only the first key
    if CAUSAL:
        scores = tl.where((keys <= 0)[None, :], scores, float("-inf"))
    return scores, seen


@triton.jit
def pooled_dropout(seed, problem, dropout_p, kv_len, BLOCK_KV: tl.constexpr, HEADS: tl.constexpr):
    """The weights that survive, `[HEADS, BLOCK_KV]`."""
    keep = dropout_keep(tl.load(seed), problem, dropout_p, 0, kv_len, 1, BLOCK_KV, HEADS)
    return tl.reshape(keep, (HEADS, BLOCK_KV))


@triton.jit
def _pool_fwd_kernel(
    query, key, value, bias, mask, lengths, seed, out, lse,
    query_strides, key_strides, value_strides, out_strides, bias_strides, mask_strides,
    batch, heads, kv_len, head_dim, qk_scale, dropout_p,
    ROW_STRIDES: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, MASK_KEYS: tl.constexpr, MASK_D: tl.constexpr, PERSISTENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first_index, end_index, step_index = walk(batch * heads // HEADS, PERSISTENT)
    for index in tl.range(first_index, end_index, step_index, num_stages=1):
        problem = index * HEADS
        b, h = problem_of(problem, batch, heads, False)
        b64, h64 = b.to(tl.int64), h.to(tl.int64)
        kv_limit = tl.minimum(tl.load(lengths + b), kv_len) if HAS_LENGTHS else kv_len
        query_ptr = query + b64 * query_strides[0] + h64 * query_strides[1]
        out_ptr = out + b64 * out_strides[0] + h64 * out_strides[1]
        # request the values before waiting for the keys
        if CHUNK == BLOCK_D:
            v = load_heads(
                value, value_strides, ROW_STRIDES[2], (b, h // GROUP), kv_limit, (0, head_dim), (BLOCK_KV, CHUNK, HEADS),
                (MASK_KEYS, MASK_D),
            )  # fmt: skip

        scores = tl.zeros((HEADS, BLOCK_KV), tl.float32)
        for d in tl.range(0, BLOCK_D, CHUNK, num_stages=STAGES):
            q = load_vector(query_ptr, query_strides, d, head_dim, CHUNK, HEADS, MASK_D)
            k = load_heads(
                key, key_strides, ROW_STRIDES[1], (b, h // GROUP), kv_limit, (d, head_dim), (BLOCK_KV, CHUNK, HEADS),
                (MASK_KEYS, MASK_D),
            )  # fmt: skip
            scores += row_dot(k, q)
        bias_ptr = bias + bias_row(b, bias_strides).to(tl.int64) * bias_strides[0] + h64 * bias_strides[1] if HAS_BIAS else bias
        mask_ptr = mask + b64 * mask_strides[0] + h64 * mask_strides[1] if HAS_MASK else mask
        scores, seen = pooled_scores(
            scores * (qk_scale * LN2), (bias_ptr, mask_ptr), (bias_strides, mask_strides), (kv_len, kv_limit), BLOCK_KV, HEADS,
            CAUSAL, HAS_BIAS, HAS_MASK, MASK_KEYS,
        )  # fmt: skip
        weights, inverse, log_sum = softmax_rows(scores, 1.0, True)
        tl.store(lse + problem.to(tl.int64) + tl.arange(0, HEADS), log_sum)
        if HAS_DROPOUT:
            keep = pooled_dropout(seed, problem, dropout_p, kv_len, BLOCK_KV, HEADS)
            weights = tl.where(keep, weights / (1.0 - dropout_p), 0.0)
        weights *= inverse[:, None]
        for d in tl.range(0, BLOCK_D, CHUNK, num_stages=STAGES):
            if CHUNK < BLOCK_D:
                v = load_heads(
                    value, value_strides, ROW_STRIDES[2], (b, h // GROUP), kv_limit, (d, head_dim), (BLOCK_KV, CHUNK, HEADS),
                    (MASK_KEYS, MASK_D),
                )  # fmt: skip
            values = tl.where(seen[:, :, None], v, 0.0) if HAS_MASK else v
            store_vector(out_ptr, out_strides, weighted_sum(weights, values), d, head_dim, CHUNK, HEADS, MASK_D)


@triton.jit
def _pool_bwd_kernel(
    query, key, value, bias, mask, lengths, seed, dout, lse, dlse, dquery, dkey, dvalue, dbias,
    query_strides, key_strides, value_strides, bias_strides, mask_strides, dout_strides,
    dquery_strides, dkey_strides, dvalue_strides, dbias_strides,
    batch, heads, kv_len, head_dim, scale, dropout_p,
    ROW_STRIDES: tl.constexpr, KV_SHARE: tl.constexpr, HEADS: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_DLSE: tl.constexpr, BIAS_GRAD: tl.constexpr, BATCH_INNER: tl.constexpr,
    MASK_KEYS: tl.constexpr, MASK_D: tl.constexpr, PERSISTENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    if BIAS_GRAD:
        bias_sum = tl.zeros((HEADS, BLOCK_KV), tl.float32)
    first_index, end_index, step_index = walk(batch * heads // HEADS, PERSISTENT)
    for index in tl.range(first_index, end_index, step_index, num_stages=1):
        b, h = problem_of(index * HEADS, batch, heads, BATCH_INNER)
        b64, h64 = b.to(tl.int64), h.to(tl.int64)
        problem = b * heads + h
        kv_limit = tl.minimum(tl.load(lengths + b), kv_len) if HAS_LENGTHS else kv_len
        query_ptr = query + b64 * query_strides[0] + h64 * query_strides[1]
        dout_ptr = dout + b64 * dout_strides[0] + h64 * dout_strides[1]

        # defined before the loops: with a single chunk they stay on chip from the first loop to the second
        q = load_vector(query_ptr, query_strides, 0, head_dim, CHUNK, HEADS, MASK_D)
        do = load_vector(dout_ptr, dout_strides, 0, head_dim, CHUNK, HEADS, MASK_D)
        k = load_heads(
            key, key_strides, ROW_STRIDES[1], (b, h // KV_SHARE), kv_limit, (0, head_dim), (BLOCK_KV, CHUNK, HEADS),
            (MASK_KEYS, MASK_D),
        )  # fmt: skip
        v = load_heads(
            value, value_strides, ROW_STRIDES[2], (b, h // KV_SHARE), kv_limit, (0, head_dim), (BLOCK_KV, CHUNK, HEADS),
            (MASK_KEYS, MASK_D),
        )  # fmt: skip
        scores = row_dot(k, q)
        dweights = row_dot(v, do)
        for d in tl.range(CHUNK, BLOCK_D, CHUNK, num_stages=STAGES):
            q_next = load_vector(query_ptr, query_strides, d, head_dim, CHUNK, HEADS, MASK_D)
            do_next = load_vector(dout_ptr, dout_strides, d, head_dim, CHUNK, HEADS, MASK_D)
            k_next = load_heads(
                key, key_strides, ROW_STRIDES[1], (b, h // KV_SHARE), kv_limit, (d, head_dim), (BLOCK_KV, CHUNK, HEADS),
                (MASK_KEYS, MASK_D),
            )  # fmt: skip
            v_next = load_heads(
                value, value_strides, ROW_STRIDES[2], (b, h // KV_SHARE), kv_limit, (d, head_dim), (BLOCK_KV, CHUNK, HEADS),
                (MASK_KEYS, MASK_D),
            )  # fmt: skip
            scores += row_dot(k_next, q_next)
            dweights += row_dot(v_next, do_next)
        bias_ptr = bias + bias_row(b, bias_strides).to(tl.int64) * bias_strides[0] + h64 * bias_strides[1] if HAS_BIAS else bias
        mask_ptr = mask + b64 * mask_strides[0] + h64 * mask_strides[1] if HAS_MASK else mask
        scores, seen = pooled_scores(
            scores * scale, (bias_ptr, mask_ptr), (bias_strides, mask_strides), (kv_len, kv_limit), BLOCK_KV, HEADS, CAUSAL,
            HAS_BIAS, HAS_MASK, MASK_KEYS,
        )  # fmt: skip
        # normalised by their own sum: next to a large score the logarithm of the sum is lost in lse
        if HAS_BIAS:
            weights, inverse, _ = softmax_rows(scores, 1.0, True)
            weights *= inverse[:, None]
        else:
            log_sum = tl.load(lse + problem.to(tl.int64) + tl.arange(0, HEADS))
            shift = tl.where(log_sum == float("-inf"), float("inf"), log_sum)
            weights = tl.exp2((scores - shift[:, None]) * LOG2E)
            if query.dtype.element_ty == tl.float32:  # as `backward.weights_of`
                total = tl.sum(weights, axis=1)
                weights *= tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
        dropped = weights
        if HAS_DROPOUT:
            keep = pooled_dropout(seed, problem, dropout_p, kv_len, BLOCK_KV, HEADS)
            dropped = tl.where(keep, weights / (1.0 - dropout_p), 0.0)
            dweights = tl.where(keep, dweights / (1.0 - dropout_p), 0.0)
        if HAS_MASK:
            dweights = tl.where(seen, dweights, 0.0)
        delta = tl.sum(weights * dweights, axis=1)
        if HAS_DLSE:
            delta -= tl.load(dlse + problem.to(tl.int64) + tl.arange(0, HEADS))
        dscores = weights * (dweights - delta[:, None])
        if BIAS_GRAD:
            bias_sum += dscores
        dscores *= scale

        dquery_ptr = dquery + b64 * dquery_strides[0] + h64 * dquery_strides[1]
        for d in tl.range(0, BLOCK_D, CHUNK, num_stages=STAGES):
            if CHUNK < BLOCK_D:
                k = load_heads(
                    key, key_strides, ROW_STRIDES[1], (b, h // KV_SHARE), kv_limit, (d, head_dim), (BLOCK_KV, CHUNK, HEADS),
                    (MASK_KEYS, MASK_D),
                )  # fmt: skip
                q = load_vector(query_ptr, query_strides, d, head_dim, CHUNK, HEADS, MASK_D)
                do = load_vector(dout_ptr, dout_strides, d, head_dim, CHUNK, HEADS, MASK_D)
            keys = tl.where(seen[:, :, None], k, 0.0) if HAS_MASK else k
            store_vector(dquery_ptr, dquery_strides, weighted_sum(dscores, keys), d, head_dim, CHUNK, HEADS, MASK_D)
            dv = dropped[:, :, None] * do[:, None, :]
            store_heads(
                dvalue, dvalue_strides, ROW_STRIDES[6], (b, h), dv, kv_len, (d, head_dim), (BLOCK_KV, CHUNK, HEADS),
                (MASK_KEYS, MASK_D),
            )  # fmt: skip
            dk = dscores[:, :, None] * q[:, None, :]
            store_heads(
                dkey, dkey_strides, ROW_STRIDES[5], (b, h), dk, kv_len, (d, head_dim), (BLOCK_KV, CHUNK, HEADS),
                (MASK_KEYS, MASK_D),
            )  # fmt: skip
    if BIAS_GRAD:
        keys = tl.arange(0, BLOCK_KV)[None, :]
        # HEADS is 1 here; the axis only shapes the store
        heads_axis = tl.arange(0, HEADS)[:, None]
        ptrs = dbias + tl.program_id(0).to(tl.int64) * dbias_strides[0] + heads_axis * dbias_strides[1] + keys * dbias_strides[2]
        tl.store(ptrs, bias_sum.to(dbias.dtype.element_ty), mask=keys < kv_len)
