// Exact attention of short sequences on sm_90a, backward, where the four tiles of a problem fit into shared memory.
//
//   S = Q K^T    P = exp(scale S - lse)    dV = P^T dO    dP = dO V^T
//   dS = P (dP - delta), delta = rowsum(P dP) - dlse      dQ = scale dS K    dK = scale dS^T Q
//
// O is not read: the whole row is on chip, so delta is computed again. A warpgroup holds 64 queries in S, P, dP, dS and dQ, and 64 keys in dV and dK.
//
// shared memory:   | Q | K | V, then dQ | dO, then dK | dV | W: P, then scale dS | barriers |                       one problem a block
//                  | Q | K | Q | K | V, then dV | dO | W | barriers |     PERSISTENT: dK and dQ leave through Q and K, and the next problem arrives
//
// Rounded P lies only in shared memory once it is made (at ROWS = 128 a thread has 128 registers, if two blocks share a multiprocessor), and is
// read back for dS; rounded dS is the left operand of dQ from registers, and of dK from shared memory. Source: paper 002; bytes moved are its minimum.
//
// Compiled with ROWS (64 or 128), HEAD_DIM (32, 64 or 128: D rounded up, the rest is zeros), PERSISTENT, BLOCKS_PER_SM, BF16, CAUSAL, HAS_DLSE,
// MASK_QUERIES and MASK_KEYS (there are fewer than ROWS).
#include "backward_sm90.cuh"

using Operand = Tile<HEAD_DIM>;
constexpr int PAIRS = PERSISTENT ? 2 : 1;  // of Q and K
enum Barrier { QUERY_KEY, DOUT = QUERY_KEY + PAIRS, VALUE, BARRIERS };

struct BackwardShared {
    u32 base;
    constexpr __device__ __forceinline__ u32 query(int pair) const { return base + 2 * pair * Operand::BYTES; }
    constexpr __device__ __forceinline__ u32 key(int pair) const { return query(pair) + Operand::BYTES; }
    constexpr __device__ __forceinline__ u32 value() const { return query(PAIRS); }
    constexpr __device__ __forceinline__ u32 dout() const { return value() + Operand::BYTES; }
    constexpr __device__ __forceinline__ u32 dvalue() const { return PERSISTENT ? value() : dout() + Operand::BYTES; }
    constexpr __device__ __forceinline__ u32 weights() const { return dout() + (PERSISTENT ? 1 : 2) * Operand::BYTES; }
    constexpr __device__ __forceinline__ u32 barrier(int i) const { return weights() + Weights::BYTES + 8 * i; }
};
static_assert(BackwardShared{0}.barrier(BARRIERS) <= SHARED_BYTES, "the launch asks for too little shared memory");

// Each warpgroup's elected thread reads the rows that it writes, so only that thread must know when their memory is free.
struct Reader {
    const Maps& maps;
    BackwardShared shared;
    int group;

    __device__ __forceinline__ void query_and_key(const Problem& problem, int pair) const {
        u32 barrier = shared.barrier(QUERY_KEY + pair);
        barrier_expect(barrier, 2 * Operand::ROW_GROUP_BYTES);
        load_rows<HEAD_DIM>(shared.query(pair), maps.query, barrier, problem, group);
        load_rows<HEAD_DIM>(shared.key(pair), maps.key, barrier, problem, group);
    }
    __device__ __forceinline__ void dout(const Problem& problem) const {
        load_alone<HEAD_DIM>(shared.dout(), maps.dout, shared.barrier(DOUT), problem, group);
    }
    __device__ __forceinline__ void value(const Problem& problem) const {
        load_alone<HEAD_DIM>(shared.value(), maps.value, shared.barrier(VALUE), problem, group);
    }
};

extern "C" __global__ void __launch_bounds__(128 * ROW_GROUPS, BLOCKS_PER_SM)
    backward_sm90(BACKWARD_MAPS, BACKWARD_NUMBERS) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const BackwardShared shared{shared_address(memory)};
    const Maps maps{.query = query_map, .key = key_map, .value = value_map, .dout = dout_map};
    const int group = warpgroup_of();
    const Reader reader{maps, shared, group};
    if (threadIdx.x == 0) {
        init_barriers(shared, BARRIERS, ROW_GROUPS);
        // All rows of Q and K are requested before the first of dO. One row group after another delayed S, which cost 5 % at 128 x 64.
        const Problem first(blockIdx.x, heads);
        for (int g = 0; g < ROW_GROUPS; g++) Reader{maps, shared, g}.query_and_key(first, 0);
        for (int g = 0; g < ROW_GROUPS; g++) Reader{maps, shared, g}.dout(first);
        for (int g = 0; g < ROW_GROUPS; g++) Reader{maps, shared, g}.value(first);
    }
    __syncthreads();
    Rows rows(lse, blockIdx.x, q_len, group);
    int count = 0;
