// O and lse of rows whose keys were attended to in parts (`last_wave.py`): a warp a row.
//
// Part p has O_p = sum of w_p v and L_p = sum of w_p for weights w_p = 2^(s + o_p), s the scores in base 2 and o_p the offset of the row
// there. With o the least of the offsets: O = sum of 2^(o - o_p) O_p / sum of 2^(o - o_p) L_p, and lse = (log2 of the second sum - o) ln 2.
// There is no shared memory: a lane holds its columns of O in registers.
//
// part_outs [block][part][row][HEAD_DIM], part_sums [block][part][row] {o_p, L_p}; block counts from `whole` on. Macros: HEAD_DIM (a multiple
// of 64), BLOCK_Q, BF16.
#include "numbers.cuh"

extern "C" __global__ void __launch_bounds__(128) combine(
    const float* part_outs, const float2* part_sums, Number* out, float* lse, int heads, int q_len, int head_dim, int whole, int parts,
    long long out_batch, long long out_head, long long out_row) {
    const int at = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, row = at % BLOCK_Q;
    const int block = at / BLOCK_Q, index = whole + block, blocks = q_len / BLOCK_Q;
    const int problem = index / blocks, query = index % blocks * BLOCK_Q + row;
    part_sums += (long long)block * parts * BLOCK_Q + row;
    part_outs += ((long long)block * parts * BLOCK_Q + row) * HEAD_DIM + 2 * lane;
    // o = min o_p
    float least = part_sums[0].x, sum = 0.0f;
    for (int p = 1; p < parts; p++) least = min_nan(least, part_sums[p * BLOCK_Q].x);
    float2 o[HEAD_DIM / 64];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 64; i++) o[i] = make_float2(0.0f, 0.0f);
    // O = sum of 2^(o - o_p) O_p, and the same sum of L_p
#pragma unroll 4
    for (int p = 0; p < parts; p++) {
        float2 given = part_sums[p * BLOCK_Q];
        float factor = exp2_fast(least - given.x);
        sum += factor * given.y;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 64; i++) {
            float2 x = *reinterpret_cast<const float2*>(part_outs + (long long)p * BLOCK_Q * HEAD_DIM + 64 * i);
            o[i].x += factor * x.x;
            o[i].y += factor * x.y;
        }
    }
    // compared with 0, not tested by > 0: a NaN sum must stay NaN
    float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    Number* to = out + problem / heads * out_batch + problem % heads * out_head + query * out_row;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 64; i++)
        if (64 * i + 2 * lane < head_dim) store_pair(to + 64 * i + 2 * lane, o[i].x * inverse, o[i].y * inverse);
    if (lane == 0) lse[(long long)problem * q_len + query] = sum == 0.0f ? MINUS_INFINITY : (log2_fast(sum) - least) * LN2;
}
