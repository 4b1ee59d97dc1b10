"""Dynamic mask attention in Triton: a program owns a few queries, in all heads of a group, and walks the list of their kept keys.

    rows of a program: BLOCK_Q queries x GROUP heads of one key head      [ROWS, D]
    forward takes BLOCK_N keys of the list at a time and gathers their rows of K and V by index.
        S = Q Kg^T + score, masked by the interval of each key -> online softmax -> O += P Vg
    backward, one pass: recomputes the scores, sums dQ on chip, and adds dK, dV and dscore in float32 with atomics.
    backward, deterministic: first dQ as above; then programs that own BLOCK_N keys compute dK, dV and dscore. The keys are sorted
        so that those of a tile have similar intervals. A program reads the queries of its tile's span in order.

Packing the heads of a group into the rows of a small query block keeps the lists short (w + BLOCK_Q) and the products large.
Source: paper 004, Eq. 5 to 10. Traffic: K and V rows of each block's list, (w + BLOCK_Q) / BLOCK_Q times n * D, mostly from L2.
"""

import triton
import triton.language as tl

from saccade.dynamic_mask.log2 import LN2, LOG2E, to_log2

# an lse beyond this has lost more than 3e-5 of the logarithm of the sum
_FAR = tl.constexpr(1024.0)


@triton.jit
def row_of(first, BLOCK_Q: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr):
    """(query, head within the group, whether it is real) of each row of a program; heads run fastest."""
    rows = tl.arange(0, BLOCK_Q * GROUP_PAD)
    return first + rows // GROUP_PAD, rows % GROUP_PAD, rows % GROUP_PAD < GROUP


@triton.jit
def load_rows(tensor, strides, b, heads, indices, dims, inside):
    """`[n, D]` rows of `[B, H, T, D]` at (b, heads, indices), 0 outside; 64-bit offsets."""
    ptrs = tensor + b.to(tl.int64) * strides[0] + heads.to(tl.int64)[:, None] * strides[1]
    ptrs += indices.to(tl.int64)[:, None] * strides[2] + dims[None, :]
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def load_list(tensors, owner, base, first, count, kv_len, BLOCK_N: tl.constexpr, HAS_SCORES: tl.constexpr):
    """(index, listed, bias in base 2, start, stop) of BLOCK_N keys of a list."""
    lists, scores, start, stop = tensors
    along = first + tl.arange(0, BLOCK_N)
    listed = along < count
    index = tl.load(lists + base + along, mask=listed, other=0)
    key_entry = owner.to(tl.int64) * kv_len + index
    begins = tl.load(start + key_entry, mask=listed, other=0)
    ends = tl.load(stop + key_entry, mask=listed, other=-2147483648)  # no position sees it
    bias = to_log2(tl.load(scores + key_entry, mask=listed, other=0.0)) if HAS_SCORES else listed.to(tl.float32) * 0
    return index, listed, bias, begins, ends


