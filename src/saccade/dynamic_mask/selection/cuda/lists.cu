// The keys that each block of queries reads, found in one launch. See lists.py.
//
//   A thread block owns a stretch of consecutive blocks of queries. It collects the keys that some query of the stretch sees, in order of
//   position, into shared memory; then a warp for each block of queries lists the keys that all its queries see, behind them those that
//   only some do.
//
// Shared memory:   | intervals of the collected keys: `room` pairs | their positions: `room` | of_warps: keys that each warp found in a turn |
//
// Compiled with THREADS. The source uses only CUDA C++ and the instructions of dependent.cuh.
#include "dependent.cuh"

typedef unsigned int u32;

constexpr int WARPS = THREADS / 32;
constexpr int MINE = 8;  // keys of a thread and turn: their loads wait together
extern __shared__ __align__(128) unsigned char shared_memory[];

struct Interval {
    int start, stop;  // positions start <= i < stop see the key
};

// the intervals of a thread's keys of one turn, and where the turn's first key begins
struct Turn {
    Interval keys[MINE];
    int begins;

    // key n of this thread, of all keys
    static __device__ __forceinline__ int key(int begin, int n) { return begin + (int(threadIdx.x) / 32 * MINE + n) * 32 + int(threadIdx.x) % 32; }

    __device__ __forceinline__ void load(const int* start, const int* stop, int kv_len, int begin) {
        begins = begin < kv_len ? start[begin] : 2147483647;
#pragma unroll
        for (int n = 0; n < MINE; n++) {
            bool there = key(begin, n) < kv_len;
            keys[n].start = there ? start[key(begin, n)] : 2147483647;
            keys[n].stop = there ? stop[key(begin, n)] : 0;
        }
    }
};

// keys that some position of first .. last sees, at most `room`; returns how many
__device__ __forceinline__ int collect(
    const int* start, const int* stop, int kv_len, int first, int last, int room, Interval* intervals, int* keys, int* of_warps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int found = 0;
    Turn now, next;
    now.load(start, stop, kv_len, 0);
    // `start` does not decrease: behind a key that begins too late nothing is seen
    for (int begin = 0; now.begins <= last; begin += MINE * THREADS) {
        next.load(start, stop, kv_len, begin + MINE * THREADS);  // under way while this turn is processed
        u32 takes[MINE];
        int mine = 0;
#pragma unroll
        for (int n = 0; n < MINE; n++) {
            const Interval& seen = now.keys[n];
            takes[n] = __ballot_sync(~0u, seen.start <= last && seen.stop > first && seen.stop > seen.start);
            mine += __popc(takes[n]);
        }
        if (lane == 0) of_warps[warp] = mine;
        __syncthreads();
        int place = found;
        for (int w = 0; w < WARPS; w++) {
            place += w < warp ? of_warps[w] : 0;
            found += of_warps[w];
        }
#pragma unroll
        for (int n = 0; n < MINE; n++) {
            int at = place + __popc(takes[n] & ((1u << lane) - 1));
            if (takes[n] >> lane & 1 && at < room) {
                intervals[at] = now.keys[n];
                keys[at] = Turn::key(begin, n);
            }
            place += __popc(takes[n]);
        }
        __syncthreads();
        now = next;
    }
    return min(found, room);
}

__device__ __forceinline__ int warp_sum(int x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

// From which candidate on, in turns of 32 from `begin`, one is still seen at position `first`. All lanes of a warp.
__device__ __forceinline__ int first_seen(const Interval* intervals, int begin, int offered, int first) {
    const int lane = threadIdx.x % 32;
    while (begin < offered && !__ballot_sync(~0u, begin + lane < offered && intervals[begin + lane].stop > first)) begin += 32;
    return begin;
}

// how many candidates have begun at position `last`: their starts do not decrease
__device__ __forceinline__ int begun(const Interval* intervals, int begin, int offered, int last) {
    while (begin < offered) {
        int middle = (begin + offered) / 2;
        if (intervals[middle].start <= last)
            begin = middle + 1;
        else
            offered = middle;
    }
    return offered;
}

// The list of the positions first .. last, of candidates from .. offered - 1: in `out`, at most `longest`. All lanes of a warp.
__device__ __forceinline__ void list_block(
    const Interval* intervals, const int* keys, int from, int offered, int first, int last, int longest, int* out, int* count,
    int* whole_count) {
    const int lane = threadIdx.x % 32;
    int wholes = 0;
#pragma unroll 4
    for (int i = from + lane; i < offered; i += 32) wholes += intervals[i].start <= first && intervals[i].stop > last;
    wholes = warp_sum(wholes);
    int whole_place = 0, other_place = wholes;
#pragma unroll 4
    for (int begin = from; begin < offered; begin += 32) {
        int i = begin + lane;
        Interval seen = i < offered ? intervals[i] : Interval{2147483647, 0};
        bool whole = seen.start <= first && seen.stop > last;
        bool other = seen.start <= last && seen.stop > first && !whole;
        u32 all_whole = __ballot_sync(~0u, whole), all_other = __ballot_sync(~0u, other);
        int place = (whole ? whole_place : other_place) + __popc((whole ? all_whole : all_other) & ((1u << lane) - 1));
        if ((whole || other) && place < longest) out[place] = keys[i];
        whole_place += __popc(all_whole);
        other_place += __popc(all_other);
    }
    if (lane == 0) {
        *count = min(other_place, longest);
        *whole_count = wholes;
    }
}

// keys [rows, blocks, longest], counts and wholes [rows, blocks]. block: queries; of_stretch: blocks; base: position of the first query.
// sums, `sum_count` times four floats, and more, `more_count` floats, become 0, for a kernel behind this one that adds to them.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) query_lists(
    const int* start, const int* stop, int* keys, int* counts, int* wholes, float4* sums, float* more, int kv_len, int base, int blocks,
    int block, int of_stretch, int stretches, int room, int longest, long long sum_count, long long more_count) {
    __shared__ int of_warps[WARPS];
    let_next_kernel_start();
    wait_for_kernel_ahead();
    const long long thread = blockIdx.x * (long long)THREADS + threadIdx.x, threads = gridDim.x * (long long)THREADS;
    for (long long i = thread; i < sum_count; i += threads) sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (long long i = thread; i < more_count; i += threads) more[i] = 0.0f;
    Interval* intervals = reinterpret_cast<Interval*>(shared_memory);
    int* candidates = reinterpret_cast<int*>(intervals + room);
    const int row = blockIdx.x / stretches, from = blockIdx.x % stretches * of_stretch, to = min(from + of_stretch, blocks);
    const long long of_row = (long long)row * kv_len;
    const int last = min(base + to * block, kv_len) - 1;
    const int offered =
        collect(start + of_row, stop + of_row, kv_len, base + from * block, last, room, intervals, candidates, of_warps);
    int begin = 0;  // no position of this warp's later blocks sees a candidate before this one
    for (int n = from + threadIdx.x / 32; n < to; n += WARPS) {
        const long long slot = (long long)row * blocks + n;
        const int first = base + n * block, last = min(first + block, kv_len) - 1;
        // where scores rise, a stretch has three times the candidates that a block sees
        begin = first_seen(intervals, begin, offered, first);
        const int end = begun(intervals, begin, offered, last);
        list_block(intervals, candidates, begin, end, first, last, longest, keys + slot * longest, counts + slot, wholes + slot);
    }
}
