// dK and dV of N:M attention on sm_90a, for a stored selection. See README.md of this family.
//
//   S^T = K Q^T    P^T = exp(S^T - lse) where the bit is set, else 0    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
//   dV += P^T dO   dK += scale dS^T Q                                   over the queries of all heads of a group, in order
//
// A thread block owns 128 keys; K and V stay in shared memory, tiles of 64 queries of Q and dO come by TMA into a ring of STAGES. Scores
// are computed with keys as rows, so P^T and dS^T, rounded, are register operands of dV and dK.
//
// Two pairs of producer warps take tiles in turn: reading the bits, which come from memory, lasts about as long as a tile. A warp brings the
// bits of 64 keys, turned round so that a consumer reads 64 bits, of 64 queries, of each of its two keys; and lse or delta.
//
// Shared memory:   | K: 128 rows | V: 128 rows | STAGES x (Q, dO) | STAGES x bits of 128 keys | STAGES x (-lse, delta) | BIAS: STAGES x 64 rows | barriers (`Barrier`) |
//
// Compiled with HEAD_DIM (64 or 128: D rounded up, the rest is zeros), STAGES, OWN_REGISTERS (K and V
// as register operands), BF16, CAUSAL, DROPOUT, BLOCKS (a block mask), BIAS (bytes of a number of the bias: 2, of the type of Q, or 4; 0
// without one).
#include "tiles.cuh"

constexpr int TILE_BYTES = 64 * HEAD_DIM * 2;  // queries, or their dO
constexpr int STATS_BYTES = 4 * 80;            // a number for each query
// D = 64 leaves the producers, which copy a bias too, more registers
constexpr int PRODUCER_REGISTERS = BIAS && HEAD_DIM == 64 ? 40 : 24;
constexpr int STATS = BIAS ? 3 : 2;
constexpr int BIAS_PITCH = BIAS ? BLOCK * BIAS + 16 : 0;  // bytes of a row of the bias; lanes meet no bank twice

struct KeyGradientShared {
    u32 base;

    __device__ __forceinline__ explicit KeyGradientShared(const unsigned char* memory) : base(align_operands(shared_address(memory))) {}
    constexpr __device__ __forceinline__ explicit KeyGradientShared(u32 base) : base(base) {}
    constexpr __device__ __forceinline__ u32 keys(int warpgroup) const { return base + warpgroup * OWN_BYTES; }
    constexpr __device__ __forceinline__ u32 values(int warpgroup) const { return keys(WARPGROUPS + warpgroup); }
    constexpr __device__ __forceinline__ u32 query(int stage) const { return keys(2 * WARPGROUPS) + stage * 2 * TILE_BYTES; }
    constexpr __device__ __forceinline__ u32 dout(int stage) const { return query(stage) + TILE_BYTES; }
    // 8 bytes a key: bits of the 64 queries
    constexpr __device__ __forceinline__ u32 bits(int stage) const { return query(STAGES) + stage * 8 * BLOCK; }
    // -lse (base 2; with a bias natural) of the 64 queries, then delta, with a bias then -log2 of the sums of weights: those of lane t, queries 8 i + 2 t + {0, 1}, lie together, 80 bytes after those of t - 1,
    // so that the four lanes read from different banks
    constexpr __device__ __forceinline__ u32 stats(int stage) const { return bits(STAGES) + stage * STATS * STATS_BYTES; }
    constexpr __device__ __forceinline__ u32 bias(int stage) const { return stats(STAGES) + stage * 64 * BIAS_PITCH; }
    constexpr __device__ __forceinline__ u32 barrier(int index) const { return bias(STAGES) + 8 * index; }
};
static_assert(KeyGradientShared(0u).barrier(BARRIERS) + EIGHT_ROWS <= SHARED_BYTES, "the launch asks for too little shared memory");

// 128 keys of one key head, and the query tiles that see them: those from `begin` on, of each head of the group
struct KeyBlock {
    int batch, kv_head, first_key, begin, stretch;

