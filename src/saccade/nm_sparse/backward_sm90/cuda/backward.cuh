// The parts that the kernels of the backward of sm_90a share: sizes, masks of pairs, dropout, products over D, results.
//
// A thread block owns 128 rows, 64 a warpgroup, whose operands stay in shared memory; a producer warpgroup loads tiles of the other side
// (TMA) with the stored bits, and in the dK, dV kernel with lse and delta.
//
// With a bias P = exp(scale * Q K^T + bias - lse), the difference before it is scaled to base 2: next to finfo.min a score in base 2 would overflow.
// Producer threads copy its tiles, 16 bytes each, and a barrier completes with them. Next to a large score the logarithm of the sum is lost
// in lse: where |lse| is above FAR the dQ kernel adds up the weights of a row, and gives -log2 of the sum to the dK, dV kernel. lse is never below
// the largest score, so these weights are at most 1.
//
// accumulator.cuh says which numbers of a product a lane holds.
#pragma once
#include "accumulator.cuh"
#include "async_copy.cuh"
#include "block_order.cuh"
#include "mma.cuh"
#include "numbers.cuh"
#include "ring.cuh"
#include "philox.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

#ifndef BIAS
#define BIAS 0
#endif
constexpr int WARPGROUPS = 2;
constexpr int BLOCK = 64 * WARPGROUPS;        // rows of a thread block
constexpr int COLUMNS = HEAD_DIM / 64;        // column blocks of 128 bytes
constexpr int OWN_BYTES = 64 * HEAD_DIM * 2;  // one operand of one warpgroup
constexpr int PRODUCER_WARPS = 4;
constexpr float FAR = 1024.0f;           // an lse beyond it has lost more than 3e-5 of the logarithm of the sum
constexpr int EARLY = 48;                // with a block mask block 0 of so many heads comes first, see block_order.cuh
constexpr int NUMBER = BIAS ? BIAS : 4;  // bytes of a number of the bias; any where there is none

struct Sizes {
    int heads, group;      // query heads; query heads of a key head
    int q_len, kv_len;     // kv_len: all keys
    int seen;              // keys that some query can see
    int words, counters;   // of the stored selection and of dropout, a query
    int head_dim;
    int present;           // bits 0, 1: queries differ along batch, heads; 2, 3: keys; 4, 5: values; 6, 7: dout
    int vectors;           // whether four words of the selection begin at a multiple of 16 bytes
    long long mask_batch, mask_head, mask_row;  // of the block mask, for dK and dV transposed; its columns are adjacent
    // BIAS: columns are adjacent, rows begin at multiples of 16 bytes, and as many columns, a multiple of 16 bytes too, may be read
    const unsigned char* bias;
    long long bias_batch, bias_head, bias_row;  // in numbers
    int bias_columns;
    float exponent;        // scale * log2(e)
    float scale, spared;   // spared: 1 / (1 - dropout_p)
    u32 threshold;         // a weight survives if its draw of 24 bits is no less
};

__device__ __forceinline__ int lane_of() {
    return thread_of() % 32;
}

__device__ __forceinline__ void store_shared(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, u32 x, u32 y) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ u32 load_shared(u32 address) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void load_shared(u32 address, u32& x, u32& y) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(u32 address, float& x, float& y) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}

// 16 ones for each of two neighbours that is kept. `even` and `odd`: bit words shifted so that the bits of columns 2t and 2t + 1 of column
// group i are the signs of bytes i; a permutation of bytes that copies signs makes the mask, in one instruction.
__device__ __forceinline__ u32 pair_mask(u32 even, u32 odd, int i) {
    u32 mask;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mask) : "r"(even), "r"(odd), "r"(0xCC88u + 0x1111u * i));
    return mask;
}

__device__ __forceinline__ u32 even_bits(u32 word, int t) {
    return word << (7 - 2 * t);
}
__device__ __forceinline__ u32 odd_bits(u32 word, int t) {
    return word << (6 - 2 * t);
}

// transposes 32 words of a warp, one a lane, as a matrix of bits
__device__ __forceinline__ u32 transpose_bits(u32 x) {
#pragma unroll
    for (int j = 16; j > 0; j /= 2) {
        // columns without bit j
        u32 left = j == 16 ? 0x0000FFFFu : j == 8 ? 0x00FF00FFu : j == 4 ? 0x0F0F0F0Fu : j == 2 ? 0x33333333u : 0x55555555u;
        bool upper = lane_of() & j;
        u32 y = __shfl_xor_sync(~0u, x, j), mine = upper ? ~left : left;
        y = upper ? y >> j : y << j;
        x = (x & mine) | (y & ~mine);
    }
    return x;
}

