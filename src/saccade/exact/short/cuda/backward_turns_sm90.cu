// Exact attention of short sequences on sm_90a, backward, in the memory of three tiles (ROWS = 64, D = 256). The equations are those of backward_sm90.cu.
//
// shared memory:   | Q, then dK | V, then K, then dQ | dO, then dV | W: P, then scale dS | delta of either half | barriers |
//
// With four tiles a single block would fit a multiprocessor; with three tiles two fit (104 KB each), so that one computes and writes while the other
// reads. The price is K's latency: V is read first, and K takes its place once dP is formed. Two warpgroups share the 64 rows: of S, P, dP, dS each has
// half of the keys, of the gradients half of the head dim. Source: paper 002; bytes moved are its minimum.
//
// Compiled with ROWS (64), HEAD_DIM (256: D rounded up, the rest is zeros), BLOCKS_PER_SM, BF16, CAUSAL, HAS_DLSE, MASK_QUERIES and MASK_KEYS
// (there are fewer than ROWS).
#include "backward_sm90.cuh"

using Operand = Tile<HEAD_DIM>;
constexpr int HALVES = 2;
constexpr int KEYS = ROWS / HALVES, COLUMNS = HEAD_DIM / HALVES;  // of a warpgroup
static_assert(ROWS == 64 && KEYS == 32, "rows of one warpgroup");
enum Barrier { DOUT, VALUE, QUERY, KEY, BARRIERS };

struct TurnsShared {
    u32 base;
    constexpr __device__ __forceinline__ u32 query() const { return base; }
    constexpr __device__ __forceinline__ u32 key_value() const { return base + Operand::BYTES; }
    constexpr __device__ __forceinline__ u32 dout() const { return base + 2 * Operand::BYTES; }
    constexpr __device__ __forceinline__ u32 weights() const { return base + 3 * Operand::BYTES; }
    constexpr __device__ __forceinline__ u32 delta(int half) const { return weights() + Weights::BYTES + 4 * ROWS * half; }
    constexpr __device__ __forceinline__ u32 barrier(int i) const { return delta(HALVES) + 8 * i; }
};
static_assert(TurnsShared{0}.barrier(BARRIERS) <= SHARED_BYTES, "the launch asks for too little shared memory");

