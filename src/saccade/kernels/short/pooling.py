"""Tq = 1, the query of a CLS token: a weighted mean of the values, forward and backward, without matrix units.

    forward    s = scale * K q, p = softmax(s), o = p V
    backward   dV = p dO^T, dp = V dO, ds = p * (dp - sum(p * dp) + dlse), dK = scale * ds q^T, dq = scale * ds K

One FLOP a byte: only the traffic counts (k, v in; backward also dk, dv out). A program takes HEADS adjacent heads of one batch
row as one `[HEADS, BLOCK_KV, BLOCK_D]` tile, so that at D = 32 neighbouring 64-byte rows are read together.
Source: paper 002, "separate fwd/bwd kernels for a case where len(q)=1".
"""

import triton
import triton.language as tl

from saccade.kernels.short.tiles import LN2, LOG2E, dropout_keep, load_tile, problem_of, store_tile


@triton.jit
def load_vector(ptr, strides, head_dim, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, MASK_D: tl.constexpr):
    """The single row of HEADS adjacent heads, float32 `[HEADS, BLOCK_D]`."""
    heads = tl.arange(0, HEADS).to(tl.int64) * strides[1]
    cols = tl.arange(0, BLOCK_D)
    ptrs = ptr + heads[:, None] + cols[None, :]
    if MASK_D:
        return tl.load(ptrs, mask=(cols < head_dim)[None, :], other=0.0).to(tl.float32)
    return tl.load(ptrs).to(tl.float32)


@triton.jit
def store_vector(ptr, strides, x, head_dim, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, MASK_D: tl.constexpr):
    """Write `[HEADS, BLOCK_D]` as the single row of HEADS adjacent heads."""
    heads = tl.arange(0, HEADS).to(tl.int64) * strides[1]
    cols = tl.arange(0, BLOCK_D)
    ptrs = ptr + heads[:, None] + cols[None, :]
    x = x.to(ptr.dtype.element_ty)
    if MASK_D:
        tl.store(ptrs, x, mask=(cols < head_dim)[None, :])
    else:
        tl.store(ptrs, x)


@triton.jit
def load_heads(ptr, strides, limit, head_dim, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
               MASK_KEYS: tl.constexpr, MASK_D: tl.constexpr):  # fmt: skip
    """A `[HEADS, BLOCK_KV, BLOCK_D]` tile for any HEADS, 1 too."""
    tile = load_tile(ptr, strides, 0, limit, 0, head_dim, BLOCK_KV, BLOCK_D, HEADS, MASK_KEYS, MASK_D)
    return tile if HEADS > 1 else tile[None, :, :]


@triton.jit
def store_heads(ptr, strides, tile, limit, head_dim, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
                MASK_KEYS: tl.constexpr, MASK_D: tl.constexpr):  # fmt: skip
    """The inverse of `load_heads`."""
    tile = tile if HEADS > 1 else tl.reshape(tile, (BLOCK_KV, BLOCK_D))
    store_tile(ptr, strides, tile, 0, limit, 0, head_dim, BLOCK_KV, BLOCK_D, HEADS, MASK_KEYS, MASK_D)


@triton.jit
def pooled_scores(
    k, q, qk_scale, bias, bias_strides, mask, mask_strides, kv_len, kv_limit,
    BLOCK_KV: tl.constexpr, HEADS: tl.constexpr, CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    MASK_KEYS: tl.constexpr,
):  # fmt: skip
    """Base-2 scores `[HEADS, BLOCK_KV]`, -inf where the key is invisible, and which keys are visible."""
    keys = tl.arange(0, BLOCK_KV)
    heads = tl.arange(0, HEADS).to(tl.int64)
    scores = tl.sum(k.to(tl.float32) * q[:, None, :], axis=2) * qk_scale
    seen = scores == scores
    if HAS_BIAS:
        ptrs = bias + heads[:, None] * bias_strides[1] + (keys.to(tl.int64) * bias_strides[3])[None, :]
        scores += tl.load(ptrs, mask=(keys < kv_len)[None, :], other=0.0).to(tl.float32) * LOG2E
    if HAS_MASK:
        ptrs = mask + heads[:, None] * mask_strides[1] + (keys.to(tl.int64) * mask_strides[3])[None, :]
        seen = tl.load(ptrs, mask=(keys < kv_len)[None, :], other=0) != 0
        scores = tl.where(seen, scores, float("-inf"))
    if MASK_KEYS:
        scores = tl.where((keys < kv_limit)[None, :], scores, float("-inf"))
    if CAUSAL:  # upper-left: the only query sees the first key alone
        scores = tl.where((keys <= 0)[None, :], scores, float("-inf"))
    return scores, seen


