// Volta's functions of single instructions, by arithmetic on the CPU.
#pragma once
#include "numbers.cuh"

typedef long long int64;
typedef Number Half;

inline float float_of_half(unsigned x) { return (float)bit_copy<_Float16>((unsigned short)x); }
inline unsigned half_of_float(float x) { return bit_copy<unsigned short>((_Float16)x); }
inline u32 add_halves(u32 x, u32 y) {
    return half_of_float(float_of_half(x & 0xffff) + float_of_half(y & 0xffff)) | half_of_float(float_of_half(x >> 16) + float_of_half(y >> 16)) << 16;
}
inline float log2_flushed(float x) { return std::log2(x); }
inline u32 shuffle_xor(u32 x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }
inline float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }
inline bool any_lane(bool x) {
    for (int lanes = 1; lanes < 32; lanes *= 2) x |= shuffle_xor((u32)x, lanes) != 0;
    return x;
}
