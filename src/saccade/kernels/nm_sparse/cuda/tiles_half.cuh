// Tiles of 16-bit K and V in shared memory and a warp's products with them, for fused_sm80.cu.
//
// Keys are permuted when they are copied: row 8 j + 2 t + b of each 16 rows in shared memory is key 4 t + 2 j + b, so that a lane finds
// keys 4 t .. 4 t + 3 in its accumulators, as a sparse product wants them. V stays in order. Rows are 16 bytes longer than D, an odd
// number of 16-byte units, so that eight of them lie in different banks.
#pragma once
#define SCORE_GROUP(q, j) (2 * (q) + (j))
#include "mma.cuh"
#include "rows.cuh"

constexpr int ROW_BYTES = 2 * HEAD_DIM + 16;
constexpr int TILE_BYTES = BLOCK_KV * ROW_BYTES;
constexpr int STAGE_BYTES = 2 * TILE_BYTES;  // of K, then V
constexpr int QUERY_BYTES = 16 * WARPS * ROW_BYTES;
constexpr int CHUNKS = HEAD_DIM / 8;               // of 16 bytes, a row
constexpr bool QUERY_REGISTERS = HEAD_DIM <= 128;  // else Q is read from shared memory again for every tile

struct Operands : Rows {
    u32 memory;  // stages of (K, V), then Q
    u32 query[QUERY_REGISTERS ? HEAD_DIM / 4 : 4];

    __device__ __forceinline__ Operands(const Sizes& sizes, u32 memory) : Rows(sizes), memory(memory) {}
    __device__ __forceinline__ u32 keys(int stage) const { return memory + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 values(int stage) const { return keys(stage) + TILE_BYTES; }
    __device__ __forceinline__ u32 queries() const { return keys(STAGES) + threadIdx.x / 32 * 16 * ROW_BYTES; }

    // 16 x 16 of Q, columns 16 step ..
    __device__ __forceinline__ void load_query(u32* a, int step) const {
        int lane = threadIdx.x % 32;
        load_matrices(a, queries() + lane % 16 * ROW_BYTES + (2 * step + lane / 16) * 16);
    }

    // before the first product: Q of the block into shared memory, with the first tile's copies
    __device__ __forceinline__ void copy_query(const Number* from, long long stride, int first) {
        for (int i = threadIdx.x; i < 16 * WARPS * CHUNKS; i += 32 * WARPS) {
            int row = first + i / CHUNKS, column = i % CHUNKS * 8;
            bool inside = row < sizes.q_len;
            copy_16(keys(STAGES) + i / CHUNKS * ROW_BYTES + column * 2, from + (inside ? row : 0) * stride + column, inside);
        }
    }

    // once it is there
    __device__ __forceinline__ void keep_query() {
        if (QUERY_REGISTERS)
#pragma unroll
            for (int step = 0; step < HEAD_DIM / 16; step++) load_query(query + 4 * step, step);
    }

    // scores = Q K^T of the tile at `stage`
    __device__ __forceinline__ void multiply_keys(int stage) {
        int lane = threadIdx.x % 32;
        u32 from = keys(stage) + (lane / 16 * 8 + lane % 8) * ROW_BYTES + lane / 8 % 2 * 16;
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; i++) scores[i] = 0.0f;
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++) {
            u32* a = query + (QUERY_REGISTERS ? 4 * step : 0);
            if (!QUERY_REGISTERS) load_query(a, step);
#pragma unroll
            for (int q = 0; q < SPANS; q++) {
                u32 b[4];
                load_matrices(b, from + q * 16 * ROW_BYTES + step * 32);
                multiply(scores + 8 * q, a, b[0], b[1]);
                multiply(scores + 8 * q + 4, a, b[2], b[3]);
            }
        }
    }

    // out += P V of the tile at `stage`
    __device__ __forceinline__ void multiply_values(int stage) {
        u32 from = values(stage) + threadIdx.x % 32 * ROW_BYTES;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++) {
                u32 b[4];
                load_transposed(b, from + step * 32 * ROW_BYTES + n * 16);
                multiply_sparse(out + 4 * n, packed + 4 * step, b, metadata[step]);
            }
        }
    }
};

// a tile of K (its keys permuted) and V, zeros beyond the last key
__device__ __forceinline__ void copy_tile(
    u32 keys, u32 values, const Number* key, const Number* value, long long key_row, long long value_row, int first, int kv_len) {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // so that addresses are made here, not kept over the tiles and spilled
#pragma unroll 2
    for (int i = thread; i < BLOCK_KV * CHUNKS; i += 32 * WARPS) {
        int row = i / CHUNKS, chunk = i % CHUNKS, place = (row & ~15) | (row & 2) << 2 | (row & 12) >> 1 | (row & 1);
        bool inside = first + row < kv_len;
        long long at = inside ? first + row : 0;
        copy_16(keys + place * ROW_BYTES + chunk * 16, key + at * key_row + chunk * 8, inside);
        copy_16(values + row * ROW_BYTES + chunk * 16, value + at * value_row + chunk * 8, inside);
    }
}

// nothing to do: copied numbers are operands
__device__ __forceinline__ void settle_tile(u32 keys, u32 values) {}
