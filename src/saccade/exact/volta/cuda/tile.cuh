// Tiles of 16-bit rows in shared memory, filled through registers: sm_70 has no asynchronous copy.
//
// Rows are DIM numbers (HEAD_DIM up to a multiple of 16, the rest zeros) and one chunk of 16 bytes apart, an odd number of chunks: the
// eight lanes that read 16 bytes at a time, of eight rows that differ modulo 8, then meet no bank twice.
#pragma once
#include "instruction.cuh"

#define DIM ((HEAD_DIM + 15) / 16 * 16)
#define STRIDE (DIM + 8)  // numbers from row to row
#define TILE_BYTES(rows) ((rows) * STRIDE * 2)

// this thread's share of N rows, on its way from global to shared memory; EACH: threads that share them
template <int N, int EACH>
struct Share {
    static constexpr int CHUNKS = DIM / 8, COUNT = (N * CHUNKS + EACH - 1) / EACH;
    uint4 held[COUNT];

    // rows first .. first + N - 1, zeros from `end` on, which is never read; rows begin at 16 bytes
    __device__ __forceinline__ void load(const Half* source, int64 stride, int first, int end) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int at = threadIdx.x + i * EACH, row = at / CHUNKS, chunk = at % CHUNKS;
            held[i] = make_uint4(0, 0, 0, 0);
            if ((N * CHUNKS % EACH == 0 || row < N) && first + row < end && (DIM == HEAD_DIM || chunk < HEAD_DIM / 8))
                held[i] = *(const uint4*)(source + (first + row) * stride + 8 * chunk);
        }
    }
    __device__ __forceinline__ void store(Half* tile) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int at = threadIdx.x + i * EACH, row = at / CHUNKS, chunk = at % CHUNKS;
            if (N * CHUNKS % EACH == 0 || row < N) *(uint4*)(tile + row * STRIDE + 8 * chunk) = held[i];
        }
    }
};

__device__ __forceinline__ uint4 read_chunk(const Half* tile, int row, int column) {
    return *(const uint4*)(tile + row * STRIDE + column);
}
