// Vectors of the compiler's own kind (GCC and clang), as wide as the processor's.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace saccade {

// A product keeps ROWS x TILE vectors of sums in registers: 24 of AVX-512's 32, or 12 of 16, so that the rest of them hold its operands.
#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 6;
#else
constexpr int LANES = 8, ROWS = 3;
#endif
constexpr int TILE = 4;

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

inline Vector load(const float* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Vector v) { std::memcpy(to, &v, sizeof v); }

inline Vector all(float x) { return Vector{} + x; }

// 2^x for x <= 0, to 8e-8 of it; 0 from -126 down, NaN for NaN.
inline Vector exp2(Vector x) {
  // a float of this size has no bits behind the point, so the sum is x rounded, with the integer in its last bits
  const Vector rounded = x + 12582912.0f;
  const Vector r = x - (rounded - 12582912.0f);
  // minimax polynomial of degree 6 on [-1/2, 1/2], fitted to a relative error of 2e-9
  Vector p = r * 1.535336163e-4f + 1.339887442e-3f;
  p = p * r + 9.618437359e-3f;
  p = p * r + 5.550332471e-2f;
  p = p * r + 2.402264791e-1f;
  p = p * r + 6.931472029e-1f;
  p = p * r + 1.0f;
  const Integers scaled = ((Integers)rounded << 23) + (Integers)p;
  // added to the bits of a NaN, the exponent of another could make it a number
  return x <= -126.0f ? Vector{} : x != x ? x : (Vector)scaled;
}

}  // namespace saccade