// whether dropout spares the weight of a query and a key: word key % 4 of counter (query * ceil(Tk / 4) + key / 4, problem)
__device__ __forceinline__ bool survives(u64 seed, const Sizes& sizes, int problem, int query, int key) {
    Words drawn = philox(seed, u32(query) * u32(sizes.counters) + u32(key / 4), problem);
    u32 low = key & 1 ? drawn.word[1] : drawn.word[0], high = key & 1 ? drawn.word[3] : drawn.word[2];
    return (key & 2 ? high : low) >> 8 >= sizes.threshold;
}

// Copies ROWS x COLUMNS_OF numbers of the bias, from a query and a key on, to rows of PITCH bytes; thread `thread` of THREADS does its part. Numbers
// after the last query or column are zeros.
template <int ROWS, int COLUMNS_OF, int PITCH, int THREADS>
__device__ __forceinline__ void copy_bias(u32 to, const Sizes& sizes, int batch, int head, int query, int key, int thread) {
    constexpr int CHUNKS = COLUMNS_OF * NUMBER / 16, AT_ONCE = THREADS / CHUNKS;  // of 16 bytes; rows
    static_assert(THREADS % CHUNKS == 0 && ROWS % AT_ONCE == 0 && PITCH % 16 == 0);
    const int row = query + thread / CHUNKS, column = key + thread % CHUNKS * (16 / NUMBER);
    const unsigned char* from = sizes.bias + (batch * sizes.bias_batch + head * sizes.bias_head + row * sizes.bias_row + column) * NUMBER;
    to += thread / CHUNKS * PITCH + thread % CHUNKS * 16;
#pragma unroll 1
    for (int i = 0; i < ROWS / AT_ONCE; i++) {
        const bool inside = row + i * AT_ONCE < sizes.q_len && column < sizes.bias_columns;
        copy_16(to + i * AT_ONCE * PITCH, inside ? from : sizes.bias, inside);
        from += AT_ONCE * sizes.bias_row * NUMBER;
    }
}

// copies of 64 rows, in column blocks of 64
__device__ __forceinline__ void copy_rows(u32 to, const TensorMap& map, u32 barrier, int row, int head, int batch, int bytes = ROWS_64) {
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) copy_4d(to + column * bytes, map, barrier, 64 * column, row, head, batch);
}

// 64 rows of D in shared memory as the register operand of products over D: fragments of 16 x 16, (row g, columns 2t), (g + 8, 2t),
// (g, 2t + 8), (g + 8, 2t + 8)
__device__ __forceinline__ void load_fragments(u32 (&to)[HEAD_DIM / 4], u32 from) {
    int lane = lane_of(), row = thread_of() / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        load_matrices(to + 4 * step, swizzled(from + step / 4 * ROWS_64, row, step % 4 * 2 + lane / 16));
    }
}

// 64 rows of D as the left operand of products over D, and its columns 16 step .. 16 step + 15: rows in shared memory, or fragments in registers
__device__ __forceinline__ u64 left_operand(u32 rows) {
    return operand(rows);
}
__device__ __forceinline__ const u32* left_operand(const u32 (&fragments)[HEAD_DIM / 4]) {
    return fragments;
}
__device__ __forceinline__ u64 columns_of(u64 rows, int step) {
    return advance(rows, columns_at(step, ROWS_64));
}
__device__ __forceinline__ const u32* columns_of(const u32* fragments, int step) {
    return fragments + 4 * step;
}

// d = A B^T over D, committed: 64 rows of A, which are a thread block's own and lie in shared memory or in registers, and N rows of B
template <int N, class Own>
__device__ __forceinline__ void issue_over_dim(float (&d)[N / 2], const Own& own, u32 other) {
    auto a = left_operand(own);
    u64 b = operand(other);
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        auto rows = columns_of(a, step);
        u64 columns = advance(b, columns_at(step, N * 128));
        if (step == 0)
            Products<N>::set(d, rows, columns);
        else
            Products<N>::add(d, rows, columns);
    }
    products_commit();
}

// an accumulator of 64 rows of D, times a factor, to rows of `stride` elements; `row` and `rows`: of this warpgroup's first, and how many are real
__device__ __forceinline__ void store_rows(
    const float (&values)[HEAD_DIM / 2], float factor, unsigned short* to, long long stride, int rows, int head_dim) {
    int first = threadIdx.x % 128 / 32 * 16 + lane_of() / 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = first + 8 * h;
        store_row<HEAD_DIM>(values, h, factor, to + row * stride, head_dim, row < rows);
    }
}
