"""Forward and backward for sm_90, written in Gluon: tiles arrive and leave by the copy engine, products run on warpgroups.

The mathematics is that of `forward.py` and `backward.py`; what differs is who holds what. Triton keeps tiles and both score
matrices in registers at S = 128, so that one program fills a multiprocessor and its phases wait for each other. Here every tile
lives in shared memory only, P is rounded and parked there before dP exists, and a thread needs 128 registers:

    S = Q K^T                      64 registers a thread (8 warps, 128 x 128)
    P = exp2(S - lse) -> shared    0
    dV = P^T dO, dP = dO V^T       D/4 + 64, both running while the other is used
    dS = P (dP - rowsum(P dP)) -> shared, over P
    dK = dS^T Q, dQ = dS K         D/2

Source: paper 002; bytes moved are its minimum, every tensor once. Mask, bias, lengths, dropout and grouped heads stay with Triton.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def fetch(desc, b, h, col, smem, bar, wanted):
    """Start reading the tile of problem (b, h) at head-dim column `col`; `bar` completes when it has arrived."""
    mbarrier.expect(bar, 2 * smem.numel, pred=wanted)
    tma.async_copy_global_to_shared(desc, [b, 0, h, col], bar, smem, pred=wanted)


@gluon.jit
def emit(desc, b, h, col, tile, smem, T: gl.constexpr, COLS: gl.constexpr):
    """Round a tile into `smem` and start writing it out; `smem` is free after the next `tma.store_wait`."""
    smem.reshape([T, COLS]).store(tile.to(desc.dtype))
    fence_async_shared()  # the copy engine must see what the threads wrote
    tma.async_copy_shared_to_global(desc, [b, 0, h, col], smem)


@gluon.jit
def start_product(a, b, layout: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """a @ b on the warpgroup units, in flight until `warpgroup_mma_wait`."""
    return warpgroup_mma(a, b, gl.zeros([ROWS, COLS], gl.float32, layout=layout), use_acc=False, is_async=True)


@gluon.jit
def visible(
    scores, first, kv_len, ROWS: gl.constexpr, T: gl.constexpr, CAUSAL: gl.constexpr, MASK_KEYS: gl.constexpr,
    layout: gl.constexpr, hidden,
):  # fmt: skip
    """`scores` with `hidden` where a key is past the end or in the future."""
    keys = gl.expand_dims(gl.arange(0, T, layout=gl.SliceLayout(0, layout)), 0)
    if MASK_KEYS:
        scores = gl.where(keys < kv_len, scores, hidden)
    if CAUSAL:
        queries = first + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), 1)
        scores = gl.where(keys <= queries, scores, hidden)
    return scores


@gluon.jit
def load_rows(rows, problem, q_len, other, T: gl.constexpr, MASK_Q: gl.constexpr, layout: gl.constexpr):
    """A float32 row vector of a problem (lse or dlse), `other` beyond the last query."""
    queries = gl.arange(0, T, layout=gl.SliceLayout(1, layout))
    ptrs = rows + problem.to(gl.int64) * q_len + queries
    if MASK_Q:
        values = gl.load(ptrs, mask=queries < q_len, other=other)
    else:
        values = gl.load(ptrs)
    return values


@gluon.jit
def _fwd_block(
    out, lse, q4, k4, v4, v_bar, problem, b, h, first, q_len, kv_len, qk_scale,
    T: gl.constexpr, D: gl.constexpr, BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr, MASK_Q: gl.constexpr, MASK_KEYS: gl.constexpr,
):  # fmt: skip
    """BLOCK_Q queries of a problem, whose output leaves through the memory of their q."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, T, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    q_s = q4.reshape([BLOCK_Q, D])
    scores = start_product(q_s, k4.reshape([T, D]).permute((1, 0)), score_layout, BLOCK_Q, T)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    scores = visible(scores, first, kv_len, BLOCK_Q, T, CAUSAL, MASK_KEYS, score_layout, float("-inf"))
    shift = gl.max(scores, 1) * qk_scale
    weights = gl.exp2(scores * qk_scale - gl.expand_dims(shift, 1))
    row_sum = gl.sum(weights, 1)
    queries = first + gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(1, score_layout))
    ptrs = lse + problem.to(gl.int64) * q_len + queries
    log_sum = (gl.log2(row_sum) + shift) * _LN2
    if MASK_Q:
        gl.store(ptrs, log_sum, mask=queries < q_len)
    else:
        gl.store(ptrs, log_sum)
    # the accumulator of one product is laid out as the left operand of the next: nothing moves
    operand = gl.convert_layout(weights.to(v4.dtype), gl.DotOperandLayout(0, out_layout, 2))
    mbarrier.wait(v_bar, 0)
    acc = start_product(operand, v4.reshape([T, D]), out_layout, BLOCK_Q, D)
    inverse = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, out_layout))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    q_s.store((acc * gl.expand_dims(inverse, 1)).to(v4.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [b, first, h, 0], q4)


@gluon.jit
def _fwd_hopper_kernel(
    query, key, value, out, lse, heads, q_len, kv_len, qk_scale,
    T: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, MASK_Q: gl.constexpr, MASK_KEYS: gl.constexpr,
):  # fmt: skip
    """One problem a program; its neighbours on the multiprocessor hide its latencies, if together they keep 190 KB in flight. Four
    warps take 64 queries at a time, eight all 128. (Persistent programs with a ring of problems: 5 to 15 % slower.)"""
    DTYPE: gl.constexpr = query.dtype
    BLOCK_Q: gl.constexpr = gl.num_warps() * 16
    BLOCKS: gl.constexpr = T // BLOCK_Q
    qs = gl.allocate_shared_memory(DTYPE, [BLOCKS, 1, BLOCK_Q, 1, D], query.layout)
    k4 = gl.allocate_shared_memory(DTYPE, [1, T, 1, D], key.layout)
    v4 = gl.allocate_shared_memory(DTYPE, [1, T, 1, D], key.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())  # q and k, v
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=1)
    problem = gl.program_id(0)
    b, h = problem // heads, problem % heads
    mbarrier.expect(bars.index(0), 4 * T * D)
    for i in gl.static_range(BLOCKS):
        tma.async_copy_global_to_shared(query, [b, i * BLOCK_Q, h, 0], bars.index(0), qs.index(i))
    tma.async_copy_global_to_shared(key, [b, 0, h, 0], bars.index(0), k4)
    fetch(value, b, h, 0, v4, bars.index(1), True)
    mbarrier.wait(bars.index(0), 0)
    for i in gl.static_range(BLOCKS):
        _fwd_block(
            out, lse, qs.index(i), k4, v4, bars.index(1), problem, b, h, i * BLOCK_Q, q_len, kv_len, qk_scale,
            T, D, BLOCK_Q, CAUSAL, MASK_Q, MASK_KEYS,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def load_shift(lse, problem, q_len, T: gl.constexpr, MASK_Q: gl.constexpr, layout: gl.constexpr):
    """Base-2 shift of the scores, +inf past the last query. Asked for before it is needed: at its place of use its latency shows,
    0.5 of 3.1 ms at S = 128, D = 32."""
    return load_rows(lse, problem, q_len, float("inf"), T, MASK_Q, layout) * _LOG2E


@gluon.jit
def park_weights(
    scores, shift, w_s, kv_len, qk_scale, T: gl.constexpr, CAUSAL: gl.constexpr, MASK_KEYS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """P = exp2(S - lse), rounded, into shared memory; 0 past the end of queries (their shift is +inf) and keys."""
    weights = gl.exp2(scores * qk_scale - gl.expand_dims(shift, 1))
    w_s.store(visible(weights, 0, kv_len, T, T, CAUSAL, MASK_KEYS, layout, 0.0).to(w_s.dtype))
    fence_async_shared()


@gluon.jit
def park_score_gradient(
    dweights, dlse_rows, w_s, scale, HAS_DLSE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """scale * dS = scale * P (dP - rowsum(P dP) + dlse), rounded, over P in shared memory."""
    weights = w_s.load(layout).to(gl.float32)
    delta = gl.sum(weights * dweights, 1)
    if HAS_DLSE:
        delta -= dlse_rows
    dscores = weights * (dweights - gl.expand_dims(delta, 1))
    w_s.store((dscores * scale).to(w_s.dtype))
    fence_async_shared()


@gluon.jit
def fetch_pair(query, key, qs, ks, bars, pair, b, h, T: gl.constexpr, D: gl.constexpr, wanted):
    """Start reading q and k of problem (b, h) once the gradients of an earlier one have left that pair."""
    tma.store_wait(0)
    mbarrier.expect(bars.index(pair), 4 * T * D, pred=wanted)
    tma.async_copy_global_to_shared(query, [b, 0, h, 0], bars.index(pair), qs.index(pair), pred=wanted)
    tma.async_copy_global_to_shared(key, [b, 0, h, 0], bars.index(pair), ks.index(pair), pred=wanted)


@gluon.jit
def _bwd_problem(
    query, key, value, dout, dquery, dkey, dvalue, shift, dlse, problem, count, step, total, heads, q_len, kv_len, scale,
    qs, ks, v4, do4, w_s, bars,
    T: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, HAS_DLSE: gl.constexpr, MASK_Q: gl.constexpr,
    MASK_KEYS: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """Backward of one problem whose tiles and shift are on their way; if PERSISTENT, start reading the next one."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [T // 16, gl.num_warps() * 16 // T], [16, T * T // 16 // gl.num_warps(), 16]
    )
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [T // 16, gl.num_warps() * 16 // T], [16, D * T // 16 // gl.num_warps(), 16]
    )
    PAIRS: gl.constexpr = 2 if PERSISTENT else 1
    b, h = problem // heads, problem % heads
    more = problem + step < total
    b2, h2 = (problem + step) // heads, (problem + step) % heads
    pair = count % PAIRS
    phase = count & 1
    q4 = qs.index(pair)
    k4 = ks.index(pair)
    q_s = q4.reshape([T, D])
    k_s = k4.reshape([T, D])
    v_s = v4.reshape([T, D])
    do_s = do4.reshape([T, D])
    dlse_rows = load_rows(dlse, problem, q_len, 0.0, T, MASK_Q, score_layout) if HAS_DLSE else shift
    mbarrier.wait(bars.index(pair), (count // PAIRS) & 1)
    scores = start_product(q_s, k_s.permute((1, 0)), score_layout, T, T)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    park_weights(scores, shift, w_s, kv_len, scale * _LOG2E, T, CAUSAL, MASK_KEYS, score_layout)
    mbarrier.wait(bars.index(2), phase)
    dv = start_product(w_s.permute((1, 0)), do_s, grad_layout, T, D)
    mbarrier.wait(bars.index(3), phase)
    dweights = start_product(do_s, v_s.permute((1, 0)), score_layout, T, T)
    if PERSISTENT:
        fetch_pair(query, key, qs, ks, bars, 1 - pair, b2, h2, T, D, more)
        dv, dweights = warpgroup_mma_wait(0, deps=(dv, dweights))
        emit(dvalue, b, h, 0, dv, v4, T, D)
        fetch(dout, b2, h2, 0, do4, bars.index(2), more)
    else:
        dv = warpgroup_mma_wait(1, deps=(dv,))
        spare = gl.allocate_shared_memory(v4.dtype, [1, T, 1, D], v4.layout)
        emit(dvalue, b, h, 0, dv, spare, T, D)
        dweights = warpgroup_mma_wait(0, deps=(dweights,))
    park_score_gradient(dweights, dlse_rows, w_s, scale, HAS_DLSE, score_layout)
    dk = start_product(w_s.permute((1, 0)), q_s, grad_layout, T, D)
    dq = start_product(w_s, k_s, grad_layout, T, D)
    if PERSISTENT:
        tma.store_wait(0)
        fetch(value, b2, h2, 0, v4, bars.index(3), more)
        dk = warpgroup_mma_wait(1, deps=(dk,))
        emit(dkey, b, h, 0, dk, q4, T, D)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        emit(dquery, b, h, 0, dq, k4, T, D)
    else:
        dk = warpgroup_mma_wait(1, deps=(dk,))
        emit(dkey, b, h, 0, dk, do4, T, D)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        emit(dquery, b, h, 0, dq, v4, T, D)
        spare._keep_alive()  # the copy engine reads it after its last mention: nothing else may be given its memory


@gluon.jit
def _bwd_hopper_kernel(
    query, key, value, dout, dquery, dkey, dvalue, lse, dlse, batch, heads, q_len, kv_len, scale,
    T: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, HAS_DLSE: gl.constexpr, MASK_Q: gl.constexpr,
    MASK_KEYS: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """Whole tiles. Either one problem a program, two programs a multiprocessor (D <= 64), or a persistent program that reads the
    next problem while it computes this one: q and k into a second pair, v and dout as soon as dP and dV are done with theirs."""
    DTYPE: gl.constexpr = query.dtype
    PAIRS: gl.constexpr = 2 if PERSISTENT else 1
    qs = gl.allocate_shared_memory(DTYPE, [PAIRS, 1, T, 1, D], query.layout)
    ks = gl.allocate_shared_memory(DTYPE, [PAIRS, 1, T, 1, D], query.layout)
    v4 = gl.allocate_shared_memory(DTYPE, [1, T, 1, D], query.layout)
    do4 = gl.allocate_shared_memory(DTYPE, [1, T, 1, D], query.layout)
    w_s = gl.allocate_shared_memory(DTYPE, [T, T], gl.NVMMASharedLayout.get_default_for([T, T], DTYPE))
    bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())  # q and k (two pairs), dout, v
    for i in gl.static_range(4):
        mbarrier.init(bars.index(i), count=1)
    total = batch * heads
    first = gl.program_id(0)
    b, h = first // heads, first % heads
    mbarrier.expect(bars.index(0), 4 * T * D)
    tma.async_copy_global_to_shared(query, [b, 0, h, 0], bars.index(0), qs.index(0))
    tma.async_copy_global_to_shared(key, [b, 0, h, 0], bars.index(0), ks.index(0))
    fetch(dout, b, h, 0, do4, bars.index(2), True)
    fetch(value, b, h, 0, v4, bars.index(3), True)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [T // 16, gl.num_warps() * 16 // T], [16, T * T // 16 // gl.num_warps(), 16]
    )
    shift = load_shift(lse, first, q_len, T, MASK_Q, score_layout)
    if PERSISTENT:
        step = gl.num_programs(0)
        count = 0
        for problem in range(first, total, step):
            next_shift = load_shift(lse, gl.minimum(problem + step, total - 1), q_len, T, MASK_Q, score_layout)
            _bwd_problem(
                query, key, value, dout, dquery, dkey, dvalue, shift, dlse, problem, count, step, total, heads, q_len, kv_len,
                scale, qs, ks, v4, do4, w_s, bars, T, D, CAUSAL, HAS_DLSE, MASK_Q, MASK_KEYS, PERSISTENT,
            )  # fmt: skip
            shift = next_shift
            count += 1
    else:  # not a loop of one step: Gluon keeps it, and its counters cost 30 spilled registers
        _bwd_problem(
            query, key, value, dout, dquery, dkey, dvalue, shift, dlse, first, 0, 1, total, heads, q_len, kv_len, scale,
            qs, ks, v4, do4, w_s, bars, T, D, CAUSAL, HAS_DLSE, MASK_Q, MASK_KEYS, PERSISTENT,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _bwd_hopper_turns_kernel(
    query, key, value, dout, dquery, dkey, dvalue, lse, dlse, batch, heads, q_len, kv_len, scale,
    T: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, HAS_DLSE: gl.constexpr, MASK_Q: gl.constexpr, MASK_KEYS: gl.constexpr,
):  # fmt: skip
    """One problem a program, in the memory of three tiles: v is read first, and k takes its place once dP is there. Where four tiles
    let one program alone on a multiprocessor and three let two (T = 64, D = 256: 104 KB), one computes and writes while the other reads;
    k's latency is the price. Each gradient leaves through the memory of the tile that it is the last to need."""
    DTYPE: gl.constexpr = query.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [T // 16, gl.num_warps() * 16 // T], [16, T * T // 16 // gl.num_warps(), 16]
    )
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [T // 16, gl.num_warps() * 16 // T], [16, D * T // 16 // gl.num_warps(), 16]
    )
    q4 = gl.allocate_shared_memory(DTYPE, [1, T, 1, D], query.layout)
    kv4 = gl.allocate_shared_memory(DTYPE, [1, T, 1, D], query.layout)
    do4 = gl.allocate_shared_memory(DTYPE, [1, T, 1, D], query.layout)
    w_s = gl.allocate_shared_memory(DTYPE, [T, T], gl.NVMMASharedLayout.get_default_for([T, T], DTYPE))
    bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())  # dout, v, q, k
    for i in gl.static_range(4):
        mbarrier.init(bars.index(i), count=1)
    problem = gl.program_id(0)
    b, h = problem // heads, problem % heads
    fetch(dout, b, h, 0, do4, bars.index(0), True)
    fetch(value, b, h, 0, kv4, bars.index(1), True)
    fetch(query, b, h, 0, q4, bars.index(2), True)
    q_s = q4.reshape([T, D])
    kv_s = kv4.reshape([T, D])
    do_s = do4.reshape([T, D])
    shift = load_shift(lse, problem, q_len, T, MASK_Q, score_layout)
    dlse_rows = load_rows(dlse, problem, q_len, 0.0, T, MASK_Q, score_layout) if HAS_DLSE else shift

    mbarrier.wait(bars.index(0), 0)
    mbarrier.wait(bars.index(1), 0)
    dweights = start_product(do_s, kv_s.permute((1, 0)), score_layout, T, T)
    dweights = warpgroup_mma_wait(0, deps=(dweights,))
    gl.thread_barrier()  # every warp is done with v
    fetch(key, b, h, 0, kv4, bars.index(3), True)
    mbarrier.wait(bars.index(2), 0)
    mbarrier.wait(bars.index(3), 0)
    scores = start_product(q_s, kv_s.permute((1, 0)), score_layout, T, T)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    park_weights(scores, shift, w_s, kv_len, scale * _LOG2E, T, CAUSAL, MASK_KEYS, score_layout)
    dv = start_product(w_s.permute((1, 0)), do_s, grad_layout, T, D)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    emit(dvalue, b, h, 0, dv, do4, T, D)
    park_score_gradient(dweights, dlse_rows, w_s, scale, HAS_DLSE, score_layout)
    # one after the other: both at once would take 128 registers a thread
    dq = start_product(w_s, kv_s, grad_layout, T, D)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    emit(dquery, b, h, 0, dq, kv4, T, D)
    dk = start_product(w_s.permute((1, 0)), q_s, grad_layout, T, D)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    emit(dkey, b, h, 0, dk, q4, T, D)
    tma.store_wait(0)
    q4._keep_alive()  # the copy engine reads them after their last mention
    kv4._keep_alive()
    do4._keep_alive()


@gluon.jit
def _bwd_hopper_streamed_kernel(
    query, key, value, dout, dquery, dkey, dvalue, lse, dlse, batch, heads, q_len, kv_len, scale,
    T: gl.constexpr, D: gl.constexpr, CHUNK: gl.constexpr, CAUSAL: gl.constexpr, HAS_DLSE: gl.constexpr,
    MASK_Q: gl.constexpr, MASK_KEYS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Where four tiles do not fit: q and k stay, v and dout pass through SLOTS chunks of the head dim, each read once. Persistent;
    a chunk's buffer takes the gradient that is computed from it, then the next problem's chunk."""
    DTYPE: gl.constexpr = query.dtype
    CHUNKS: gl.constexpr = D // CHUNK
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [T // 16, gl.num_warps() * 16 // T], [16, T * T // 16 // gl.num_warps(), 16]
    )
    grad_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [T // 16, gl.num_warps() * 16 // T], [16, CHUNK * T // 16 // gl.num_warps(), 16]
    )
    qs = gl.allocate_shared_memory(DTYPE, [CHUNKS, 1, T, 1, CHUNK], query.layout)
    ks = gl.allocate_shared_memory(DTYPE, [CHUNKS, 1, T, 1, CHUNK], query.layout)
    vs = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, T, 1, CHUNK], query.layout)
    dos = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, T, 1, CHUNK], query.layout)
    w_s = gl.allocate_shared_memory(DTYPE, [T, T], gl.NVMMASharedLayout.get_default_for([T, T], DTYPE))
    bars = gl.allocate_shared_memory(gl.int64, [1 + 2 * SLOTS, 1], mbarrier.MBarrierLayout())  # q and k, dout slots, v slots
    for i in gl.static_range(1 + 2 * SLOTS):
        mbarrier.init(bars.index(i), count=1)
    total = batch * heads
    first = gl.program_id(0)
    step = gl.num_programs(0)
    b, h = first // heads, first % heads
    mbarrier.expect(bars.index(0), 4 * T * D)
    for c in range(CHUNKS):
        tma.async_copy_global_to_shared(query, [b, 0, h, c * CHUNK], bars.index(0), qs.index(c))
        tma.async_copy_global_to_shared(key, [b, 0, h, c * CHUNK], bars.index(0), ks.index(c))
    for c in range(SLOTS):
        fetch(dout, b, h, c * CHUNK, dos.index(c), bars.index(1 + c), True)
        fetch(value, b, h, c * CHUNK, vs.index(c), bars.index(1 + SLOTS + c), True)
    shift = load_shift(lse, first, q_len, T, MASK_Q, score_layout)
    count = 0
    for problem in range(first, total, step):
        b, h = problem // heads, problem % heads
        more = problem + step < total
        b2, h2 = (problem + step) // heads, (problem + step) % heads
        next_shift = load_shift(lse, gl.minimum(problem + step, total - 1), q_len, T, MASK_Q, score_layout)
        dlse_rows = load_rows(dlse, problem, q_len, 0.0, T, MASK_Q, score_layout) if HAS_DLSE else shift
        mbarrier.wait(bars.index(0), count & 1)
        scores = warpgroup_mma_init(gl.zeros([T, T], gl.float32, layout=score_layout))
        for c in range(CHUNKS):
            k_t = ks.index(c).reshape([T, CHUNK]).permute((1, 0))
            scores = warpgroup_mma(qs.index(c).reshape([T, CHUNK]), k_t, scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        park_weights(scores, shift, w_s, kv_len, scale * _LOG2E, T, CAUSAL, MASK_KEYS, score_layout)
        shift = next_shift

        # chunks of v and dout: dP grows, dV of the chunk is complete
        dweights = gl.zeros([T, T], gl.float32, layout=score_layout)
        for c in range(CHUNKS):
            slot = c % SLOTS
            phase = (count * (CHUNKS // SLOTS) + c // SLOTS) & 1
            do_s = dos.index(slot).reshape([T, CHUNK])
            mbarrier.wait(bars.index(1 + slot), phase)
            dv = start_product(w_s.permute((1, 0)), do_s, grad_layout, T, CHUNK)
            mbarrier.wait(bars.index(1 + SLOTS + slot), phase)
            v_t = vs.index(slot).reshape([T, CHUNK]).permute((1, 0))
            dweights = warpgroup_mma(do_s, v_t, dweights, is_async=True)
            # the slot before this one: its dV has left, so v can come in, for this problem or the next
            other = (c + SLOTS - 1) % SLOTS
            here = c - 1 + SLOTS < CHUNKS
            tma.store_wait(0)
            fetch(
                value, gl.where(here, b, b2), gl.where(here, h, h2), (c - 1 + SLOTS) % CHUNKS * CHUNK,
                vs.index(other), bars.index(1 + SLOTS + other), (c > 0) & (here | more),
            )  # fmt: skip
            dv, dweights = warpgroup_mma_wait(0, deps=(dv, dweights))
            emit(dvalue, b, h, c * CHUNK, dv, vs.index(slot), T, CHUNK)
            here = c + SLOTS < CHUNKS
            fetch(
                dout, gl.where(here, b, b2), gl.where(here, h, h2), (c + SLOTS) % CHUNKS * CHUNK,
                dos.index(slot), bars.index(1 + slot), here | more,
            )  # fmt: skip
        park_score_gradient(dweights, dlse_rows, w_s, scale, HAS_DLSE, score_layout)
        tma.store_wait(0)
        last: gl.constexpr = (CHUNKS - 1) % SLOTS
        fetch(value, b2, h2, (SLOTS - 1) * CHUNK, vs.index(last), bars.index(1 + SLOTS + last), more)

        # chunks of q and k: dK and dQ take their place, then the next problem's q and k
        mbarrier.expect(bars.index(0), 4 * T * D, pred=more)
        for c in range(CHUNKS):
            q4 = qs.index(c)
            k4 = ks.index(c)
            dk = start_product(w_s.permute((1, 0)), q4.reshape([T, CHUNK]), grad_layout, T, CHUNK)
            dq = start_product(w_s, k4.reshape([T, CHUNK]), grad_layout, T, CHUNK)
            tma.store_wait(0)
            left = (c > 0) & more
            tma.async_copy_global_to_shared(
                query, [b2, 0, h2, (c - 1) * CHUNK], bars.index(0), qs.index(gl.maximum(c - 1, 0)), pred=left
            )
            tma.async_copy_global_to_shared(
                key, [b2, 0, h2, (c - 1) * CHUNK], bars.index(0), ks.index(gl.maximum(c - 1, 0)), pred=left
            )
            dk, dq = warpgroup_mma_wait(0, deps=(dk, dq))
            emit(dkey, b, h, c * CHUNK, dk, q4, T, CHUNK)
            emit(dquery, b, h, c * CHUNK, dq, k4, T, CHUNK)
        tma.store_wait(0)
        tma.async_copy_global_to_shared(query, [b2, 0, h2, D - CHUNK], bars.index(0), qs.index(CHUNKS - 1), pred=more)
        tma.async_copy_global_to_shared(key, [b2, 0, h2, D - CHUNK], bars.index(0), ks.index(CHUNKS - 1), pred=more)
        count += 1
