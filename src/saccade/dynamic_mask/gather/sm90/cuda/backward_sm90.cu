// Backward of dynamic mask attention on sm_90a in one pass over gathered keys; dK and dV are added up by the copy engine. See README.md of this family.
//
//   two warps             K and V of the listed keys into a ring of STAGES tiles (gather.cuh)
//   two more              hand dV and dK to the copy engine, which adds them up
//   each of two           64 rows:  S = Q K^T, dP = dO V^T, P = exp(S - lse), dS = P (dP - delta), dQ += dS K;  then, of the tile's keys
//   and all 128 rows,     the first  dV = P^T dO,  the second  dK = dS^T Q and dscores = dS^T 1
//
// A block has PARTS parts of 128 rows, which meet a tile one after the other, dV and dK of its keys summed over them in registers: at D = 64
// two, so that gathers and additions serve twice the rows. The order of the products (docs/notes/dynamic_mask.md has others and their times):
//
//   two parts     S of the next part; between its exponentials dP of that and dV or dK of this one; dQ of the next
//   one (D 128)   dQ and dV or dK of this tile, S and dP of the next: P and dS of two tiles, or three tiles, have no place
//
// Programs are persistent. Rows of a block: row r is query r / GROUP_PAD and head r % GROUP_PAD of a key head's group, GROUP_PAD a power of two.
// The additions must overlap with everything else. Each warp puts its 16 keys into an area of its own, with the address of every row behind
// it, and goes on to the next tile, whose products are under way by then. The queue of the copy engine is short, and a warp that adds to a full queue
// stalls. So a separate warp does only that. An area is written again once its rows have been read, a tile later.
//
// Next to large scores lse has lost the logarithm of the sum. The list of a block with such a row is gathered twice: first for the exact
// maximum and sum of its rows (`measure`), then for the gradients, with weights relative to the maximum, and dO and delta, in which
// every gradient is linear, divided by the sum. So the walk over the keys needs no extra instruction.
//
// Lane 4g + t of a warp holds rows g and g + 8 of its 16, written [h] for h = 0, 1, and columns 8i + 2t + {0, 1} of each column group i.
//
// Shared memory, R = ROWS / 64 row groups of a block (`GatherShared`):
//
//   | Q: R x 64 rows | dO: R x 64 rows | P and dS of part 0 | of part 1 | ones | ring: K, V, notes, full and empty (gather.cuh) |
//   | areas of 8 warps: 16 rows of dV or dK, addresses, sums | delta: ROWS | multiplied | staged, drained of each area |
//
// With one part (D = 128) dS lies where V of its tile was.
//
// Compiled with HEAD_DIM (64, 128), BLOCK_N 64, STAGES, HAS_SCORES, INDICES 1, BF16.
#define GATHER_WARPS 2
#include "backward_consumer.cuh"
#include "backward_adder.cuh"

// The list of every block of this program, twice where a row is far: what `Consumer::measure` walks, then what the gradients do. Both sides read the
// same numbers.
__device__ __forceinline__ void gather_lists(Gatherer& gatherer, const Given& given) {
    for (int index = blockIdx.x; index < given.total; index += gridDim.x) {
        QueryBlock work(index, given.owners, given.blocks);
        float farthest = 0.0f;
#pragma unroll
        for (int row = 0; row < ROWS; row += 32) {
            int query, head;
            bool real = locate_row(given, work, row + thread_of() % 32, query, head);
            farthest = fmaxf(farthest, real ? distance(given.lse[place_of(given, work, query, head)]) : 0.0f);
        }
        int walks = 0;
        do gatherer.gather(work);
        while (++walks < 2 && __any_sync(~0u, farthest > FAR));
    }
    gatherer.announce();
}

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1) backward_sm90(
    const Number* query, const Number* key, const Number* value, const float* scores, const int* start, const int* stop,
    const int* lists, const int* counts, const int* wholes, const Number* dout, const Number* out, const float* lse, const float* dlse,
    Number* dquery, float* dkey, float* dvalue, float* dscores, long long query_batch, long long query_head, long long query_row,
    long long key_batch, long long key_head, long long value_batch, long long value_head, long long dout_batch, long long dout_head,
    long long dout_row, long long out_batch, long long out_head, long long out_row, long long dquery_batch, long long dquery_head,
    long long dquery_row, u32 key_row, u32 value_row, int kv_heads, int group, int group_shift, int q_len, int kv_len, int longest,
    int blocks, int owners, int total, float exponent, float scale) {
    extern __shared__ unsigned char memory[];
    GatherShared shared(memory);
    if (threadIdx.x == 0) {
        shared.ring().init(4 * WARPGROUPS);
        barrier_init(shared.multiplied(), 4 * WARPGROUPS);
        for (int warp = 0; warp < 4 * WARPGROUPS; warp++) {
            barrier_init(shared.staged(warp), 1);
            barrier_init(shared.drained(warp), 1);
        }
        barrier_fence();
    }
    // rows of 64 ones
#pragma unroll
    for (int at = 0; at < ONES_BYTES; at += 1024)
        if (threadIdx.x < 256) store_note(shared.ones() + at + 4 * threadIdx.x, BF16 ? 0x3F803F80 : 0x3C003C00);
    fence_async();
    __syncthreads();
    const Given given{.query = query, .dout = dout, .out = out, .lse = lse, .dlse = dlse, .counts = counts, .wholes = wholes,
                      .dquery = dquery, .dkey = dkey, .dvalue = dvalue, .dscores = dscores,
                      .query_batch = query_batch, .query_head = query_head, .query_row = query_row, .dout_batch = dout_batch, .dout_head = dout_head, .dout_row = dout_row,
                      .out_batch = out_batch, .out_head = out_head, .out_row = out_row, .dquery_batch = dquery_batch, .dquery_head = dquery_head, .dquery_row = dquery_row,
                      .kv_heads = kv_heads, .group = group, .group_shift = group_shift, .q_len = q_len, .kv_len = kv_len,
                      .blocks = blocks, .owners = owners, .total = total, .exponent = exponent, .scale = scale};
    // the compiler takes what comes from a shuffle for the same in all lanes
    int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
    if (warp < 4) {
        leave_registers<PRODUCER_REGISTERS>();
        if (warp < GATHER_WARPS) {
            const Gathered gathered{.key = key, .value = value, .scores = scores, .start = start, .stop = stop, .lists = lists, .counts = counts,
                                    .key_batch = key_batch, .key_head = key_head, .value_batch = value_batch, .value_head = value_head,
                                    .key_row = key_row, .value_row = value_row, .kv_heads = kv_heads, .kv_len = kv_len,
                                    .longest = longest, .blocks = blocks, .owners = owners, .wholes = nullptr};
            Gatherer gatherer(gathered, shared.ring());
            gather_lists(gatherer, given);
        } else if (warp == 2) {
            Adder<0>{given, shared}.run();
        } else {
            Adder<1>{given, shared}.run();
        }
    } else {
        take_registers<CONSUMER_REGISTERS>();
        if (warp < 8)
            Consumer<0>(given, shared).run();
        else
            Consumer<1>(given, shared).run();
    }
}
