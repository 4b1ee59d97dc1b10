// Numbers of kernels/cuda/numbers.cuh as nm_sparse's fused kernel uses them, by arithmetic on the CPU.
#pragma once
#define DTYPE (BF16 ? 0 : 1)
#include "convert.cuh"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short Number;

constexpr float LN2 = 0.6931471805599453f;
#define MINUS_INFINITY __int_as_float(0xff800000)

inline int thread_of() { return threadIdx.x; }
inline int block_of() { return blockIdx.x; }
inline float log2_fast(float x) { return std::log2(x); }
inline float max_nan(float a, float b) { return max_or_nan(a, b); }
inline float min_nan(float a, float b) { return -max_or_nan(-a, -b); }
inline float quad_max(float x) {
    x = max_nan(x, __shfl_xor_sync(~0u, x, 1));
    return max_nan(x, __shfl_xor_sync(~0u, x, 2));
}
inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

template <int DIM>
void store_row(const float (&values)[DIM / 2], int h, float factor, Number* to, int columns, bool there) {
    for (int i = 0; i < DIM / 2; i++) {
        int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (i / 2 % 2 == h && there && column < columns) to[column] = narrow_one(values[i] * factor);
    }
}
