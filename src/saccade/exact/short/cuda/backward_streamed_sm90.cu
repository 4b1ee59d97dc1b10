// Exact attention of short sequences on sm_90a, backward, where four tiles do not fit into shared memory (ROWS = 128, D = 256). The equations are those
// of backward_sm90.cu.
//
// shared memory:   | Q: CHUNKS tiles | K: CHUNKS tiles | V: SLOTS tiles | dO: SLOTS tiles | W: P, then scale dS | barriers |
//
// Tiles hold CHUNK columns of the head dim. Q and K stay; V and dO pass through SLOTS, each read once. A persistent block: the memory of a chunk takes
// the gradient that is computed from it (dV in V, dK in Q, dQ in K), then the chunk of the next problem. Source: paper 002; bytes moved are its minimum.
//
// Compiled with ROWS (128), HEAD_DIM (256: D rounded up, the rest is zeros), CHUNK (64), SLOTS (2), BLOCKS_PER_SM, BF16, CAUSAL, HAS_DLSE,
// MASK_QUERIES and MASK_KEYS (there are fewer than ROWS).
#include "backward_sm90.cuh"

using Chunk = Tile<CHUNK>;
constexpr int CHUNKS = HEAD_DIM / CHUNK;
static_assert(CHUNKS % SLOTS == 0 && SLOTS >= 2, "a chunk finds its slot by its number");
enum Barrier { QUERY_KEY, DOUT, VALUE = DOUT + SLOTS, BARRIERS = VALUE + SLOTS };

struct StreamedShared {
    u32 base;
    constexpr __device__ __forceinline__ u32 query(int chunk) const { return base + chunk * Chunk::BYTES; }
    constexpr __device__ __forceinline__ u32 key(int chunk) const { return query(CHUNKS + chunk); }
    constexpr __device__ __forceinline__ u32 value(int slot) const { return key(CHUNKS + slot); }
    constexpr __device__ __forceinline__ u32 dout(int slot) const { return value(SLOTS + slot); }
    constexpr __device__ __forceinline__ u32 weights() const { return dout(SLOTS); }
    constexpr __device__ __forceinline__ u32 barrier(int i) const { return weights() + Weights::BYTES + 8 * i; }
};
static_assert(StreamedShared{0}.barrier(BARRIERS) <= SHARED_BYTES, "the launch asks for too little shared memory");

// Each warpgroup's elected thread reads the rows that it writes, so only that thread must know when their memory is free.
struct Reader {
    const Maps& maps;
    StreamedShared shared;
    int group;

    __device__ __forceinline__ void expect_query_and_key() const {
        barrier_expect(shared.barrier(QUERY_KEY), 2 * CHUNKS * Chunk::ROW_GROUP_BYTES);
    }
    __device__ __forceinline__ void query_and_key(const Problem& problem, int chunk) const {
        load_rows<CHUNK>(shared.query(chunk), maps.query, shared.barrier(QUERY_KEY), problem, group, chunk * CHUNK);
        load_rows<CHUNK>(shared.key(chunk), maps.key, shared.barrier(QUERY_KEY), problem, group, chunk * CHUNK);
    }
    __device__ __forceinline__ void dout(const Problem& problem, int chunk) const {
        int slot = chunk % SLOTS;
        load_alone<CHUNK>(shared.dout(slot), maps.dout, shared.barrier(DOUT + slot), problem, group, chunk * CHUNK);
    }
    __device__ __forceinline__ void value(const Problem& problem, int chunk) const {
        int slot = chunk % SLOTS;
        load_alone<CHUNK>(shared.value(slot), maps.value, shared.barrier(VALUE + slot), problem, group, chunk * CHUNK);
    }
};

extern "C" __global__ void __launch_bounds__(128 * ROW_GROUPS, BLOCKS_PER_SM)
    backward_streamed_sm90(BACKWARD_MAPS, BACKWARD_NUMBERS) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const StreamedShared shared{shared_address(memory)};
    const Maps maps{.query = query_map, .key = key_map, .value = value_map, .dout = dout_map};
    const int group = warpgroup_of();
    const Reader reader{maps, shared, group};
    if (threadIdx.x == 0) {
        init_barriers(shared, BARRIERS, ROW_GROUPS);
    }
    __syncthreads();
    if (elected()) {
        const Problem first(blockIdx.x, heads);
        reader.expect_query_and_key();
        for (int chunk = 0; chunk < CHUNKS; chunk++) reader.query_and_key(first, chunk);
        for (int chunk = 0; chunk < SLOTS; chunk++) {
            reader.dout(first, chunk);
            reader.value(first, chunk);
        }
    }
    Rows rows(lse, blockIdx.x, q_len, group);
    int count = 0;
