// The gathering warpgroup of forward and backward on sm_90a: rows of K and V by index, tile by tile, into a ring in shared memory.
//
//   block of queries -> list of keys -> tiles of BLOCK_N keys, each a place of the ring: K, V and for every key bias, start and stop of
//   its interval of positions and (INDICES) its index. Consumers wait for `full`, and each of their warps arrives at `empty`.
// K and V have the layout that wgmma reads: column blocks of 64 (128 bytes), BLOCK_N rows each, swizzled by 128 bytes. The copies write as threads
// do and the products read as the copy engine does, so the writers fence (a fence by the consumers would cost 150 clocks a tile).
//
// Compiled with HEAD_DIM (64, 128), BLOCK_N (64, 128), STAGES, HAS_SCORES, INDICES, BF16, GATHER_WARPS (the first of a warpgroup; rows
// of a tile are shared out among them), WHOLE_TILES (the keys that all queries of a block see end a tile and the others begin one;
// behind the last of either bias is -inf), PAIRED_NOTES (`note_at`), RUNS (rows that follow each other come by the copy engine).
//
// The ring:   | K: STAGES tiles | V: STAGES tiles | STAGES x (bias, start, stop, index: a number a key) | full: STAGES | empty: STAGES |
#pragma once
#include "async_copy.cuh"
#include "gather_instruction.cuh"
#include "swizzle.cuh"
#include "tma.cuh"

constexpr int TILE_BYTES = BLOCK_N * HEAD_DIM * 2;
constexpr int COLUMN_BYTES = BLOCK_N * 128;    // of a column block of a tile
constexpr int NOTE_BYTES = BLOCK_N * 4;        // of one number for each key of a tile
constexpr int NOTES = INDICES ? 4 : 3;
#ifndef GATHER_WARPS
#define GATHER_WARPS 4
#endif
#ifndef WHOLE_TILES
#define WHOLE_TILES 0
#endif
#ifndef PAIRED_NOTES
#define PAIRED_NOTES 0
#endif
#ifndef RUNS
#define RUNS 0
#endif
constexpr int GATHER_LAG = STAGES > 2;  // tiles whose copies are under way while the next are requested; 2 were slower

// The place of a row's number among those of its tile. A lane of an accumulator holds columns 8i + 2t + {0, 1} of each eight i:
// PAIRED_NOTES puts those of two eights side by side, 16 bytes for a lane.
constexpr __device__ __forceinline__ int note_at(int row) {
    return PAIRED_NOTES ? row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2 : row;
}

struct Place {
    int stage = 0, parity = 0;  // parity of this pass through the ring

    __device__ __forceinline__ void advance() {
        stage++;
        if (stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Addresses in shared memory: the base is the only one in a register, the others are that plus constants.
struct Ring {
    u32 base;  // a multiple of 1024

    static constexpr int BYTES = STAGES * (2 * TILE_BYTES + NOTES * NOTE_BYTES + 16);

    constexpr __device__ __forceinline__ u32 keys(int stage) const { return base + stage * TILE_BYTES; }
    constexpr __device__ __forceinline__ u32 values(int stage) const { return keys(STAGES + stage); }
    constexpr __device__ __forceinline__ u32 bias(int stage) const { return keys(2 * STAGES) + stage * (NOTES * NOTE_BYTES); }  // base 2
    constexpr __device__ __forceinline__ u32 start(int stage) const { return bias(stage) + NOTE_BYTES; }
    constexpr __device__ __forceinline__ u32 stop(int stage) const { return bias(stage) + 2 * NOTE_BYTES; }  // INT_MIN beyond the list
    constexpr __device__ __forceinline__ u32 index(int stage) const { return bias(stage) + 3 * NOTE_BYTES; }
    constexpr __device__ __forceinline__ u32 full(int stage) const { return bias(STAGES) + 8 * stage; }
    constexpr __device__ __forceinline__ u32 empty(int stage) const { return full(STAGES + stage); }

    // by one thread; `readers`: warps that arrive at `empty` when they are done with a place
    __device__ __forceinline__ void init(int readers) const {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full(stage), GATHER_WARPS);
            barrier_init(empty(stage), readers);
        }
    }
};

// the tensors that the gatherer reads; strides in elements, those of rows in bytes
struct Gathered {
    const Number *key, *value;
    const float* scores;
    const int *start, *stop, *lists, *counts;
    long long key_batch, key_head, value_batch, value_head;
    u32 key_row, value_row;
    int kv_heads, kv_len, longest, blocks, owners;  // owners: B * Hkv
    const int* wholes;                              // WHOLE_TILES: keys of a list that all queries see, before the others
    const TensorMap *key_map, *value_map;           // RUNS
};

// A block of queries of one key head. Heads take turns, so that blocks that run side by side do not all walk the list of the same head.
struct QueryBlock {
    int owner, block, list;  // list: row of the lists and of their counts

