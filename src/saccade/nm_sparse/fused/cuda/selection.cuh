// The two of four consecutive keys that a row keeps, and the exponents of their weights.
//
// Scores a, b, c, d of keys 4j .. 4j + 3. "2:4" keeps the two largest, "1:2" (PAIRS) the larger of (a, b) and of (c, d); ties go to the
// lower key. A sparse product takes the kept weights in the order of their keys, with a code of four bits: the index of the first,
// plus four times that of the second.
//
//   m1 = max(a, b)  n1 = min(a, b)  m2 = max(c, d)  n2 = min(c, d)
//   both of the first pair    n1 >= m2                 code 4   (0, 1)
//   both of the second        n2 > m1                  code 14  (2, 3)
//   one of each               otherwise, m1 and m2     code 8 + (b > a) + 4 (d > c)
//
// NaN: max and min keep it, and every comparison with it fails, so a pair that holds a NaN passes it on.
//
// Codes are summed as floats. Two rows share a word, the second 16 bits up, on top of 2^23, where the mantissa counts units: comparisons and minima
// run at half rate on the integer unit, which is the limit; predicated additions and multiply-adds run on the float units.
#pragma once
#include "numbers.cuh"

// how a selection is computed: the same result, other instructions (docs/notes/nm_sparse.md counts them)
#define SELECT_OVERRIDE 2   // predicated; one-of-each is written first, the other two cases over it
#define SELECT_EARLY 3      // the same with the code of one-of-each written before the comparisons; the two weights are added one by one
#define SELECT_UNORDERED 4  // the kept two, and their indices, in any order

#if SELECTION == SELECT_UNORDERED && !PAIRS
#define ANY_ORDER  // mma.cuh
#endif

constexpr float CODES_ZERO = 8388608.0f;  // 2^23
// what a word of codes begins with
constexpr float CODES_BEGIN = CODES_ZERO + (TF32 ? 4.0f : SELECTION == SELECT_UNORDERED || PAIRS ? 8.0f : 0.0f) * 65537.0f;

// exponents x and y of the two kept weights, score * scale + offset; `codes` gains UNIT * code
template <int UNIT>
__device__ __forceinline__ void select_pairs(
    float a, float b, float c, float d, float scale, float offset, float& x, float& y, float& codes) {
    constexpr float unit = UNIT;
    x = fmaf(max_nan(a, b), scale, offset);
    y = fmaf(max_nan(c, d), scale, offset);
    asm("{ .reg .pred second, fourth;\n"
        "setp.gt.f32 second, %2, %1;\n"
        "setp.gt.f32 fourth, %4, %3;\n"
        "@second add.f32 %0, %0, %5;\n"
        "@fourth add.f32 %0, %0, %6; }"
        : "+f"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d), "f"(unit), "f"(4 * unit));
}

// TF32: exponent of the larger of two, whose code speaks of halves of numbers: 4 (0, 1) for the first, 14 (2, 3) for the second
template <int UNIT>
__device__ __forceinline__ void select_pair(float a, float b, float scale, float offset, float& x, float& codes) {
    x = fmaf(max_nan(a, b), scale, offset);
    asm("{ .reg .pred second;\n"
        "setp.gt.f32 second, %2, %1;\n"
        "@second add.f32 %0, %0, %3; }"
        : "+f"(codes)
        : "f"(a), "f"(b), "f"(10.0f * UNIT));
}

// asm: from `cond ? p : q` the compiler makes a select on the integer unit, never a predicated multiply-add
template <int UNIT>
__device__ __forceinline__ void select_override(
    float a, float b, float c, float d, float scale, float offset, float& x, float& y, float& codes) {
    constexpr float unit = UNIT;
    float before = codes;
    asm("{ .reg .pred first, second, upper, last;\n"
        ".reg .f32 m1, n1, m2, n2;\n"
        "max.NaN.f32 m1, %3, %4;\n"
        "min.NaN.f32 n1, %3, %4;\n"
        "max.NaN.f32 m2, %5, %6;\n"
        "min.NaN.f32 n2, %5, %6;\n"
        "setp.ge.f32 first, n1, m2;\n"
        "setp.gt.f32 second, n2, m1;\n"
        "setp.gt.f32 upper, %4, %3;\n"
        "setp.gt.f32 last, %6, %5;\n"
        "fma.rn.f32 %0, m1, %7, %8;\n"
        "@first fma.rn.f32 %0, %3, %7, %8;\n"
        "@second fma.rn.f32 %0, %5, %7, %8;\n"
        "fma.rn.f32 %1, m2, %7, %8;\n"
        "@first fma.rn.f32 %1, %4, %7, %8;\n"
        "@second fma.rn.f32 %1, %6, %7, %8;\n"
        "add.f32 %2, %13, %9;\n"
        "@upper add.f32 %2, %2, %10;\n"
        "@last add.f32 %2, %2, %11;\n"
        "@first add.f32 %2, %13, %11;\n"
        "@second add.f32 %2, %13, %12; }"
        : "=&f"(x), "=&f"(y), "=&f"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d), "f"(scale), "f"(offset), "f"(8 * unit), "f"(unit), "f"(4 * unit), "f"(14 * unit), "f"(before));
}

