// Tiles in shared memory: rows of 16-byte chunks, permuted so that the eight rows of an 8 x 16-byte matrix lie in different banks.
#pragma once
#include "copy.cuh"

#define ROUND_UP(x, to) (((x) + (to) - 1) / (to) * (to))

// bytes from the tile's start to a chunk of a row. STRIDE: chunks of a row in memory, 4 or a multiple of 8.
// `turn`: a number that differs, modulo 8, in the eight rows of a matrix; the row itself, where they follow each other
template <int STRIDE>
__device__ __forceinline__ uint32 chunk_offset(int row, int turn, int chunk) {
    const int permuted = STRIDE == 4 ? chunk ^ ((turn >> 1) & 3) : chunk ^ (turn & 7);
    return (uint32)(row * STRIDE + permuted) * 16;
}
