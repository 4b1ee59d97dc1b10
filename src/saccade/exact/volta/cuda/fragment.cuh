// Fragments of a warp: the quad-pairs stand on top of each other, so that one instruction multiplies 32 rows of A.
//
// A quad-pair may take any 8 of the 32 rows. Row l + 4 h of quad-pair p is row 4 p + l + 16 h of the 32, which is the lane's
// own number: a lane holds row `lane` of A, and in C rows `lane & ~2` and `lane & ~2 | 2`, shared only with lane ^ 2.
#pragma once
#include "m8n8k4.cuh"

// the first of the two rows that a lane holds of C; the other is 2 further
__device__ __forceinline__ int row_of(int lane) { return lane & ~2; }
// the column of element i of C, in 8
__device__ __forceinline__ int column_of(int lane, int i) { return (i & 4) + (lane & 2) + (i & 1); }

// C, rounded to float16, as A by rows: a[0], a[1] columns 0..3 of row `lane`; a[2], a[3] columns 4..7
__device__ __forceinline__ void as_rows(const float (&c)[8], u32 (&a)[4], int lane) {
    const bool upper = lane & 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 first = pack(c[4 * half], c[4 * half + 1]), second = pack(c[4 * half + 2], c[4 * half + 3]);
        const u32 other = shuffle_xor(upper ? first : second, 2);
        a[2 * half] = upper ? other : first;
        a[2 * half + 1] = upper ? second : other;
    }
}

// Columns of B by rows are permuted within 16: a lane reads 8 neighbours, 8 h .. 8 h + 7, and hands the first four to one product,
// the others to the next. So column n of product s (0 or 1) of the pair is 4 s + (n & 3) + 2 (n & 4), and as_rows of both gives
// 8 neighbours: a of the first, then of the second.
__device__ __forceinline__ int paired_column(int lane, int i, int s) { return 4 * s + 2 * (i & 4) + (lane & 2) + (i & 1); }