// The work of `select_override`, in an order from which ptxas makes a shorter schedule if all else is as in the tuned shapes.
template <int UNIT>
__device__ __forceinline__ void select_early(
    float a, float b, float c, float d, float scale, float offset, float& x, float& y, float& codes) {
    constexpr float unit = UNIT;
    float before = codes;
    asm("{ .reg .pred first, second, upper, last;\n"
        ".reg .f32 m1, n1, m2, n2;\n"
        "setp.gt.f32 upper, %4, %3;\n"
        "setp.gt.f32 last, %6, %5;\n"
        "add.f32 %2, %13, %9;\n"
        "@upper add.f32 %2, %2, %10;\n"
        "@last add.f32 %2, %2, %11;\n"
        "max.NaN.f32 m1, %3, %4;\n"
        "min.NaN.f32 n1, %3, %4;\n"
        "max.NaN.f32 m2, %5, %6;\n"
        "min.NaN.f32 n2, %5, %6;\n"
        "setp.ge.f32 first, n1, m2;\n"
        "setp.gt.f32 second, n2, m1;\n"
        "fma.rn.f32 %0, m1, %7, %8;\n"
        "@first fma.rn.f32 %0, %3, %7, %8;\n"
        "@second fma.rn.f32 %0, %5, %7, %8;\n"
        "fma.rn.f32 %1, m2, %7, %8;\n"
        "@first fma.rn.f32 %1, %4, %7, %8;\n"
        "@second fma.rn.f32 %1, %6, %7, %8;\n"
        "@first add.f32 %2, %13, %11;\n"
        "@second add.f32 %2, %13, %12; }"
        : "=&f"(x), "=&f"(y), "=&f"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d), "f"(scale), "f"(offset), "f"(8 * unit), "f"(unit), "f"(4 * unit), "f"(14 * unit), "f"(before));
}

// x and y in an order of their own: m1 and m2, or n2 and m2, or m1 and n1. With u = (b > a), l = (d > c) codes are 8 + u + 4 l, 11 + 3 l and
// 4 - 3 u, of which the 8 is there before. 21 instructions for four scores and their weights, 24 with `select_override`.
//
// mma.sp takes pairs in either order (PTX ISA, "Sparse matrix storage": only 0, 5, 10 and 15 are invalid), mma.sp::ordered_metadata rising ones.
// Up to sm_90 both are the same instruction; on later ones, the assembler says, the former may take longer.
template <int UNIT>
__device__ __forceinline__ void select_unordered(
    float a, float b, float c, float d, float scale, float offset, float& x, float& y, float& codes) {
    constexpr float unit = UNIT;
    asm("{ .reg .pred first, second;\n"
        ".reg .f32 m1, n1, m2, n2, upper, last, code;\n"
        "max.NaN.f32 m1, %3, %4;\n"
        "min.NaN.f32 n1, %3, %4;\n"
        "max.NaN.f32 m2, %5, %6;\n"
        "min.NaN.f32 n2, %5, %6;\n"
        "setp.gt.f32 second, n2, m1;\n"
        "setp.ge.f32 first, n1, m2;\n"
        "set.gt.f32.f32 upper, %4, %3;\n"
        "set.gt.f32.f32 last, %6, %5;\n"
        "fma.rn.f32 %0, m1, %7, %8;\n"
        "@second fma.rn.f32 %0, n2, %7, %8;\n"
        "fma.rn.f32 %1, m2, %7, %8;\n"
        "@first fma.rn.f32 %1, n1, %7, %8;\n"
        "fma.rn.f32 code, last, 0f40800000, upper;\n"
        "@second fma.rn.f32 code, last, %10, %10;\n"
        "@first fma.rn.f32 code, upper, %11, %12;\n"
        "fma.rn.f32 %2, code, %9, %2; }"
        : "=&f"(x), "=&f"(y), "+f"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d), "f"(scale), "f"(offset), "f"(unit), "f"(3.0f), "f"(-3.0f), "f"(-4.0f));
}

template <int UNIT>
__device__ __forceinline__ void select_four(
    float a, float b, float c, float d, float scale, float offset, float& x, float& y, float& codes) {
    if constexpr (PAIRS)
        select_pairs<UNIT>(a, b, c, d, scale, offset, x, y, codes);
    else if constexpr (SELECTION == SELECT_EARLY)
        select_early<UNIT>(a, b, c, d, scale, offset, x, y, codes);
    else if constexpr (SELECTION == SELECT_UNORDERED)
        select_unordered<UNIT>(a, b, c, d, scale, offset, x, y, codes);
    else
        select_override<UNIT>(a, b, c, d, scale, offset, x, y, codes);
}
