// Tiles of tokens: a thread block takes TILE consecutive tokens of a head, whatever sequences they belong to, and each warp 16 of them. The kernels
// share the bounds of tokens, the rows of their sequences in shared memory, and the pairs that are seen.
//
// A warp multiplies the rows of its own tokens' sequences alone: at a mean of 20 tokens those are 41, and of all 64 tokens of a tile 89.
// Rows of a tile in shared memory begin at any row of a chunk. A step of 16 rows from there reads up to 15 rows behind the last, which are zeros.
//
// Macros: those of sequence.cuh (CAUSAL 0 or 1), DROPOUT (1: `bits` says which weights survive).
#pragma once
#include "accumulator.cuh"
#include "prefetch.cuh"
#include "sequence.cuh"

constexpr int TILE = 16 * WARPS;
constexpr int MOST = ROWS - 15;  // rows of a chunk
static_assert(MOST >= TILE, "a chunk holds the tokens of the tile");

// a number that comes in the place of a pointer: pointers alone change from call to call of a launch
__device__ __forceinline__ int number_of(const void* given) {
    return int(reinterpret_cast<unsigned long long>(given));
}

// The sequences of a call, begin and end of sequence s in offsets[s] and offsets[s + 1].
struct Sequences {
    const int* offsets;
    int number, total;  // total: tokens

    // clamped: offsets come from the device, and nobody has checked them
    __device__ __forceinline__ int at(int i) const { return min(max(offsets[i], 0), total); }
};

// The first row of each of the tile's tokens' sequence, and the row behind its last, in shared memory. Both are the end of all behind the last sequence.
//
// A block finds them itself: up to 64 sequences in one round of loads, up to 2,048 in two. A launch that finds them for all blocks takes 2 to 4 us.
struct Bounds {
    int* const found;  // first rows, then last ones
    const int begin;   // the first token

    static constexpr u32 BYTES = 8 * TILE;
    static constexpr int FEW = THREADS / 2;

    __device__ __forceinline__ int first(int token) const { return found[token - begin]; }
    __device__ __forceinline__ int last(int token) const { return found[TILE + token - begin]; }

    // A sequence at most FEW before that of the first token, by each warp for itself.
    __device__ __forceinline__ int sequence_before(const Sequences& of) const {
        int low = 0, high = of.number;
#pragma unroll 1
        while (high - low > FEW) {
            const int step = (high - low + 31) / 32, probe = low + (int(threadIdx.x) % 32 + 1) * step;
            const int steps = __popc(__ballot_sync(~0u, probe <= of.number && of.offsets[min(probe, of.number)] <= begin));
            high = min(high, low + (steps + 1) * step - 1);
            low = min(low + steps * step, high);
        }
        return low;
    }

    __device__ __forceinline__ void find(const Sequences& of) const {
        const int end = of.at(of.number), behind = min(begin + TILE, end);
        for (int i = threadIdx.x; i < 2 * TILE; i += THREADS) found[i] = end;
        bool are_left = true;
#pragma unroll 1
        for (int sequence = sequence_before(of) + int(threadIdx.x); are_left; sequence += THREADS) {
            const bool is_there = sequence < of.number;
            const int first = is_there ? of.at(sequence) : 0, last = is_there ? of.at(sequence + 1) : 0;
            __syncthreads();
            for (int i = max(first - begin, 0); i < min(last - begin, TILE); i++) found[i] = first, found[TILE + i] = last;
            // between two tokens of a tile there may be any number of empty sequences
            are_left = __syncthreads_or(threadIdx.x == THREADS - 1 && sequence + 1 < of.number && last < behind);
        }
    }
};

// The tokens that a block computes together, begin .. stop - 1, and the rows of their sequences, low .. high - 1: all of the tile, or, once a NaN was
// found, those of one sequence at a time. A weight of 0 times a NaN is a NaN, and that of one sequence must not reach another.
struct Groups {
    const Bounds& bounds;
    const int behind;
    int begin, stop, low, high;
    bool alone = false;

    __device__ __forceinline__ Groups(const Bounds& bounds, int begin, int total)
        : bounds(bounds), behind(min(begin + TILE, total)), begin(begin), stop(behind) { find(); }
    __device__ __forceinline__ bool are_left() const { return begin < behind; }
    __device__ __forceinline__ void find() { low = bounds.first(begin), high = bounds.last(stop - 1); }

    __device__ __forceinline__ void next(bool found_nan) {
        const bool several = found_nan && !alone && bounds.first(stop - 1) != low;
        alone |= several;
        if (!several) begin = stop;
        if (begin >= behind) return;
        const int end = bounds.last(begin);
        stop = alone && end > begin ? min(end, behind) : behind;
        find();
    }
};

struct Range {
    int first;
    u32 length;

    __device__ __forceinline__ bool has(int x) const { return u32(x - first) < length; }
};

// The 16 tokens of a warp. This lane has rows g and g + 8, [h].
struct Own {
    int token;        // of row g
    int begin, stop;  // those of the warp that are in the group
    int low, high;    // rows of their sequences
    bool there[2];    // in the group
    int first[2], last[2];

