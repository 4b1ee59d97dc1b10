// Rounds of keys and chunks of queries, the memory in which they come, and where gradients are written: what all warpgroups of backward_sm90.cu share.
#pragma once
#include "chunks_sm90.cuh"
#include "ring.cuh"

#ifndef SEGMENT
#define SEGMENT 1
#endif
#if BIAS
#include "rows_of_bias.cuh"
#endif

constexpr int CHUNK_ROWS = 64, ROUND_ROWS = 128, ROUNDS_KNOWN = 4;
constexpr int ROUND_BITS = 10;  // of the number of a round, which shares a word with those of its segment's first round and end
using KeyTile = Tile<HEAD_DIM, ROUND_ROWS>;
using QueryTile = Tile<HEAD_DIM, CHUNK_ROWS>;
using ScoreTile = Tile<CHUNK_ROWS, ROUND_ROWS>;  // rows are keys
constexpr bool NARROW = HEAD_DIM == 128;  // registers are scarce: S is dead before dP is formed
constexpr int PART = HEAD_DIM < 64 ? HEAD_DIM : 64;  // columns of dQ at a time
enum Barrier { KEYS, KEYS_READ = 2, SCORES = 4, SCORES_READ = 6, CHUNK = 8, ROWS = CHUNK + STAGES, CHUNK_READ = ROWS + STAGES, BARRIERS = CHUNK_READ + STAGES };
enum Meeting { OF_KEYS = 1, OF_ALL_KEYS = 3, OF_LOADS = 4 };

struct LongBackwardShared : Memory {
    using Memory::Memory;
    __device__ __forceinline__ u32 key(int n) const { return base + KEYS_AT + n % 2 * 2 * KeyTile::BYTES; }
    __device__ __forceinline__ u32 value(int n) const { return key(n) + KeyTile::BYTES; }
    __device__ __forceinline__ u32 query(int stage) const { return base + QUERIES_AT + stage * 2 * QueryTile::BYTES; }
    __device__ __forceinline__ u32 dout(int stage) const { return query(stage) + QueryTile::BYTES; }
    __device__ __forceinline__ u32 dscores(int n) const { return base + SCORES_AT + n % 2 * ScoreTile::BYTES; }
    __device__ __forceinline__ u32 out(int n) const { return base + OUT_AT + n % 2 * QueryTile::BYTES; }
    // 64 queries and the 64 keys of a warpgroup
    __device__ __forceinline__ u32 bias(int stage, int warpgroup) const { return base + BIAS_AT + (2 * stage + warpgroup) * BIAS_BLOCK_BYTES; }
    // of each two queries -lse in base 2, then -delta; with a bias, then whether a query of each 16 is a far one
    __device__ __forceinline__ u32 rows(int stage) const { return base + ROWS_AT + stage * ROW_BYTES; }
    __device__ __forceinline__ u32 far(int stage) const { return rows(stage) + 8 * CHUNK_ROWS; }
    __device__ __forceinline__ u32 round(int n) const { return base + ROUNDS_AT + n % ROUNDS_KNOWN * 32; }
    __device__ __forceinline__ u32 barrier(int i) const { return base + BARRIERS_AT + 8 * i; }

    static constexpr u32 KEYS_AT = 0, QUERIES_AT = 4 * KeyTile::BYTES, SCORES_AT = QUERIES_AT + STAGES * 2 * QueryTile::BYTES,
                         OUT_AT = SCORES_AT + 2 * ScoreTile::BYTES, BIAS_AT = OUT_AT + 2 * OWN_DELTA * QueryTile::BYTES,
                         ROWS_AT = BIAS_AT + BIAS * STAGES * 2 * BIAS_BLOCK_BYTES, ROW_BYTES = 8 * CHUNK_ROWS + BIAS * 16,
                         ROUNDS_AT = ROWS_AT + STAGES * ROW_BYTES, BARRIERS_AT = ROUNDS_AT + ROUNDS_KNOWN * 32;
};
static_assert(LongBackwardShared::BARRIERS_AT + 8 * BARRIERS <= SHARED_BYTES, "the launch asks for too little shared memory");

// chunks of queries from `first` to before `end`
struct Chunks {
    int first, end;

    __device__ __forceinline__ bool have(int chunk) const { return first <= chunk && chunk < end; }
};

// 128 keys of an item, and the chunks of queries that meet them
struct Round {
    Item item;
    int start;  // the first key; -1 behind the last round of the block
    int first, end;  // of a WINDOW: the rounds of its segment

