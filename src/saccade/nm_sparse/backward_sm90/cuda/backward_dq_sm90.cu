// dQ of N:M attention on sm_90a, for a stored selection. See README.md of this family.
//
//   S = Q K^T    P = exp(S - lse) where the bit is set, else 0    dP = dO V^T    dS = P (dP - delta)    dQ = scale dS K
//
// A thread block owns 128 queries; Q and dO stay in shared memory, tiles of BLOCK_KV keys of K and V come by TMA into a ring of STAGES,
// with their bits. dS, rounded, is the register operand of dQ. (Compressed for sparse tensor cores it is slower: the exchange between
// lanes costs more than half a product saves. See docs/notes/nm_sparse.md.)
//
// Shared memory:   | Q: 128 rows | dO: 128 rows | STAGES x (K, V) | STAGES x bits of 128 queries | BIAS: STAGES x 128 rows | barriers (`Barrier`) |
//
// Compiled with HEAD_DIM (64 or 128: D rounded up, the rest is zeros), BLOCK_KV, STAGES, TURNS, BF16, CAUSAL, DROPOUT,
// BLOCKS (a block mask), BIAS (bytes of a number of the bias: 2, of the type of Q, or 4; 0 without one).
#include "tiles.cuh"

constexpr int TILE_BYTES = BLOCK_KV * HEAD_DIM * 2;  // keys, or their values
constexpr int WORDS = BLOCK_KV / 32;                 // of a query's bits
static_assert(WORDS == 2 || WORDS == 4, "bits of a query are one load");
constexpr int BIAS_PITCH = (BLOCK_KV + 8) * BIAS;  // bytes of a row; lanes that load two numbers at once meet no bank twice

struct QueryGradientShared {
    u32 base;

    __device__ __forceinline__ explicit QueryGradientShared(const unsigned char* memory) : base(align_operands(shared_address(memory))) {}
    constexpr __device__ __forceinline__ explicit QueryGradientShared(u32 base) : base(base) {}
    constexpr __device__ __forceinline__ u32 query(int warpgroup) const { return base + warpgroup * OWN_BYTES; }
    constexpr __device__ __forceinline__ u32 dout(int warpgroup) const { return query(WARPGROUPS + warpgroup); }
    constexpr __device__ __forceinline__ u32 keys(int stage) const { return query(2 * WARPGROUPS) + stage * 2 * TILE_BYTES; }
    constexpr __device__ __forceinline__ u32 values(int stage) const { return keys(stage) + TILE_BYTES; }
    // WORDS words a query
    constexpr __device__ __forceinline__ u32 bits(int stage) const { return keys(STAGES) + stage * BLOCK * WORDS * 4; }
    constexpr __device__ __forceinline__ u32 bias(int stage) const { return bits(STAGES) + stage * BLOCK * BIAS_PITCH; }
    constexpr __device__ __forceinline__ u32 barrier(int index) const { return bias(STAGES) + 8 * index; }
};
static_assert(QueryGradientShared(0u).barrier(BARRIERS) + EIGHT_ROWS <= SHARED_BYTES, "the launch asks for too little shared memory");

// 128 queries of one head, and how many key tiles they see
struct QueryBlock {
    int batch, head, first_query, tiles;

    __device__ __forceinline__ explicit QueryBlock(const Sizes& sizes) {
        int blocks = (sizes.q_len + BLOCK - 1) / BLOCK, problem = blockIdx.x / blocks, block = blockIdx.x % blocks;
        if (CAUSAL) block = blocks - 1 - block;  // long ones first
        if (BLOCKS && !CAUSAL) order_blocks(blockIdx.x, gridDim.x / blocks, blocks, EARLY, problem, block);
        batch = problem / sizes.heads;
        head = problem % sizes.heads;
        first_query = block * BLOCK;
        int keys = CAUSAL ? min(sizes.seen, first_query + BLOCK) : sizes.seen;
        tiles = (keys + BLOCK_KV - 1) / BLOCK_KV;
    }
    __device__ __forceinline__ int problem(const Sizes& sizes) const { return batch * sizes.heads + head; }
};

