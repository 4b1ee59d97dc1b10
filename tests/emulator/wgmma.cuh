// Products of a warpgroup of launch/cuda/wgmma.cuh: each warp computes its 16 rows as it issues them, from descriptors and swizzled rows of 128
// or 64 bytes. Products are not under way here, so a wait that is missing is not found.
#pragma once
#include "mma.cuh"
#include "swizzle.cuh"

template <int PITCH = 128>
u64 operand(u32 address, u32 leading = 16) {
    static_assert(PITCH == 128 || PITCH == 64);
    return u64((address & 0x3FFFF) >> 4) | u64(leading >> 4) << 16 | (PITCH == 128 ? 1ull : 2ull) << 62;
}
inline u64 advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }
inline void products_begin() {}
inline void products_commit() {}
template <int GROUPS>
void products_wait() {}

// number k along the sum of row or column `outer`; ROWS: rows of the operand are along the sum, and `leading` parts its column blocks of 64
inline float from_operand(u64 descriptor, bool rows, int outer, int k) {
    const u32 begin = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4, pitch = descriptor >> 62 == 1 ? 128 : 64;
    const int row = rows ? k : outer, column = rows ? outer : k, block = pitch / 2;
    const u32 at = begin + (rows ? column / block * leading : 0) + row * pitch + column % (rows ? block : 16) * 2;
    // the hardware takes the row from the address too
    return widen_one(at_shared<unsigned short>(at ^ (at >> 7 & (pitch == 128 ? 7 : 3)) << 4));
}

// Operands as numbers, for the whole warp before any lane goes on: a lane would otherwise find each number in swizzled memory anew.
struct Operands { float a[16][16], b[256][16]; };
inline Operands operands[32];
inline Operands& operands_of_warp() { return operands[current / 32]; }
inline void read_rows(u64 a, bool rows_a) {
    const int first = current / 32 % 4 * 16;
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++) operands_of_warp().a[row][k] = from_operand(a, rows_a, first + row, k);
}
// A in registers: a[0..3] = columns 2t, 2t + 1 of row g; of row g + 8; columns 2t + 8, 2t + 9 of row g; of row g + 8
inline void hold_rows(const u32* a) {
    for (int i = 0; i < 8; i++)
        operands_of_warp().a[lane_id() / 4 + i / 2 % 2 * 8][lane_id() % 4 * 2 + i / 4 * 8 + i % 2] = widen_one(a[i / 2] >> 16 * (i % 2) & 0xffff);
}
inline void read_columns(u64 b, bool rows_b, int columns) {
    for (int column = 0; column < columns; column++)
        for (int k = 0; k < 16; k++) operands_of_warp().b[column][k] = from_operand(b, rows_b, column, k);
}
// all lanes must name the same
inline void tell_operands(u64 a, u64 b) {
    u32* in = my_warp().in[lane_id()];
    std::memcpy(in, &a, 8), std::memcpy(in + 2, &b, 8);
}
inline void check_operands(Warp& w) {
    for (auto& in : w.in) if (std::memcmp(in, w.in[0], 16)) fail("lanes of a warp name different operands");
}

// d = or += A B over 16, for the warp's 16 rows
inline void multiply_operands(float* d, bool set, int columns) {
    const Operands& of = operands_of_warp();
    for (int i = 0; i < columns / 2; i++) {
        const float* a = of.a[lane_id() / 4 + 8 * (i / 2 % 2)];
        const float* b = of.b[i / 4 * 8 + lane_id() % 4 * 2 + i % 2];
        float sum = set ? 0.0f : d[i];
        for (int k = 0; k < 16; k++) sum += a[k] * b[k];
        d[i] = sum;
    }
    meet("wgmma, read", [](Warp&) {});
}
inline void multiply_any(float* d, bool set, u64 a, bool rows_a, u64 b, bool rows_b, int columns) {
    tell_operands(a, b);
    meet("wgmma", [=](Warp& w) { check_operands(w), read_rows(a, rows_a), read_columns(b, rows_b, columns); });
    multiply_operands(d, set, columns);
}
inline void multiply_held_any(float* d, bool set, const u32* a, u64 b, bool rows_b, int columns) {
    hold_rows(a);
    tell_operands(0, b);
    meet("wgmma", [=](Warp& w) { check_operands(w), read_columns(b, rows_b, columns); });
    multiply_operands(d, set, columns);
}
template <int N>
void multiply_shared(float (&d)[N / 2], bool set, u64 a, bool rows_a, u64 b, bool rows_b) {
    static_assert(N <= 256);
    multiply_any(d, set, a, rows_a, b, rows_b, N);
}
template <int N>
void multiply_held(float (&d)[N / 2], bool set, const u32* a, u64 b, bool rows_b) {
    static_assert(N <= 256);
    multiply_held_any(d, set, a, b, rows_b, N);
}

template <int N>
struct Products {
    typedef float Sums[N / 2];
    static void set(Sums& d, u64 a, u64 b) { multiply_shared<N>(d, true, a, false, b, false); }
    static void add(Sums& d, u64 a, u64 b) { multiply_shared<N>(d, false, a, false, b, false); }
    static void set_rows(Sums& d, u64 a, u64 b) { multiply_shared<N>(d, true, a, false, b, true); }
    static void add_rows(Sums& d, u64 a, u64 b) { multiply_shared<N>(d, false, a, false, b, true); }
    static void set(Sums& d, const u32* a, u64 b) { multiply_held<N>(d, true, a, b, false); }
    static void add(Sums& d, const u32* a, u64 b) { multiply_held<N>(d, false, a, b, false); }
    static void set_rows(Sums& d, const u32* a, u64 b) { multiply_held<N>(d, true, a, b, true); }
    static void add_rows(Sums& d, const u32* a, u64 b) { multiply_held<N>(d, false, a, b, true); }
    static void set_transposed(Sums& d, u64 a, u64 b) { multiply_shared<N>(d, true, a, true, b, true); }
    static void add_transposed(Sums& d, u64 a, u64 b) { multiply_shared<N>(d, false, a, true, b, true); }
};
inline void set_sums(float (&d)[4], u64 a, u64 b) { multiply_shared<8>(d, true, a, true, b, false); }
inline void add_sums(float (&d)[4], u64 a, u64 b) { multiply_shared<8>(d, false, a, true, b, false); }