@triton.jit
def pooled_dropout(seed, problem, dropout_p, kv_len, BLOCK_KV: tl.constexpr, HEADS: tl.constexpr):
    """Which weights survive, `[HEADS, BLOCK_KV]`."""
    keep = dropout_keep(tl.load(seed), problem, dropout_p, 0, kv_len, 1, BLOCK_KV, HEADS)
    return tl.reshape(keep, (HEADS, BLOCK_KV))


@triton.jit
def _pool_fwd_kernel(
    query, key, value, bias, mask, lengths, seed, out, lse,
    query_strides, key_strides, value_strides, out_strides, bias_strides, mask_strides,
    batch, heads, kv_len, head_dim, qk_scale, dropout_p,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    MASK_KEYS: tl.constexpr, MASK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    for index in tl.range(tl.program_id(0), batch * heads // HEADS, tl.num_programs(0), num_stages=STAGES):
        problem = index * HEADS
        b, h = problem_of(problem, batch, heads, False)
        b64, h64 = b.to(tl.int64), h.to(tl.int64)
        kv_limit = tl.minimum(tl.load(lengths + b), kv_len) if HAS_LENGTHS else kv_len
        key_ptr = key + b64 * key_strides[0] + (h64 // GROUP) * key_strides[1]
        value_ptr = value + b64 * value_strides[0] + (h64 // GROUP) * value_strides[1]
        q = load_vector(query + b64 * query_strides[0] + h64 * query_strides[1], query_strides, head_dim, BLOCK_D, HEADS, MASK_D)
        k = load_heads(key_ptr, key_strides, kv_limit, head_dim, BLOCK_KV, BLOCK_D, HEADS, MASK_KEYS, MASK_D)
        v = load_heads(value_ptr, value_strides, kv_limit, head_dim, BLOCK_KV, BLOCK_D, HEADS, MASK_KEYS, MASK_D)
        bias_ptr = bias + b64 * bias_strides[0] + h64 * bias_strides[1] if HAS_BIAS else bias
        mask_ptr = mask + b64 * mask_strides[0] + h64 * mask_strides[1] if HAS_MASK else mask
        scores, seen = pooled_scores(
            k, q, qk_scale, bias_ptr, bias_strides, mask_ptr, mask_strides, kv_len, kv_limit,
            BLOCK_KV, HEADS, CAUSAL, HAS_BIAS, HAS_MASK, MASK_KEYS,
        )  # fmt: skip
        row_max = tl.max(scores, axis=1)
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
        weights = tl.exp2(scores - shift[:, None])
        row_sum = tl.sum(weights, axis=1)
        inverse = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
        tl.store(lse + problem.to(tl.int64) + tl.arange(0, HEADS), (tl.log2(row_sum) + shift) * LN2)
        if HAS_DROPOUT:
            keep = pooled_dropout(seed, problem, dropout_p, kv_len, BLOCK_KV, HEADS)
            weights = tl.where(keep, weights / (1.0 - dropout_p), 0.0)
        values = tl.where(seen[:, :, None], v, 0.0) if HAS_MASK else v
        acc = tl.sum(weights[:, :, None] * values.to(tl.float32), axis=1) * inverse[:, None]
        store_vector(out + b64 * out_strides[0] + h64 * out_strides[1], out_strides, acc, head_dim, BLOCK_D, HEADS, MASK_D)


@triton.jit
def _pool_bwd_kernel(
    query, key, value, bias, mask, lengths, seed, dout, lse, dlse, dquery, dkey, dvalue, dbias,
    query_strides, key_strides, value_strides, bias_strides, mask_strides, dout_strides,
    dquery_strides, dkey_strides, dvalue_strides, dbias_strides,
    batch, heads, kv_len, head_dim, scale, dropout_p,
    GROUP: tl.constexpr, KV_SHARE: tl.constexpr, HEADS: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_DLSE: tl.constexpr, BIAS_GRAD: tl.constexpr, BATCH_INNER: tl.constexpr,
    MASK_KEYS: tl.constexpr, MASK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    owners = heads // GROUP
    if BIAS_GRAD:
        bias_sum = tl.zeros((HEADS, BLOCK_KV), tl.float32)
    for index in tl.range(tl.program_id(0), batch * owners // HEADS, tl.num_programs(0), num_stages=STAGES):
        b, owner = problem_of(index * HEADS, batch, owners, BATCH_INNER)
        b64, owner64 = b.to(tl.int64), owner.to(tl.int64)
        kv_limit = tl.minimum(tl.load(lengths + b), kv_len) if HAS_LENGTHS else kv_len
        key_ptr = key + b64 * key_strides[0] + (owner64 // KV_SHARE) * key_strides[1]
        value_ptr = value + b64 * value_strides[0] + (owner64 // KV_SHARE) * value_strides[1]
        k = load_heads(key_ptr, key_strides, kv_limit, head_dim, BLOCK_KV, BLOCK_D, HEADS, MASK_KEYS, MASK_D)
        v = load_heads(value_ptr, value_strides, kv_limit, head_dim, BLOCK_KV, BLOCK_D, HEADS, MASK_KEYS, MASK_D)
        dk = tl.zeros((HEADS, BLOCK_KV, BLOCK_D), tl.float32)
        dv = tl.zeros((HEADS, BLOCK_KV, BLOCK_D), tl.float32)
        for step in tl.range(0, GROUP, num_stages=1):
            h = owner * GROUP + step
            h64 = h.to(tl.int64)
            problem = b * heads + h
            q = load_vector(query + b64 * query_strides[0] + h64 * query_strides[1], query_strides, head_dim, BLOCK_D, HEADS, MASK_D)
            do = load_vector(dout + b64 * dout_strides[0] + h64 * dout_strides[1], dout_strides, head_dim, BLOCK_D, HEADS, MASK_D)
            log_sum = tl.load(lse + problem.to(tl.int64) + tl.arange(0, HEADS))
            shift = tl.where(log_sum == float("-inf"), float("inf"), log_sum * LOG2E)
            bias_ptr = bias + b64 * bias_strides[0] + h64 * bias_strides[1] if HAS_BIAS else bias
            mask_ptr = mask + b64 * mask_strides[0] + h64 * mask_strides[1] if HAS_MASK else mask
            scores, seen = pooled_scores(
                k, q, scale * LOG2E, bias_ptr, bias_strides, mask_ptr, mask_strides, kv_len, kv_limit,
                BLOCK_KV, HEADS, CAUSAL, HAS_BIAS, HAS_MASK, MASK_KEYS,
            )  # fmt: skip
            weights = tl.exp2(scores - shift[:, None])
            dweights = tl.sum(v.to(tl.float32) * do[:, None, :], axis=2)
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
            dv += dropped[:, :, None] * do[:, None, :]
            dk += (dscores * scale)[:, :, None] * q[:, None, :]
            keys = tl.where(seen[:, :, None], k, 0.0) if HAS_MASK else k
            dq = tl.sum((dscores * scale)[:, :, None] * keys.to(tl.float32), axis=1)
            store_vector(dquery + b64 * dquery_strides[0] + h64 * dquery_strides[1], dquery_strides, dq, head_dim, BLOCK_D, HEADS, MASK_D)
            if BIAS_GRAD:
                bias_sum += dscores
        dkey_ptr = dkey + b64 * dkey_strides[0] + owner64 * dkey_strides[1]
        dvalue_ptr = dvalue + b64 * dvalue_strides[0] + owner64 * dvalue_strides[1]
        store_heads(dkey_ptr, dkey_strides, dk, kv_len, head_dim, BLOCK_KV, BLOCK_D, HEADS, MASK_KEYS, MASK_D)
        store_heads(dvalue_ptr, dvalue_strides, dv, kv_len, head_dim, BLOCK_KV, BLOCK_D, HEADS, MASK_KEYS, MASK_D)
    if BIAS_GRAD:
        keys = tl.arange(0, BLOCK_KV)
        ptrs = dbias + tl.program_id(0).to(tl.int64) * dbias_strides[0] + tl.arange(0, HEADS)[:, None] * 0 + keys[None, :] * dbias_strides[2]
        tl.store(ptrs, bias_sum.to(dbias.dtype.element_ty), mask=(keys < kv_len)[None, :])
