// dQ = scale times the sums that `backward_one_pass_sm90.cu` left in memory, rounded: a thread block a tile of 64 queries.
// Sums have the order in which that kernel's warpgroups held them, each half of the columns: [tile][half][8 columns][thread][h][2 columns].
//
// Compiled with HEAD_DIM (64 or 128), BF16.
#include "backward.cuh"

constexpr int HALF = HEAD_DIM / 2;  // columns of a warpgroup

extern "C" __global__ void __launch_bounds__(256) write_dq_sm90(
    const float4* parked, unsigned short* dquery, int heads, int q_len, int head_dim, long long dquery_batch, long long dquery_head,
    long long dquery_row, float scale) {
    int tiles = (q_len + 63) / 64, problem = blockIdx.x / tiles, half = threadIdx.x / 128, thread = threadIdx.x % 128;
    const float4* from = parked + (long long)blockIdx.x * (16 * HEAD_DIM) + half * (8 * HEAD_DIM) + thread;
    float sums[HALF / 2];
#pragma unroll
    for (int c = 0; c < HALF / 8; c++) {
        float4 four = from[128 * c];
        sums[4 * c] = four.x, sums[4 * c + 1] = four.y, sums[4 * c + 2] = four.z, sums[4 * c + 3] = four.w;
    }
    int first = 64 * (blockIdx.x % tiles) + thread / 32 * 16 + thread % 32 / 4;
    unsigned short* to = dquery + problem / heads * dquery_batch + problem % heads * dquery_head + half * HALF;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = first + 8 * h;
        store_row<HALF>(sums, h, scale, to + row * dquery_row, head_dim - half * HALF, row < q_len);
    }
}