struct Shows {
    const QueryBlock& work;
    const Sizes& sizes;
    const unsigned char* mask;

    __device__ __forceinline__ bool operator()(int step) const {
        const unsigned char* at = mask + work.batch * sizes.mask_batch + work.head * sizes.mask_head;
        bool shown = false;
#pragma unroll
        for (int w = 0; w < WARPGROUPS; w++) {
#pragma unroll
            for (int c = 0; c < BLOCK_KV / 64; c++) {
                int query = work.first_query + 64 * w, key = step * BLOCK_KV + 64 * c;
                if (query < sizes.q_len && key < sizes.seen) shown |= at[query / 64 * sizes.mask_row + key / 64] != 0;
            }
        }
        return shown;
    }

    // whether a warpgroup sees it; only with tiles of 64 keys
    __device__ __forceinline__ bool operator()(int step, int warpgroup) const {
        static_assert(!BLOCKS || BLOCK_KV == 64);
        const unsigned char* at = mask + work.batch * sizes.mask_batch + work.head * sizes.mask_head;
        int query = work.first_query + 64 * warpgroup;
        return query < sizes.q_len && !(CAUSAL && step > query / 64) && at[query / 64 * sizes.mask_row + step];
    }
};

struct Producer {
    const TensorMap &query_map, &key_map, &value_map, &dout_map;
    const Sizes& sizes;
    const QueryBlock& work;
    QueryGradientShared shared;
    const unsigned* row;  // the bits of this thread's query
    u32 bits[WORDS];      // of a tile

    __device__ __forceinline__ void load_own() {
        u32 barrier = shared.barrier(FULL_OWN);
        barrier_expect(barrier, 2 * WARPGROUPS * OWN_BYTES);
        for (int w = 0; w < WARPGROUPS; w++) {
            int query = work.first_query + 64 * w;
            copy_rows(shared.query(w), query_map, barrier, query, sizes.present & 2 ? work.head : 0, sizes.present & 1 ? work.batch : 0);
            copy_rows(shared.dout(w), dout_map, barrier, query, sizes.present & 128 ? work.head : 0, sizes.present & 64 ? work.batch : 0);
        }
    }

    __device__ __forceinline__ void load_tile(int step, int stage) {
        int head = work.head / sizes.group, key = step * BLOCK_KV;
        u32 barrier = shared.barrier(FULL + stage);
        barrier_expect(barrier, 2 * TILE_BYTES);
        copy_rows(shared.keys(stage), key_map, barrier, key, sizes.present & 8 ? head : 0, sizes.present & 4 ? work.batch : 0, BLOCK_KV * 128);
        copy_rows(shared.values(stage), value_map, barrier, key, sizes.present & 32 ? head : 0, sizes.present & 16 ? work.batch : 0, BLOCK_KV * 128);
    }

    __device__ __forceinline__ void fetch(int step) {
        int word = step * WORDS;
        bool inside = work.first_query + int(threadIdx.x) < sizes.q_len;
        if (inside && sizes.vectors) {
            if (WORDS == 4) {
                uint4 four = *reinterpret_cast<const uint4*>(row + word);
                bits[0] = four.x, bits[1] = four.y, bits[WORDS - 2] = four.z, bits[WORDS - 1] = four.w;
            } else {
                uint2 two = *reinterpret_cast<const uint2*>(row + word);
                bits[0] = two.x, bits[1] = two.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i++) bits[i] = inside && word + i < sizes.words ? row[word + i] : 0;
        }
    }

    __device__ __forceinline__ void store(int stage) const {
        u32 to = shared.bits(stage) + 4 * WORDS * threadIdx.x;
#pragma unroll
        for (int i = 0; i < WORDS; i += 2) store_shared(to + 4 * i, bits[i], bits[i + 1]);
    }

