"""Backward for one query on sm_90, in Gluon: keys and values pass by once, through a ring filled by the copy engine.

    s = K q, P = exp2(s - lse), dP = V dO         [BLOCK_KV]
    delta = sum(P * dP) - dlse
    dq = scale * (sum((P * dP) K) - delta * sum(P K))
    dV = P dO^T, dK = scale * P (dP - delta) q^T  outer products

Written so, neither K nor V is needed once delta is known: P and dP are, two numbers a key. A program then asks for a ring of chunks in
place of the whole problem (128 KB at T = 128, D = 256, which left one program a multiprocessor whose reading, computing and writing
did not overlap: 0.77 of the roof). Source: paper 002, q = 1.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def fetch_chunk(key, value, ks, vs, bars, chunk, slot, b, h, ROWS: gl.constexpr, D: gl.constexpr, wanted):
    """Start reading ROWS keys and values of problem (b, h) into a slot, whose barrier completes when both are there."""
    bar = bars.index(slot)
    mbarrier.expect(bar, 4 * ROWS * D, pred=wanted)
    tma.async_copy_global_to_shared(key, [b, chunk * ROWS, h, 0], bar, ks.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(value, [b, chunk * ROWS, h, 0], bar, vs.index(slot), pred=wanted)


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
def store_outer(
    tensor, strides, b, h, first, kv_len, head_dim, column, row, ROWS: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """column row^T, rounded, into ROWS rows from `first` of `[B, H, T, D]`; strides are (batch, head, row)."""
    keys = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    start = tensor + b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[1]
    ptrs = start + gl.expand_dims(keys.to(gl.int64) * strides[2], 1) + gl.expand_dims(cols, 0)
    tile = (gl.expand_dims(column, 1) * gl.expand_dims(row, 0)).to(tensor.dtype.element_ty)
    if MASK:
        gl.store(ptrs, tile, mask=gl.expand_dims(keys < kv_len, 1) & gl.expand_dims(cols < head_dim, 0))
    else:
        gl.store(ptrs, tile)


@gluon.jit
def _pool_bwd_hopper_kernel(
    key, value, dkey, dvalue, query, dout, dquery, lse, dlse,
    query_strides, dout_strides, dquery_strides, dkey_strides, dvalue_strides, batch, heads, kv_len, head_dim, scale,
    T: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr, HAS_DLSE: gl.constexpr, MASK_KEYS: gl.constexpr,
    MASK_D: gl.constexpr,
):  # fmt: skip
    """One problem a program; strides are (batch, head), of dkey and dvalue (batch, head, row)."""
    CHUNKS: gl.constexpr = T // ROWS
    ACROSS: gl.constexpr = min(D // 8, 32)  # lanes along a row, 16 bytes each
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ks = gl.allocate_shared_memory(key.dtype, [SLOTS, 1, ROWS, 1, D], key.layout)
    vs = gl.allocate_shared_memory(key.dtype, [SLOTS, 1, ROWS, 1, D], key.layout)
    weights_s = gl.allocate_shared_memory(gl.float32, [CHUNKS, ROWS], flat)
    dweights_s = gl.allocate_shared_memory(gl.float32, [CHUNKS, ROWS], flat)
    bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(bars.index(i), count=1)
    problem = gl.program_id(0)
    b, h = problem // heads, problem % heads
    for c in gl.static_range(SLOTS):
        fetch_chunk(key, value, ks, vs, bars, c, c, b, h, ROWS, D, True)
    q = load_row(query, query_strides, b, h, head_dim, D, MASK_D, layout)
    do = load_row(dout, dout_strides, b, h, head_dim, D, MASK_D, layout)
    shift = gl.load(lse + problem) * _LOG2E

    delta_rows = gl.zeros([ROWS], gl.float32, layout=rows)
    with_dweights = gl.zeros([ROWS, D], gl.float32, layout=layout)  # (P dP) K and P K, to be summed over keys
    without = gl.zeros([ROWS, D], gl.float32, layout=layout)
    for c in range(CHUNKS):
        slot = c % SLOTS
        mbarrier.wait(bars.index(slot), (c // SLOTS) & 1)
        k = ks.index(slot).reshape([ROWS, D]).load(layout).to(gl.float32)
        v = vs.index(slot).reshape([ROWS, D]).load(layout).to(gl.float32)
        if SLOTS < CHUNKS:
            gl.thread_barrier()  # everybody has read the slot
            fetch_chunk(key, value, ks, vs, bars, c + SLOTS, slot, b, h, ROWS, D, c + SLOTS < CHUNKS)
        weights = gl.exp2(gl.sum(k * gl.expand_dims(q, 0), 1) * (scale * _LOG2E) - shift)
        if MASK_KEYS:
            weights = gl.where(c * ROWS + gl.arange(0, ROWS, layout=rows) < kv_len, weights, 0.0)
        dweights = gl.sum(v * gl.expand_dims(do, 0), 1)
        weights_s.index(c).store(weights)
        dweights_s.index(c).store(dweights)
        delta_rows += weights * dweights
        with_dweights += gl.expand_dims(weights * dweights, 1) * k
        without += gl.expand_dims(weights, 1) * k
    delta = gl.sum(delta_rows, 0)
    if HAS_DLSE:
        delta -= gl.load(dlse + problem)
    dq = (gl.sum(with_dweights, 0) - delta * gl.sum(without, 0)) * scale
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    ptrs = dquery + b.to(gl.int64) * dquery_strides[0] + h.to(gl.int64) * dquery_strides[1] + cols
    if MASK_D:
        gl.store(ptrs, dq.to(dquery.dtype.element_ty), mask=cols < head_dim)
    else:
        gl.store(ptrs, dq.to(dquery.dtype.element_ty))
    for c in range(CHUNKS):
        weights = weights_s.index(c).load(rows)
        dscores = weights * (dweights_s.index(c).load(rows) - delta) * scale
        MASK: gl.constexpr = MASK_KEYS or MASK_D
        store_outer(dvalue, dvalue_strides, b, h, c * ROWS, kv_len, head_dim, weights, do, ROWS, D, MASK, layout)
        store_outer(dkey, dkey_strides, b, h, c * ROWS, kv_len, head_dim, dscores, q, ROWS, D, MASK, layout)