__device__ __forceinline__ void store_shared(u32 address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ float load_shared(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

// Rounds this warpgroup's half of a gradient's columns into its half of a tile, and starts writing it out. A warp has waited for its own part of the
// product that read this half; the other three may still multiply.
__device__ __forceinline__ void emit_half(const TensorMap& map, u32 tile, const Problem& problem, int half, const float (&d)[COLUMNS / 2]) {
    u32 own = tile + half * COLUMNS / 64 * Operand::BLOCK_BYTES;
    meet(half);
    round_into<COLUMNS>(own, 0, d);
    fence_async();
    meet(half);
    if (elected()) store_rows<COLUMNS>(map, own, problem, 0, half * COLUMNS);
}

extern "C" __global__ void __launch_bounds__(128 * HALVES, BLOCKS_PER_SM)
    backward_turns_sm90(BACKWARD_MAPS, BACKWARD_NUMBERS) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const TurnsShared shared{shared_address(memory)};
    const Problem problem(blockIdx.x, heads);
    const int half = warpgroup_of(), own = half * COLUMNS / 64 * Operand::BLOCK_BYTES;
    if (threadIdx.x == 0) {
        init_barriers(shared, BARRIERS, 1);
        load_alone<HEAD_DIM>(shared.dout(), dout_map, shared.barrier(DOUT), problem, 0);
        load_alone<HEAD_DIM>(shared.key_value(), value_map, shared.barrier(VALUE), problem, 0);
        load_alone<HEAD_DIM>(shared.query(), query_map, shared.barrier(QUERY), problem, 0);
    }
    __syncthreads();
    const Rows rows(lse, problem.index, q_len, 0);
    float dlse_rows[2];
    if (HAS_DLSE) load_pair(dlse_rows, dlse, problem.index, q_len, 0, 0.0f);

    float dweights[KEYS / 2], scores[KEYS / 2];
    barrier_wait(shared.barrier(DOUT), 0);
    barrier_wait(shared.barrier(VALUE), 0);
    // dP = dO V^T
    products_begin();
    multiply_rows<HEAD_DIM, KEYS>(dweights, shared.dout(), 0, shared.key_value(), KEYS * half);
    products_commit();
    products_wait<0>();
    __syncthreads();  // no warp still reads V
    if (threadIdx.x == 0) load_alone<HEAD_DIM>(shared.key_value(), key_map, shared.barrier(KEY), problem, 0);
    barrier_wait(shared.barrier(QUERY), 0);
    barrier_wait(shared.barrier(KEY), 0);
    // S = Q K^T
    products_begin();
    multiply_rows<HEAD_DIM, KEYS>(scores, shared.query(), 0, shared.key_value(), KEYS * half);
    products_commit();
    products_wait<0>();
    // P = exp(scale S - lse), and rowsum(P dP) over these keys
    u32 words[KEYS / 4];
    float delta[2] = {0.0f, 0.0f};
#pragma unroll
    for (int e = 0; e < KEYS / 2; e += 2) {
        int h = half_of(e), row = first_row(0) + 8 * h, key = KEYS * half + column_at(own_column(), e);
        words[e / 2] = rows.weights(scores + e, h, row, key, kv_len, scale * LOG2E);
        float2 p = floats_of(words[e / 2]);
        delta[h] = fmaf(p.x, dweights[e], fmaf(p.y, dweights[e + 1], delta[h]));
    }
    // a fragment has 16 keys
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
        store_matrices(shared.weights() + fragment<ROWS>(0, half * KEYS / 16 + step), words + 4 * step);
    fence_async();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        delta[h] = quad_sum(delta[h]);
        if (int(threadIdx.x) % 4 == 0) store_shared(shared.delta(half) + 4 * (first_row(0) + 8 * h), delta[h]);
    }
    __syncthreads();  // P and both halves of delta are there

    float gradient[COLUMNS / 2];  // one after the other: both together would take 128 registers a thread
    // dV = P^T dO
    products_begin();
    multiply_transposed<HEAD_DIM, COLUMNS>(gradient, shared.weights(), 0, shared.dout() + own);
    products_commit();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        delta[h] += load_shared(shared.delta(1 - half) + 4 * (first_row(0) + 8 * h));
        if (HAS_DLSE) delta[h] -= dlse_rows[h];
        delta[h] *= -scale;
    }
    products_wait<0>();
    emit_half(dvalue_map, shared.dout(), problem, half, gradient);
    __syncthreads();  // no warp still reads P
    // dS = P (dP - delta)
#pragma unroll
    for (int e = 0; e < KEYS / 2; e += 2) {
        int h = half_of(e);
        float2 p = floats_of(words[e / 2]);
        words[e / 2] = pack(p.x * fmaf(dweights[e], scale, delta[h]), p.y * fmaf(dweights[e + 1], scale, delta[h]));
    }
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
        store_matrices(shared.weights() + fragment<ROWS>(0, half * KEYS / 16 + step), words + 4 * step);
    fence_async();
    __syncthreads();
    // dQ = dS K
    products_begin();
#pragma unroll
    for (int step = 0; step < ROWS / 16; step++) {
        u64 left = operand(shared.weights() + Weights::columns_from(0, step));
        u64 right = advance(operand(shared.key_value() + own, Operand::BLOCK_BYTES), step * 16 * Operand::PITCH);
        if (step == 0) Products<COLUMNS>::set_rows(gradient, left, right);
        else Products<COLUMNS>::add_rows(gradient, left, right);
    }
    products_commit();
    products_wait<0>();
    emit_half(dquery_map, shared.key_value(), problem, half, gradient);
    // dK = dS^T Q
    products_begin();
    multiply_transposed<HEAD_DIM, COLUMNS>(gradient, shared.weights(), 0, shared.query() + own);
    products_commit();
    products_wait<0>();
    emit_half(dkey_map, shared.query(), problem, half, gradient);
    if (elected()) stores_wait_read();
}
