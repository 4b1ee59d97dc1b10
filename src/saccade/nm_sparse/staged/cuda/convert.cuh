// Conversions and functions of single instructions.
#pragma once
#include "copy.cuh"

__device__ __forceinline__ uint32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(uint32 x) { return __uint_as_float(x); }

// two floats to 16 bits each, `low` in the low half
__device__ __forceinline__ uint32 pack(float low, float high) {
    uint32 packed;
#if DTYPE == 1
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

__device__ __forceinline__ void unpack(uint32 packed, float& low, float& high) {
#if DTYPE == 1
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(low), "=f"(high) : "r"(packed));
#else
    low = float_of(packed << 16);
    high = float_of(packed & 0xffff0000u);
#endif
}

// nearest TF32, ties away from zero; the matrix units would cut the low 13 bits off
__device__ __forceinline__ uint32 to_tf32(uint32 x) {
    uint32 rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(float_of(x)));
    return rounded;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// the larger one, NaN if either is
__device__ __forceinline__ float max_or_nan(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

__device__ __forceinline__ uint32 shuffle_xor(uint32 x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
__device__ __forceinline__ float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
