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

// d = or += A B over 16; left(row, k) of the warp's 16 rows
template <int N, class Left>
void multiply_rows(float (&d)[N / 2], bool set, const Left& left, u64 b, bool rows_b) {
    meet("wgmma", [](Warp&) {});
    for (int i = 0; i < N / 2; i++) {
        const int row = lane_id() / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + lane_id() % 4 * 2 + i % 2;
        float sum = set ? 0.0f : d[i];
        for (int k = 0; k < 16; k++) sum += left(row, k) * from_operand(b, rows_b, column, k);
        d[i] = sum;
    }
    meet("wgmma, read", [](Warp&) {});
}
template <int N>
void multiply_shared(float (&d)[N / 2], bool set, u64 a, bool rows_a, u64 b, bool rows_b) {
    const int first = current / 32 % 4 * 16;
    multiply_rows<N>(d, set, [=](int row, int k) { return from_operand(a, rows_a, first + row, k); }, b, rows_b);
}
// A in registers: a[0..3] = columns 2t, 2t + 1 of row g; of row g + 8; columns 2t + 8, 2t + 9 of row g; of row g + 8
template <int N>
void multiply_held(float (&d)[N / 2], bool set, const u32* a, u64 b, bool rows_b) {
    static float held[32][16][16];
    auto& mine = held[current / 32];
    for (int i = 0; i < 8; i++) mine[lane_id() / 4 + i / 2 % 2 * 8][lane_id() % 4 * 2 + i / 4 * 8 + i % 2] = widen_one(a[i / 2] >> 16 * (i % 2) & 0xffff);
    multiply_rows<N>(d, set, [&](int row, int k) { return mine[row][k]; }, b, rows_b);
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
