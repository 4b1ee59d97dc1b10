// A boolean mask as bits, for the kernels of long sequences on sm_90: words[batch][head][row][column / 64], bit i for column 64 word + i, 0 behind
// the last one. A warp makes the words of 32 rows and 64 columns, and reads the mask along the axis with the smaller stride:
//
//   ROWS_LIE_CLOSE 0   32 columns at a time, of which a ballot makes half a word; lane r keeps that of row r
//   ROWS_LIE_CLOSE 1   32 rows at a time, a lane each, which adds a bit to its own word
//
// In the attention kernel a lane would gather its 32 bytes from 8 lines a load: 512 cycles of L1 for 64 x 64 pairs, twice those of the products
// at D = 64. Compiled with ROWS_LIE_CLOSE and THREADS.
typedef unsigned int u32;
typedef unsigned long long u64;

struct Mask {
    const unsigned char* plane;
    long long row_stride, column_stride;
    int rows, columns;

    __device__ __forceinline__ bool at(int row, int column) const {
        return row < rows && column < columns && plane[row * row_stride + column * column_stride];
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) mask_bits(
    const unsigned char* mask, u64* words, int batches, int heads, int rows, int columns, long long mask_batch, long long mask_head,
    long long mask_row, long long mask_column) {
    const int lane = threadIdx.x % 32, row_tiles = (rows + 31) / 32, width = (columns + 63) / 64;
    const long long all = (long long)batches * heads * row_tiles * width;
    for (long long i = blockIdx.x * (long long)(THREADS / 32) + threadIdx.x / 32; i < all; i += gridDim.x * (long long)(THREADS / 32)) {
        const int tile = int(i % (row_tiles * width)), plane = int(i / (row_tiles * width));
        // neighbouring threads read neighbouring bytes
        const int first = 32 * (ROWS_LIE_CLOSE ? tile % row_tiles : tile / width), word = ROWS_LIE_CLOSE ? tile / row_tiles : tile % width;
        const Mask from{mask + plane / heads * mask_batch + plane % heads * mask_head, mask_row, mask_column, rows, columns};
        u64 mine = 0;
#pragma unroll 8
        for (int j = 0; j < (ROWS_LIE_CLOSE ? 64 : 32); j++) {
            if (ROWS_LIE_CLOSE) {
                mine |= u64(from.at(first + lane, 64 * word + j)) << j;
            } else {
                const u32 low = __ballot_sync(~0u, from.at(first + j, 64 * word + lane));
                const u32 high = __ballot_sync(~0u, from.at(first + j, 64 * word + 32 + lane));
                if (j == lane) mine = u64(high) << 32 | low;
            }
        }
        if (first + lane < rows) words[((long long)plane * rows + first + lane) * width + word] = mine;
    }
}
