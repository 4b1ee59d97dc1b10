// Functions of single instructions: conversions between float and pairs of halves, base-2 exponential, exchange between lanes.
#pragma once

typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;
typedef unsigned short Half;  // float16, as bits

// two floats to float16, `low` in the low half
__device__ __forceinline__ uint32 pack(float low, float high) {
    uint32 packed;
    // sm_70 converts one at a time
    asm("{ .reg .f16 a, b; cvt.rn.f16.f32 a, %1; cvt.rn.f16.f32 b, %2; mov.b32 %0, {a, b}; }" : "=r"(packed) : "f"(low), "f"(high));
    return packed;
}

__device__ __forceinline__ void unpack(uint32 packed, float& low, float& high) {
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(low), "=f"(high) : "r"(packed));
}

// of two pairs of halves
__device__ __forceinline__ uint32 add_halves(uint32 x, uint32 y) {
    uint32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
    return sum;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32 shuffle_xor(uint32 x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
__device__ __forceinline__ float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
