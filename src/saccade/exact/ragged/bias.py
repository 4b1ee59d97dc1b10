"""Backward with a bias, for sequences beyond a tile: the numbers that give the weights of a row, and the gradient of the bias.

    m = max_j (scale q k_j + bias_j), c = 1 / sum_j exp(scale q k_j + bias_j - m)      P = c exp(scale Q K^T + bias - m)
    dbias = sum of dS over the batch rows and heads that share it

Next to a score of 1e9, lse loses the logarithm of the sum, and weights from lse would add up to the number of keys. m and c keep it. The
gradient forms scores and dP a third time. Each program owns a tile of the gradient, so no two programs add to one number.
"""

import triton
import triton.language as tl

from saccade.exact.ragged.backward import pair_gradients
from saccade.exact.ragged.forward import keys_of, masked_scores
from saccade.exact.ragged.tiles import BOTTOM_RIGHT, FULL, LOG2E, VARYING, load_rows, lse_of, rows_of


@triton.jit(do_not_specialize=VARYING)
def weights_kernel(
    query, key, mask, bias, cu_q, cu_k, members, count, row_max, inverse, total_q, total_k, sequences, lse_stride, max_q, max_k,
    query_strides, key_strides, beside_strides, lse_batch_stride, heads, head_dim, windows, scale,
    ROWS: tl.constexpr, GROUP: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, WIDE: tl.constexpr, MASK_D: tl.constexpr, DENSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """m and c of each query, float32, laid out like lse; -inf and 0 of a query that sees no key."""
    tiles = tl.cdiv(max_q, TILE_Q)
    number = sequences if DENSE else tl.load(count)
    for item in tl.range(tl.program_id(0), number * heads * tiles, tl.num_programs(0)):
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
            largest = tl.full((TILE_Q,), float("-inf"), tl.float32)
            total = tl.zeros((TILE_Q,), tl.float32)
            _, end = keys_of(first, k_len, reach, TILE_Q, TILE_K, CAUSAL)
            for start in tl.range(0, end, TILE_K):
                k = load_rows(
                    key, key_strides, ROWS[1], (s, k_first, h // GROUP), start, (k_len, head_dim), TILE_K, BLOCK_D, MASK_D
                )
                scores = masked_scores(
                    q, k, (mask, bias), beside_strides, (s, h, first, start, q_len, k_len, reach), (scale, windows),
                    (TILE_Q, TILE_K), (True, CAUSAL), (HAS_MASK, True, WIDE), PRECISION,
                )  # fmt: skip
                larger = tl.maximum(largest, tl.max(scores, 1))
                shift = tl.where(larger == float("-inf"), 0.0, larger)
                total = total * tl.exp2((largest - shift) * LOG2E) + tl.sum(tl.exp2((scores - shift[:, None]) * LOG2E), 1)
                largest = larger
            lines = first + tl.arange(0, TILE_Q)
            at = (lse_batch_stride, lse_stride)
            tl.store(lse_of(row_max, at, s, q_first, h) + lines, largest, mask=lines < q_len)
            tl.store(lse_of(inverse, at, s, q_first, h) + lines, tl.where(total == 0.0, 0.0, 1.0 / total), mask=lines < q_len)


@triton.jit(do_not_specialize=VARYING)
def backward_bias_kernel(
    query, key, value, seed, mask, bias, cu_q, cu_k, members, count, dout, row_max, inverse, delta, dbias, total_q, total_k, sequences, lse_stride,
    max_q, max_k, query_strides, key_strides, value_strides, dout_strides, beside_strides, lse_batch_stride, heads, head_dim, windows, scale,
    dropout_p, rows, owners,
    ROWS: tl.constexpr, GROUP: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, WIDE: tl.constexpr, HAS_DROPOUT: tl.constexpr, MASK_D: tl.constexpr, DENSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dbias, float32 `[rows, owners, max_q, max_k]`: row r has the sum over batch rows r, r + rows, .., owner 0 of 1 that over all heads."""
    q_tiles, k_tiles = tl.cdiv(max_q, TILE_Q), tl.cdiv(max_k, TILE_K)
    number = sequences if DENSE else tl.load(count)
    for item in tl.range(tl.program_id(0), rows * owners * q_tiles * k_tiles, tl.num_programs(0)):
        first_key, left = item % k_tiles * TILE_K, item // k_tiles
        first, left = left % q_tiles * TILE_Q, left // q_tiles
        owner, row = left % owners, left // owners
        found = tl.zeros((TILE_K, TILE_Q), tl.float32)
        for member in tl.range(row, number, rows):
            s = row * 0 + member  # a loop's counter is a plain int under the interpreter
            if not DENSE:
                s = tl.load(members + member)
            q_first, q_len = rows_of(cu_q, s, total_q, max_q, DENSE, True)
            k_first, k_len = rows_of(cu_k, s, total_k, max_k, DENSE, False)
            reach = (k_len - q_len) if CAUSAL == BOTTOM_RIGHT else 0
            inside = (first < q_len) & (first_key < k_len)
            if CAUSAL != FULL:
                inside &= first_key <= first + TILE_Q - 1 + reach
            if inside:
                for head in tl.range(owner, heads, owners):
                    h = owner * 0 + head
                    q = load_rows(
                        query, query_strides, ROWS[0], (s, q_first, h), first, (q_len, head_dim), TILE_Q, BLOCK_D, MASK_D
                    )
                    do = load_rows(
                        dout, dout_strides, ROWS[3], (s, q_first, h), first, (q_len, head_dim), TILE_Q, BLOCK_D, MASK_D
                    )
                    k = load_rows(
                        key, key_strides, ROWS[1], (s, k_first, h // GROUP), first_key, (k_len, head_dim), TILE_K, BLOCK_D, MASK_D
                    )
                    v = load_rows(
                        value,
                        value_strides,
                        ROWS[2],
                        (s, k_first, h // GROUP),
                        first_key,
                        (k_len, head_dim),
                        TILE_K,
                        BLOCK_D,
                        MASK_D,
                    )
                    _, dscores = pair_gradients(
                        (q, k, v, do), (row_max, inverse, delta, seed, (mask, bias)),
                        ((lse_batch_stride, lse_stride), beside_strides),
                        (s, h, s * heads + h, q_first, q_len, k_len, reach, max_k, first, first_key),
                        (scale, windows, dropout_p), (TILE_Q, TILE_K), CAUSAL, (HAS_MASK, True, WIDE, HAS_DROPOUT), PRECISION,
                    )  # fmt: skip
                    found += dscores
        queries, keys = first + tl.arange(0, TILE_Q), first_key + tl.arange(0, TILE_K)
        place = (row.to(tl.int64) * owners + owner) * max_q + queries[None, :].to(tl.int64)
        ptrs = dbias + place * max_k + keys[:, None]
        exists = (queries < max_q)[None, :] & (keys < max_k)[:, None]
        tl.store(ptrs, tl.load(ptrs, mask=exists, other=0.0) + found, mask=exists)
