// delta = rowsum(dout * out) - dlse: what backward subtracts from each dP of a row. Eight lanes share a row, and there is no shared memory.
//
// Macros: HEAD_DIM, THREADS, DLSE.
#include "instruction.cuh"

// dout, out by strides (batch, head, row), rows on 16 bytes; dlse, delta: float32 [B, H, Tq]
extern "C" __global__ void __launch_bounds__(THREADS) volta_delta(
    const Half* dout, const Half* out, const float* dlse, float* delta, int64 dout_batch, int64 dout_head, int64 dout_row,
    int64 out_batch, int64 out_head, int64 out_row, int64 rows, int heads, int q_len) {
    const int64 row = (int64)blockIdx.x * (THREADS / 8) + threadIdx.x / 8;
    const int64 problem = row / q_len, query = row % q_len, batch = problem / heads, head = problem % heads;
    dout += batch * dout_batch + head * dout_head + query * dout_row;
    out += batch * out_batch + head * out_head + query * out_row;
    float sum = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < HEAD_DIM / 8; chunk += 8) {
        const int mine = chunk + (threadIdx.x & 7);
        if (row >= rows || mine >= HEAD_DIM / 8) continue;
        const uint4 a = *(const uint4*)(dout + 8 * mine), b = *(const uint4*)(out + 8 * mine);
        const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 x = floats_of(left[i]), y = floats_of(right[i]);
            sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) sum += shuffle_xor(sum, lanes);
#if DLSE
    if (row < rows) sum -= dlse[row];
#endif
    if (row < rows && (threadIdx.x & 7) == 0) delta[row] = sum;
}
