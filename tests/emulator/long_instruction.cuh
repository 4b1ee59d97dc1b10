// Single instructions of exact/long/cuda/long_instruction.cuh.
#pragma once
#include "numbers.cuh"

inline float reciprocal(float x) { return 1.0f / x; }
inline int apart(int x) { return x; }
inline u32 bytes_of(u32 x, u32 y, u32 selector) { return __byte_perm(x, y, selector); }
inline void store_16(u32 to, int x, int y, int z, int w) { at_shared<uint4>(to) = {unsigned(x), unsigned(y), unsigned(z), unsigned(w)}; }
inline void store_4(u32 to, float x) { at_shared<float>(to) = x; }
inline void store_4(u32 to, u32 x) { at_shared<u32>(to) = x; }
inline int load_4(u32 from) { return at_shared<int>(from); }
inline void load_16(u32 (&x)[4], u32 from) { std::memcpy(x, &at_shared<uint4>(from), 16); }
inline float4 load_floats(u32 from) { return at_shared<float4>(from); }
inline u64 keep_in_cache() { return 0; }
inline float4 load_kept(const float4* from, u64) { return *from; }
inline void store_kept(float4* to, float4 x, u64) { *to = x; }