    __device__ __forceinline__ explicit KeyBlock(const Sizes& sizes) {
        int blocks = (sizes.kv_len + BLOCK - 1) / BLOCK, owner = blockIdx.x / blocks, kv_heads = sizes.heads / sizes.group;
        first_key = blockIdx.x % blocks * BLOCK;  // causal: long ones first
        if constexpr (BLOCKS && !CAUSAL) {
            order_blocks(blockIdx.x, gridDim.x / blocks, blocks, EARLY, owner, first_key);
            first_key *= BLOCK;
        }
        batch = owner / kv_heads;
        kv_head = owner % kv_heads;
        begin = CAUSAL ? first_key / 64 : 0;
        stretch = max((sizes.q_len + 63) / 64 - begin, 0);
    }
    __device__ __forceinline__ int steps(const Sizes& sizes) const { return sizes.group * stretch; }
    __device__ __forceinline__ int head(int step, const Sizes& sizes) const { return kv_head * sizes.group + step / stretch; }
    __device__ __forceinline__ int tile(int step) const { return begin + step % stretch; }
};

struct Shows {
    const KeyBlock& work;
    const Sizes& sizes;
    const unsigned char* mask;  // a row for each tile of keys, so that a warp looks at adjacent bytes

    __device__ __forceinline__ bool operator()(int step) const {
        return shown(step, work.first_key / 64) || (work.first_key + 64 < sizes.kv_len && shown(step, work.first_key / 64 + 1));
    }

    // whether the keys of a warpgroup are seen
    __device__ __forceinline__ bool operator()(int step, int warpgroup) const {
        int keys = work.first_key / 64 + warpgroup;
        return 64 * keys < sizes.kv_len && !(CAUSAL && work.tile(step) < keys) && shown(step, keys);
    }

    __device__ __forceinline__ bool shown(int step, int keys) const {
        return mask[work.batch * sizes.mask_batch + work.head(step, sizes) * sizes.mask_head + keys * sizes.mask_row + work.tile(step)];
    }
};

struct Producer {
    const TensorMap &query_map, &key_map, &value_map, &dout_map;
    const unsigned* kept;
    const float *lse, *delta;
    const float* log_inverse;  // BIAS
    const Sizes& sizes;
    const KeyBlock& work;
    KeyGradientShared shared;
    u32 near[2], far[2];  // of a tile, the bits of queries `lane` and `lane + 32`
    float stats[2];       // of both

    // the 64 keys of the block whose bits this warp loads; with 0 it loads lse too, with 1 delta
    __device__ __forceinline__ int half() const { return thread_of() / 32 % 2; }

    __device__ __forceinline__ void load_own() {
        int b = sizes.present & 4 ? work.batch : 0, h = sizes.present & 8 ? work.kv_head : 0;
        int vb = sizes.present & 16 ? work.batch : 0, vh = sizes.present & 32 ? work.kv_head : 0;
        u32 barrier = shared.barrier(FULL_OWN);
        barrier_expect(barrier, 2 * WARPGROUPS * OWN_BYTES);
        for (int w = 0; w < WARPGROUPS; w++) {
            copy_rows(shared.keys(w), key_map, barrier, work.first_key + 64 * w, h, b);
            copy_rows(shared.values(w), value_map, barrier, work.first_key + 64 * w, vh, vb);
        }
    }

    __device__ __forceinline__ void load_tile(int step, int stage) {
        int head = work.head(step, sizes), row = 64 * work.tile(step);
        u32 barrier = shared.barrier(FULL + stage);
        barrier_expect(barrier, 2 * TILE_BYTES);
        copy_rows(shared.query(stage), query_map, barrier, row, sizes.present & 2 ? head : 0, sizes.present & 1 ? work.batch : 0);
        copy_rows(shared.dout(stage), dout_map, barrier, row, sizes.present & 128 ? head : 0, sizes.present & 64 ? work.batch : 0);
    }

    __device__ __forceinline__ void fetch_bits(const unsigned* at, bool inside, u32 (&bits)[2]) const {
        int left = inside ? sizes.words - work.first_key / 32 - 2 * half() : 0;
        if (left > 0 && sizes.vectors) {
            uint2 two = *reinterpret_cast<const uint2*>(at);
            bits[0] = two.x, bits[1] = two.y;
        } else {
            bits[0] = left > 0 ? at[0] : 0;
            bits[1] = left > 1 ? at[1] : 0;
        }
    }

    // what a lane loads of a tile, from memory
    __device__ __forceinline__ void fetch(int step) {
        int query = 64 * work.tile(step) + lane_of();
        long long row = (long long)(work.batch * sizes.heads + work.head(step, sizes)) * sizes.q_len + query;
        const unsigned* at = kept + row * sizes.words + work.first_key / 32 + 2 * half();
        fetch_bits(at, query < sizes.q_len, near);
        fetch_bits(at + 32ll * sizes.words, query + 32 < sizes.q_len, far);
        const float* numbers = half() ? delta : lse;
        stats[0] = query < sizes.q_len ? numbers[row] : 0.0f;
        stats[1] = query + 32 < sizes.q_len ? numbers[row + 32] : 0.0f;
    }