    __device__ __forceinline__ void run(const Shows& shows, const unsigned* kept) {
        Steps steps(work.tiles);
        if (threadIdx.x == 0) load_own();
        row = kept + ((long long)work.problem(sizes) * sizes.q_len + work.first_query + threadIdx.x) * sizes.words;
        int step = steps.next(shows);
        if (step < steps.total) fetch(step);
        for (int n = 0; step < steps.total; n++) {
            int stage = stage_of(n);
            barrier_wait(shared.barrier(EMPTY + stage), parity_of(n) ^ 1);
            if (threadIdx.x == 0) load_tile(step, stage);
            store(stage);
            if constexpr (BIAS) {
                copy_bias<BLOCK, BLOCK_KV, BIAS_PITCH, 32 * PRODUCER_WARPS>(
                    shared.bias(stage), sizes, work.batch, work.head, work.first_query, step * BLOCK_KV, thread_of());
                barrier_arrive_after_copies(shared.barrier(FULL + stage));
            }
            __syncwarp();
            if (lane_of() == 0) barrier_arrive(shared.barrier(FULL + stage));
            step = steps.next(shows);
            if (step < steps.total) fetch(step);
        }
    }
};

// TURNS: warpgroups issue the products of a tile in turn, so that one computes on scores while the other's products run. Warpgroup w waits at
// barrier TURN + w; barrier 0 is __syncthreads.
enum NamedBarrier { TURN = 1 };
static_assert(!(TURNS && BLOCKS), "warpgroups visit different tiles");
__device__ __forceinline__ void take_turn(int warpgroup) {
    if (TURNS) sync_threads(TURN + warpgroup, 256);
}
__device__ __forceinline__ void pass_turn(int warpgroup) {
    if (TURNS) pass_barrier(warpgroup == WARPGROUPS - 1 ? TURN : TURN + 1 + warpgroup, 256);
}

// A warpgroup: 64 queries of a block, 16 a warp.
struct Consumer {
    const Sizes& sizes;
    const QueryBlock& work;
    QueryGradientShared shared;
    int warpgroup, t;
    float shift[2], sums[2];  // -lse (base 2; with a bias natural) and delta of rows g and g + 8
    float totals[2] = {0.0f, 0.0f};  // BIAS: sums of weights, if `far`
    bool far;                        // whether lse has lost the logarithm of the sum in a row of this warp
    float dquery[HEAD_DIM / 2];
    float scores[BLOCK_KV / 2], dprobs[BLOCK_KV / 2];  // [8 keys][h][2 keys]; weights take the place of scores
    u32 dscores[BLOCK_KV / 4];  // rounded
    u64 seed;                  // DROPOUT
    u32 alive[BLOCK_KV / 64];  // bit 4 i + 2 h + b: the weight in scores[4 i + 2 h + b] survives

    __device__ __forceinline__ Consumer(const Sizes& sizes, const QueryBlock& work, const QueryGradientShared& shared)
        : sizes(sizes), work(work), shared(shared), t(threadIdx.x % 4) {
        warpgroup = __shfl_sync(~0u, int(threadIdx.x) / 128 - 1, 0);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) dquery[i] = 0.0f;
    }

    __device__ __forceinline__ int row() const { return int(threadIdx.x - 128) / 32 * 16 + lane_of() / 4; }

    __device__ __forceinline__ void load_rows(const float* lse, const float* delta) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int query = work.first_query + row() + 8 * h;
            bool inside = query < sizes.q_len;
            long long at = (long long)work.problem(sizes) * sizes.q_len + query;
            shift[h] = inside ? -(BIAS ? 1.0f : LOG2E) * lse[at] : 0.0f;
            sums[h] = inside ? delta[at] : 0.0f;
        }
        if constexpr (BIAS) far = __any_sync(~0u, is_far(0) || is_far(1));
    }

    __device__ __forceinline__ bool is_far(int h) const { return fabsf(shift[h]) > FAR && fabsf(shift[h]) <= LARGEST; }

    // dQ and the weights of a row are as many times too large as its weights add up to
    __device__ __forceinline__ void correct(float* log_inverse) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float total = quad_sum(totals[h]);
            if (!is_far(h) || total == 0.0f) total = 1.0f;
            int query = work.first_query + row() + 8 * h;
            if (t == 0 && query < sizes.q_len) log_inverse[(long long)work.problem(sizes) * sizes.q_len + query] = -log2_fast(total);
