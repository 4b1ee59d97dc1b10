// Tiles in shared memory: rows of 16-byte chunks, permuted so that the eight rows of an 8 x 16-byte matrix lie in different banks.
#pragma once
#include "number.cuh"

#include "async_copy.cuh"

#define ROUND_UP(x, to) (((x) + (to) - 1) / (to) * (to))

// bytes from the tile's start to a chunk of a row. STRIDE: chunks of a row in memory, 4 or a multiple of 8.
// `turn`: a number that differs, modulo 8, in the eight rows of a matrix; the row itself, where they follow each other
template <int STRIDE>
__device__ __forceinline__ u32 chunk_offset(int row, int turn, int chunk) {
    const int permuted = STRIDE == 4 ? chunk ^ ((turn >> 1) & 3) : chunk ^ (turn & 7);
    return (u32)(row * STRIDE + permuted) * 16;
}

// The copies of a tile, [rows, CHUNKS] of 16 bytes, are distributed over THREADS threads: this thread's are (row + i * rows a turn, chunk),
// so that their addresses need no division, wherever CHUNKS divides THREADS.
template <int CHUNKS, int THREADS>
struct Share {
    static constexpr bool EVEN = THREADS % CHUNKS == 0;
    static constexpr int TURN = EVEN ? THREADS / CHUNKS : 1;

    __device__ __forceinline__ static int count(int rows) { return (rows * CHUNKS + THREADS - 1) / THREADS; }
    __device__ __forceinline__ static int row(int i) {
        return EVEN ? (int)(threadIdx.x / (unsigned)CHUNKS) + i * TURN : (int)((threadIdx.x + i * THREADS) / (unsigned)CHUNKS);
    }
    __device__ __forceinline__ static int chunk(int i) {
        return EVEN ? (int)(threadIdx.x % (unsigned)CHUNKS) : (int)((threadIdx.x + i * THREADS) % (unsigned)CHUNKS);
    }
    // the number at the start of the i-th chunk, in rows `stride` apart
    template <typename T>
    __device__ __forceinline__ static const T* of(const T* tile, int64 stride, int i) {
        const int width = 16 / (int)sizeof(T);
        if (EVEN) return tile + row(0) * stride + chunk(0) * width + i * (TURN * stride);
        return tile + row(i) * stride + chunk(i) * width;
    }
};
