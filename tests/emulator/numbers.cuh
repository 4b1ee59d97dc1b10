// Numbers, by arithmetic on the CPU; BF16 as in kernels/cuda/numbers.cuh.
#pragma once
#include "device.hpp"

typedef unsigned int u32;
typedef unsigned short Number;

constexpr float LN2 = 0.6931471805599453f;
#define MINUS_INFINITY __int_as_float(0xff800000)

inline unsigned short narrow_number(float x) {
#if BF16
    unsigned u = bit_copy<unsigned>(x);
    return x != x ? 0x7fff : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
#else
    return bit_copy<unsigned short>((_Float16)x);
#endif
}
inline void store_pair(Number* to, float low, float high) { to[0] = narrow_number(low), to[1] = narrow_number(high); }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline float min_nan(float a, float b) { return a != a || b != b ? NAN : (a < b ? a : b); }
