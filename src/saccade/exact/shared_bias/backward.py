"""Backward: the numbers of each row, then dK and dV, then dQ and the gradient of the bias.

    P = exp(S - lse)        dS = P * (dP - delta)       dP = dO V^T, delta = rowsum(dO * O) - dlse
    dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K, dbias = sum of dS over the rows and heads that share it

`rows_kernel` writes three numbers for each query. A program of `keys_kernel` owns a tile of keys and walks the queries. Its score tiles have keys as
rows, so that P and dS are the left factors of dV and dK without a transpose. A program of `queries_kernel` owns a tile of queries of a row and walks
the keys. One of `bias_kernel` (`bias_gradient.py`) owns a tile of the bias and walks the rows.

No atomics: each sum is complete in one program, or a float32 part of it that torch adds up in order.
"""

import triton
import triton.language as tl

from saccade.exact.shared_bias.forward import masked_scores, row_step
from saccade.exact.shared_bias.tiles import (
    EXTREME,
    LOG2E,
    base_of,
    bias_of,
    factor_of,
    length_of,
    load_bias,
    load_numbers,
    load_rows,
    score_gradients,
    seen_keys,
    store_rows,
    survivors,
)

# of lse, beyond which float32 has lost too much of the logarithm of the sum
_FAR = tl.constexpr(1024.0)


