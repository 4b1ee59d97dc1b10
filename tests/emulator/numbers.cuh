// Numbers of launch/cuda/numbers.cuh, by arithmetic on the CPU.
#pragma once
#include "device.hpp"

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

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float LARGEST = 3.402823466e+38f;
#define MINUS_INFINITY __int_as_float(0xff800000)

inline int thread_of() { return threadIdx.x; }
inline int block_of() { return blockIdx.x; }

inline unsigned short narrow_one(float x) {
#if BF16
    unsigned u = bit_copy<unsigned>(x);
    if (x != x) return 0x7fff;
    return (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
#else
    return bit_copy<unsigned short>((_Float16)x);
#endif
}
inline float widen_one(unsigned short x) {
#if BF16
    return bit_copy<float>((unsigned)x << 16);
#else
    return (float)bit_copy<_Float16>(x);
#endif
}
inline u32 pack(float low, float high) { return narrow_one(low) | (u32)narrow_one(high) << 16; }
inline float2 floats_of(u32 pair) { return make_float2(widen_one(pair & 0xffff), widen_one(pair >> 16)); }
inline void store_pair(Number* to, float low, float high) {
#if TF32
    to[0] = low, to[1] = high;
#else
    to[0] = narrow_one(low), to[1] = narrow_one(high);
#endif
}
inline u32 to_tf32(float number) {
    const u32 x = bit_copy<u32>(number);
    if ((x & 0x7f800000u) == 0x7f800000u) return x;
    return (x + 0x1000u) & 0xffffe000u;
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : (a > b ? a : b); }
inline float min_nan(float a, float b) { return a != a || b != b ? NAN : (a < b ? a : b); }
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