    // the tile of the bias, and with the second 64 keys the corrections of the weights
    __device__ __forceinline__ void bring_bias(int step, int stage) const {
        int query = 64 * work.tile(step), head = work.head(step, sizes);
        copy_bias<64, BLOCK, BIAS_PITCH, 64>(shared.bias(stage), sizes, work.batch, head, query, work.first_key, thread_of() % 64);
        barrier_arrive_after_copies(shared.barrier(FULL + stage));
        if (half()) {
            const int lane = lane_of();
            query += lane;
            const float* at = log_inverse + (long long)(work.batch * sizes.heads + head) * sizes.q_len + query;
            u32 to = shared.stats(stage) + 2 * STATS_BYTES + lane % 8 / 2 * 80 + (lane / 8 * 2 + lane % 2) * 4;  // as in `store`
            store_shared(to, __float_as_uint(query < sizes.q_len ? at[0] : 0.0f));
            store_shared(to + 32, __float_as_uint(query + 32 < sizes.q_len ? at[32] : 0.0f));
        }
    }

    __device__ __forceinline__ void store(int stage) const {
        int lane = lane_of();
        u32 to = shared.stats(stage) + half() * STATS_BYTES + lane % 8 / 2 * 80 + (lane / 8 * 2 + lane % 2) * 4;
        float factor = half() ? 1.0f : BIAS ? -1.0f : -LOG2E;
        store_shared(to, __float_as_uint(factor * stats[0]));
        store_shared(to + 32, __float_as_uint(factor * stats[1]));
#pragma unroll
        for (int i = 0; i < 2; i++)
            store_shared(shared.bits(stage) + 8 * (64 * half() + 32 * i + lane), transpose_bits(near[i]), transpose_bits(far[i]));
    }

    __device__ __forceinline__ void run(const Shows& shows) {
        Steps steps(work.steps(sizes));
        if (threadIdx.x == 0) load_own();
        int step = steps.next(shows);
        if (threadIdx.x >= 64) step = steps.next(shows);
        for (int n = threadIdx.x / 64; step < steps.total; n += 2) {
            int stage = stage_of(n);
            barrier_wait(shared.barrier(EMPTY + stage), parity_of(n) ^ 1);
            if (thread_of() % 64 == 0) load_tile(step, stage);
            __syncwarp();
            if constexpr (BIAS) bring_bias(step, stage);
            // The bits are not fetched before the wait, because 24 registers hold no more; the ring is long enough to hide their latency.
            fetch(step);
            store(stage);
            __syncwarp();
            if (lane_of() == 0) barrier_arrive(shared.barrier(FULL + stage));
            steps.next(shows);
            step = steps.next(shows);
        }
    }
};

// A warpgroup: 64 keys of a block, 16 a warp.
struct Consumer {
    const Sizes& sizes;
    const KeyBlock& work;
    KeyGradientShared shared;
    int warpgroup, t;
    float dkey[HEAD_DIM / 2], dvalue[HEAD_DIM / 2];
    float scores[32], dprobs[32];  // [8 queries][h][2 queries]; weights take the place of scores
    u32 probs[16], dscores[16];    // rounded
    u32 even[2][2], odd[2][2];     // bits of a tile, [h][32 queries]
    u64 seed;   // DROPOUT
    u32 alive;  // bit 4 i + 2 h + b: the weight in scores[4 i + 2 h + b] survives