    __device__ __forceinline__ int rounds() const { return max(1, (item.k_rows + ROUND_ROWS - 1) / ROUND_ROWS); }
    __device__ __forceinline__ int chunks() const { return max(!WINDOW, (item.q_len + CHUNK_ROWS - 1) / CHUNK_ROWS); }
    __device__ __forceinline__ int keys() const { return between(0, item.k_len - start, ROUND_ROWS); }
    // the rounds that a chunk meets in a window, one at least: those with a key that some query sees, or the nearest
    __device__ __forceinline__ int last_round() const { return max(0, item.k_len - 1) / ROUND_ROWS; }
    __device__ __forceinline__ int first_of(int chunk) const { return between(0, (chunk * CHUNK_ROWS + item.back()) >> 7, last_round()); }
    __device__ __forceinline__ int last_of(int chunk) const { return between(0, (chunk * CHUNK_ROWS + CHUNK_ROWS - 1 + item.reach()) >> 7, last_round()); }
    // the first chunk whose window begins in a round or behind it
    __device__ __forceinline__ int first_from(int round) const { return round == 0 ? 0 : between(0, (round * ROUND_ROWS - item.back() + 63) >> 6, chunks()); }

    // Whether dK and dV of its keys are another segment's; whether a chunk's dQ is this one's; whether the chunk is met for the first time, and whether
    // its dQ was begun before.
    __device__ __forceinline__ bool is_beyond() const { return WINDOW && start >= end * ROUND_ROWS; }
    __device__ __forceinline__ bool owns(int chunk) const { return !WINDOW || first_of(chunk) >= first; }
    __device__ __forceinline__ bool opens(int chunk) const {
        return WINDOW ? start == max(first_of(chunk), first) * ROUND_ROWS : start == 0;
    }
    __device__ __forceinline__ bool continues(int chunk) const { return WINDOW ? start > first_of(chunk) * ROUND_ROWS : start > 0; }
    // whether the block has this round to compute
    __device__ __forceinline__ bool is_there() const {
        if (!WINDOW) return start < rounds() * ROUND_ROWS;
        return is_beyond() ? first_chunk() < end_chunk() : start < rounds() * ROUND_ROWS;
    }

    // Without a window round 0 meets every chunk, so that every query gets a dQ; the last chunk meets every round, so that no round is empty.
    __device__ __forceinline__ int first_chunk() const {
        if (WINDOW) {
            if (start > last_round() * ROUND_ROWS) return chunks();
            const int met = start == 0 ? 0 : between(0, (start - item.reach()) >> 6, chunks());
            return is_beyond() ? max(met, first_from(first)) : met;
        }
        if (start == 0) return 0;
        if (start >= item.k_len) return chunks() - 1;
        return CAUSAL ? between(0, (start - item.reach()) / CHUNK_ROWS, chunks() - 1) : 0;
    }
    __device__ __forceinline__ int end_chunk() const {
        if (!WINDOW) return chunks();
        const int last = min(start / ROUND_ROWS, end - 1);
        return last >= last_round() ? chunks() : first_from(last + 1);
    }
    // The chunks that see a key of a warpgroup, with a WINDOW. It passes others that the round meets.
    __device__ __forceinline__ Chunks seeing(int warpgroup) const {
        const int key = start + 64 * warpgroup, behind = min(key + 64, item.k_len);
        return key < behind ? Chunks{(key - item.reach()) >> 6, (behind - item.back() + 63) >> 6} : Chunks{0, 0};
    }
    // the first key of the last round that a chunk meets
    __device__ __forceinline__ int last_start(int chunk) const {
        if (WINDOW) return last_of(chunk) * ROUND_ROWS;
        if (chunk == chunks() - 1) return (rounds() - 1) * ROUND_ROWS;
        int last = max(0, item.k_len - 1) / ROUND_ROWS;
        if (CAUSAL) last = between(0, (chunk * CHUNK_ROWS + CHUNK_ROWS - 1 + item.reach()) >> 7, last);
        return last * ROUND_ROWS;
    }
};

__device__ __forceinline__ void write_round(u32 to, const Round& r) {
    const Item& it = r.item;
    const int place = WINDOW ? r.start / ROUND_ROWS | r.first << ROUND_BITS | r.end << 2 * ROUND_BITS : r.start;
    tell(to, {it.head, it.told_row(), it.q_first, it.q_len, it.k_first, it.k_len, it.k_rows, r.start < 0 ? -1 : place});
}
__device__ __forceinline__ Round read_round(u32 from, const Window& window) {
    const int head = told(from, 0), row = told(from, 1);
    const Item item{head, Item::batch_of(row), told(from, 2), told(from, 3), told(from, 4), told(from, 5), told(from, 6), row, window};
    const int place = told(from, 7);
    if (!WINDOW || place < 0) return Round{item, place, 0, 0};
    constexpr int ROUNDS = 1 << ROUND_BITS;
    return Round{item, place % ROUNDS * ROUND_ROWS, place >> ROUND_BITS & ROUNDS - 1, place >> 2 * ROUND_BITS};
}

// The rows of a round where results are written. With GROUPED heads they are read once more, for the loops around a chunk leave them no registers.
__device__ __forceinline__ Item item_to_write(const Round& round, u32 from) {
    return GROUPED ? read_round(from, round.item.window).item : round.item;
}

struct Gradients {
    Number *dquery, *dkey, *dvalue;
    Strides dquery_strides, dkey_strides, dvalue_strides;
    int head_dim;
    float scale;
};

#if BIAS
static_assert(!OWN_DELTA, "delta comes with the numbers of the rows");
#else
struct NumbersOfRows {};
#endif
