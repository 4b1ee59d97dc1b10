// The part of a lane in the 32 x 8 sums of a product, in float32 or, with HALF_SUMS, in float16.
//
//   float32: 8 numbers, of rows `lane & ~2` and 2 further, four columns each; the other four lie in lane ^ 2
//   float16: 4 pairs, row `lane` whole; it is directly the left operand of another product
#pragma once
#include "fragment.cuh"

#if HALF_SUMS
#define LANE_ROWS 1
typedef u32 Sums[4];
__device__ __forceinline__ int held_row(int lane) { return lane; }
__device__ __forceinline__ int row_index(int i) { return 0; }
__device__ __forceinline__ int held_column(int lane, int i) { return i; }
__device__ __forceinline__ bool first_of_row(int lane) { return true; }
__device__ __forceinline__ float row_max(float x) { return x; }
__device__ __forceinline__ float row_sum(float x) { return x; }
__device__ __forceinline__ void widen(float (&x)[8], const Sums& sums) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = floats_of(sums[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
}
__device__ __forceinline__ void narrow(Sums& sums, const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = pack(x[2 * i], x[2 * i + 1]);
}
// x as A by rows: a[0], a[1] columns 0..3 of row `lane`; a[2], a[3] columns 4..7
__device__ __forceinline__ void as_operand(const float (&x)[8], u32 (&a)[4], int lane) { narrow(a, x); }
// bits of the columns of the lane's rows, of which it has computed those of row `lane`
__device__ __forceinline__ void bits_of_rows(u32 (&bits)[1], u32 own, int lane) { bits[0] = own; }
// a tile's sums to those of all tiles
__device__ __forceinline__ void add(Sums& sums, const Sums& tile) {
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = add_halves(sums[i], tile[i]);
}
// the sums as a lane holds float32 ones, so that additions to memory meet half as many rows at a time: columns 0, 1, 4, 5 of two rows or 2, 3, 6, 7
__device__ __forceinline__ void as_floats(float (&x)[8], const Sums& sums, int lane) {
    const bool upper = lane & 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 other = shuffle_xor(upper ? sums[2 * half] : sums[2 * half + 1], 2);
        const float2 first = floats_of(upper ? other : sums[2 * half]), second = floats_of(upper ? sums[2 * half + 1] : other);
        x[4 * half] = first.x, x[4 * half + 1] = first.y, x[4 * half + 2] = second.x, x[4 * half + 3] = second.y;
    }
}
#else
#define LANE_ROWS 2
typedef float Sums[8];
__device__ __forceinline__ int held_row(int lane) { return row_of(lane); }
// which of the lane's two rows, which are 2 apart, element i belongs to
__device__ __forceinline__ int row_index(int i) { return i >> 1 & 1; }
__device__ __forceinline__ int held_column(int lane, int i) { return column_of(lane, i); }
__device__ __forceinline__ bool first_of_row(int lane) { return !(lane & 2); }
__device__ __forceinline__ float row_max(float x) { return fmaxf(x, shuffle_xor(x, 2)); }
__device__ __forceinline__ float row_sum(float x) { return x + shuffle_xor(x, 2); }
__device__ __forceinline__ void widen(float (&x)[8], const Sums& sums) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = sums[i];
}
__device__ __forceinline__ void narrow(Sums& sums, const float (&x)[8]) { widen(sums, x); }
__device__ __forceinline__ void as_operand(const float (&x)[8], u32 (&a)[4], int lane) { as_rows(x, a, lane); }
__device__ __forceinline__ void bits_of_rows(u32 (&bits)[2], u32 own, int lane) {
    const u32 other = shuffle_xor(own, 2);
    bits[0] = lane & 2 ? other : own, bits[1] = lane & 2 ? own : other;
}
#endif

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < (int)(sizeof(Sums) / 4); i++) sums[i] = 0;
}

__device__ __forceinline__ void scale_rows(Sums& sums, const float (&by)[LANE_ROWS]) {
    float x[8];
    widen(x, sums);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= by[row_index(i)];
    narrow(sums, x);
}
