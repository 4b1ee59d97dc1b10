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

// lane and element that hold (row, column) of C, by the number of 32-bit words that a lane has of it
struct Held { int lane, i; };
inline Held held884(int words, int pair, int row, int column) {
    const int high = row / 4;
    if (words == 4) return {4 * pair + row % 4 + 16 * high, column};
    return {4 * pair + (row & 1) + (column & 2) + 16 * high, (column & 4) + (row & 2) + (column & 1)};
}

// c += a b: four words of C are halves, rounded once an instruction; eight are floats
template <Order A, Order B, int WORDS>
inline void multiply(u32 (&c)[WORDS], u32 a0, u32 a1, u32 b0, u32 b1) {
    static_assert(WORDS == 4 || WORDS == 8);
    Warp& warp = my_warp();
    u32* in = warp.in[lane_id()];
    std::memcpy(in, c, 4 * WORDS), in[8] = a0, in[9] = a1, in[10] = b0, in[11] = b1;
    static constexpr char what[] = {'m', '8', 'n', '8', 'k', '4', ' ', '0' + A, '0' + B, '0' + WORDS, 0};
    meet(what, [](Warp& w) {
        for (int pair = 0; pair < 4; pair++)
            for (int row = 0; row < 8; row++)
                for (int column = 0; column < 8; column++) {
                    const Held at = held884(WORDS, pair, row, column);
                    float sum = WORDS == 4 ? element884(w, at.lane, 0, at.i) : bit_copy<float>(w.in[at.lane][at.i]);
                    for (int k = 0; k < 4; k++)
                        sum += operand884(w, pair, 8, A == ROWS_FIRST, row, k) * operand884(w, pair, 10, B == COLUMNS_FIRST, column, k);
                    if (WORDS == 8) w.out[at.lane][at.i] = bit_copy<u32>(sum);
                    else ((unsigned short*)w.out[at.lane])[at.i] = (unsigned short)half_of_float(sum);
                }
    });
    std::memcpy(c, warp.out[lane_id()], 4 * WORDS);
}
template <Order A, Order B>
inline void multiply(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
    multiply<A, B, 8>(reinterpret_cast<u32(&)[8]>(c), a0, a1, b0, b1);
}