    __device__ __forceinline__ Consumer(const Sizes& sizes, const KeyBlock& work, const KeyGradientShared& shared)
        : sizes(sizes), work(work), shared(shared), t(threadIdx.x % 4) {
        warpgroup = __shfl_sync(~0u, int(threadIdx.x) / 128 - 1, 0);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) dkey[i] = dvalue[i] = 0.0f;
    }

    // d += A B: 64 keys, D, over 64 queries
    __device__ __forceinline__ void issue_rows(float (&d)[HEAD_DIM / 2], const u32* a, u32 queries) {
        u64 b = operand(queries, ROWS_64);
#pragma unroll
        for (int step = 0; step < 4; step++) Products<HEAD_DIM>::add_rows(d, a + 4 * step, advance(b, step * 16 * 128));
        products_commit();
    }

    __device__ __forceinline__ void load_bits(int stage) {
        u32 at = shared.bits(stage) + 8 * (threadIdx.x - 128 - threadIdx.x % 32) / 2 + 8 * (threadIdx.x % 32 / 4);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 word[2];
            load_shared(at + 64 * h, word[0], word[1]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                even[h][half] = even_bits(word[half], t);
                odd[h][half] = odd_bits(word[half], t);
            }
        }
    }

    __device__ __forceinline__ u32 mask(int i, int h) const { return pair_mask(even[h][i / 4], odd[h][i / 4], i % 4); }

    __device__ __forceinline__ void draw(int step) {
        int problem = work.batch * sizes.heads + work.head(step, sizes);
        int key = work.first_key + int(threadIdx.x - 128) / 32 * 16 + lane_of() / 4, query = 64 * work.tile(step) + 2 * t;
        alive = 0;
#pragma unroll 1
        for (int e = 0; e < 32; e++)
            if (survives(seed, sizes, problem, query + e / 4 * 8 + e % 2, key + e / 2 % 2 * 8)) alive |= 1u << e;
    }
    __device__ __forceinline__ float dropped(float x, int e) const {
        if constexpr (!DROPOUT) return x;
        return alive >> e & 1 ? x * sizes.spared : 0.0f;
    }

    // scores -> weights, of column groups i and i + 1
    __device__ __forceinline__ void weigh_two(int stage, int i) {
        int key = int(threadIdx.x - 128) / 32 * 16;
        u32 words[4];  // four blocks of 8 queries and 8 keys, transposed: [group][h]
        if constexpr (BIAS == 2) {
            int lane = lane_of();
            load_transposed(words, shared.bias(stage) + (8 * (i + lane / 16) + lane % 8) * BIAS_PITCH + (key + lane / 8 % 2 * 8) * 2);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float shift[2], more[2];
            load_shared(shared.stats(stage) + 80 * t + 8 * (i + n), shift[0], shift[1]);
            load_shared(shared.stats(stage) + 2 * STATS_BYTES + 80 * t + 8 * (i + n), more[0], more[1]);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float2 two;
                if constexpr (BIAS == 2) {
                    two = floats_of(words[2 * n + h]);
                } else {
                    u32 at = shared.bias(stage) + (8 * (i + n) + 2 * t) * BIAS_PITCH + (key + lane_of() / 4 + 8 * h) * 4;
                    two = make_float2(__uint_as_float(load_shared(at)), __uint_as_float(load_shared(at + BIAS_PITCH)));
                }
                float &x = scores[4 * (i + n) + 2 * h], &y = scores[4 * (i + n) + 2 * h + 1];
                x = exp2_fast(fmaf(fmaf(x, sizes.scale, two.x) + shift[0], LOG2E, more[0]));
                y = exp2_fast(fmaf(fmaf(y, sizes.scale, two.y) + shift[1], LOG2E, more[1]));
            }
        }
    }

    // scores -> weights, kept in float for dS, and rounded for dV
    __device__ __forceinline__ void exponentiate(int stage) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float shift[2];
            if (BIAS && i % 2 == 0) weigh_two(stage, i);
            if constexpr (!BIAS) load_shared(shared.stats(stage) + 80 * t + 8 * i, shift[0], shift[1]);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int e = 4 * i + 2 * h;
