"""The gradient of the bias: programs that own a part of it and walk the rows that share it, see `backward.py`.

A bias `[W, Hb, Tq, Tk]`, each of W and Hb 1 or more, has W * Hb matrices. The members of matrix (w, owner) are the rows w, w + W, ... of head
`owner`, or of all heads if Hb is 1. Program z of a tile takes the z-th chunk of the members, in order.
"""

import triton
import triton.language as tl

from saccade.exact.shared_bias.tiles import (
    base_of,
    bias_of,
    length_of,
    load_bias,
    load_numbers,
    load_rows,
    score_gradients,
    seen_keys,
)


@triton.jit
def _member(number, w, owner, windows, heads, owners):
    """(row, head) of a member."""
    each = heads // owners
    number = w * 0 + number  # a loop's counter is a plain int under the interpreter
    return w + number // each * windows, owner + number % each


@triton.jit
def _store_sum(dbias, matrix, first, first_key, q_len, kv_len, tile, TILE_Q: tl.constexpr, TILE_K: tl.constexpr):
    """Write a tile of a matrix of float32 `[.., Tq, Tk]`."""
    queries, keys = first + tl.arange(0, TILE_Q), first_key + tl.arange(0, TILE_K)
    ptrs = dbias + (matrix.to(tl.int64) * q_len + queries[:, None]) * kv_len + keys[None, :]
    tl.store(ptrs, tile, mask=(queries < q_len)[:, None] & (keys < kv_len)[None, :])


@triton.jit
def bias_kernel(
    query, key, value, bias, lengths, visible, seed, dout, numbers, dbias, q_strides, k_strides, v_strides, dout_strides, bias_strides, visible_stride,
    windows, heads, owners, q_len, kv_len, head_dim, scale, dropout_p, step, members, chunk,
    GROUP: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK_D: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_VISIBLE: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    EVEN: tl.constexpr, PADDED: tl.constexpr, UNIT: tl.constexpr, MASK_D: tl.constexpr, WIDE: tl.constexpr, WIDE_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dbias, float32 `[Z, W, Hb, Tq, Tk]`, of a tile over a chunk of its members. EVEN: all queries and keys of a tile exist."""
    k_tiles, q_tiles = tl.cdiv(kv_len, TILE_K), tl.cdiv(q_len, TILE_Q)
    first_key, left = tl.program_id(0) % k_tiles * TILE_K, tl.program_id(0) // k_tiles
    first, matrix = left % q_tiles * TILE_Q, left // q_tiles
    owner, w, z = matrix % owners, matrix // owners % windows, matrix // owners // windows
    pairs = bias_of(bias, bias_strides, w, owner, windows)
    added = load_bias(
        pairs, bias_strides, (first, first_key), (q_len, kv_len), (TILE_Q, TILE_K), not PADDED, False, UNIT, WIDE_BIAS
    )
    found = tl.zeros((TILE_Q, TILE_K), tl.float32)
    for number in tl.range(z * chunk, tl.minimum(z * chunk + chunk, members)):
        b, h = _member(number, w, owner, windows, heads, owners)
        limit = length_of(lengths, b, kv_len, HAS_LENGTHS)
        drop = (seed, b * heads + h, dropout_p)
        q = load_rows(
            base_of(query, q_strides, b, h), q_strides[2], first, q_len, head_dim, TILE_Q, BLOCK_D, not EVEN, MASK_D, WIDE
        )
        do = load_rows(
            base_of(dout, dout_strides, b, h), dout_strides[2], first, q_len, head_dim, TILE_Q, BLOCK_D, not EVEN, MASK_D, WIDE
        )
        k = load_rows(
            base_of(key, k_strides, b, h // GROUP), k_strides[2], first_key, limit, head_dim, TILE_K, BLOCK_D, not EVEN or HAS_LENGTHS, MASK_D, WIDE
        )  # fmt: skip
        v = load_rows(
            base_of(value, v_strides, b, h // GROUP), v_strides[2], first_key, limit, head_dim, TILE_K, BLOCK_D, not EVEN or HAS_LENGTHS, MASK_D, WIDE
        )  # fmt: skip
        shift, inverse, terms = load_numbers(numbers, b * heads + h, step, first, q_len, TILE_Q)
        seen = seen_keys(visible, visible_stride, b, first_key, limit, TILE_K, HAS_VISIBLE)
        found += score_gradients(
            (q, k, v, do, added), (shift, inverse, terms), seen, scale, drop, (first, first_key, kv_len), (TILE_Q, TILE_K),
            HAS_VISIBLE or HAS_LENGTHS, HAS_DROPOUT, PRECISION,
        )  # fmt: skip
    _store_sum(dbias, matrix, first, first_key, q_len, kv_len, found, TILE_Q, TILE_K)
