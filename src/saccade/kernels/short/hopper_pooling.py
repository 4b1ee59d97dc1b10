"""Backward for one query on sm_90, in Gluon: keys and values arrive, and their gradients leave, by the copy engine.

    s = K q, P = exp2(s - lse), dP = V dO         [BLOCK_KV]
    delta = sum(P * dP), dS = P * (dP - delta + dlse)
    dV = P dO^T, dK = scale * dS q^T              outer products, written over V and K in shared memory
    dq = scale * dS^T K

Half of the traffic is writing, and there are five operations for each byte: nothing but bytes in flight matters. A program holds a
problem's K and V, chunk by chunk in registers, and several programs share a multiprocessor. Source: paper 002, q = 1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def chunk_weights(
    k, v, q, do, shift, first, kv_len, qk_scale, ROWS: gl.constexpr, MASK_KEYS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """P and dP of ROWS keys, float32."""
    scores = gl.sum(k * gl.expand_dims(q, 0), 1)
    dweights = gl.sum(v * gl.expand_dims(do, 0), 1)
    weights = gl.exp2(scores * qk_scale - shift)
    if MASK_KEYS:
        keys = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        weights = gl.where(keys < kv_len, weights, 0.0)
    return weights, dweights


@gluon.jit
def _pool_bwd_hopper_kernel(
    key, value, dkey, dvalue, query, dout, dquery, lse, dlse,
    query_strides, dout_strides, dquery_strides, batch, heads, kv_len, head_dim, scale,
    T: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, HAS_DLSE: gl.constexpr, MASK_KEYS: gl.constexpr, MASK_D: gl.constexpr,
):  # fmt: skip
    """One problem a program; strides are (batch, head)."""
    DTYPE: gl.constexpr = key.dtype
    CHUNKS: gl.constexpr = T // ROWS
    ACROSS: gl.constexpr = min(D // 8, 32)  # lanes along a row, 16 bytes each
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    ks = gl.allocate_shared_memory(DTYPE, [CHUNKS, 1, ROWS, 1, D], key.layout)
    vs = gl.allocate_shared_memory(DTYPE, [CHUNKS, 1, ROWS, 1, D], key.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * CHUNKS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * CHUNKS):
        mbarrier.init(bars.index(i), count=1)
    problem = gl.program_id(0)
    b, h = problem // heads, problem % heads
    for c in gl.static_range(CHUNKS):
        mbarrier.expect(bars.index(2 * c), 2 * ROWS * D)
        tma.async_copy_global_to_shared(key, [b, c * ROWS, h, 0], bars.index(2 * c), ks.index(c))
        mbarrier.expect(bars.index(2 * c + 1), 2 * ROWS * D)
        tma.async_copy_global_to_shared(value, [b, c * ROWS, h, 0], bars.index(2 * c + 1), vs.index(c))

    cols = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    b64, h64 = b.to(gl.int64), h.to(gl.int64)
    query_ptrs = query + b64 * query_strides[0] + h64 * query_strides[1] + cols
    dout_ptrs = dout + b64 * dout_strides[0] + h64 * dout_strides[1] + cols
    if MASK_D:
        q = gl.load(query_ptrs, mask=cols < head_dim, other=0.0).to(gl.float32)
        do = gl.load(dout_ptrs, mask=cols < head_dim, other=0.0).to(gl.float32)
    else:
        q = gl.load(query_ptrs).to(gl.float32)
        do = gl.load(dout_ptrs).to(gl.float32)
    shift = gl.load(lse + problem) * _LOG2E
    qk_scale = scale * _LOG2E

    # the row sum first: dS of any key needs delta of all
    products = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, layout))
    for c in range(CHUNKS):
        mbarrier.wait(bars.index(2 * c), 0)
        mbarrier.wait(bars.index(2 * c + 1), 0)
        k = ks.index(c).reshape([ROWS, D]).load(layout).to(gl.float32)
        v = vs.index(c).reshape([ROWS, D]).load(layout).to(gl.float32)
        weights, dweights = chunk_weights(k, v, q, do, shift, c * ROWS, kv_len, qk_scale, ROWS, MASK_KEYS, layout)
        products += weights * dweights
    delta = gl.sum(products, 0)
    if HAS_DLSE:
        delta -= gl.load(dlse + problem)

    total = gl.zeros([ROWS, D], gl.float32, layout=layout)
    for c in range(CHUNKS):
        k4 = ks.index(c)
        v4 = vs.index(c)
        k = k4.reshape([ROWS, D]).load(layout).to(gl.float32)
        v = v4.reshape([ROWS, D]).load(layout).to(gl.float32)
        weights, dweights = chunk_weights(k, v, q, do, shift, c * ROWS, kv_len, qk_scale, ROWS, MASK_KEYS, layout)
        dscores = weights * (dweights - delta) * scale
        total += gl.expand_dims(dscores, 1) * k
        v4.reshape([ROWS, D]).store((gl.expand_dims(weights, 1) * gl.expand_dims(do, 0)).to(DTYPE))
        k4.reshape([ROWS, D]).store((gl.expand_dims(dscores, 1) * gl.expand_dims(q, 0)).to(DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(dvalue, [b, c * ROWS, h, 0], v4)
        tma.async_copy_shared_to_global(dkey, [b, c * ROWS, h, 0], k4)
    dq = gl.sum(total, 0)
    ptrs = dquery + b64 * dquery_strides[0] + h64 * dquery_strides[1] + cols
    if MASK_D:
        gl.store(ptrs, dq.to(DTYPE), mask=cols < head_dim)
    else:
        gl.store(ptrs, dq.to(DTYPE))
    tma.store_wait(0)
    # the copy engine still reads these after their last mention: without this the sum over warps above is given the same memory
    ks._keep_alive()
    vs._keep_alive()
