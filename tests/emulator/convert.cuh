// Conversions, by arithmetic on the CPU.
#pragma once
#include "copy.cuh"

inline unsigned short narrow_one(float x) {
#if DTYPE == 1
    return bit_copy<unsigned short>((_Float16)x);
#else
    unsigned u = bit_copy<unsigned>(x);
    if (x != x) return 0x7fff;
    return (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
#endif
}
inline float widen_one(unsigned short x) {
#if DTYPE == 1
    return (float)bit_copy<_Float16>(x);
#else
    return bit_copy<float>((unsigned)x << 16);
#endif
}
inline uint32 bits_of(float x) { return bit_copy<uint32>(x); }
inline float float_of(uint32 x) { return bit_copy<float>(x); }
inline uint32 pack(float low, float high) { return narrow_one(low) | (uint32)narrow_one(high) << 16; }
inline void unpack(uint32 packed, float& low, float& high) { low = widen_one(packed & 0xffff), high = widen_one(packed >> 16); }
inline uint32 to_tf32(uint32 x) {
    if ((x & 0x7f800000u) == 0x7f800000u) return x;
    return (x + 0x1000u) & 0xffffe000u;
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float max_or_nan(float x, float y) { return x != x || y != y ? NAN : (x > y ? x : y); }
inline uint32 shuffle_xor(uint32 x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }
inline float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }
