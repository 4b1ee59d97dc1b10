// Operands of warpgroup products in shared memory: column blocks of 64 numbers of 16 bits, whose rows of 128 bytes lie one below the other.
// The 16-byte chunks of a row change places with its number, so that neither eight rows of a product nor those of a warp meet in a bank:
//
//   row 0   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |      chunk c of row r is at place c ^ (r % 8): rows repeat after eight, 1,024 bytes
//   row 1   | 1 | 0 | 3 | 2 | 5 | 4 | 7 | 6 |
//   row 2   | 2 | 3 | 0 | 1 | 6 | 7 | 4 | 5 |
#pragma once

constexpr int EIGHT_ROWS = 8 * 128;     // bytes; operands begin at a multiple of it
constexpr int ROWS_64 = 64 * 128;       // of a column block of 64 rows, which a warpgroup multiplies

// where a chunk of a row of the column block at `block` lies
// (the kernels of gather/sm90 write this out: as a function it gave their instructions another order)
__device__ __forceinline__ unsigned swizzled(unsigned block, int row, int chunk) {
    return block + row * 128 + (chunk ^ (row & 7)) * 16;
}

// bytes from the beginning of an operand to its columns 16 step .., where a column block has `block_bytes`
constexpr __device__ __forceinline__ int columns_at(int step, int block_bytes) {
    return step / 4 * block_bytes + step % 4 * 32;
}

// where operands begin in dynamic shared memory, which is aligned to 16 bytes
__device__ __forceinline__ unsigned align_operands(unsigned address) {
    return (address + EIGHT_ROWS - 1) & ~unsigned(EIGHT_ROWS - 1);
}
