// The parts that the kernels of sm_90a for short sequences share: tiles of whole sequences in shared memory, their products, and their way in and out.
//
// A warpgroup computes on 64 rows of an accumulator (accumulator.cuh).
//
// Compiled with ROWS (64 or 128: the sequence length rounded up), HEAD_DIM, BF16.
#pragma once
#include "accumulator.cuh"
#include "mma.cuh"
#include "numbers.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

constexpr int ROW_GROUPS = ROWS / 64;  // of 64 rows, which a warpgroup computes on and one copy moves

// ROWS x COLUMNS numbers of 16 bits: blocks of 64 columns, or one of 32, each with its rows of 128 (64) bytes one below the other.
// The 16-byte chunks of a row are swizzled, so that neither eight rows of a product nor the rows of a warp meet in a bank.
template <int COLUMNS>
struct Tile {
    static constexpr int PITCH = COLUMNS == 32 ? 64 : 128;  // bytes of a row in a block
    static constexpr int BLOCKS = COLUMNS == 32 ? 1 : COLUMNS / 64;
    static constexpr int BLOCK_BYTES = ROWS * PITCH;
    static constexpr int BYTES = BLOCKS * BLOCK_BYTES;
    static constexpr int BLOCK_COLUMNS = PITCH / 2;
    static constexpr int ROW_GROUP_BYTES = BLOCKS * 64 * PITCH;  // what one row group has in all blocks

    // where the operand of a product over columns begins: 16 columns from 16 step on
    static __device__ __forceinline__ u32 columns_from(int row, int step) {
        constexpr int STEPS = PITCH / 32;
        return step / STEPS * BLOCK_BYTES + row * PITCH + step % STEPS * 32;
    }
};
using Weights = Tile<ROWS>;  // P, then dS: queries are rows, keys are columns

// d = A B^T over COLUMNS: 64 rows of A from `a_row` on, N rows of B from `b_row` on. With ADDS d += A B^T.
template <int COLUMNS, int N, bool ADDS = false>
__device__ __forceinline__ void multiply_rows(float (&d)[N / 2], u32 a, int a_row, u32 b, int b_row) {
    using T = Tile<COLUMNS>;
#pragma unroll
    for (int step = 0; step < COLUMNS / 16; step++) {
        u64 left = operand<T::PITCH>(a + T::columns_from(a_row, step)), right = operand<T::PITCH>(b + T::columns_from(b_row, step));
        if (step == 0 && !ADDS) Products<N>::set(d, left, right);
        else Products<N>::add(d, left, right);
    }
}

// d = W^T B over the rows: keys 64 group .. 64 group + 63 of W, columns of B from `b` on, N of them
template <int COLUMNS, int N>
__device__ __forceinline__ void multiply_transposed(float (&d)[N / 2], u32 weights, int group, u32 b) {
    using T = Tile<COLUMNS>;
    u64 left = operand(weights + group * Weights::BLOCK_BYTES), right = operand<T::PITCH>(b, T::BLOCK_BYTES);
#pragma unroll
    for (int step = 0; step < ROWS / 16; step++) {
        u64 a = advance(left, step * 16 * 128), b_rows = advance(right, step * 16 * T::PITCH);
        if (step == 0) Products<N>::set_transposed(d, a, b_rows);
        else Products<N>::add_transposed(d, a, b_rows);
    }
}

// d = W B over the rows of B, W rounded in registers
template <int COLUMNS>
__device__ __forceinline__ void multiply_registers(float (&d)[COLUMNS / 2], const u32 (&rounded)[ROWS / 4], u32 b) {
    using T = Tile<COLUMNS>;
    u64 right = operand<T::PITCH>(b, T::BLOCK_BYTES);
#pragma unroll
    for (int step = 0; step < ROWS / 16; step++) {
        u64 b_rows = advance(right, step * 16 * T::PITCH);
        if (step == 0) Products<COLUMNS>::set_rows(d, rounded + 4 * step, b_rows);
        else Products<COLUMNS>::add_rows(d, rounded + 4 * step, b_rows);
    }
}

// These kernels use threadIdx, not thread_of(). The latter reads the register again at each use: 40 times here, a seventh of backward's time at 128 x 64.
__device__ __forceinline__ int warpgroup_of() {
    return __shfl_sync(~0u, int(threadIdx.x) / 128, 0);  // the same register in all lanes: branches on it do not diverge
}
__device__ __forceinline__ bool elected() {
    return threadIdx.x % 128 == 0;  // the thread that moves tiles for its warpgroup
}
enum NamedBarrier { OF_WARPGROUP = 1 };  // of the first warpgroup, then one of each other; 0 is __syncthreads

