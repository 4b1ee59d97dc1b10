// Matrix instructions of launch/cuda/mma.cuh, from the fragment layouts in the PTX ISA. g = lane / 4, t = lane % 4.
#pragma once
#include "numbers.cuh"

inline void load_any(u32* m, u32 address, bool transposed) {
    if (address % 16 || address + 16 > SHARED) fail("a row of a matrix is not aligned, or out of bounds");
    Warp& warp = my_warp();
    warp.in[lane_id()][0] = address;
    meet(transposed ? "ldmatrix.trans" : "ldmatrix", [&](Warp& w) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const int g = lane / 4, t = lane % 4;
                if (!transposed) std::memcpy(&w.out[lane][i], shared_memory + w.in[8 * i + g][0] + 4 * t, 4);
                else for (int half = 0; half < 2; half++)
                    std::memcpy((char*)&w.out[lane][i] + 2 * half, shared_memory + w.in[8 * i + 2 * t + half][0] + 2 * g, 2);
            }
    });
    std::memcpy(m, warp.out[lane_id()], 16);
}
inline void load_matrices(u32* m, u32 address) { load_any(m, address, false); }
inline void load_transposed(u32* m, u32 address) { load_any(m, address, true); }

inline void store_any(u32 address, const u32* m, bool transposed) {
    u32* in = my_warp().in[lane_id()];
    std::memcpy(in, m, 16), in[4] = address;
    meet(transposed ? "stmatrix.trans" : "stmatrix", [=](Warp& w) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 8; i++) {
                const int row = lane / 4, column = lane % 4 * 2 + i % 2, matrix = i / 2;
                const u32 to = transposed ? w.in[8 * matrix + column][4] + 2 * row : w.in[8 * matrix + row][4] + 2 * column;
                at_shared<unsigned short>(to) = w.in[lane][matrix] >> 16 * (i % 2);
            }
    });
}
inline void store_matrices(u32 address, const u32* m) { store_any(address, m, false); }
inline void store_transposed(u32 address, const u32* m) { store_any(address, m, true); }

constexpr int PER_WORD = TF32 ? 1 : 2;
inline float element(u32 word, int i) {
#if TF32
    if (word & 0x1fff && (word & 0x7f800000u) != 0x7f800000u) fail("an operand is not rounded to TF32");
    return bit_copy<float>(word);
#else
    return widen_one(i ? word >> 16 : word & 0xffff);
#endif
}

// c += A B for A [16][depth], B [depth][8] as the lanes hold them; `a` says whether A has an element there
template <class A, class B>
void accumulate(Warp& w, int depth, A a, B b) {
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
            float sum = bit_copy<float>(w.in[lane][i]);
            for (int k = 0; k < depth; k++) {
                float x;
                if (a(row, k, x)) sum += x * b(k, column);
            }
            w.out[lane][i] = bit_copy<u32>(sum);
        }
}

// fragment of a dense A of 32 bytes a row: register (row / 8) + 2 * (second 16 bytes)
inline float dense_a(Warp& w, int row, int k) {
    const int per = 4 * PER_WORD;  // numbers in 16 bytes
    return element(w.in[4 * (row % 8) + k % per / PER_WORD][4 + row / 8 + 2 * (k / per)], k % PER_WORD);
}
inline float any_b(Warp& w, int k, int column) {
    const int per = 4 * PER_WORD;
    return element(w.in[4 * column + k % per / PER_WORD][8 + k / per], k % PER_WORD);
}

inline void multiply(float* c, const u32* a, u32 b0, u32 b1) {
    Warp& warp = my_warp();
    u32* in = warp.in[lane_id()];
    std::memcpy(in, c, 16), std::memcpy(in + 4, a, 16), in[8] = b0, in[9] = b1;
    meet("mma", [](Warp& w) {
        accumulate(w, 8 * PER_WORD, [&](int row, int k, float& x) { return x = dense_a(w, row, k), true; }, [&](int k, int n) { return any_b(w, k, n); });
    });
    std::memcpy(c, warp.out[lane_id()], 16);
}

// four bits for each 4 (TF32: 2) logical k of a row: lane 4 g + 2 s + (second half of k), low 16 bits row g, high 16 row g + 8
inline unsigned code_of(Warp& w, int selector, int row, int group) {
    const unsigned code = w.in[4 * (row % 8) + 2 * selector + group / 4][12] >> (16 * (row / 8) + 4 * (group % 4)) & 15;
#ifdef ANY_ORDER
    const bool legal = code % 4 != code / 4;
#else
    const bool legal = TF32 ? code == 0x4 || code == 0xE
                                  : code == 0x4 || code == 0x8 || code == 0xC || code == 0x9 || code == 0xD || code == 0xE;
#endif
    if (!legal) fail("metadata that sparse products do not define");
    return code;
}

template <int SELECTOR = 0>
inline void multiply_sparse(float* c, const u32* a, const u32* b, u32 metadata) {
    Warp& warp = my_warp();
    u32* in = warp.in[lane_id()];
    std::memcpy(in, c, 16), std::memcpy(in + 4, a, 16), std::memcpy(in + 8, b, 16), in[12] = metadata;
    meet(SELECTOR ? "mma.sp 1" : "mma.sp 0", [](Warp& w) {
        const int size = 2 * PER_WORD;  // logical k of a group
        auto sparse_a = [&](int row, int k, float& x) {
            const unsigned code = code_of(w, SELECTOR, row, k / size);
            int slot = -1;
            if (TF32) slot = (code == 0xE) == (k % 2) ? 0 : -1;
            else for (int s = 0; s < 2; s++) if ((int)(code >> (2 * s) & 3) == k % 4) slot = s;
            if (slot >= 0) x = dense_a(w, row, TF32 ? k / 2 : k / 4 * 2 + slot);
            return slot >= 0;
        };
        accumulate(w, 16 * PER_WORD, sparse_a, [&](int k, int n) { return any_b(w, k, n); });
    });
    std::memcpy(c, warp.out[lane_id()], 16);
}
