// Copies of tiles of K and V into shared memory by 16 bytes, for fused_sm80.cu, where CHUNKS of them make a row of D numbers.
//
// If D allows it, each thread copies one column of 16 bytes, from rows at a fixed distance: places are constants, and addresses take two additions
// each. With places and rows computed for each 16 bytes, copies were 450 of 1,400 instructions of a warp and tile of float32.
#pragma once
#include "async_copy.cuh"
#include "numbers.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int NUMBERS = 16 / sizeof(Number);  // of 16 bytes
constexpr int DISTANCE = THREADS / CHUNKS;    // of a thread's rows
constexpr bool COLUMNS = THREADS % CHUNKS == 0 && BLOCK_KV % (THREADS / CHUNKS) == 0 && (TF32 || THREADS / CHUNKS % 8 == 0);

// The key whose row lies at a place of a tile of K. In each 16 rows of 16-bit numbers, row 8 j + 2 t + b is key 4 t + 2 j + b, so that a lane
// finds keys 4 t .. 4 t + 3 in its accumulators, as a sparse product wants them.
__device__ __forceinline__ constexpr int key_at(int place) {
    return TF32 ? place : (place & ~15) | (place & 6) << 1 | (place & 8) >> 2 | (place & 1);
}

// The tiles of K (PERMUTED: by `key_at`) or V of a head, in rows of ROW_BYTES: the first by `copy_first`, then on toward the first key.
template <int ROW_BYTES, bool PERMUTED>
struct Tiles {
    static constexpr int ROW = ROW_BYTES;
    const Number* from;
    const Number* own;  // COLUMNS: the thread's first 16 bytes of the tile that was copied last
    long long stride;
    int copied;  // that tile

    static __device__ __forceinline__ constexpr int row_at(int place) { return PERMUTED ? key_at(place) : place; }

    __device__ __forceinline__ Tiles(const Number* from, long long stride, int tile) : from(from), stride(stride), copied(tile) {
        int thread = threadIdx.x;
        own = from + (tile * BLOCK_KV + row_at(thread / CHUNKS)) * stride + thread % CHUNKS * NUMBERS;
        asm("" : "+l"(own));  // otherwise the compiler computes the address again for each tile, by 64-bit multiplications
    }

    // copies a tile that is not the last one of the keys, so that it is full
    __device__ __forceinline__ void copy(u32 memory, int tile, int kv_len) {
        if constexpr (COLUMNS) {
            int thread = threadIdx.x;
            own -= (BLOCKS ? copied - tile : 1) * (BLOCK_KV * stride);
            copied = tile;
            const Number* at = own;
            u32 to = memory + thread / CHUNKS * ROW + thread % CHUNKS * 16;
#pragma unroll
            for (int place = 0; place < BLOCK_KV; place += DISTANCE) {
                copy_16(to + place * ROW, at, true);
                at += (row_at(place + DISTANCE) - row_at(place)) * stride;
            }
        } else {
            copy_first(memory, tile, kv_len);
        }
    }

    // copies any tile, with zeros for rows beyond the last key
    __device__ __forceinline__ void copy_first(u32 memory, int tile, int kv_len) const {
        int thread = thread_of();  // so that addresses are computed here: kept in registers over the tiles, they were spilled
#pragma unroll 1
        for (int i = thread; i < BLOCK_KV * CHUNKS; i += THREADS) {
            int place = i / CHUNKS, chunk = i % CHUNKS, key = tile * BLOCK_KV + row_at(place);
            bool inside = key < kv_len;
            copy_16(memory + place * ROW + chunk * 16, from + (inside ? key : 0) * stride + chunk * NUMBERS, inside);
        }
    }
};
