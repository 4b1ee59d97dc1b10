"""Forward for sm_90, in Gluon: one warpgroup gathers the kept keys, three multiply.

    a program's block: BLOCK_Q queries x GROUP heads of one key head = 192 rows, 64 for each consumer
    gatherer: rows of K and V by index (cp.async, 16 bytes a lane) into a ring of STAGES tiles; bias and interval of each key with K
    consumer: S = Q K^T, online softmax, O += P V, while the other consumers are elsewhere in theirs

The list of a block holds first the keys that all its queries see, so only its last tiles are masked: three comparisons and selects for
each score would cost as much as the softmax itself. Programs are persistent, and the gatherer is already in the next block while the
consumers finish theirs. Source: paper 004, Eq. 5 to 10. Minimum traffic: (keep + BLOCK_Q) / BLOCK_Q rows of K and V a query, from L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def make_ring(
    DTYPE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr,
):  # fmt: skip
    """(keys, values, bias, start, stop, index, full, empty), STAGES of each."""
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], DTYPE)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D], tile)
    vs = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D], tile)
    bias_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], flat)
    start_s = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], flat)
    stop_s = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], flat)
    index_s = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return ks, vs, bias_s, start_s, stop_s, index_s, full, empty


@gluon.jit
def _announce(full, tile, behind: gl.constexpr, STAGES: gl.constexpr):
    """Give the consumers the tile asked for `behind` tiles ago. The fence is here, where there is time, and not with them: the
    copies write as threads do, the products read as the copy engine does."""
    async_copy.wait_group(behind)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(full.index((tile + STAGES) % STAGES), count=1, pred=tile >= 0)


@gluon.jit
def _gather(
    key, value, scores, start, stop, lists, counts, ring,
    key_batch, key_head, key_row, value_batch, value_head, value_row, kv_heads, kv_len, longest, blocks, total,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, HAS_SCORES: gl.constexpr, INDICES: gl.constexpr,
):  # fmt: skip
    """The gathering warpgroup: every tile of every block of this program, in the order of the consumers."""
    ks, vs, bias_s, start_s, stop_s, index_s, full, empty = ring
    ACROSS: gl.constexpr = D // 8  # lanes along a row
    tile_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, tile_layout)
    flat_layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, tile_layout))
    rows = gl.arange(0, BLOCK_N, layout=row_layout)
    flat = gl.arange(0, BLOCK_N, layout=flat_layout)
    done = 0
    for work in range(gl.program_id(0), total, gl.num_programs(0)):
        owner = work // blocks
        b, h = (owner // kv_heads).to(gl.int64), (owner % kv_heads).to(gl.int64)  # type: ignore[attr-defined]
        keys = key + b * key_batch + h * key_head
        values = value + b * value_batch + h * value_head
        of_owner = owner.to(gl.int64) * kv_len
        listed = lists + work.to(gl.int64) * longest  # type: ignore[attr-defined]
        count = gl.load(counts + work)
        index = gl.load(listed + rows, mask=rows < count, other=0)
        place = gl.load(listed + flat, mask=flat < count, other=0)
        next_index = gl.load(listed + BLOCK_N + rows, mask=BLOCK_N + rows < count, other=0)
        next_place = gl.load(listed + BLOCK_N + flat, mask=BLOCK_N + flat < count, other=0)
        for first in range(0, count, BLOCK_N):
            # indices are asked for two tiles ahead: one tile's copies are issued in less time than a load takes
            ahead = first + 2 * BLOCK_N
            later_index = gl.load(listed + ahead + rows, mask=ahead + rows < count, other=0)
            later_place = gl.load(listed + ahead + flat, mask=ahead + flat < count, other=0)
            slot = done % STAGES
            mbarrier.wait(empty.index(slot), ((done // STAGES) & 1) ^ 1)
            offsets = gl.expand_dims(index.to(gl.int64) * key_row, 1) + gl.expand_dims(cols, 0)
            async_copy.async_copy_global_to_shared(ks.index(slot), keys + offsets)
            async_copy.async_copy_global_to_shared(start_s.index(slot), start + of_owner + place)
            async_copy.async_copy_global_to_shared(stop_s.index(slot), stop + of_owner + place)
            if INDICES:
                async_copy.async_copy_global_to_shared(index_s.index(slot), listed + gl.minimum(first + flat, count - 1))
            if HAS_SCORES:
                async_copy.async_copy_global_to_shared(bias_s.index(slot), scores + of_owner + place)
            offsets = gl.expand_dims(index.to(gl.int64) * value_row, 1) + gl.expand_dims(cols, 0)
            async_copy.async_copy_global_to_shared(vs.index(slot), values + offsets)
            async_copy.commit_group()
            # one behind, not two: the consumers want the tile after the one that they have just begun
            _announce(full, done - 1, 1, STAGES)
            index, place = next_index, next_place
            next_index, next_place = later_index, later_place
            done += 1
    _announce(full, done - 1, 0, STAGES)


@gluon.jit
def _scores(
    s, bias, start_s, stop_s, at, first, whole, count, scale, BLOCK_N: gl.constexpr, HAS_SCORES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """scale * Q K^T + bias, -inf where a query does not see a key."""
    column: gl.constexpr = gl.SliceLayout(0, layout)
    s = s * scale
    if HAS_SCORES:
        s += gl.expand_dims(bias, 0)
    if first + BLOCK_N > whole:  # keys that some query does not see, or the end of the list
        begins = start_s.load(column)
        listed = first + gl.arange(0, BLOCK_N, layout=column) < count
        ends = gl.where(listed, stop_s.load(column), -2147483648)
        positions = gl.expand_dims(at, 1)
        s = gl.where((positions >= gl.expand_dims(begins, 0)) & (positions < gl.expand_dims(ends, 0)), s, float("-inf"))
    return s


@gluon.jit
def _softmax_step(s, row_max, row_sum):
    """(P, row maximum, row sum, factor on what was summed before)."""
    new_max = gl.maximum(row_max, gl.max(s, 1))
    shift = gl.where(new_max == float("-inf"), 0.0, new_max) * _LOG2E  # no key seen yet: not -inf - -inf
    weights = gl.exp2(s * _LOG2E - gl.expand_dims(shift, 1))
    factor = gl.exp2(row_max * _LOG2E - shift)
    return weights, new_max, row_sum * factor + gl.sum(weights, 1), factor


@gluon.jit
def _consume(
    query, out, lse, counts, wholes, q_s, ring, numbers, half,
    GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, HAS_SCORES: gl.constexpr,
):  # fmt: skip
    """A consuming warpgroup: rows `64 * half` and on of every block of this program."""
    ks, vs, bias_s, start_s, stop_s, _, full, empty = ring
    query_batch, query_head, query_row, out_batch, out_head, out_row, kv_heads, q_len, kv_len, blocks, total, scale = numbers
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    tile_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    operand: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    cols = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, tile_layout)), 0)
    q_tile = q_s.index(half)
    row = 64 * half + gl.arange(0, 64, layout=gl.SliceLayout(1, tile_layout))  # of the block, in memory order
    member = row % GROUP_PAD
    done = 0
    work = gl.program_id(0)
    block, owner = work % blocks, work // blocks
    b, h = owner // kv_heads, owner % kv_heads
    count = gl.load(counts + work)
    whole = gl.load(wholes + work)
    queries = block * BLOCK_Q + row // GROUP_PAD
    inside = gl.expand_dims((member < GROUP) & (queries < q_len), 1)
    heads = (h * GROUP + member).to(gl.int64)
    places = gl.expand_dims(heads * query_head + queries.to(gl.int64) * query_row, 1) + cols
    q_rows = gl.load(query + b.to(gl.int64) * query_batch + places, mask=inside, other=0.0)
    while work < total:
        q_tile.store(q_rows)
        fence_async_shared()
        gl.thread_barrier()
        at = block * BLOCK_Q + (64 * half + gl.arange(0, 64, layout=gl.SliceLayout(1, score_layout))) // GROUP_PAD
        at += kv_len - q_len
        row_max = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, score_layout))
        row_sum = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, score_layout))
        acc = gl.zeros([64, D], gl.float32, layout=out_layout)
        zero = gl.zeros([64, BLOCK_N], gl.float32, layout=score_layout)
        for first in range(0, count, BLOCK_N):
            slot = done % STAGES
            mbarrier.wait(full.index(slot), (done // STAGES) & 1)
            # before the product: behind it, loads wait 350 clocks for the shared memory that it reads
            bias = bias_s.index(slot).load(gl.SliceLayout(0, score_layout))
            s = warpgroup_mma(q_tile, ks.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            s = _scores(
                s, bias, start_s.index(slot), stop_s.index(slot), at, first, whole, count, scale, BLOCK_N, HAS_SCORES, score_layout,
            )  # fmt: skip
            weights, row_max, row_sum, factor = _softmax_step(s, row_max, row_sum)
            acc *= gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, out_layout)), 1)
            p = gl.convert_layout(weights.to(vs.dtype), operand)
            acc = warpgroup_mma(p, vs.index(slot), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=(acc, p))
            gl.thread_barrier()  # all four warps are done with what is given back
            mbarrier.arrive(empty.index(slot), count=1)
            done += 1
        # asked for before this block is written: their latency passes meanwhile
        next_work = work + gl.num_programs(0)
        asked = gl.minimum(next_work, total - 1)
        next_block, owner = asked % blocks, asked // blocks
        next_b, next_h = owner // kv_heads, owner % kv_heads
        next_queries = next_block * BLOCK_Q + row // GROUP_PAD
        next_inside = gl.expand_dims((member < GROUP) & (next_queries < q_len), 1)
        next_heads = (next_h * GROUP + member).to(gl.int64)
        places = gl.expand_dims(next_heads * query_head + next_queries.to(gl.int64) * query_row, 1) + cols
        q_rows = gl.load(query + next_b.to(gl.int64) * query_batch + places, mask=next_inside, other=0.0)
        count = gl.load(counts + asked)
        whole = gl.load(wholes + asked)

        inverse = gl.convert_layout(gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum), gl.SliceLayout(1, out_layout))
        q_tile.store((acc * gl.expand_dims(inverse, 1)).to(vs.dtype))
        log_sum = gl.where(row_sum == 0.0, float("-inf"), gl.log2(row_sum) * _LN2 + row_max)
        of_scores = 64 * half + gl.arange(0, 64, layout=gl.SliceLayout(1, score_layout))
        at = block * BLOCK_Q + of_scores // GROUP_PAD
        ptrs = lse + ((b * kv_heads + h) * GROUP + of_scores % GROUP_PAD).to(gl.int64) * q_len + at
        gl.store(ptrs, log_sum, mask=(of_scores % GROUP_PAD < GROUP) & (at < q_len))
        places = gl.expand_dims(heads * out_head + queries.to(gl.int64) * out_row, 1) + cols
        gl.store(out + b.to(gl.int64) * out_batch + places, q_tile.load(tile_layout), mask=inside)
        work, block, b, h = next_work, next_block, next_b, next_h
        queries, inside, heads = next_queries, next_inside, next_heads


@gluon.jit
def _gather_fwd_hopper_kernel(
    query, key, value, scores, start, stop, lists, counts, wholes, out, lse,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    out_batch, out_head, out_row, kv_heads, q_len, kv_len, longest, blocks, total, scale,
    GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, HAS_SCORES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, GATHER_WARPS: gl.constexpr, GATHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = query.dtype.element_ty
    q_s = gl.allocate_shared_memory(DTYPE, [3, 64, D], gl.NVMMASharedLayout.get_default_for([64, D], DTYPE))
    ring = make_ring(DTYPE, BLOCK_N, D, STAGES, 3)
    numbers = (query_batch, query_head, query_row, out_batch, out_head, out_row, kv_heads, q_len, kv_len, blocks, total, scale)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    query, out, lse, counts, wholes, q_s, ring, numbers, 0,
                    GROUP, GROUP_PAD, BLOCK_Q, BLOCK_N, D, STAGES, HAS_SCORES,
                ),
            ),
            (
                _consume,
                (
                    query, out, lse, counts, wholes, q_s, ring, numbers, 1,
                    GROUP, GROUP_PAD, BLOCK_Q, BLOCK_N, D, STAGES, HAS_SCORES,
                ),
            ),
            (
                _consume,
                (
                    query, out, lse, counts, wholes, q_s, ring, numbers, 2,
                    GROUP, GROUP_PAD, BLOCK_Q, BLOCK_N, D, STAGES, HAS_SCORES,
                ),
            ),
            (
                _gather,
                (
                    key, value, scores, start, stop, lists, counts, ring, key_batch, key_head, key_row,
                    value_batch, value_head, value_row, kv_heads, kv_len, longest, blocks, total, BLOCK_N, D, STAGES, HAS_SCORES, False,
                ),
            ),
        ],
        [4, 4, GATHER_WARPS],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, GATHER_REGISTERS],
    )  # fmt: skip
