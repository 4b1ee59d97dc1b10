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
def fetch_chunk(key, value, ks, vs, bars, chunk, b, h, ROWS: gl.constexpr, D: gl.constexpr, wanted):
    """Start reading ROWS keys and values of problem (b, h); the chunk's barrier completes when both are there."""
    bar = bars.index(chunk)
    mbarrier.expect(bar, 4 * ROWS * D, pred=wanted)
    tma.async_copy_global_to_shared(key, [b, chunk * ROWS, h, 0], bar, ks.index(chunk), pred=wanted)
    tma.async_copy_global_to_shared(value, [b, chunk * ROWS, h, 0], bar, vs.index(chunk), pred=wanted)


@gluon.jit
def load_row(tensor, strides, b, h, head_dim, D: gl.constexpr, MASK_D: gl.constexpr, layout: gl.constexpr):
    """The one query row (or its output gradient) of a problem, float32."""
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    ptrs = tensor + b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[1] + cols
    if MASK_D:
        row = gl.load(ptrs, mask=cols < head_dim, other=0.0)
    else:
        row = gl.load(ptrs)
    return row.to(gl.float32)


@gluon.jit
def store_row(
    tensor, strides, b, h, head_dim, row, D: gl.constexpr, MASK_D: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Round the one row of a problem and write it."""
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    ptrs = tensor + b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[1] + cols
    if MASK_D:
        gl.store(ptrs, row.to(tensor.dtype.element_ty), mask=cols < head_dim)
    else:
        gl.store(ptrs, row.to(tensor.dtype.element_ty))


@gluon.jit
def row_delta(
    ks, vs, bars, phase, q, do, shift, kv_len, qk_scale, T: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
    MASK_KEYS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """sum(P dP) over all keys, as they arrive: dS of any key needs it."""
    products = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, layout))
    for c in range(T // ROWS):
        mbarrier.wait(bars.index(c), phase)
        k = ks.index(c).reshape([ROWS, D]).load(layout).to(gl.float32)
        v = vs.index(c).reshape([ROWS, D]).load(layout).to(gl.float32)
        weights, dweights = chunk_weights(k, v, q, do, shift, c * ROWS, kv_len, qk_scale, ROWS, MASK_KEYS, layout)
        products += weights * dweights
    return gl.sum(products, 0)


@gluon.jit
def chunk_gradients(
    dkey, dvalue, k4, v4, b, h, chunk, q, do, shift, delta, kv_len, scale, D: gl.constexpr, ROWS: gl.constexpr,
    MASK_KEYS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """dK and dV of ROWS keys over K and V, on their way out; their share of dq, [ROWS, D]."""
    k = k4.reshape([ROWS, D]).load(layout).to(gl.float32)
    v = v4.reshape([ROWS, D]).load(layout).to(gl.float32)
    qk_scale = scale * _LOG2E
    weights, dweights = chunk_weights(k, v, q, do, shift, chunk * ROWS, kv_len, qk_scale, ROWS, MASK_KEYS, layout)
    dscores = weights * (dweights - delta) * scale
    v4.reshape([ROWS, D]).store((gl.expand_dims(weights, 1) * gl.expand_dims(do, 0)).to(v4.dtype))
    k4.reshape([ROWS, D]).store((gl.expand_dims(dscores, 1) * gl.expand_dims(q, 0)).to(k4.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dvalue, [b, chunk * ROWS, h, 0], v4)
    tma.async_copy_shared_to_global(dkey, [b, chunk * ROWS, h, 0], k4)
    return gl.expand_dims(dscores, 1) * k


@gluon.jit
def _pool_bwd_hopper_kernel(
    key, value, dkey, dvalue, query, dout, dquery, lse, dlse,
    query_strides, dout_strides, dquery_strides, batch, heads, kv_len, head_dim, scale,
    T: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, HAS_DLSE: gl.constexpr, MASK_KEYS: gl.constexpr, MASK_D: gl.constexpr,
):  # fmt: skip
    """One problem a program; strides are (batch, head)."""
    CHUNKS: gl.constexpr = T // ROWS
    ACROSS: gl.constexpr = min(D // 8, 32)  # lanes along a row, 16 bytes each
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    ks = gl.allocate_shared_memory(key.dtype, [CHUNKS, 1, ROWS, 1, D], key.layout)
    vs = gl.allocate_shared_memory(key.dtype, [CHUNKS, 1, ROWS, 1, D], key.layout)
    bars = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CHUNKS):
        mbarrier.init(bars.index(i), count=1)
    problem = gl.program_id(0)
    b, h = problem // heads, problem % heads
    for c in gl.static_range(CHUNKS):
        fetch_chunk(key, value, ks, vs, bars, c, b, h, ROWS, D, True)
    q = load_row(query, query_strides, b, h, head_dim, D, MASK_D, layout)
    do = load_row(dout, dout_strides, b, h, head_dim, D, MASK_D, layout)
    shift = gl.load(lse + problem) * _LOG2E
    delta = row_delta(ks, vs, bars, 0, q, do, shift, kv_len, scale * _LOG2E, T, D, ROWS, MASK_KEYS, layout)
    if HAS_DLSE:
        delta -= gl.load(dlse + problem)
    total = gl.zeros([ROWS, D], gl.float32, layout=layout)
    for c in range(CHUNKS):
        total += chunk_gradients(
            dkey, dvalue, ks.index(c), vs.index(c), b, h, c, q, do, shift, delta, kv_len, scale, D, ROWS, MASK_KEYS, layout
        )
    store_row(dquery, dquery_strides, b, h, head_dim, gl.sum(total, 0), D, MASK_D, layout)
    tma.store_wait(0)
    # the copy engine still reads these after their last mention: without this the sum over warps above is given the same memory
    ks._keep_alive()
    vs._keep_alive()
    bars._keep_alive()


@gluon.jit
def _pool_bwd_hopper_persistent_kernel(
    key, value, dkey, dvalue, query, dout, dquery, lse, dlse,
    query_strides, dout_strides, dquery_strides, batch, heads, kv_len, head_dim, scale,
    T: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, HAS_DLSE: gl.constexpr, MASK_KEYS: gl.constexpr, MASK_D: gl.constexpr,
    LAG: gl.constexpr,
):  # fmt: skip
    """The same where one problem fills the multiprocessor (128 KB at T = 128, D = 256) and nobody else covers its latencies: as soon
    as a chunk's gradients have left, LAG chunks later, the next problem's chunk comes into their place."""
    CHUNKS: gl.constexpr = T // ROWS
    ACROSS: gl.constexpr = min(D // 8, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    ks = gl.allocate_shared_memory(key.dtype, [CHUNKS, 1, ROWS, 1, D], key.layout)
    vs = gl.allocate_shared_memory(key.dtype, [CHUNKS, 1, ROWS, 1, D], key.layout)
    bars = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CHUNKS):
        mbarrier.init(bars.index(i), count=1)
    total = batch * heads
    step = gl.num_programs(0)
    first = gl.program_id(0)
    b, h = first // heads, first % heads
    for c in range(CHUNKS):
        fetch_chunk(key, value, ks, vs, bars, c, b, h, ROWS, D, True)
    q = load_row(query, query_strides, b, h, head_dim, D, MASK_D, layout)
    do = load_row(dout, dout_strides, b, h, head_dim, D, MASK_D, layout)
    shift = gl.load(lse + first) * _LOG2E
    phase = 0
    for problem in range(first, total, step):
        following = gl.minimum(problem + step, total - 1)
        more = problem + step < total
        b2, h2 = following // heads, following % heads
        delta = row_delta(ks, vs, bars, phase, q, do, shift, kv_len, scale * _LOG2E, T, D, ROWS, MASK_KEYS, layout)
        if HAS_DLSE:
            delta -= gl.load(dlse + problem)
        next_q = load_row(query, query_strides, b2, h2, head_dim, D, MASK_D, layout)
        next_do = load_row(dout, dout_strides, b2, h2, head_dim, D, MASK_D, layout)
        next_shift = gl.load(lse + following) * _LOG2E
        dq = gl.zeros([ROWS, D], gl.float32, layout=layout)
        for c in range(CHUNKS):
            dq += chunk_gradients(
                dkey, dvalue, ks.index(c), vs.index(c), b, h, c, q, do, shift, delta, kv_len, scale, D, ROWS, MASK_KEYS, layout
            )
            tma.store_wait(2 * LAG)  # all but the two of this chunk, and of LAG - 1 before it, have left
            fetch_chunk(key, value, ks, vs, bars, gl.maximum(c - LAG, 0), b2, h2, ROWS, D, (c >= LAG) & more)
        store_row(dquery, dquery_strides, b, h, head_dim, gl.sum(dq, 0), D, MASK_D, layout)
        tma.store_wait(0)
        for c in range(CHUNKS - LAG, CHUNKS):
            fetch_chunk(key, value, ks, vs, bars, c, b2, h2, ROWS, D, more)
        q, do, shift, b, h = next_q, next_do, next_shift, b2, h2
        phase = 1 - phase
    ks._keep_alive()
    vs._keep_alive()
    bars._keep_alive()
