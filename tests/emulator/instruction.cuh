// Functions of single instructions, by arithmetic on the CPU.
#pragma once
#include "device.hpp"

typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;
typedef unsigned short Half;

inline float float_of_half(unsigned x) { return (float)bit_copy<_Float16>((unsigned short)x); }
inline unsigned half_of_float(float x) { return bit_copy<unsigned short>((_Float16)x); }
inline uint32 pack(float low, float high) { return half_of_float(low) | half_of_float(high) << 16; }
inline void unpack(uint32 packed, float& low, float& high) { low = float_of_half(packed & 0xffff), high = float_of_half(packed >> 16); }
inline uint32 add_halves(uint32 x, uint32 y) {
    return half_of_float(float_of_half(x & 0xffff) + float_of_half(y & 0xffff)) | half_of_float(float_of_half(x >> 16) + float_of_half(y >> 16)) << 16;
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline uint32 shuffle_xor(uint32 x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }
inline float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }
inline bool any_lane(bool x) {
    for (int lanes = 1; lanes < 32; lanes *= 2) x |= shuffle_xor((uint32)x, lanes) != 0;
    return x;
}