#pragma unroll
                for (int b = 0; b < 2; b++)
                    if constexpr (!BIAS) scores[e + b] = exp2_fast(fmaf(scores[e + b], sizes.exponent, shift[b]));
                probs[2 * i + h] = pack(dropped(scores[e], e), dropped(scores[e + 1], e + 1)) & mask(i, h);
            }
        }
    }

    // dS is masked once more, not multiplied by a masked weight: a key that is not kept may hold NaN.
    __device__ __forceinline__ void differentiate(int stage) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float sums[2];
            load_shared(shared.stats(stage) + STATS_BYTES + 80 * t + 8 * i, sums[0], sums[1]);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int e = 4 * i + 2 * h;
                float x = scores[e] * (dropped(dprobs[e], e) - sums[0]), y = scores[e + 1] * (dropped(dprobs[e + 1], e + 1) - sums[1]);
                dscores[2 * i + h] = pack(x, y) & mask(i, h);
            }
        }
    }

    __device__ __forceinline__ void run(const Shows& shows) {
        barrier_wait(shared.barrier(FULL_OWN), 0);
        if constexpr (OWN_REGISTERS) {
            u32 keys[HEAD_DIM / 4], values[HEAD_DIM / 4];
            load_fragments(keys, shared.keys(warpgroup));
            load_fragments(values, shared.values(warpgroup));
            run_with(keys, values, shows);
        } else {
            run_with(shared.keys(warpgroup), shared.values(warpgroup), shows);
        }
    }

    // `keys` and `values`: fragments in registers, or addresses of rows in shared memory
    template <class Own>
    __device__ __forceinline__ void run_with(const Own& keys, const Own& values, const Shows& shows) {
        Steps steps(work.steps(sizes));
        int n = -1, step = next_tile(steps, shows, shared, warpgroup, n);
        for (n++; step < steps.total; n++) {
            int stage = stage_of(n);
            if constexpr (DROPOUT) draw(step);
            barrier_wait(shared.barrier(FULL + stage), parity_of(n));
            products_begin();
            // S^T = K Q^T, dP^T = V dO^T
            issue_over_dim<64>(scores, keys, shared.query(stage));
            issue_over_dim<64>(dprobs, values, shared.dout(stage));
            load_bits(stage);
            // dV and dK of the tile before are done too
            products_wait<1>();
            if (!BLOCKS && n > 0) release(shared, stage_of(n - 1));
            exponentiate(stage);  // P^T = exp(S^T - lse)
            products_begin();
            issue_rows(dvalue, probs, shared.dout(stage));  // dV += P^T dO
            products_wait<1>();
            differentiate(stage);  // dS^T = P^T (dP^T - delta)
            products_begin();
            issue_rows(dkey, dscores, shared.query(stage));  // dK += dS^T Q
            products_wait<DROPOUT || BLOCKS ? 0 : 1>();  // dV: frees the registers of its operand. No product may run while `draw` loops
            // The place is freed immediately: before its next tile, this warpgroup may have to pass tiles that use the same place.
            if (BLOCKS) release(shared, stage);
            step = next_tile(steps, shows, shared, warpgroup, n);
        }
        products_wait<0>();
    }
};

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1) backward_dkv_sm90(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map,
    const __grid_constant__ TensorMap dout_map, const unsigned* kept, const float* lse, const float* delta,
    const unsigned char* block_mask, const u64* seed, unsigned short* dkey, unsigned short* dvalue, int heads, int group, int q_len,
    int kv_len, int seen, int words, int counters, int head_dim, int present, int vectors, long long dkey_batch,
    long long dkey_head, long long dkey_row, long long dvalue_batch, long long dvalue_head, long long dvalue_row,
#if BIAS
    const unsigned char* bias, const float* log_inverse, long long bias_batch, long long bias_head, long long bias_row, int bias_columns,
#endif
    long long mask_batch, long long mask_head, long long mask_row, float exponent, float scale, float spared, u32 threshold) {
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
    KeyGradientShared shared(memory);
    const KeyBlock work(sizes);
    const Shows shows{work, sizes, block_mask};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(shared.barrier(FULL + s), 3 + (BIAS ? 64 : 0));  // the copies, a pair of producer warps, and their copies of the bias
            barrier_init(shared.barrier(EMPTY + s), RELEASES);
        }
        barrier_init(shared.barrier(FULL_OWN), 1);
        barrier_fence();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        leave_registers<PRODUCER_REGISTERS>();
        Producer producer{.query_map = query_map, .key_map = key_map, .value_map = value_map, .dout_map = dout_map,
                          .kept = kept, .lse = lse, .delta = delta,
#if BIAS
                          .log_inverse = log_inverse,
#endif
                          .sizes = sizes, .work = work, .shared = shared};
        producer.run(shows);
    } else {
        take_registers<252 - PRODUCER_REGISTERS / 2>();
        Consumer consumer(sizes, work, shared);
        if constexpr (DROPOUT) consumer.seed = *seed;
        consumer.run(shows);
        int first = work.first_key + 64 * consumer.warpgroup, rows = sizes.kv_len - first;
        store_rows(consumer.dvalue, 1.0f, dvalue + work.batch * dvalue_batch + work.kv_head * dvalue_head + first * dvalue_row, dvalue_row, rows, head_dim);
        store_rows(consumer.dkey, sizes.scale, dkey + work.batch * dkey_batch + work.kv_head * dkey_head + first * dkey_row, dkey_row, rows, head_dim);
    }
}
