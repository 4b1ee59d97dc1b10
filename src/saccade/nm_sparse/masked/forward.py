"""Forward: prune each tile of scores to N:M, then online softmax and P V over the kept scores.

    program -> BLOCK_Q queries of one head                                [BLOCK_Q, D]
        for each tile of BLOCK_S slots up to the causal edge:
            S = scale * Q K^T + bias, -inf where invisible                [BLOCK_Q, BLOCK_S]
            keep the N largest of each group, and groups that are never pruned -> bits (one per slot), -inf elsewhere
            online softmax, O += P V

Tiles hold whole groups, so each tile is pruned independently. Source: paper 003, sections 3 and A.1.
"""

import triton
import triton.language as tl

from saccade.nm_sparse.masked.tiles import (
    LN2,
    LOG2E,
    kept_rows,
    keys_of,
    load_rows,
    never_pruned,
    pair_pointers,
    scores_of,
    select,
    slots_up_to,
    store_bits,
    store_rows,
    survives,
)


@triton.jit
def _fwd_tile(
    state, q, tensors, strides, seen_blocks, where, numbers, SHAPE: tl.constexpr, HAS: tl.constexpr, PRECISION: tl.constexpr
):
    acc, row_max, row_sum = state
    key, value, mask, bias, seed, bits = tensors
    key_strides, value_strides, mask_strides, bias_strides = strides
    b, h, problem, queries, rows, rows_in, first = where
    kv_len, head_dim, words, scale, dropout_p, stores = numbers
    HEADS_PER_KEY: tl.constexpr = SHAPE[0]
    BLOCK_S: tl.constexpr = SHAPE[1]
    BLOCK_D: tl.constexpr = SHAPE[2]
    N: tl.constexpr = SHAPE[3]
    M: tl.constexpr = SHAPE[4]
    P: tl.constexpr = SHAPE[5]
    CAUSAL: tl.constexpr = HAS[0]
    HAS_MASK: tl.constexpr = HAS[1]
    HAS_BIAS: tl.constexpr = HAS[2]
    HAS_DROPOUT: tl.constexpr = HAS[3]
    DENSE_FIRST: tl.constexpr = HAS[4]
    DENSE_RECENT: tl.constexpr = HAS[5]
    keys, real = keys_of(first, kv_len, BLOCK_S, M, P)
    inside = rows_in[:, None] & real[None, :]
    k = load_rows(key, key_strides, b, h // HEADS_PER_KEY, keys, real, head_dim, BLOCK_D)
    scores = scores_of(q, k, bias, bias_strides, (b, h, queries, keys), inside, scale, HAS_BIAS, PRECISION)
    visible = inside & seen_blocks
    if CAUSAL:
        visible = visible & (keys[None, :] <= queries[:, None])
    if HAS_MASK:
        passes = tl.load(pair_pointers(mask, mask_strides, b, h, queries, keys), mask=inside, other=0)
        visible = visible & (passes != 0)
    scores = tl.where(visible, scores, float("-inf"))
    kept = select(scores, N, P)
    if DENSE_FIRST + DENSE_RECENT > 0:
        kept = kept | (never_pruned(queries, keys, M, DENSE_FIRST, DENSE_RECENT) & (scores != float("-inf")))
    if stores != 0:
        store_bits(bits, rows, rows_in, first, words, kept)
    scores = tl.where(kept, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # otherwise a row that has seen no key yet would compute -inf - -inf
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    # the maximum is subtracted first: a score near the largest float32 times log2(e) would overflow
    weights = tl.exp2((scores - shift[:, None]) * LOG2E)
    rescale = tl.exp2((row_max - shift) * LOG2E)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    if HAS_DROPOUT:
        spared = survives(tl.load(seed), problem, dropout_p, queries, first, keys, kv_len, BLOCK_S, M, P)
        weights = tl.where(spared, weights, 0.0)
    v = load_rows(value, value_strides, b, h // HEADS_PER_KEY, keys, real, head_dim, BLOCK_D)
    v = kept_rows(v, kept)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, new_max, row_sum


# a single binary whether or not bits are stored, so that a second run makes the same selection
@triton.jit(do_not_specialize=["stores"])
def _masked_fwd_kernel(
    query, key, value, mask, bias, block_mask, seed, out, lse, bits,
    query_strides, key_strides, value_strides, out_strides, mask_strides, bias_strides, block_strides,
    heads, q_len, kv_len, head_dim, words, blocks, scale, dropout_p, stores,
    HEADS_PER_KEY: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr, HAS_DROPOUT: tl.constexpr, MASK_TILE: tl.constexpr, PRECISION: tl.constexpr,
    DENSE_FIRST: tl.constexpr, DENSE_RECENT: tl.constexpr,
):  # fmt: skip
    block = blocks - 1 - tl.program_id(0) % blocks  # long rows of a causal problem first
    problem = tl.program_id(0) // blocks
    b, h = problem // heads, problem % heads
    queries = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    rows_in = queries < q_len
    rows = problem.to(tl.int64) * q_len + queries
    q = load_rows(query, query_strides, b, h, queries, rows_in, head_dim, BLOCK_D)
    limit = tl.minimum(kv_len, (block + 1) * BLOCK_Q) if CAUSAL else kv_len
    row_max = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for first in tl.range(0, slots_up_to(limit, M, P), BLOCK_S):
        if HAS_BLOCKS:
            keys, real = keys_of(first, kv_len, BLOCK_S, M, P)
            ptrs = pair_pointers(block_mask, block_strides, b, h, queries // MASK_TILE, keys // MASK_TILE)
            seen = tl.load(ptrs, mask=rows_in[:, None] & real[None, :], other=0) != 0
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) != 0:
                acc, row_max, row_sum = _fwd_tile(
                    (acc, row_max, row_sum), q, (key, value, mask, bias, seed, bits),
                    (key_strides, value_strides, mask_strides, bias_strides), seen,
                    (b, h, problem, queries, rows, rows_in, first), (kv_len, head_dim, words, scale, dropout_p, stores),
                    (HEADS_PER_KEY, BLOCK_S, BLOCK_D, N, M, P),
                    (CAUSAL, HAS_MASK, HAS_BIAS, HAS_DROPOUT, DENSE_FIRST, DENSE_RECENT), PRECISION,
                )  # fmt: skip
        else:
            acc, row_max, row_sum = _fwd_tile(
                (acc, row_max, row_sum), q, (key, value, mask, bias, seed, bits),
                (key_strides, value_strides, mask_strides, bias_strides), True, (b, h, problem, queries, rows, rows_in, first),
                (kv_len, head_dim, words, scale, dropout_p, stores), (HEADS_PER_KEY, BLOCK_S, BLOCK_D, N, M, P),
                (CAUSAL, HAS_MASK, HAS_BIAS, HAS_DROPOUT, DENSE_FIRST, DENSE_RECENT), PRECISION,
            )  # fmt: skip
    # compared with 0 and not tested by > 0: a NaN sum must stay NaN
    inverse = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    if HAS_DROPOUT:
        inverse = inverse / (1.0 - dropout_p)
    store_rows(out, out_strides, b, h, queries, rows_in, head_dim, acc * inverse[:, None], BLOCK_D)
    log_sum = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(row_sum) * LN2)
    tl.store(lse + rows, log_sum, mask=rows_in)