#if PERSISTENT
#pragma unroll 1
    for (int index = blockIdx.x; index < problems; index += gridDim.x, count++) {
#else
    {
        int index = blockIdx.x;
#endif
        const Problem problem(index, heads), next(index + gridDim.x, heads);
        const bool more = PERSISTENT && index + int(gridDim.x) < problems;
        const int pair = count % PAIRS;
        float dlse_rows[2];
        if (HAS_DLSE) load_pair(dlse_rows, dlse, index, q_len, group, 0.0f);

        float scores[ROWS / 2];
        barrier_wait(shared.barrier(QUERY_KEY + pair), count / PAIRS & 1);
        // S = Q K^T
        products_begin();
        multiply_rows<HEAD_DIM, ROWS>(scores, shared.query(pair), 64 * group, shared.key(pair), 0);
        products_commit();
        products_wait<0>();
        // P = exp(scale S - lse)
        rows.park_weights(scores, shared.weights(), group, kv_len, scale * LOG2E);
        if (more) rows.load(lse, next.index, q_len, group);  // loaded early: at its place of use the latency would not be hidden
        fence_async();
        __syncthreads();

        float dvalue[HEAD_DIM / 2], dweights[ROWS / 2];
        barrier_wait(shared.barrier(DOUT), count & 1);
        products_begin();
        // dV = P^T dO
        multiply_transposed<HEAD_DIM, HEAD_DIM>(dvalue, shared.weights(), group, shared.dout());
        products_commit();
        barrier_wait(shared.barrier(VALUE), count & 1);
        products_begin();
        // dP = dO V^T
        multiply_rows<HEAD_DIM, ROWS>(dweights, shared.dout(), 64 * group, shared.value(), 0);
        products_commit();
        if constexpr (PERSISTENT) {
            if (elected()) {
                stores_wait_read();  // dQ and dK of the problem before have left the other pair
                if (more) reader.query_and_key(next, 1 - pair);
            }
            products_wait<0>();
            __syncthreads();  // no warp still reads W, V, dO
            emit<HEAD_DIM>(dvalue_map, shared.dvalue(), problem, group, dvalue);
            if (elected() && more) reader.dout(next);
        } else {
            products_wait<1>();
            emit<HEAD_DIM>(dvalue_map, shared.dvalue(), problem, group, dvalue);
            products_wait<0>();
            __syncthreads();  // no warp still reads W, V, dO
        }
        // dS = P (dP - delta)
        u32 dscores[ROWS / 4];
        park_score_gradient(dscores, dweights, dlse_rows, shared.weights(), group, scale);
        fence_async();
        __syncthreads();

        float dkey[HEAD_DIM / 2], dquery[HEAD_DIM / 2];
        products_begin();
        // dK = dS^T Q
        multiply_transposed<HEAD_DIM, HEAD_DIM>(dkey, shared.weights(), group, shared.query(pair));
        products_commit();
        // dQ = dS K
        multiply_registers<HEAD_DIM>(dquery, dscores, shared.key(pair));
        products_commit();
        if constexpr (PERSISTENT) {
            if (elected()) {
                stores_wait_read();  // dV has left
                if (more) reader.value(next);
            }
            products_wait<0>();
            __syncthreads();  // no warp still reads Q, K
            emit<HEAD_DIM>(dkey_map, shared.query(pair), problem, group, dkey);
            emit<HEAD_DIM>(dquery_map, shared.key(pair), problem, group, dquery);
        } else {
            products_wait<1>();
            emit<HEAD_DIM>(dkey_map, shared.dout(), problem, group, dkey);
            products_wait<0>();
            emit<HEAD_DIM>(dquery_map, shared.value(), problem, group, dquery);
        }
    }
    if (elected()) stores_wait_read();
}