    __device__ __forceinline__ QueryBlock(int index, int owners, int blocks) : owner(index % owners), block(index / owners) {
        list = owner * blocks + block;
    }
};

// Keys of a list that are read without a mask. The last of those that all queries see do not fill a tile: among the others, if these then
// take at most half a tile more, else they have a tile of their own.
__device__ __forceinline__ int unmasked(int count, int whole) {
    int tail = whole % BLOCK_N, others = count - whole;
    bool joins = (others + tail + 31) / 32 - (others + 31) / 32 <= 1;
    return joins ? whole - tail : whole;
}

// tiles of a list: keys first .. end - 1 of it, BLOCK_N of them or, at the end of a kind, fewer
struct Tiles {
    int count, whole, whole_tiles, total;

    __device__ __forceinline__ Tiles(const Gathered& given, int list) {
        count = given.counts[list];
        whole = WHOLE_TILES ? unmasked(count, given.wholes[list]) : 0;
        whole_tiles = (whole + BLOCK_N - 1) / BLOCK_N;
        total = whole_tiles + (count - whole + BLOCK_N - 1) / BLOCK_N;
    }
    __device__ __forceinline__ int first(int tile) const {
        return BLOCK_N * tile + (tile < whole_tiles ? 0 : whole - BLOCK_N * whole_tiles);
    }
    __device__ __forceinline__ int end(int tile) const { return tile < whole_tiles ? whole : count; }
};

struct Gatherer {
    static constexpr int ROWS = BLOCK_N / GATHER_WARPS;  // of a tile, for a warp
    static constexpr int ACROSS = HEAD_DIM / 8;          // lanes along a row
    static constexpr int AT_ONCE = 32 / ACROSS;          // rows of one instruction
    static_assert(ROWS % 8 == 0 && ROWS <= 32, "a lane holds the index of one row of its warp, and all its rows have one swizzle");
    static_assert(GATHER_LAG <= STAGES - 2, "consumers keep a tile until they have begun the next");

    const Gathered& given;
    Ring ring;
    int lane, first_row;  // first_row: of this warp, in a tile
    u32 corner;           // of this lane's first 16 bytes, in a tile
    Place place, oldest;  // oldest: not given to the consumers yet
    int pending = 0;

    __device__ __forceinline__ Gatherer(const Gathered& given, Ring ring) : given(given), ring(ring) {
        lane = threadIdx.x % 32;
        // the compiler assumes that the result of a shuffle is the same in all lanes
        first_row = __shfl_sync(~0u, threadIdx.x % (32 * GATHER_WARPS) / 32 * ROWS, 0);
        int row = lane / ACROSS, chunk = lane % ACROSS;
        // `swizzled`, for a row at most 7 past a multiple of 8, which the compiler does not know
        corner = chunk / 8 * COLUMN_BYTES + (first_row + row) * 128 + (((chunk % 8) ^ row) * 16);
    }

    // every tile of every block of this program, in the order of the consumers
    __device__ __forceinline__ void run() {
        int total = given.owners * given.blocks;
        for (int index = blockIdx.x; index < total; index += gridDim.x) gather(QueryBlock(index, given.owners, given.blocks));
        announce();
    }

    __device__ __forceinline__ void gather(const QueryBlock& work) {
        Tiles tiles(given, work.list);
        if (tiles.total == 0) return;
        const int* listed = given.lists + (long long)work.list * given.longest;
        if (RUNS && runs(listed, tiles.whole))
            walk<true>(work, tiles, listed);
        else
            walk<false>(work, tiles, listed);
    }

    // Whether nearly all keys of a list are consecutive, as they are where scores rise: of its second half not one in 32 is missing (before
    // it may stand a few of long ago). Tested for each tile, as `walk` does then, it cost other lists 3 to 6 % of the kernel.
    __device__ __forceinline__ bool runs(const int* listed, int whole) const {
        int half = whole / 2, ends = listed[lane % 2 ? max(whole, 1) - 1 : half];
        int span = __shfl_sync(~0u, ends, 1) - __shfl_sync(~0u, ends, 0);
        return whole >= BLOCK_N && span <= half + half / 32;
    }