@triton.jit
def rows_kernel(
    query, key, bias, lengths, visible, dout, out, lse, dlse, numbers, q_strides, k_strides, dout_strides, out_strides, bias_strides,
    visible_stride, windows, heads, q_len, kv_len, head_dim, scale, step,
    GROUP: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_VISIBLE: tl.constexpr,
    HAS_DLSE: tl.constexpr, EXACT: tl.constexpr, PADDED: tl.constexpr, UNIT: tl.constexpr, MASK_D: tl.constexpr, WIDE: tl.constexpr, WIDE_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """shift, inverse and terms of each query, float32 `[3, B, H, Tq]`: P = exp2(factor S + shift) |inverse|, terms = -delta |inverse|.

    Usually shift is -lse and inverse 1. In float32 (EXACT), and where lse has lost the logarithm of the sum, they are the maximum of the row and
    one over its own sum: weights then add up to 1, whatever S rounds to. inverse is negative where the factor is 1/4 and not log2(e).
    """
    tiles = tl.cdiv(q_len, TILE_Q)
    first, pair = tl.program_id(0) % tiles * TILE_Q, tl.program_id(0) // tiles
    b, h = pair // heads, pair % heads
    queries = first + tl.arange(0, TILE_Q)
    place, exist = pair.to(tl.int64) * q_len + queries, queries < q_len
    o = load_rows(base_of(out, out_strides, b, h), out_strides[2], first, q_len, head_dim, TILE_Q, BLOCK_D, True, MASK_D, WIDE)
    do = load_rows(
        base_of(dout, dout_strides, b, h), dout_strides[2], first, q_len, head_dim, TILE_Q, BLOCK_D, True, MASK_D, WIDE
    )
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse + place, mask=exist, other=0.0)
    log_sum = tl.load(lse + place, mask=exist, other=float("-inf"))
    sees = log_sum != float("-inf")
    shift, inverse, factor = (
        tl.where(sees, log_sum, 0.0),
        tl.full((TILE_Q,), 1.0, tl.float32),
        tl.full((TILE_Q,), LOG2E, tl.float32),
    )
    far = tl.sum((tl.abs(shift) > _FAR).to(tl.int32), 0) > 0
    if EXACT or far:
        limit = length_of(lengths, b, kv_len, HAS_LENGTHS)
        keys, pairs = base_of(key, k_strides, b, h // GROUP), bias_of(bias, bias_strides, b, h, windows)
        q = load_rows(base_of(query, q_strides, b, h), q_strides[2], first, q_len, head_dim, TILE_Q, BLOCK_D, True, MASK_D, WIDE)
        row_max, row_sum = tl.full((TILE_Q,), float("-inf"), tl.float32), tl.zeros((TILE_Q,), tl.float32)
        for start in tl.range(0, limit, TILE_K, num_stages=1):
            scores = masked_scores(
                q, (keys, pairs, visible), (k_strides[2], bias_strides, visible_stride), (b, first, start),
                (q_len, kv_len, limit, head_dim), scale, (TILE_Q, TILE_K, BLOCK_D),
                (True, HAS_VISIBLE, PADDED, UNIT, MASK_D, WIDE, WIDE_BIAS), PRECISION,
            )  # fmt: skip
            _, row_max, row_sum, _ = row_step(scores, row_max, row_sum)
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
        inverse = tl.where(row_sum == 0.0, 1.0, 1.0 / row_sum)
        factor = tl.where(tl.abs(shift) > EXTREME, 0.25, LOG2E)
    # a query that sees no key: weights of 0
    tl.store(numbers + place, tl.where(sees, -shift * factor, float("-inf")), mask=exist)
    tl.store(numbers + step + place, tl.where(factor == 0.25, -inverse, inverse), mask=exist)
    tl.store(numbers + 2 * step + place, -delta * inverse, mask=exist)


@triton.jit
def keys_kernel(
    query, key, value, bias, lengths, visible, seed, dout, numbers, dkey, dvalue, q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    bias_strides, visible_stride, windows, heads, q_len, kv_len, head_dim, scale, dropout_p, step,
    GROUP: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_VISIBLE: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    EVEN: tl.constexpr, COPIED: tl.constexpr, PADDED: tl.constexpr, UNIT: tl.constexpr, MASK_D: tl.constexpr, WIDE: tl.constexpr, WIDE_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys, over the queries of all heads of its group. EVEN: tiles hold no queries that do not exist. COPIED: the bias is a copy with
    the queries of a key side by side, for whole tiles.

    A key that the row does not see affects only its own row of dK and dV, which is cleared at the end.
    """
    tiles, owners = tl.cdiv(kv_len, TILE_K), heads // GROUP
    first, pair = tl.program_id(0) % tiles * TILE_K, tl.program_id(0) // tiles
    b, owner = pair // owners, pair % owners
    limit = length_of(lengths, b, kv_len, HAS_LENGTHS)
    k = load_rows(base_of(key, k_strides, b, owner), k_strides[2], first, limit, head_dim, TILE_K, BLOCK_D, True, MASK_D, WIDE)
    v = load_rows(base_of(value, v_strides, b, owner), v_strides[2], first, limit, head_dim, TILE_K, BLOCK_D, True, MASK_D, WIDE)
    dk, dv = tl.zeros((TILE_K, BLOCK_D), tl.float32), tl.zeros((TILE_K, BLOCK_D), tl.float32)
    for member in tl.range(0, GROUP, num_stages=1):
        h = owner * GROUP + member
        rows, grads = base_of(query, q_strides, b, h), base_of(dout, dout_strides, b, h)
        pairs = bias_of(bias, bias_strides, b, h, windows)
        for start in tl.range(0, q_len, TILE_Q):
            q = load_rows(rows, q_strides[2], start, q_len, head_dim, TILE_Q, BLOCK_D, not EVEN, MASK_D, WIDE)
            do = load_rows(grads, dout_strides[2], start, q_len, head_dim, TILE_Q, BLOCK_D, not EVEN, MASK_D, WIDE)
            shift, inverse, terms = load_numbers(numbers, b * heads + h, step, start, q_len, TILE_Q)
            added = load_bias(
                pairs, bias_strides, (start, first), (q_len, kv_len), (TILE_Q, TILE_K), not PADDED, True, UNIT, WIDE_BIAS,
                not COPIED,
            )  # fmt: skip
            # S^T = scale K Q^T + bias^T, P^T
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale + added.to(tl.float32)
            weights = tl.exp2(scores * factor_of(inverse)[None, :] + shift[None, :])
            share = tl.abs(inverse)[None, :]
            # dV += P^T dO, dP^T = V dO^T, dK += dS^T Q
            dropped = weights * share
            dweights = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            if HAS_DROPOUT:
                kept = tl.trans(survivors((seed, b * heads + h, dropout_p), start, first, kv_len, TILE_Q, TILE_K)) != 0
                dropped = tl.where(kept, dropped / (1.0 - dropout_p), 0.0)
                dweights = tl.where(kept, dweights / (1.0 - dropout_p), 0.0)
            dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)
            dscores = weights * (dweights * share + terms[None, :])
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)
    seen = seen_keys(visible, visible_stride, b, first, limit, TILE_K, HAS_VISIBLE)[:, None]
    dk, dv = tl.where(seen, dk * scale, 0.0), tl.where(seen, dv, 0.0)
    store_rows(base_of(dkey, dk_strides, b, owner), dk_strides[2], first, kv_len, head_dim, dk, TILE_K, BLOCK_D, MASK_D, WIDE)
    store_rows(base_of(dvalue, dv_strides, b, owner), dv_strides[2], first, kv_len, head_dim, dv, TILE_K, BLOCK_D, MASK_D, WIDE)


@triton.jit
def queries_kernel(
    query, key, value, bias, lengths, visible, seed, dout, numbers, dquery, q_strides, k_strides, v_strides, dout_strides, dq_strides, bias_strides,
    visible_stride, windows, heads, q_len, kv_len, head_dim, scale, dropout_p, step,
    GROUP: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_VISIBLE: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PADDED: tl.constexpr, UNIT: tl.constexpr, MASK_D: tl.constexpr, WIDE: tl.constexpr, WIDE_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries."""
    tiles = tl.cdiv(q_len, TILE_Q)
    first, pair = tl.program_id(0) % tiles * TILE_Q, tl.program_id(0) // tiles
    b, h = pair // heads, pair % heads
    limit = length_of(lengths, b, kv_len, HAS_LENGTHS)
    keys, values = base_of(key, k_strides, b, h // GROUP), base_of(value, v_strides, b, h // GROUP)
    pairs = bias_of(bias, bias_strides, b, h, windows)
    q = load_rows(base_of(query, q_strides, b, h), q_strides[2], first, q_len, head_dim, TILE_Q, BLOCK_D, True, MASK_D, WIDE)
    do = load_rows(
        base_of(dout, dout_strides, b, h), dout_strides[2], first, q_len, head_dim, TILE_Q, BLOCK_D, True, MASK_D, WIDE
    )
    shift, inverse, terms = load_numbers(numbers, pair, step, first, q_len, TILE_Q)
    dq = tl.zeros((TILE_Q, BLOCK_D), tl.float32)
    drop = (seed, pair, dropout_p)
    whole = limit // TILE_K * TILE_K
    for start in tl.range(0, whole, TILE_K):
        k = load_rows(keys, k_strides[2], start, limit, head_dim, TILE_K, BLOCK_D, False, MASK_D, WIDE)
        v = load_rows(values, v_strides[2], start, limit, head_dim, TILE_K, BLOCK_D, False, MASK_D, WIDE)
        added = load_bias(pairs, bias_strides, (first, start), (q_len, kv_len), (TILE_Q, TILE_K), False, False, UNIT, WIDE_BIAS)
        seen = seen_keys(visible, visible_stride, b, start, limit, TILE_K, HAS_VISIBLE)
        dscores = score_gradients(
            (q, k, v, do, added), (shift, inverse, terms), seen, scale, drop, (first, start, kv_len), (TILE_Q, TILE_K),
            HAS_VISIBLE, HAS_DROPOUT, PRECISION,
        )  # fmt: skip
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)
    if whole < limit:
        k = load_rows(keys, k_strides[2], whole, limit, head_dim, TILE_K, BLOCK_D, True, MASK_D, WIDE)
        v = load_rows(values, v_strides[2], whole, limit, head_dim, TILE_K, BLOCK_D, True, MASK_D, WIDE)
        added = load_bias(
            pairs, bias_strides, (first, whole), (q_len, kv_len), (TILE_Q, TILE_K), not PADDED, False, UNIT, WIDE_BIAS
        )
        seen = seen_keys(visible, visible_stride, b, whole, limit, TILE_K, HAS_VISIBLE)
        dscores = score_gradients(
            (q, k, v, do, added), (shift, inverse, terms), seen, scale, drop, (first, whole, kv_len), (TILE_Q, TILE_K), True,
            HAS_DROPOUT, PRECISION,
        )  # fmt: skip
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(
        base_of(dquery, dq_strides, b, h), dq_strides[2], first, q_len, head_dim, dq * scale, TILE_Q, BLOCK_D, MASK_D, WIDE
    )
