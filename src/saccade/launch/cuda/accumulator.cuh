// The places of an accumulator's numbers: lane 4g + t of a warp has rows g and g + 8 of the warp's 16, written [h] for h = 0, 1, and columns 2t and 2t + 1,
// [b], of each column group i of 8, in d[4i + 2h + b]. Warp w of a warpgroup has rows 16w .. 16w + 15. Two neighbours rounded to 16 bits share a
// register. Four such registers are the left operand of the next product, without a shuffle.
#pragma once
#include "numbers.cuh"

// which of its thread's two rows number e is of
constexpr __device__ __forceinline__ int half_of(int e) { return e / 2 % 2; }
// Its row and its column, of a thread whose first ones are given. They are added here, because the order of sums changes schedules of kernels.
constexpr __device__ __forceinline__ int row_at(int first, int e) { return first + e / 2 % 2 * 8; }
constexpr __device__ __forceinline__ int column_at(int first, int e) { return first + e / 4 * 8 + e % 2; }

// the first of this thread's rows in its warpgroup's 64, which begin at `first`, and the first of its columns
__device__ __forceinline__ int own_row(int first = 0) { return first + int(threadIdx.x) / 32 % 4 * 16 + int(threadIdx.x) % 32 / 4; }
__device__ __forceinline__ int own_column() { return 2 * (int(threadIdx.x) % 4); }

// the largest number of each row in this thread's columns; `quad_max` finds that of all columns
template <int N>
__device__ __forceinline__ void own_max(float (&most)[2], const float (&d)[N]) {
    most[0] = most[1] = MINUS_INFINITY;
#pragma unroll
    for (int e = 0; e < N; e++) most[half_of(e)] = fmaxf(most[half_of(e)], d[e]);
}

// D = diag(factor) D
template <int N>
__device__ __forceinline__ void scale_rows(float (&d)[N], const float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int e = 2 * h; e < N; e += 4) d[e] *= factor[h], d[e + 1] *= factor[h];
}

// 16 columns times a factor a row, rounded: a left operand
__device__ __forceinline__ void round_columns(u32 (&words)[4], const float* d, float first, float second) {
    words[0] = pack(d[0] * first, d[1] * first);
    words[1] = pack(d[2] * second, d[3] * second);
    words[2] = pack(d[4] * first, d[5] * first);
    words[3] = pack(d[6] * second, d[7] * second);
}