    // RUN: rows that follow each other are fetched by the copy engine
    template <bool RUN>
    __device__ __forceinline__ void walk(const QueryBlock& work, const Tiles& tiles, const int* listed) {
        long long batch = work.owner / given.kv_heads, head = work.owner % given.kv_heads, keys = (long long)work.owner * given.kv_len;
        auto* key = reinterpret_cast<const char*>(given.key + batch * given.key_batch + head * given.key_head);
        auto* value = reinterpret_cast<const char*>(given.value + batch * given.value_batch + head * given.value_head);
        int mine = first_row + lane % ROWS;
        // Indices are requested two tiles ahead and the numbers of a key one: issuing a tile's copies takes less time than a load.
        // Behind the list comes its last key again: any other could hold NaN, which a weight of 0 does not hide.
        auto index = [&](int tile) { return listed[min(tiles.first(tile) + mine, tiles.end(tile) - 1)]; };
        int now = index(0), next = index(1);
        Note note(given, keys, now, tiles.whole_tiles <= 0);
        for (int tile = 0; tile < tiles.total; tile++) {
            int later = index(tile + 2);
            wait_for_place();
            if (!RUN || !copy_run(u64(key), u64(value), now))
                copy(key + lane % ACROSS * 16, value + lane % ACROSS * 16, now);
            copies_commit();
            store(note, now, tiles.first(tile) + mine < tiles.end(tile), tile >= tiles.whole_tiles);
            note = Note(given, keys, next, tile + 1 >= tiles.whole_tiles);
            now = next;
            next = later;
            place.advance();
            if (++pending > GATHER_LAG) {
                copies_wait<GATHER_LAG>();
                give_oldest();
            }
        }
    }

    struct Note {
        float bias;
        int start, stop;

        __device__ __forceinline__ Note(const Gathered& given, long long keys, int index, bool masked) {
            bias = HAS_SCORES ? given.scores[keys + index] : 0.0f;
            if (WHOLE_TILES && !masked) return;
            start = given.start[keys + index];
            stop = given.stop[keys + index];
        }
    };

    __device__ __forceinline__ void store(const Note& note, int index, bool listed, bool masked) const {
        if (lane >= ROWS) return;
        u32 to = ring.bias(place.stage) + 4 * note_at(first_row + lane);
        // once a key: a score beyond 2.36e38 would overflow in base 2, and -inf hides a key
        float bias = max_nan(min_nan(note.bias * LOG2E, LARGEST), -LARGEST);
        store_note(to, __float_as_int(WHOLE_TILES && !listed ? MINUS_INFINITY : bias));
        if (WHOLE_TILES && !masked) return;
        store_note(to + NOTE_BYTES, note.start);
        store_note(to + 2 * NOTE_BYTES, listed ? note.stop : -2147483647 - 1);
        if (INDICES) store_note(to + 3 * NOTE_BYTES, index);
    }

    __device__ __forceinline__ void copy(const char* key, const char* value, int index) const {
        u32 to = ring.keys(place.stage) + corner;
#pragma unroll
        for (int row = 0; row < ROWS; row += AT_ONCE) {
            u64 from = u64(u32(__shfl_sync(~0u, index, row + lane / ACROSS)));
            // `corner` has the swizzle of the first rows; those of the following differ from it in the higher bits of a row's number
            u32 there = (to ^ (row % 8 * 16)) + row * 128;
            copy_16_of_row(there, key + from * given.key_row);
            copy_16_of_row(there + STAGES * TILE_BYTES, value + from * given.value_row);
        }
    }

#if RUNS
    // This warp's rows by the copy engine, if they follow each other. The barrier cannot pass before this warp arrives at it.
    __device__ __forceinline__ bool copy_run(u64 key, u64 value, int index) const {
        int first = __shfl_sync(~0u, index, 0);
        if (!__all_sync(~0u, index == first + lane % ROWS)) return false;
        u32 barrier = ring.full(place.stage), to = ring.keys(place.stage) + first_row * 128;
        key += u64(u32(first)) * given.key_row;
        value += u64(u32(first)) * given.value_row;
        expect_more<2 * ROWS * HEAD_DIM * 2>(barrier);
#pragma unroll
        for (int column = 0; column < HEAD_DIM / 64; column++) {
            copy_rows(to + column * COLUMN_BYTES, *given.key_map, barrier, key, column);
            copy_rows(to + column * COLUMN_BYTES + STAGES * TILE_BYTES, *given.value_map, barrier, value, column);
        }
        return true;
    }
#else
    __device__ __forceinline__ bool copy_run(u64, u64, int) const { return false; }
#endif

    __device__ __forceinline__ void wait_for_place() {
        u32 barrier = ring.empty(place.stage);
        if (__all_sync(~0u, barrier_passed(barrier, place.parity ^ 1))) return;
        announce();  // the consumers may need tiles that are under way before they can free a place
        barrier_wait(barrier, place.parity ^ 1);
    }

    // Waits for all copies that are under way, and gives their tiles to the consumers.
    __device__ __forceinline__ void announce() {
        copies_wait<0>();
        while (pending > 0) give_oldest();
    }

    __device__ __forceinline__ void give_oldest() {
        fence_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.full(oldest.stage));
        oldest.advance();
        pending--;
    }
};