// the 128 threads of a warpgroup meet
__device__ __forceinline__ void meet(int warpgroup) {
    sync_threads(OF_WARPGROUP + warpgroup, 128);
}

// The place of this lane's row of fragment `step` (16 columns), of the 16 rows of its warp within row group `group`. 16-byte chunk c of a row is at
// place c ^ (row % 8) (rows of 64 bytes: c ^ (row / 2 % 4)); a fragment's two chunks differ in bit 0, so that a step is one exclusive or.
template <int COLUMNS>
__device__ __forceinline__ u32 fragment(int group, int step) {
    using T = Tile<COLUMNS>;
    constexpr int STEPS = T::PITCH / 32;
    int row = 64 * group + int(threadIdx.x) / 32 % 4 * 16 + int(threadIdx.x) % 16, swizzle = T::PITCH == 128 ? row & 7 : row >> 1 & 3;
    u32 first = row * T::PITCH + ((int(threadIdx.x) % 32 / 16) ^ swizzle) * 16;
    return (first ^ step % STEPS * 32) + step / STEPS * T::BLOCK_BYTES;
}

// 64 rows of accumulators, times a factor a row, rounded into a tile
template <int COLUMNS>
__device__ __forceinline__ void round_into(u32 tile, int group, const float (&d)[COLUMNS / 2], float first = 1.0f, float second = 1.0f) {
#pragma unroll
    for (int step = 0; step < COLUMNS / 16; step++) {
        u32 words[4], to = tile + fragment<COLUMNS>(group, step);
        round_columns(words, d + 8 * step, first, second);
        store_matrices(to, words);
    }
}

// by one thread: the first `count` barriers of a block, each of so many arrivals a phase
template <class Shared>
__device__ __forceinline__ void init_barriers(const Shared& shared, int count, int arrivals) {
    for (int i = 0; i < count; i++) barrier_init(shared.barrier(i), arrivals);
    barrier_fence();
}

// One (batch row, head).
struct Problem {
    int index, batch, head;

    __device__ __forceinline__ Problem(int index, int heads) : index(index), batch(index / heads), head(index % heads) {}
};

// Starts reading one row group of a tile; the barrier counts its bytes. column: the first of the head dim.
template <int COLUMNS>
__device__ __forceinline__ void load_rows(u32 tile, const TensorMap& map, u32 barrier, const Problem& problem, int group, int column = 0) {
    using T = Tile<COLUMNS>;
#pragma unroll
    for (int block = 0; block < T::BLOCKS; block++)
        copy_4d(tile + block * T::BLOCK_BYTES + group * 64 * T::PITCH, map, barrier, column + block * T::BLOCK_COLUMNS, 64 * group, problem.head,
                problem.batch);
}

// Starts writing one row group of a tile, which its warpgroup has rounded into it.
template <int COLUMNS>
__device__ __forceinline__ void store_rows(const TensorMap& map, u32 tile, const Problem& problem, int group, int column = 0) {
    using T = Tile<COLUMNS>;
#pragma unroll
    for (int block = 0; block < T::BLOCKS; block++)
        store_4d(map, tile + block * T::BLOCK_BYTES + group * 64 * T::PITCH, column + block * T::BLOCK_COLUMNS, 64 * group, problem.head,
                 problem.batch);
    stores_commit();
}

// Rounds 64 rows of a gradient into a tile that is no longer read, and starts writing them out.
template <int COLUMNS>
__device__ __forceinline__ void emit(const TensorMap& map, u32 tile, const Problem& problem, int group, const float (&d)[COLUMNS / 2], int column = 0) {
    round_into<COLUMNS>(tile, group, d);
    fence_async();
    meet(group);
    if (elected()) store_rows<COLUMNS>(map, tile, problem, group, column);
}

// the row (0 .. 63, then the row group's) that this lane holds as its first; its second is 8 further
__device__ __forceinline__ int first_row(int group) {
    return own_row(64 * group);
}

// Two numbers of the rows of this lane: lse or its gradient; `outside` beyond the last query.
__device__ __forceinline__ void load_pair(float (&to)[2], const float* from, int problem, int q_len, int group, float outside) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = first_row(group) + 8 * h;
        bool inside = !MASK_QUERIES || row < q_len;
        to[h] = inside ? from[(long long)problem * q_len + row] : outside;
    }
}

// whether a query sees a key: column e of the accumulators of a row
__device__ __forceinline__ bool sees(int row, int key, int kv_len) {
    return !(MASK_KEYS && key >= kv_len) && !(CAUSAL && key > row);
}
