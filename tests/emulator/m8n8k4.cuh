// mma.m8n8k4, from the fragment layouts in the PTX ISA: four products, one a quad-pair.
#pragma once
#include "instruction.cuh"

enum Order { ROWS_FIRST, COLUMNS_FIRST };

// half `i` of the operand that begins at word `at` of a lane
inline float element884(Warp& w, int lane, int at, int i) { return float_of_half(w.in[lane][at + i / 2] >> (16 * (i & 1)) & 0xffff); }

// where an operand keeps (outer, k), outer being a row of A or a column of B: lane of the quad-pair and element.
// `along_k`: a lane's four elements follow each other along k (A by rows, B by columns)
inline float operand884(Warp& w, int pair, int at, bool along_k, int outer, int k) {
    const int l = along_k ? outer % 4 : k, high = outer / 4, i = along_k ? k : outer % 4;
    return element884(w, 4 * pair + l + 16 * high, at, i);
}

template <Order A, Order B>
inline void multiply(float (&c)[8], uint32 a0, uint32 a1, uint32 b0, uint32 b1) {
    Warp& warp = my_warp();
    uint32* in = warp.in[lane_id()];
    std::memcpy(in, c, 32), in[8] = a0, in[9] = a1, in[10] = b0, in[11] = b1;
    static const std::string what = "mma.m8n8k4 " + std::to_string(A) + std::to_string(B);
    meet(what.c_str(), [](Warp& w) {
        for (int pair = 0; pair < 4; pair++) {
            float a[8][4], b[4][8];
            for (int outer = 0; outer < 8; outer++)
                for (int k = 0; k < 4; k++) {
                    a[outer][k] = operand884(w, pair, 8, A == ROWS_FIRST, outer, k);
                    b[k][outer] = operand884(w, pair, 10, B == COLUMNS_FIRST, outer, k);
                }
            for (int high = 0; high < 2; high++)
                for (int l = 0; l < 4; l++)
                    for (int i = 0; i < 8; i++) {
                        const int lane = 4 * pair + l + 16 * high, row = (l & 1) + (i & 2) + 4 * high, column = (i & 4) + (l & 2) + (i & 1);
                        float sum = bit_copy<float>(w.in[lane][i]);
                        for (int k = 0; k < 4; k++) sum += a[row][k] * b[k][column];
                        w.out[lane][i] = bit_copy<uint32>(sum);
                    }
        }
    });
    std::memcpy(c, warp.out[lane_id()], 32);
}
