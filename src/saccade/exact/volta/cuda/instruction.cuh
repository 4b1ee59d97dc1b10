// Operations that Volta's kernels need besides the numbers that families share: pairs of halves, base-2 logarithm, exchange between lanes.
#pragma once
#include "numbers.cuh"

typedef long long int64;
typedef Number Half;  // float16, as bits

// of two pairs of halves
__device__ __forceinline__ u32 add_halves(u32 x, u32 y) {
    u32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
    return sum;
}

// `log2_fast` of numbers.cuh, but a denormal number counts as 0, which saves the instructions that would scale it.
__device__ __forceinline__ float log2_flushed(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 shuffle_xor(u32 x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
__device__ __forceinline__ float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
