// Exact attention of short sequences on sm_90a, forward: one problem (batch row, head) a thread block, each tensor read or written once.
//
//   S = Q K^T    m = rowmax(scale S)    P = exp(scale S - m)    O = P V / rowsum(P)    lse = m + log(rowsum(P))
//
// shared memory:   | Q, then O | K | V | barriers |     tiles of ROWS x HEAD_DIM, filled and emptied by the copy engine
//
// P stays in registers: after rounding it is the left operand of P V. The blocks of a multiprocessor hide each other's latencies, if together
// they keep 190 KB in flight; a persistent block with a ring of problems was 5 to 15 % slower. WARPGROUPS of a block take 64 queries each at a
// time. Source: paper 002; the bytes moved are its minimum.
//
// Compiled with ROWS (128), HEAD_DIM (32, 64 or 128: D rounded up, the rest is zeros), WARPGROUPS, BLOCKS_PER_SM, BF16, CAUSAL, MASK_QUERIES and
// MASK_KEYS (there are fewer than ROWS).
#include "tiles_sm90.cuh"

using Operand = Tile<HEAD_DIM>;
enum Barrier { QUERY_KEY, VALUE, BARRIERS };

struct ForwardShared {
    u32 base;
    constexpr __device__ __forceinline__ u32 query() const { return base; }
    constexpr __device__ __forceinline__ u32 key() const { return base + Operand::BYTES; }
    constexpr __device__ __forceinline__ u32 value() const { return base + 2 * Operand::BYTES; }
    constexpr __device__ __forceinline__ u32 barrier(int i) const { return base + 3 * Operand::BYTES + 8 * i; }
};
static_assert(ForwardShared{0}.barrier(BARRIERS) <= SHARED_BYTES, "the launch asks for too little shared memory");

extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS, BLOCKS_PER_SM)
    forward_sm90(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                 const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap out_map, float* lse, int heads, int q_len,
                 int kv_len, float exponent) {  // exponent: scale * log2(e)
    extern __shared__ __align__(1024) unsigned char memory[];
    const ForwardShared shared{shared_address(memory)};
    const Problem problem(blockIdx.x, heads);
    if (threadIdx.x == 0) {
        init_barriers(shared, BARRIERS, 1);
        barrier_expect(shared.barrier(QUERY_KEY), 2 * Operand::BYTES);
        for (int group = 0; group < ROW_GROUPS; group++) {
            load_rows<HEAD_DIM>(shared.query(), query_map, shared.barrier(QUERY_KEY), problem, group);
            load_rows<HEAD_DIM>(shared.key(), key_map, shared.barrier(QUERY_KEY), problem, group);
        }
        barrier_expect(shared.barrier(VALUE), Operand::BYTES);
        for (int group = 0; group < ROW_GROUPS; group++) load_rows<HEAD_DIM>(shared.value(), value_map, shared.barrier(VALUE), problem, group);
    }
    __syncthreads();
    int warpgroup = warpgroup_of();
    barrier_wait(shared.barrier(QUERY_KEY), 0);
#pragma unroll 1
    for (int group = warpgroup; group < ROW_GROUPS; group += WARPGROUPS) {
        float scores[ROWS / 2];
        // S = Q K^T
        products_begin();
        multiply_rows<HEAD_DIM, ROWS>(scores, shared.query(), 64 * group, shared.key(), 0);
        products_commit();
        products_wait<0>();
        // m = rowmax(S), P = exp2(exponent (S - m)): in base 2
        int row = first_row(group), key = own_column();
        float top[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int e = 0; e < ROWS / 2; e++) {
            if (!sees(row_at(row, e), column_at(key, e), kv_len)) scores[e] = MINUS_INFINITY;
            top[half_of(e)] = fmaxf(top[half_of(e)], scores[e]);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) top[h] = quad_max(top[h]) * exponent;
        u32 weights[ROWS / 4];
#pragma unroll
        for (int e = 0; e < ROWS / 2; e += 2) {
            int h = half_of(e);
            float x = exp2_fast(fmaf(scores[e], exponent, -top[h])), y = exp2_fast(fmaf(scores[e + 1], exponent, -top[h]));
            sum[h] += x + y;
            weights[e / 2] = pack(x, y);
        }
        // O = P V
        float out[HEAD_DIM / 2];
        barrier_wait(shared.barrier(VALUE), 0);
        products_begin();
        multiply_registers<HEAD_DIM>(out, weights, shared.value());
        products_commit();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] = quad_sum(sum[h]);
            int query = row + 8 * h;
            if (int(threadIdx.x) % 4 == 0 && (!MASK_QUERIES || query < q_len))
                lse[(long long)problem.index * q_len + query] = (log2_fast(sum[h]) + top[h]) * LN2;
        }
        products_wait<0>();
        round_into<HEAD_DIM>(shared.query(), group, out, 1.0f / sum[0], 1.0f / sum[1]);
        fence_async();
        meet(warpgroup);
        if (elected()) store_rows<HEAD_DIM>(out_map, shared.query(), problem, group);
    }
    if (elected()) stores_wait_read();
}
