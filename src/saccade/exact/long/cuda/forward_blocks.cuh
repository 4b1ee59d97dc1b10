// Blocks of queries and the memory of a team, which all warps of forward_sm90.cu share.
#pragma once
#include "chunks_sm90.cuh"
#include "ring.cuh"

constexpr int BLOCK_ROWS = 128, CHUNK_KEYS = 64, THREADS = 256 * TEAMS + 128;
constexpr float SLACK = BIAS ? 8.0f * LN2 : 8.0f;  // in base 2, or e with a bias; weights of 2^8 and their sums are far from the largest half
// 1: weights first, and the maxima of a chunk only where a thread's sum of them is larger than LARGEST_SUM; a warp then forms its scores once more.
#ifndef LATE_MAXIMA
#define LATE_MAXIMA 0
#endif
static_assert(!LATE_MAXIMA || (BIAS && HEAD_DIM == 32), "a warp forms scores from queries in registers, and bias that is not released");
constexpr float LARGEST_SUM = 4096.0f;
using QueryTile = Tile<HEAD_DIM, BLOCK_ROWS>;
using KeyTile = Tile<HEAD_DIM, CHUNK_KEYS>;
// With two teams a thread has 112 registers. Wider queries would exceed them, and ptxas would then wait for each product.
constexpr bool QUERY_IN_REGISTERS = HEAD_DIM == 32;
enum Barrier { QUERY, FREE = QUERY + QUERY_SLOTS, KEY = FREE + QUERY_SLOTS, VALUE = KEY + STAGES, READ = VALUE + STAGES, BARRIERS = READ + STAGES };
enum Meeting { OF_TEAM = 1, OF_WARPGROUP = OF_TEAM + TEAMS };

// of one team
struct LongForwardShared : Memory {
    const int team;

    __device__ __forceinline__ LongForwardShared(u32 all, int team) : Memory(all + team * BYTES), team(team) {}
    __device__ __forceinline__ u32 query(int slot) const { return base + slot * QueryTile::BYTES; }
    __device__ __forceinline__ u32 work(int slot) const { return base + WORKS_AT + 32 * slot; }
    __device__ __forceinline__ u32 key(int stage) const { return base + KEYS_AT + stage * 2 * KeyTile::BYTES; }
    __device__ __forceinline__ u32 value(int stage) const { return key(stage) + KeyTile::BYTES; }
    __device__ __forceinline__ u32 selectors(int stage) const { return base + SELECTORS_AT + stage * Selectors::BYTES; }
    __device__ __forceinline__ u32 barrier(int i) const { return base + BARRIERS_AT + 8 * i; }

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < QUERY_SLOTS; i++) {
            barrier_init(barrier(QUERY + i), 1);
            barrier_init(barrier(FREE + i), 2);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(barrier(KEY + i), 1);
            barrier_init(barrier(VALUE + i), 1);
            barrier_init(barrier(READ + i), 8);
        }
        barrier_fence();
    }

    static constexpr u32 KEYS_AT = QUERY_SLOTS * QueryTile::BYTES, WORKS_AT = KEYS_AT + STAGES * 2 * KeyTile::BYTES;
    static constexpr u32 SELECTORS_AT = WORKS_AT + QUERY_SLOTS * 32, BARRIERS_AT = SELECTORS_AT + KEY_MASK * STAGES * Selectors::BYTES;
    static constexpr u32 BYTES = (BARRIERS_AT + 8 * BARRIERS + 1023) / 1024 * 1024;
};

// the tiles of the bias, of all teams
struct BiasTiles {
#if BIAS
    u32 base;

    enum Barrier { TILE, READ = BIAS_STAGES, BARRIERS = 2 * BIAS_STAGES };
    using Tiles = Tile<64, BLOCK_ROWS>;
    static_assert((BIAS_STAGES & (BIAS_STAGES - 1)) == 0, "a place is a tile's number modulo BIAS_STAGES");
    static constexpr u32 BYTES = BIAS_STAGES * Tiles::BYTES + 8 * BARRIERS;

    __device__ __forceinline__ BiasTiles(u32 all) : base(all + TEAMS * LongForwardShared::BYTES) {}
    __device__ __forceinline__ u32 tile(int n) const { return base + n % BIAS_STAGES * Tiles::BYTES; }
    __device__ __forceinline__ u32 filled(int n) const { return base + BIAS_STAGES * Tiles::BYTES + 8 * (TILE + n % BIAS_STAGES); }
    __device__ __forceinline__ u32 read(int n) const { return base + BIAS_STAGES * Tiles::BYTES + 8 * (READ + n % BIAS_STAGES); }
    static __device__ __forceinline__ int parity(int n) { return n / BIAS_STAGES & 1; }

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < BIAS_STAGES; i++) {
            barrier_init(filled(i), 1);
            barrier_init(read(i), 8 * TEAMS);
        }
        barrier_fence();
    }
#else
    static constexpr u32 BYTES = 0;

    __device__ __forceinline__ BiasTiles(u32) {}
    __device__ __forceinline__ void init_barriers() const {}
#endif
};
static_assert(TEAMS * LongForwardShared::BYTES + BiasTiles::BYTES <= SHARED_BYTES, "the launch asks for too little shared memory");

// 128 queries of an item, from `first` on; a negative one is the end.
struct QueryBlock {
    Item item;
    int first;
    int tiles = 0;  // of the bias, of this team and the others of the block; an item without queries has but these to pass

    // keys that some query sees: before `end`, and from chunk `first_chunk` on
    __device__ __forceinline__ int end() const { return CAUSAL ? between(0, first + BLOCK_ROWS + item.reach(), item.k_len) : item.k_len; }
    __device__ __forceinline__ int chunks() const { return (end() + CHUNK_KEYS - 1) / CHUNK_KEYS; }
    __device__ __forceinline__ int first_chunk() const { return WINDOW ? between(0, first + item.back(), item.k_len) / CHUNK_KEYS : 0; }

    __device__ __forceinline__ void tell_to(u32 place) const {
        const int all[8] = {item.head, item.told_row(), item.q_first, item.q_len, item.k_first, item.k_len, first, tiles};
        tell(place, all);
    }
    static __device__ __forceinline__ QueryBlock from(u32 place, const Window& window) {
        const int head = told(place, 0), row = told(place, 1);
        return QueryBlock{Item{head, Item::batch_of(row), told(place, 2), told(place, 3), told(place, 4), told(place, 5), 0, row, window}, told(place, 6), BIAS ? told(place, 7) : 0};
    }
};

__device__ __forceinline__ int slot_of(int work) {
    return work % QUERY_SLOTS;
}
__device__ __forceinline__ int slot_parity(int work) {
    return work / QUERY_SLOTS & 1;
}

// keys that the products of a chunk take if `left` are left
__device__ __forceinline__ int width_of(int left) {
    return left > 32 ? 64 : left > 16 ? 32 : 16;
}
