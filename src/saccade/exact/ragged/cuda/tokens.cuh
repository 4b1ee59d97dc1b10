// Tiles of tokens: a thread block takes TILE consecutive tokens of a head, whatever sequences they belong to, and each warp 16 of them. The kernels
// share the bounds of tokens, the rows of their sequences in shared memory, and the pairs that are seen.
//
// A warp multiplies only the rows of its own tokens' sequences. At a mean of 20 tokens these are 41 rows; the 64 tokens of a tile would need 89.
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

// a number passed as a pointer: only pointers change from call to call of a launch
__device__ __forceinline__ int number_of(const void* given) {
    return int(reinterpret_cast<unsigned long long>(given));
}

// The sequences of a call, begin and end of sequence s in offsets[s] and offsets[s + 1].
struct Sequences {
    const int* offsets;
    int number, total;  // total: tokens

    // clamped: offsets come from the device unchecked
    __device__ __forceinline__ int at(int i) const { return min(max(offsets[i], 0), total); }
};

// The rows where sequences begin and end, as far as the tile's tokens are concerned. A token's sequence begins at the last such row up to its own, and ends
// at the next; tokens behind the last sequence belong to an empty one.
//
// Each warp finds them itself, without memory of its own: up to 64 sequences in one round of loads, up to 2,048 in two. A launch that finds them for all
// blocks takes 2 to 4 us.
struct Bounds {
    int begin, end;      // the first token, and the row behind the last sequence
    u64 inside;          // bit i: begin + i is such a row
    int before, behind;  // the last one up to the first token, and the first behind the tile

    static constexpr int AT_ONCE = 4, WINDOW = 32 * AT_ONCE;

    __device__ __forceinline__ int first(int token) const {
        if (token >= end) return end;
        const u64 earlier = inside & ((2ull << (token - begin)) - 1);
        return earlier ? begin + 63 - __clzll(earlier) : before;
    }
    __device__ __forceinline__ int last(int token) const {
        if (token >= end) return end;
        const u64 later = inside >> (token - begin) >> 1;
        return later ? token + __ffsll(later) : behind;
    }

    __device__ __forceinline__ Bounds(const Sequences& of, int begin) : begin(begin), end(of.at(of.number)), inside(0), before(0), behind(end) {
        const int lane = threadIdx.x % 32, needed = min(begin + TILE, end);
        if (u32(end - begin) < TILE) inside = 1ull << (end - begin);
        if (begin >= end) return;
        // between two tokens there may be any number of empty sequences
#pragma unroll 1
        for (int from = sequence_before(of, lane), most = -1; most < needed && from <= of.number; from += WINDOW) {
            u64 bits = 0;
            most = -1;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int row = of.at(min(from + 32 * i + lane, of.number)), place = row - begin;
                if (u32(place) < TILE) bits |= 1ull << place;
                if (place <= 0) before = max(before, row);
                if (place >= TILE) behind = min(behind, row);
                most = max(most, row);
            }
            inside |= u64(__reduce_or_sync(~0u, u32(bits >> 32))) << 32 | __reduce_or_sync(~0u, u32(bits));
            most = __reduce_max_sync(~0u, most);
        }
        before = __reduce_max_sync(~0u, before), behind = __reduce_min_sync(~0u, behind);
    }

private:
    // a sequence at most WINDOW / 2 before that of the first token
    __device__ __forceinline__ int sequence_before(const Sequences& of, int lane) const {
        int low = 0, high = of.number;
#pragma unroll 1
        while (high - low > WINDOW / 2) {
            const int step = (high - low + 31) / 32, probe = low + (lane + 1) * step;
            const int steps = __popc(__ballot_sync(~0u, probe <= of.number && of.offsets[min(probe, of.number)] <= begin));
            high = min(high, low + (steps + 1) * step - 1);
            low = min(low + steps * step, high);
        }
        return low;
    }
};
static_assert(TILE == 64, "a bit for each token");

// The tokens that a block computes together, begin .. stop - 1, and the rows of their sequences, low .. high - 1: all of the tile, or, once a NaN was
// found, those of one sequence at a time. A weight of 0 times a NaN is a NaN, and that of one sequence must not reach another.
struct Groups {
    const Bounds& bounds;
    const int behind;
    int begin, stop, low, high;
    bool alone = false;

    // all of the tile
    __device__ __forceinline__ Groups(const Bounds& bounds, int begin, int total)
        : bounds(bounds), behind(min(begin + TILE, total)), begin(begin), stop(behind), low(min(bounds.before, bounds.end)), high(bounds.behind) {
        if (begin >= bounds.end) low = high;
    }
    __device__ __forceinline__ bool are_left() const { return begin < behind; }

    __device__ __forceinline__ void next(bool found_nan) {
        const bool several = found_nan && !alone && bounds.first(stop - 1) != low;
        alone |= several;
        if (!several) begin = stop;
        if (begin >= behind) return;
        const int end = bounds.last(begin);
        stop = alone && end > begin ? min(end, behind) : behind;
        low = bounds.first(begin), high = bounds.last(stop - 1);
    }
};

struct Range {
    int first;
    u32 length;

    __device__ __forceinline__ bool has(int x) const { return u32(x - first) < length; }
    // the same range, counted from another place
    __device__ __forceinline__ Range from(int x) const { return {first - x, length}; }
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
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = token + 8 * h;
            there[h] = row >= group.begin && row < group.stop;
            first[h] = bounds.first(row), last[h] = bounds.last(row);
        }
        // within the group's, whatever the offsets say; of a warp without a token in the group none are left
        low = max(__shfl_sync(~0u, first[0], 0), group.low), high = min(__shfl_sync(~0u, last[1], 31), group.high);
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