@triton.jit
def _gather_fwd_kernel(
    query, key, value, scores, start, stop, lists, counts, out, lse,
    query_strides, key_strides, value_strides, out_strides, kv_heads, q_len, kv_len, head_dim, longest, blocks, qk_scale,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SCORES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = BLOCK_Q * GROUP_PAD
    block = blocks - 1 - tl.program_id(0) % blocks  # long lists first
    owner = tl.program_id(0) // blocks
    b, h = owner // kv_heads, owner % kv_heads
    queries, member, real = row_of(block * BLOCK_Q, BLOCK_Q, GROUP, GROUP_PAD)
    heads = h * GROUP + member
    dims = tl.arange(0, BLOCK_D)
    rows_in = (real & (queries < q_len))[:, None] & (dims < head_dim)[None, :]
    q = load_rows(query, query_strides, b, heads, queries, dims, rows_in)
    at = queries + (kv_len - q_len)
    slot = owner.to(tl.int64) * blocks + block
    count = tl.load(counts + slot)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for first in tl.range(0, count, BLOCK_N, num_stages=STAGES):
        index, listed, bias, begins, ends = load_list(
            (lists, scores, start, stop), owner, slot * longest, first, count, kv_len, BLOCK_N, HAS_SCORES
        )
        keys_in = listed[:, None] & (dims < head_dim)[None, :]
        k = load_rows(key, key_strides, b, index * 0 + h, index, dims, keys_in)
        v = load_rows(value, value_strides, b, index * 0 + h, index, dims, keys_in)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale + bias[None, :]
        s = tl.where((at[:, None] >= begins[None, :]) & (at[:, None] < ends[None, :]), s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        # otherwise a row that has seen no key yet would compute -inf - -inf
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
    inverse = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    ptrs = out + b.to(tl.int64) * out_strides[0] + heads.to(tl.int64)[:, None] * out_strides[1]
    ptrs += queries.to(tl.int64)[:, None] * out_strides[2] + dims[None, :]
    tl.store(ptrs, (acc * inverse[:, None]).to(out.dtype.element_ty), mask=rows_in)
    log_sum = tl.where(row_sum == 0.0, float("-inf"), (tl.log2(row_sum) + row_max) * LN2)
    row = (b.to(tl.int64) * kv_heads * GROUP + heads) * q_len + queries
    tl.store(lse + row, log_sum, mask=real & (queries < q_len))


@triton.jit
def load_shift(lse, delta, b, heads, queries, kv_heads, q_len, GROUP: tl.constexpr, inside):
    """(lse in base 2, delta) of rows; a row that sees no key gets +inf, so that its weights are 0."""
    row = (b.to(tl.int64) * kv_heads * GROUP + heads) * q_len + queries
    log_sum = tl.load(lse + row, mask=inside, other=float("-inf"))
    shift = tl.where(log_sum == float("-inf"), float("inf"), log_sum * LOG2E)
    return shift, tl.load(delta + row, mask=inside, other=0.0)


@triton.jit
def far_sums(q, key, tensors, key_strides, where, span, width, qk_scale, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """(maximum in base 2, 1 / sum of the weights relative to it) of rows, recomputed as in forward; +inf and 0 for a row that
    sees no key."""
    lists, scores, start, stop = tensors
    b, h, owner, at = where
    base, count, kv_len = span
    dims, head_dim = width
    row_max = at.to(tl.float32) * 0.0 + float("-inf")
    row_sum = at.to(tl.float32) * 0.0
    for first in tl.range(0, count, BLOCK_N, num_stages=1):
        index, listed, bias, begins, ends = load_list(
            (lists, scores, start, stop), owner, base, first, count, kv_len, BLOCK_N, True
        )
        k = load_rows(key, key_strides, b, index * 0 + h, index, dims, listed[:, None] & (dims < head_dim)[None, :])
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * qk_scale + bias[:, None]
        s = tl.where((at[None, :] >= begins[:, None]) & (at[None, :] < ends[:, None]), s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.sum(tl.exp2(s - shift[None, :]), 0)
        row_max = new_max
    return tl.where(row_max == float("-inf"), float("inf"), row_max), tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)


@triton.jit
def _gather_dq_kernel(
    query, key, value, scores, start, stop, lists, counts, dout, lse, delta, shifts, inverses, dquery, dkey, dvalue, dscores,
    query_strides, key_strides, value_strides, dout_strides, dquery_strides,
    kv_heads, q_len, kv_len, head_dim, longest, blocks, scale,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SCORES: tl.constexpr, ATOMIC: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, and with ATOMIC the other gradients, which are added to float32 `[B, Hkv, Tk, D]` and `[B, Hkv, Tk]`.

    Next to large scores lse has lost the logarithm of the sum. Such rows compute their weights relative to the maximum and
    multiply dout and delta, in which every gradient is linear, by 1 / sum; normal rows need no extra multiplication.
    """
    ROWS: tl.constexpr = BLOCK_Q * GROUP_PAD
    block = blocks - 1 - tl.program_id(0) % blocks
    owner = tl.program_id(0) // blocks
    b, h = owner // kv_heads, owner % kv_heads
    queries, member, real = row_of(block * BLOCK_Q, BLOCK_Q, GROUP, GROUP_PAD)
    heads = h * GROUP + member
    dims = tl.arange(0, BLOCK_D)
    inside = real & (queries < q_len)
    rows_in = inside[:, None] & (dims < head_dim)[None, :]
    q = load_rows(query, query_strides, b, heads, queries, dims, rows_in)
    do = load_rows(dout, dout_strides, b, heads, queries, dims, rows_in)
    shift, d = load_shift(lse, delta, b, heads, queries, kv_heads, q_len, GROUP, inside)
    at = queries + (kv_len - q_len)
    slot = owner.to(tl.int64) * blocks + block
    count = tl.load(counts + slot)
    if HAS_SCORES:
        row = (b.to(tl.int64) * kv_heads * GROUP + heads) * q_len + queries
        log_sum = tl.load(lse + row, mask=inside, other=0.0)
        inverse = tl.full((ROWS,), 1.0, tl.float32)
        if tl.max(tl.where(log_sum == float("-inf"), 0.0, tl.abs(log_sum)), 0) > _FAR:
            shift, inverse = far_sums(
                q, key, (lists, scores, start, stop), key_strides, (b, h, owner, at), (slot * longest, count, kv_len),
                (dims, head_dim), scale * LOG2E, BLOCK_N, PRECISION,
            )  # fmt: skip
            do = (do.to(tl.float32) * inverse[:, None]).to(do.dtype)
            d *= inverse
        if not ATOMIC:  # for the kernel that runs next
            tl.store(shifts + row, shift, mask=inside)
            tl.store(inverses + row, inverse, mask=inside)
    dq = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for first in tl.range(0, count, BLOCK_N, num_stages=STAGES):
        index, listed, bias, begins, ends = load_list(
            (lists, scores, start, stop), owner, slot * longest, first, count, kv_len, BLOCK_N, HAS_SCORES
        )
        keys_in = listed[:, None] & (dims < head_dim)[None, :]
        k = load_rows(key, key_strides, b, index * 0 + h, index, dims, keys_in)
        v = load_rows(value, value_strides, b, index * 0 + h, index, dims, keys_in)
        # transposed, with keys as rows, so that dK and dV need no transpose
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E) + bias[:, None] - shift[None, :]
        seen = (at[None, :] >= begins[:, None]) & (at[None, :] < ends[:, None])
        weights = tl.where(seen, tl.exp2(s), 0.0)
        dweights = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = weights * (dweights - d[None, :])
        dq = tl.dot(tl.trans(ds.to(k.dtype)), k, dq, input_precision=PRECISION)
        if ATOMIC:
            key_entry = owner.to(tl.int64) * kv_len + index
            places = key_entry[:, None] * head_dim + dims[None, :]
            dk = tl.dot(ds.to(q.dtype), q, input_precision=PRECISION) * scale
            dv = tl.dot(weights.to(do.dtype), do, input_precision=PRECISION)
            tl.atomic_add(dkey + places, dk, mask=keys_in, sem="relaxed")
            tl.atomic_add(dvalue + places, dv, mask=keys_in, sem="relaxed")
            if HAS_SCORES:
                tl.atomic_add(dscores + key_entry, tl.sum(ds, 1), mask=listed, sem="relaxed")
    ptrs = dquery + b.to(tl.int64) * dquery_strides[0] + heads.to(tl.int64)[:, None] * dquery_strides[1]
    ptrs += queries.to(tl.int64)[:, None] * dquery_strides[2] + dims[None, :]
    tl.store(ptrs, (dq * scale).to(dquery.dtype.element_ty), mask=rows_in)


@triton.jit
def _gather_dkv_kernel(
    query, key, value, scores, start, stop, order, spans, dout, lse, delta, shifts, inverses, dkey, dvalue, dscores,
    query_strides, key_strides, value_strides, dout_strides, kv_heads, q_len, kv_len, head_dim, tiles, scale,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SCORES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK, dV and dscore of BLOCK_N keys of `order`, summed over the queries of their span in order, and so deterministic."""
    tile = tl.program_id(0) % tiles
    owner = tl.program_id(0) // tiles
    b, h = owner // kv_heads, owner % kv_heads
    dims = tl.arange(0, BLOCK_D)
    base = owner.to(tl.int64) * kv_len
    index, listed, bias, begins, ends = load_list(
        (order, scores, start, stop), owner, base, tile * BLOCK_N, kv_len, kv_len, BLOCK_N, HAS_SCORES
    )
    keys_in = listed[:, None] & (dims < head_dim)[None, :]
    k = load_rows(key, key_strides, b, index * 0 + h, index, dims, keys_in)
    v = load_rows(value, value_strides, b, index * 0 + h, index, dims, keys_in)
    span = (owner.to(tl.int64) * tiles + tile) * 2
    low, high = tl.load(spans + span), tl.load(spans + span + 1)  # in queries
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dscore = tl.zeros((BLOCK_N,), tl.float32)
    for first in tl.range(low // BLOCK_Q * BLOCK_Q, high, BLOCK_Q, num_stages=STAGES):
        queries, member, real = row_of(first, BLOCK_Q, GROUP, GROUP_PAD)
        heads = h * GROUP + member
        inside = real & (queries < q_len)
        rows_in = inside[:, None] & (dims < head_dim)[None, :]
        q = load_rows(query, query_strides, b, heads, queries, dims, rows_in)
        do = load_rows(dout, dout_strides, b, heads, queries, dims, rows_in)
        shift, d = load_shift(lse, delta, b, heads, queries, kv_heads, q_len, GROUP, inside)
        if HAS_SCORES:
            row = (b.to(tl.int64) * kv_heads * GROUP + heads) * q_len + queries
            shift = tl.load(shifts + row, mask=inside, other=float("inf"))
            inverse = tl.load(inverses + row, mask=inside, other=0.0)
            do = (do.to(tl.float32) * inverse[:, None]).to(do.dtype)
            d *= inverse
        at = queries + (kv_len - q_len)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E) + bias[:, None] - shift[None, :]
        seen = (at[None, :] >= begins[:, None]) & (at[None, :] < ends[:, None])
        weights = tl.where(seen, tl.exp2(s), 0.0)
        dv = tl.dot(weights.to(do.dtype), do, dv, input_precision=PRECISION)
        dweights = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        # a key that no query sees, such as padding, may hold NaN
        ds = tl.where(seen, weights * (dweights - d[None, :]), 0.0)
        dscore += tl.sum(ds, 1)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    places = (base + index)[:, None] * head_dim + dims[None, :]
    tl.store(dkey + places, (dk * scale).to(dkey.dtype.element_ty), mask=keys_in)
    tl.store(dvalue + places, dv.to(dvalue.dtype.element_ty), mask=keys_in)
    if HAS_SCORES:
        tl.store(dscores + base + index, dscore, mask=listed)
