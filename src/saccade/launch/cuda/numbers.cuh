// Numbers, exponentials, maxima that keep NaN, and the numbers of thread and block. TF32 is 1 for float32 that is multiplied as TF32, 0 for 16
// bits; then BF16 is 1 for bfloat16, 0 for half.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef TF32
#define TF32 0
#endif
#if TF32
typedef float Number;
#else
typedef unsigned short Number;
#endif

#if BF16
#define TYPE "bf16"
constexpr bool BFLOAT16 = true;
#else
#define TYPE "f16"
constexpr bool BFLOAT16 = false;
#endif

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float LARGEST = 3.402823466e+38f;  // finite
#define MINUS_INFINITY __int_as_float(0xff800000)

// The number of the thread in its block. The read is volatile, so that values derived from the number are computed where they are used: kept in
// registers over a kernel, they were spilled.
__device__ __forceinline__ int thread_of() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// the number of the thread block, volatile for the same reason
__device__ __forceinline__ int block_of() {
    int x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}

// two floats rounded to a register, `low` in its low half
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
    if constexpr (__CUDA_ARCH__ < 800 && !BFLOAT16)  // sm_70 and sm_75 convert one number at a time, and only to half
        asm("{ .reg .f16 low, high; cvt.rn.f16.f32 low, %1; cvt.rn.f16.f32 high, %2; mov.b32 %0, {low, high}; }" : "=r"(packed) : "f"(low), "f"(high));
    else
        asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// a register of two numbers of 16 bits as floats, the low half first
__device__ __forceinline__ float2 floats_of(u32 pair) {
    if constexpr (BFLOAT16) return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
    float2 x;
    asm("{ .reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }" : "=f"(x.x), "=f"(x.y) : "r"(pair));
    return x;
}

// two floats as two neighbours in memory
__device__ __forceinline__ void store_pair(Number* to, float low, float high) {
    if constexpr (TF32)
        *reinterpret_cast<float2*>(to) = make_float2(low, high);
    else
        *reinterpret_cast<u32*>(to) = pack(low, high);
}

// nearest TF32, ties away from zero: the matrix units would cut the low 13 bits off
__device__ __forceinline__ u32 to_tf32(float x) {
    u32 rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
    return rounded;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// the larger of two; NaN if either is NaN
__device__ __forceinline__ float max_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// the smaller of two; NaN if either is NaN
__device__ __forceinline__ float min_nan(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// over the four lanes that hold one row of an accumulator
__device__ __forceinline__ float quad_max(float x) {
    x = max_nan(x, __shfl_xor_sync(~0u, x, 1));
    return max_nan(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// words[j] of the four lanes of a quad, lane t = 0 .. 3: a 4 x 4 matrix, transposed
__device__ __forceinline__ void quad_transpose(u32 (&words)[4], int t) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int low = bit == 1 ? 2 * i : i;
            u32 got = __shfl_xor_sync(~0u, t & bit ? words[low] : words[low + bit], bit);
            (t & bit ? words[low] : words[low + bit]) = got;
        }
    }
}

// The first `columns`, a multiple of 8, of row h of an accumulator [8 columns][h][2 columns], times a factor, to 16-byte aligned memory, if
// `there`; all lanes take part. 16 bytes a lane, whole sectors: by 4 bytes a lane gather's forward took 8 % longer at D = 128.
template <int DIM>
__device__ __forceinline__ void store_row(const float (&values)[DIM / 2], int h, float factor, Number* to, int columns, bool there) {
    int t = thread_of() % 4;
#pragma unroll
    for (int i = 0; i < DIM / 8; i += 4) {
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] = pack(values[4 * (i + j) + 2 * h] * factor, values[4 * (i + j) + 2 * h + 1] * factor);
        quad_transpose(words, t);
        if (there && 8 * (i + t) < columns) *reinterpret_cast<uint4*>(to + 8 * (i + t)) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}