// chunk_at, left_at and right_at, for numbers that are not negative: of signed ones a division by 2 or 8 takes each fragment six instructions more
__device__ __forceinline__ u32 place_of(u32 tile, u32 row, u32 chunk) {
    return tile + row * PITCH + (chunk ^ (HEAD_DIM == 32 ? row / 2 % 4 : row % 8)) * 16;
}
__device__ __forceinline__ u32 left_of(u32 tile, u32 row, u32 lane) {
    return place_of(tile, row + lane % 16, lane / 16);
}
__device__ __forceinline__ u32 right_of(u32 tile, u32 row, u32 lane) {
    return place_of(tile, row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// The beginning of shared memory. Hidden from the compiler, which would otherwise compute it again at each use, 54 times in backward.
__device__ __forceinline__ u32 beginning_of(const unsigned char* memory) {
    u32 address = shared_address(memory);
    asm volatile("" : "+r"(address));
    return address;
}

// strides in numbers
struct Apart {
    int row, head;
};

// the rows of a head
template <class T>
struct RowsOf {
    T* at;
    int stride;

    __device__ __forceinline__ RowsOf(T* tensor, Apart apart, int head) : at(tensor + (long long)head * apart.head), stride(apart.row) {}
    __device__ __forceinline__ T* row(int token) const { return at + (long long)token * stride; }
};
using Rows = RowsOf<const Number>;

// Requests the tile's own rows of a tensor before the bounds show which others are needed. The loads overlap with the search for the bounds.
__device__ __forceinline__ void prefetch_rows(const Rows& rows, int begin, int total) {
    constexpr int PIECES = PITCH / 64;
#pragma unroll
    for (int from = 0; from < TILE * PIECES; from += THREADS) {
        const int i = from + int(threadIdx.x), row = i / PIECES;
        if (row < min(TILE, total - begin)) prefetch_to_l2(rows.row(begin + row) + i % PIECES * 32);
    }
}

// The part of a thread in copies of rows: one chunk of every APART-th row, so that its places differ by a constant.
constexpr int APART = THREADS / CHUNKS;
static_assert(APART % 8 == 0, "chunks of these rows lie at the same place of their rows");

__device__ __forceinline__ void store_zeros(unsigned char* to) {
    *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
}

// Starts the copies of rows of a tensor, at most MOST_ROWS from token `first` on. Columns from head_dim on are not written.
template <int MOST_ROWS>
__device__ __forceinline__ void copy_rows(u32 tile, const Rows& from, int first, int rows, int head_dim) {
    const int chunk = u32(threadIdx.x) % CHUNKS, row = u32(threadIdx.x) / CHUNKS, left = 8 * chunk < head_dim ? rows - row : 0;
    const u32 to = place_of(tile, row, chunk);
    const Number* at = from.row(first + row) + 8 * chunk;
    const long long step = (long long)APART * from.stride;
#pragma unroll
    for (int i = 0; i < MOST_ROWS; i += APART, at += step)
        if (i < left) copy_16_of_row(to + i * PITCH, at);
}

// Zeros in 15 rows of a tile, from `row` on. A tile's place counts from the beginning of `memory`.
__device__ __forceinline__ void clear_behind(unsigned char* memory, u32 tile, int row) {
    static_assert(15 * CHUNKS <= THREADS, "a chunk each");
    if (threadIdx.x < 15 * CHUNKS) store_zeros(memory + place_of(tile, row + threadIdx.x / CHUNKS, threadIdx.x % CHUNKS));
}

// Zeros in the columns from head_dim on of so many rows of tiles, which lie one behind another.
__device__ __forceinline__ void clear_columns(unsigned char* memory, u32 tiles, int rows, int head_dim) {
    const int chunk = threadIdx.x % CHUNKS;
    if (8 * chunk < head_dim) return;
    for (int row = threadIdx.x / CHUNKS; row < rows; row += APART) store_zeros(memory + place_of(tiles, row, chunk));
}

// A fragment of 16 columns `step`, if that of the first 16 lies at `first`: the number of a step has bits of a chunk's place alone.
__device__ __forceinline__ u32 at_step(u32 first, int step) {
    return first ^ 32 * step;
}

// the left operand of a warp's 16 rows, from `row` of a tile on
__device__ __forceinline__ void load_left(u32 (&to)[HEAD_DIM / 16][4], u32 tile, int row, int lane) {
    const u32 first = left_of(tile, row, lane);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) load_matrices(to[i], at_step(first, i));
}

// d = A B^T for N rows of B, from `row` of a tile on
template <int N>
__device__ __forceinline__ void multiply_rows(float (&d)[N / 2], const u32 (&a)[HEAD_DIM / 16][4], u32 tile, int row, int lane) {
    const u32 first = right_of(tile, row, lane);
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
    const u32 first = left_of(tile, row, lane);
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

// Whether one of the numbers of the rows that are there is NaN. Infinite numbers may count as NaN; the tile is then computed again needlessly.
template <int N>
__device__ __forceinline__ bool has_nan(const float (&d)[N], const bool (&there)[2]) {
    float sum[2] = {};
#pragma unroll
    for (int e = 0; e < N; e++) sum[half_of(e)] += d[e];
    return (there[0] && sum[0] != sum[0]) || (there[1] && sum[1] != sum[1]);
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