#pragma unroll 1
    for (int index = blockIdx.x; index < problems; index += gridDim.x, count++) {
        const Problem problem(index, heads), next(index + gridDim.x, heads);
        const bool more = index + int(gridDim.x) < problems;
        float dlse_rows[2];
        if (HAS_DLSE) load_pair(dlse_rows, dlse, index, q_len, group, 0.0f);

        float scores[ROWS / 2];
        barrier_wait(shared.barrier(QUERY_KEY), count & 1);
        // S = Q K^T, chunk by chunk
        products_begin();
        multiply_rows<CHUNK, ROWS>(scores, shared.query(0), 64 * group, shared.key(0), 0);
#pragma unroll
        for (int chunk = 1; chunk < CHUNKS; chunk++)
            multiply_rows<CHUNK, ROWS, true>(scores, shared.query(chunk), 64 * group, shared.key(chunk), 0);
        products_commit();
        products_wait<0>();
        // P = exp(scale S - lse)
        rows.park_weights(scores, shared.weights(), group, kv_len, scale * LOG2E);
        if (more) rows.load(lse, next.index, q_len, group);
        fence_async();
        __syncthreads();

        float dweights[ROWS / 2];
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            const int slot = chunk % SLOTS, parity = (count * (CHUNKS / SLOTS) + chunk / SLOTS) & 1;
            float dvalue[CHUNK / 2];
            barrier_wait(shared.barrier(DOUT + slot), parity);
            barrier_wait(shared.barrier(VALUE + slot), parity);
            products_begin();
            // a chunk of dV = P^T dO
            multiply_transposed<CHUNK, CHUNK>(dvalue, shared.weights(), group, shared.dout(slot));
            // dP += dO V^T
            if (chunk == 0) multiply_rows<CHUNK, ROWS>(dweights, shared.dout(slot), 64 * group, shared.value(slot), 0);
            else multiply_rows<CHUNK, ROWS, true>(dweights, shared.dout(slot), 64 * group, shared.value(slot), 0);
            products_commit();
            if (chunk > 0 && elected()) {
                stores_wait_read();  // the chunk of dV before this one has left its slot
                if (chunk + SLOTS - 1 < CHUNKS) reader.value(problem, chunk + SLOTS - 1);
                else if (more) reader.value(next, (chunk + SLOTS - 1) % CHUNKS);
            }
            products_wait<0>();
            __syncthreads();  // no warp still reads this slot
            emit<CHUNK>(dvalue_map, shared.value(slot), problem, group, dvalue, chunk * CHUNK);
            if (elected()) {
                if (chunk + SLOTS < CHUNKS) reader.dout(problem, chunk + SLOTS);
                else if (more) reader.dout(next, (chunk + SLOTS) % CHUNKS);
            }
        }
        // dS = P (dP - delta)
        u32 dscores[ROWS / 4];
        park_score_gradient(dscores, dweights, dlse_rows, shared.weights(), group, scale);
        fence_async();
        if (elected()) {
            stores_wait_read();
            if (more) {
                reader.value(next, SLOTS - 1);
                reader.expect_query_and_key();
            }
        }
        __syncthreads();

#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            float dkey[CHUNK / 2], dquery[CHUNK / 2];
            products_begin();
            // chunks of dK = dS^T Q and dQ = dS K
            multiply_transposed<CHUNK, CHUNK>(dkey, shared.weights(), group, shared.query(chunk));
            multiply_registers<CHUNK>(dquery, dscores, shared.key(chunk));
            products_commit();
            if (chunk > 0 && elected()) {
                stores_wait_read();
                if (more) reader.query_and_key(next, chunk - 1);
            }
            products_wait<0>();
            __syncthreads();  // no warp still reads this chunk
            emit<CHUNK>(dkey_map, shared.query(chunk), problem, group, dkey, chunk * CHUNK);
            emit<CHUNK>(dquery_map, shared.key(chunk), problem, group, dquery, chunk * CHUNK);
        }
        if (elected()) {
            stores_wait_read();
            if (more) reader.query_and_key(next, CHUNKS - 1);
        }
    }
}
