// The numbers of each row that backward needs before its products: delta = rowsum(dout * out) - dlse, which it subtracts from each dP, and `shift`, the lse
// in base 2, +inf if a row sees no key. If lse is too coarse, shift is FAR_SHIFT, and `far` has the row's maximum and log2 of its
// sum (far.cuh). Eight lanes share a row.
//
// Shared memory, if a row of the block is far:   | maximum and sum: WARPS x 32 rows |
//
// Macros: HEAD_DIM, THREADS, DLSE, CAUSAL, MASK, LENGTHS, HALF_SUMS (of the scores of far rows alone: delta is summed in float32).
#include "far.cuh"

static_assert(THREADS / 8 == FAR_ROWS, "a block has the rows that one product takes");

// query, key, mask, lengths as in forward.cu; dout, out by strides (batch, head, row), rows on 16 bytes; lse, dlse, shift, delta: float32
// [B, H, Tq]; far: two of them a row. Four blocks a multiprocessor, for 64 registers: left to itself, ptxas took 48 and spilled 8 bytes under a float32 bias.
extern "C" __global__ void __launch_bounds__(THREADS, 4) volta_delta(
    const Half* query, const Half* key, const unsigned char* mask, const int* lengths, const Half* dout, const Half* out, const float* lse,
    const float* dlse, float* shift, float* delta, float2* far, int64 query_batch, int64 query_head, int64 query_row, int64 key_batch,
    int64 key_head, int64 key_row, int64 mask_batch, int64 mask_head, int64 mask_row, int64 mask_column, int64 dout_batch,
    int64 dout_head, int64 dout_row, int64 out_batch, int64 out_head, int64 out_row, int64 rows, int heads, int group, int q_len,
    int kv_len, float factor) {
    const int64 first_row = (int64)blockIdx.x * FAR_ROWS;
    bool lost = false;
    {
        const int64 row = first_row + threadIdx.x / 8;
        const int64 problem = row / q_len, of_row = row % q_len, batch = problem / heads, head = problem % heads;
        dout += batch * dout_batch + head * dout_head + of_row * dout_row;
        out += batch * out_batch + head * out_head + of_row * out_row;
        const float log_sum = row < rows ? lse[row] : MINUS_INFINITY;
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
        if (DLSE && row < rows) sum -= dlse[row];
        lost = is_far(log_sum);
        if (row < rows && (threadIdx.x & 7) == 0) {
            delta[row] = sum;
            // a row that sees no key gets weights of 0
            shift[row] = lost ? FAR_SHIFT : log_sum == MINUS_INFINITY ? -MINUS_INFINITY : log_sum * LOG2E;
        }
    }
    if (!__syncthreads_or(lost)) return;

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int64 row = first_row + lane;
    lost = row < rows && is_far(lse[row]);
    int problem = (int)(first_row / q_len), first_query = (int)(first_row % q_len);  // of the block's first row; later ones begin within the block
#pragma unroll 1
    for (; first_query > -FAR_ROWS && problem * (int64)q_len < rows; problem++, first_query -= q_len) {
        const bool mine = lost && first_query + lane >= 0 && first_query + lane < q_len;
        if (!any_lane(mine)) continue;  // the same in all warps
        const int batch = problem / heads, head = problem % heads;
        FarRows of = {.queries = query + batch * query_batch + head * query_head, .keys = key + batch * key_batch + head / group * key_head,
                      .query_row = query_row, .key_row = key_row,
                      .mask = mask_of(mask, batch * mask_batch + head * mask_head, mask_row, mask_column),
                      .factor = factor, .first_query = first_query, .q_len = q_len, .kv_end = kv_len};
        if (LENGTHS) of.kv_end = min(kv_len, lengths[batch]);
#if HALF_SUMS
        Anchor anchors[1] = {{MINUS_INFINITY, 0.0f}}, found;
#else
        Anchor anchors[2] = {{MINUS_INFINITY, 0.0f}, {MINUS_INFINITY, 0.0f}}, found;
#endif
        of.walk(anchors, warp, lane);
        gather_anchors(anchors, found, FACTORED ? factor : 1.0f, warp, lane);
        if (warp == 0 && mine) far[row] = make_float2(found.most, log2_flushed(found.total));
    }
}
