"""Backward for sm_90 in one pass, in Gluon: the gatherer of `hopper.py`, and two warpgroups that differentiate.

    each of 64 rows:  S = Q K^T, P = exp2(S - lse), dP = dO V^T, dS = P (dP - delta), dQ += dS K
    P and dS meet in shared memory, then one warpgroup makes dV = P^T dO of the tile's keys, the other dK = dS^T Q and dscores,
    which are added into float32 at the keys' rows

Five products a tile of BLOCK_N keys x 128 rows. The additions are what binds: (keep + BLOCK_Q) / BLOCK_Q rows of 8 * D bytes a
query and key head. Not deterministic: the order of additions is the machine's. Source: paper 004, Eq. 5 to 10.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from saccade.kernels.dynamic_mask.hopper import _gather, make_ring

_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _weights(
    s, bias, start_s, stop_s, at, shift, first, whole, count, qk_scale,
    BLOCK_N: gl.constexpr, HAS_SCORES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """P of a tile, 0 where a query does not see a key."""
    column: gl.constexpr = gl.SliceLayout(0, layout)
    s = s * qk_scale
    if HAS_SCORES:
        s += gl.expand_dims(bias * _LOG2E, 0)
    weights = gl.exp2(s - gl.expand_dims(shift, 1))
    if first + BLOCK_N > whole:
        begins = start_s.load(column)
        listed = first + gl.arange(0, BLOCK_N, layout=column) < count
        ends = gl.where(listed, stop_s.load(column), -2147483648)
        positions = gl.expand_dims(at, 1)
        weights = gl.where((positions >= gl.expand_dims(begins, 0)) & (positions < gl.expand_dims(ends, 0)), weights, 0.0)
    return weights


@gluon.jit
def _load_tile(
    tensor, batch_stride, head_stride, row_stride, smem, b, h, block, half, q_len,
    GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """64 rows of a block, all heads of a group, into shared memory."""
    row = 64 * half + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    cols = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, layout)), 0)
    queries = block * BLOCK_Q + row // GROUP_PAD
    member = row % GROUP_PAD
    inside = gl.expand_dims((member < GROUP) & (queries < q_len), 1)
    places = gl.expand_dims((h * GROUP + member).to(gl.int64) * head_stride + queries.to(gl.int64) * row_stride, 1) + cols
    smem.store(gl.load(tensor + b.to(gl.int64) * batch_stride + places, mask=inside, other=0.0))


@gluon.jit
def _halves(tile):
    """The left and the right half of the columns."""
    return tile.reshape([tile.shape[0], 2, tile.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _quarters(tile):
    left, right = _halves(tile)
    a, b = _halves(left)
    c, d = _halves(right)
    return a, b, c, d


@gluon.jit
def _differentiate(
    query, dout, dquery, lse, delta, gradient, dscores, counts, wholes, q_s, do_s, p_s, ds_s, ones_s, ring, barriers, numbers,
    HALF: gl.constexpr, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr, HAS_SCORES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows `64 * HALF` and on of every block, and dV (HALF 0) or dK of its keys into `gradient`."""
    ks, vs, bias_s, start_s, stop_s, index_s, full, empty = ring
    q_full, shared_full, shared_empty, rows_empty = barriers
    (
        query_batch, query_head, query_row, dout_batch, dout_head, dout_row, dquery_batch, dquery_head, dquery_row,
        kv_heads, q_len, kv_len, blocks, total, scale,
    ) = numbers  # fmt: skip
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    wide_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 8, 16])
    tile_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    # 16 bytes a lane and whole lines of 128: one request of the cache for each, where the accumulator's own pairs make four
    row_layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 * 16 // D, D // 16], [gl.num_warps(), 1], [1, 0])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide_layout, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, score_layout)
    qk_scale = scale * _LOG2E
    done = 0
    turn = 0
    for work in range(gl.program_id(0), total, gl.num_programs(0)):
        block, owner = work % blocks, work // blocks
        b, h = owner // kv_heads, owner % kv_heads
        count = gl.load(counts + work)
        whole = gl.load(wholes + work)
        # the other warpgroup reads these rows for its products: both must be done with the block before
        mbarrier.wait(rows_empty, (turn & 1) ^ 1)
        _load_tile(
            query, query_batch, query_head, query_row, q_s.index(HALF), b, h, block, HALF, q_len,
            GROUP, GROUP_PAD, BLOCK_Q, D, tile_layout,
        )  # fmt: skip
        _load_tile(
            dout, dout_batch, dout_head, dout_row, do_s.index(HALF), b, h, block, HALF, q_len,
            GROUP, GROUP_PAD, BLOCK_Q, D, tile_layout,
        )  # fmt: skip
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(q_full, count=1)
        row = 64 * HALF + gl.arange(0, 64, layout=score_rows)
        at = block * BLOCK_Q + row // GROUP_PAD
        real = (row % GROUP_PAD < GROUP) & (at < q_len)
        of_rows = ((b * kv_heads + h) * GROUP + row % GROUP_PAD).to(gl.int64) * q_len + at
        log_sum = gl.load(lse + of_rows, mask=real, other=float("-inf"))
        # a row that sees no key, or is none: its weights are 0
        shift = gl.where(log_sum == float("-inf"), float("inf"), log_sum * _LOG2E)
        d = gl.load(delta + of_rows, mask=real, other=0.0)
        at += kv_len - q_len
        dq = gl.zeros([64, D], gl.float32, layout=wide_layout)
        mbarrier.wait(q_full, turn & 1)
        for first in range(0, count, BLOCK_N):
            slot = done % STAGES
            phase = (done // STAGES) & 1
            buffer = done % BUFFERS
            buffer_phase = (done // BUFFERS) & 1
            zero = gl.zeros([64, BLOCK_N], gl.float32, layout=score_layout)
            mbarrier.wait(full.index(slot), phase)
            # before the products: behind them it waits for the shared memory that they read
            bias = bias_s.index(slot).load(gl.SliceLayout(0, score_layout))
            s = warpgroup_mma(q_s.index(HALF), ks.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(do_s.index(HALF), vs.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            weights = _weights(
                s, bias, start_s.index(slot), stop_s.index(slot), at, shift, first, whole, count, qk_scale,
                BLOCK_N, HAS_SCORES, score_layout,
            )  # fmt: skip
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ds = (weights * (dp - gl.expand_dims(d, 1))).to(ks.dtype)
            mbarrier.wait(shared_empty.index(buffer), buffer_phase ^ 1)
            p_s.index(2 * buffer + HALF).store(weights.to(ks.dtype))
            ds_s.index(2 * buffer + HALF).store(ds)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(shared_full.index(buffer), count=1)
            dq = warpgroup_mma(gl.convert_layout(ds, operand), ks.index(slot), dq, is_async=True)
            mbarrier.wait(shared_full.index(buffer), buffer_phase)
            wide = gl.zeros([BLOCK_N, D], gl.float32, layout=wide_layout)
            if HALF == 0:
                tile = warpgroup_mma(p_s.index(2 * buffer).permute((1, 0)), do_s.index(0), wide, use_acc=False, is_async=True)
                tile = warpgroup_mma(p_s.index(2 * buffer + 1).permute((1, 0)), do_s.index(1), tile, is_async=True)
                dq, tile = warpgroup_mma_wait(0, deps=(dq, tile))
            else:
                tile = warpgroup_mma(ds_s.index(2 * buffer).permute((1, 0)), q_s.index(0), wide, use_acc=False, is_async=True)
                tile = warpgroup_mma(ds_s.index(2 * buffer + 1).permute((1, 0)), q_s.index(1), tile, is_async=True)
                if HAS_SCORES:  # row sums of dS^T, by the matrix units: eight equal columns
                    ones = ones_s.permute((1, 0))
                    sums = gl.zeros([BLOCK_N, 8], gl.float32, layout=sum_layout)
                    sums = warpgroup_mma(ds_s.index(2 * buffer).permute((1, 0)), ones, sums, use_acc=False, is_async=True)
                    sums = warpgroup_mma(ds_s.index(2 * buffer + 1).permute((1, 0)), ones, sums, is_async=True)
                    dq, tile, sums = warpgroup_mma_wait(0, deps=(dq, tile, sums))
                else:
                    dq, tile = warpgroup_mma_wait(0, deps=(dq, tile))
            keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, row_layout))
            index = index_s.index(slot).load(gl.SliceLayout(1, row_layout)).to(gl.int64) + owner.to(gl.int64) * kv_len
            listed = gl.expand_dims(first + keys < count, 1)
            of_keys = gl.expand_dims(index * D, 1) + gl.expand_dims(gl.arange(0, D // 4, layout=gl.SliceLayout(0, row_layout)), 0)
            if HALF == 1 and HAS_SCORES:
                place = index_s.index(slot).load(gl.SliceLayout(1, sum_layout)).to(gl.int64) + owner.to(gl.int64) * kv_len
            gl.thread_barrier()  # all four warps are done with what is given back
            mbarrier.arrive(empty.index(slot), count=1)
            mbarrier.arrive(shared_empty.index(buffer), count=1)
            if HALF == 1:
                tile = tile * scale
            parts = _quarters(tile)
            for part in gl.static_range(4):
                rows = gl.convert_layout(parts[part], row_layout)
                gl.atomic_add(gradient + of_keys + (part * (D // 4)), rows, mask=listed, sem="relaxed")
            if HALF == 1 and HAS_SCORES:
                entries = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, sum_layout))
                one = gl.sum(sums, 1) * 0.125
                gl.atomic_add(dscores + place, one, mask=first + entries < count, sem="relaxed")
            done += 1
        turn += 1  # noqa: SIM113 - Gluon knows no enumerate
        # both warpgroups have read this block's rows before either overwrites its own
        mbarrier.arrive(rows_empty, count=1)
        row = 64 * HALF + gl.arange(0, 64, layout=gl.SliceLayout(1, wide_layout))
        queries = block * BLOCK_Q + row // GROUP_PAD
        member = row % GROUP_PAD
        cols = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, wide_layout)), 0)
        places = gl.expand_dims((h * GROUP + member).to(gl.int64) * dquery_head + queries.to(gl.int64) * dquery_row, 1) + cols
        inside = gl.expand_dims((member < GROUP) & (queries < q_len), 1)
        gl.store(dquery + b.to(gl.int64) * dquery_batch + places, (dq * scale).to(dquery.dtype.element_ty), mask=inside)


@gluon.jit
def _gather_bwd_hopper_kernel(
    query, key, value, scores, start, stop, lists, counts, wholes, dout, lse, delta, dquery, dkey, dvalue, dscores,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    dout_batch, dout_head, dout_row, dquery_batch, dquery_head, dquery_row,
    kv_heads, q_len, kv_len, longest, blocks, total, scale,
    GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr, HAS_SCORES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, GATHER_WARPS: gl.constexpr, GATHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = query.dtype.element_ty
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], DTYPE)
    pairs: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_N], DTYPE)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    ring = make_ring(DTYPE, BLOCK_N, D, STAGES, 2)
    q_s = gl.allocate_shared_memory(DTYPE, [2, 64, D], rows)
    do_s = gl.allocate_shared_memory(DTYPE, [2, 64, D], rows)
    p_s = gl.allocate_shared_memory(DTYPE, [2 * BUFFERS, 64, BLOCK_N], pairs)
    ds_s = gl.allocate_shared_memory(DTYPE, [2 * BUFFERS, 64, BLOCK_N], pairs)
    ones_s = gl.allocate_shared_memory(DTYPE, [8, 64], gl.NVMMASharedLayout.get_default_for([8, 64], DTYPE))
    ones_s.store(gl.full([8, 64], 1.0, DTYPE, layout=gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])))
    fence_async_shared()
    q_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    rows_empty = gl.allocate_shared_memory(gl.int64, [1], bars)
    shared_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], bars)
    shared_empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], bars)
    mbarrier.init(q_full, count=2)
    mbarrier.init(rows_empty, count=2)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(shared_full.index(i), count=2)
        mbarrier.init(shared_empty.index(i), count=2)
    barriers = (q_full, shared_full, shared_empty, rows_empty)
    numbers = (
        query_batch, query_head, query_row, dout_batch, dout_head, dout_row, dquery_batch, dquery_head, dquery_row,
        kv_heads, q_len, kv_len, blocks, total, scale,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _differentiate,
                (
                    query, dout, dquery, lse, delta, dvalue, dscores, counts, wholes, q_s, do_s, p_s, ds_s, ones_s, ring, barriers,
                    numbers, 0, GROUP, GROUP_PAD, BLOCK_Q, BLOCK_N, D, STAGES, BUFFERS, HAS_SCORES,
                ),
            ),
            (
                _differentiate,
                (
                    query, dout, dquery, lse, delta, dkey, dscores, counts, wholes, q_s, do_s, p_s, ds_s, ones_s, ring, barriers,
                    numbers, 1, GROUP, GROUP_PAD, BLOCK_Q, BLOCK_N, D, STAGES, BUFFERS, HAS_SCORES,
                ),
            ),
            (
                _gather,
                (
                    key, value, scores, start, stop, lists, counts, ring, key_batch, key_head, key_row,
                    value_batch, value_head, value_row, kv_heads, kv_len, longest, blocks, total,
                    BLOCK_N, D, STAGES, HAS_SCORES, True,
                ),
            ),
        ],
        [4, GATHER_WARPS],
        [CONSUMER_REGISTERS, GATHER_REGISTERS],
    )  # fmt: skip