    __device__ __forceinline__ Own(const Bounds& bounds, const Groups& group, int warp_begin, int lane) {
        token = warp_begin + lane / 4;
        begin = max(group.begin, warp_begin), stop = min(group.stop, warp_begin + 16);
        low = high = 0;
        // within the group's, whatever the offsets say
        if (begin < stop) low = max(bounds.first(begin), group.low), high = min(bounds.last(stop - 1), group.high);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = token + 8 * h;
            there[h] = row >= group.begin && row < group.stop;
            first[h] = there[h] ? bounds.first(row) : 0;
            last[h] = there[h] ? bounds.last(row) : 0;
        }
    }
    // The keys that a query sees, and the queries that see a key, before `end`: behind it a step reads zeros.
    __device__ __forceinline__ Range keys(int h, int end) const {
        return {first[h], u32(max(min(end, CAUSAL ? min(last[h], token + 8 * h + 1) : last[h]) - first[h], 0))};
    }
    __device__ __forceinline__ Range queries(int h, int end) const {
        const int from = CAUSAL ? token + 8 * h : first[h];
        return {from, u32(max(min(end, last[h]) - from, 0))};
    }
    __device__ __forceinline__ int end_of_keys() const { return CAUSAL ? min(high, stop) : high; }
    __device__ __forceinline__ int begin_of_queries() const { return CAUSAL ? max(low, begin) : low; }
};

// the rows of a head
struct Rows {
    const Number* at;
    long long stride;

    __device__ __forceinline__ Rows(const Number* tensor, Strides strides, int head) : at(tensor + strides.at(0, head)), stride(strides.row) {}
    __device__ __forceinline__ const Number* row(int token) const { return at + token * stride; }
};

// Asks for the tile's own rows of a tensor before the bounds tell which others are needed: memory answers while the block looks for them.
__device__ __forceinline__ void prefetch_rows(const Rows& rows, int begin, int total, int head_dim, int first_thread) {
    const int row = int(threadIdx.x) - first_thread;
    if (row >= 0 && row < min(TILE, total - begin)) prefetch_to_l2(rows.row(begin + row), 2 * head_dim);
}

// Starts the copies of rows of two tensors, from token `first` on, into two tiles, with zeros from head_dim on.
__device__ __forceinline__ void copy_rows(u32 tile, const Rows& one, u32 other_tile, const Rows& other, int first, int rows, int zeros, int head_dim) {
    const Number *from = one.row(first), *other_from = other.row(first);
    for (int i = threadIdx.x; i < (rows + zeros) * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool inside = row < rows && 8 * chunk < head_dim;
        copy_16(chunk_at(tile, row, chunk), inside ? from + row * one.stride + 8 * chunk : from, inside);
        copy_16(chunk_at(other_tile, row, chunk), inside ? other_from + row * other.stride + 8 * chunk : other_from, inside);
    }
}

// A fragment of 16 columns `step`, if that of the first 16 lies at `first`: the number of a step has bits of a chunk's place alone.
__device__ __forceinline__ u32 at_step(u32 first, int step) {
    return first ^ 32 * step;
}

// the left operand of a warp's 16 rows, from `row` of a tile on
__device__ __forceinline__ void load_left(u32 (&to)[HEAD_DIM / 16][4], u32 tile, int row, int lane) {
    const u32 first = left_at(tile, row, 0, lane);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) load_matrices(to[i], at_step(first, i));
}

// d = A B^T for N rows of B, from `row` of a tile on
template <int N>
__device__ __forceinline__ void multiply_rows(float (&d)[N / 2], const u32 (&a)[HEAD_DIM / 16][4], u32 tile, int row, int lane) {
    const u32 first = right_at(tile, row, 0, lane);
#pragma unroll
    for (int e = 0; e < N / 2; e++) d[e] = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++)
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            u32 b[4];
            load_matrices(b, at_step(first + 16 * n * PITCH, i));
            multiply(d + 8 * n, a[i], b[0], b[1]);
            multiply(d + 8 * n + 4, a[i], b[2], b[3]);
        }
}

// d += W B for N rows of B; w: a row of W is as wide, rounded
template <int N>
__device__ __forceinline__ void add_rows(float (&d)[HEAD_DIM / 2], const u32 (&w)[N / 4], u32 tile, int row, int lane) {
    const u32 first = left_at(tile, row, 0, lane);
#pragma unroll
    for (int n = 0; n < N / 16; n++)
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) {
            u32 b[4];
            load_transposed(b, at_step(first + 16 * n * PITCH, i));
            multiply(d + 8 * i, w + 4 * n, b[0], b[1]);
            multiply(d + 8 * i + 4, w + 4 * n, b[2], b[3]);
        }
}

template <int N>
__device__ __forceinline__ void round_weights(u32 (&words)[N / 4], const float (&d)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) words[i] = pack(d[2 * i], d[2 * i + 1]);
}

// whether one of the numbers of the rows that are there is NaN
template <int N>
__device__ __forceinline__ bool has_nan(const float (&d)[N], const bool (&there)[2]) {
    bool found = false;
#pragma unroll
    for (int e = 0; e < N; e++) found |= there[half_of(e)] && d[e] != d[e];
    return found;
}

// The weights that survive dropout, a bit each, of `survivors_kernel`: bit b of words[head, i, w] is that of query i and key 32 w + b of its sequence.
struct Survivors {
    const u32* bits;  // of a head
    int words;
    float inverse;  // 1 / (1 - p)

    __device__ __forceinline__ u32 word(int query, int at) const {
        return at >= 0 && at < words ? bits[(long long)query * words + at] : 0;
    }
    // of a query the 32 keys from row `key` on; first: the first row of its sequence
    __device__ __forceinline__ u32 of_query(int query, int first, int key) const {
        const int place = key - first, at = place >> 5;
        return u32((u64(word(query, at + 1)) << 32 | word(query, at)) >> (place & 31));
    }
    // of a query of the same sequence one key
    __device__ __forceinline__ bool has(int query, int first, int key) const { return word(query, (key - first) >> 5) >> ((key - first) & 31) & 1; }
};