#pragma unroll
            for (int i = h * 2; i < HEAD_DIM / 2; i += 4) dquery[i] /= total, dquery[i + 1] /= total;
        }
    }

    __device__ __forceinline__ void add_weights(int stage) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int w = 0; w < WORDS; w += 2) {
                u32 word[2];
                load_shared(shared.bits(stage) + 4 * (WORDS * (row() + 8 * h) + w), word[0], word[1]);
#pragma unroll
                for (int i = 4 * w; i < 4 * w + 8; i++) {
                    u32 bits = word[i / 4 - w] >> (i % 4 * 8 + 2 * t);
                    int e = 4 * i + 2 * h;
                    if (bits & 1) totals[h] += scores[e];
                    if (bits & 2) totals[h] += scores[e + 1];
                }
            }
        }
    }

    // two neighbours of row g + 8 h
    __device__ __forceinline__ float2 bias_of(int stage, int i, int h) const {
        u32 at = shared.bias(stage) + (row() + 8 * h) * BIAS_PITCH + (8 * i + 2 * t) * BIAS;
        float2 pair;
        if constexpr (BIAS == 4) load_shared(at, pair.x, pair.y);
        else pair = floats_of(load_shared(at));
        return pair;
    }

    __device__ __forceinline__ void exponentiate(int stage) {
        if constexpr (BIAS) {
            exponentiate_biased(stage);
        } else {
#pragma unroll
            for (int e = 0; e < BLOCK_KV / 2; e++) scores[e] = exp2_fast(fmaf(scores[e], sizes.exponent, shift[half_of(e)]));
        }
    }

    __device__ __forceinline__ void exponentiate_biased(int stage) {
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 8; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float2 bias = bias_of(stage, i, h);
                float &x = scores[4 * i + 2 * h], &y = scores[4 * i + 2 * h + 1];
                x = exp2_fast((fmaf(x, sizes.scale, bias.x) + shift[h]) * LOG2E);
                y = exp2_fast((fmaf(y, sizes.scale, bias.y) + shift[h]) * LOG2E);
            }
        }
        if (far) add_weights(stage);
    }

    // dQ += dS K
    __device__ __forceinline__ void issue_keys(int stage) {
        u64 b = operand(shared.keys(stage), BLOCK_KV * 128);
#pragma unroll
        for (int step = 0; step < BLOCK_KV / 16; step++) Products<HEAD_DIM>::add_rows(dquery, dscores + 4 * step, advance(b, step * 16 * 128));
        products_commit();
    }

    __device__ __forceinline__ void draw(int step) {
        int query = work.first_query + row(), key = step * BLOCK_KV + 2 * t, problem = work.problem(sizes);
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 64; i++) {
            alive[i] = 0;
#pragma unroll 1
            for (int e = 0; e < 32; e++)
                if (survives(seed, sizes, problem, query + e / 2 % 2 * 8, key + 64 * i + e / 4 * 8 + e % 2)) alive[i] |= 1u << e;
        }
    }
    __device__ __forceinline__ float dropped(float x, int e) const {
        if constexpr (!DROPOUT) return x;
        return alive[e / 32] >> (e % 32) & 1 ? x * sizes.spared : 0.0f;
    }

    // dS of column group i and row g + 8 h, rounded. It is masked last, since a key that is not kept may hold NaN.
    __device__ __forceinline__ u32 dscore(int i, int h, u32 bits) const {
        int e = 4 * i + 2 * h;
        float x = scores[e] * (dropped(dprobs[e], e) - sums[h]), y = scores[e + 1] * (dropped(dprobs[e + 1], e + 1) - sums[h]);
        return pack(x, y) & pair_mask(even_bits(bits, t), odd_bits(bits, t), i % 4);
    }

    __device__ __forceinline__ void differentiate(int stage) {
        u32 at = shared.bits(stage) + 4 * WORDS * row();
#pragma unroll
        for (int w = 0; w < WORDS; w += 2) {
            u32 word[2][2];  // [h][32 keys]
#pragma unroll
            for (int h = 0; h < 2; h++) load_shared(at + 4 * (WORDS * 8 * h + w), word[h][0], word[h][1]);
#pragma unroll
            for (int i = 4 * w; i < 4 * w + 8; i++) {
#pragma unroll
                for (int h = 0; h < 2; h++) dscores[2 * i + h] = dscore(i, h, word[h][i / 4 - w]);
            }
        }
    }

    __device__ __forceinline__ void run(const Shows& shows) {
        Steps steps(work.tiles);
        barrier_wait(shared.barrier(FULL_OWN), 0);
        u32 query = shared.query(warpgroup), dout = shared.dout(warpgroup);
        int n = -1, step = next_tile(steps, shows, shared, warpgroup, n);
        for (n++; step < steps.total; n++) {
            int stage = stage_of(n);
            if constexpr (DROPOUT) draw(step);
            barrier_wait(shared.barrier(FULL + stage), parity_of(n));
            take_turn(warpgroup);
            products_begin();
            // S = Q K^T, dP = dO V^T
            issue_over_dim<BLOCK_KV>(scores, query, shared.keys(stage));
            issue_over_dim<BLOCK_KV>(dprobs, dout, shared.values(stage));
            pass_turn(warpgroup);
            products_wait<1>();
            exponentiate(stage);  // P = exp(S - lse)
            products_wait<0>();
            differentiate(stage);  // dS = P (dP - delta)
            products_begin();
            issue_keys(stage);  // dQ += dS K
            // The wait stands here because ptxas runs all products one by one when this one runs into the next turn. The other warpgroup fills
            // the gap.
            products_wait<0>();
            release(shared, stage);
            step = next_tile(steps, shows, shared, warpgroup, n);
        }
    }
};

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1) backward_dq_sm90(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map,
    const __grid_constant__ TensorMap dout_map, const unsigned* kept, const float* lse, const float* delta,
    const unsigned char* block_mask, const u64* seed, unsigned short* dquery, int heads, int group, int q_len, int kv_len, int seen,
    int words, int counters, int head_dim, int present, int vectors, long long dquery_batch, long long dquery_head,
    long long dquery_row,
#if BIAS
    const unsigned char* bias, float* log_inverse, long long bias_batch, long long bias_head, long long bias_row, int bias_columns,
#endif
    long long mask_batch, long long mask_head, long long mask_row, float exponent, float scale, float spared,
    u32 threshold) {
    extern __shared__ unsigned char memory[];
    const Sizes sizes{.heads = heads, .group = group,
                      .q_len = q_len, .kv_len = kv_len, .seen = seen,
                      .words = words, .counters = counters, .head_dim = head_dim,
                      .present = present, .vectors = vectors,
                      .mask_batch = mask_batch, .mask_head = mask_head, .mask_row = mask_row,
#if BIAS
                      .bias = bias, .bias_batch = bias_batch, .bias_head = bias_head, .bias_row = bias_row, .bias_columns = bias_columns,
#endif
                      .exponent = exponent, .scale = scale, .spared = spared, .threshold = threshold};
    QueryGradientShared shared(memory);
    const QueryBlock work(sizes);
    const Shows shows{work, sizes, block_mask};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(shared.barrier(FULL + s), 1 + PRODUCER_WARPS + (BIAS ? 32 * PRODUCER_WARPS : 0));
            barrier_init(shared.barrier(EMPTY + s), RELEASES);
        }
        barrier_init(shared.barrier(FULL_OWN), 1);
        barrier_fence();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        leave_registers<24>();
        Producer producer{.query_map = query_map, .key_map = key_map, .value_map = value_map, .dout_map = dout_map,
                          .sizes = sizes, .work = work, .shared = shared};
        pass_turn(WARPGROUPS - 1);  // the first turn. A branch of a consumer before its loop makes ptxas serialise the products
        producer.run(shows, kept);
    } else {
        take_registers<240>();
        Consumer consumer(sizes, work, shared);
        if constexpr (DROPOUT) consumer.seed = *seed;
        consumer.load_rows(lse, delta);
        consumer.run(shows);
#if BIAS
        consumer.correct(log_inverse);
#endif
        int first = work.first_query + 64 * consumer.warpgroup;
        store_rows(
            consumer.dquery, sizes.scale, dquery + work.batch * dquery_batch + work.head * dquery_head + first * dquery_row, dquery_row,
            sizes.q_len - first, head_dim);
    }
}
