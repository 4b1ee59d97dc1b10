// dQ, dK and dV of N:M attention in one pass on sm_90a, for a stored selection: five products, where two kernels need seven.
//
//   S^T = K Q^T    P^T = exp(S^T - lse) where the bit is set, else 0    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
//   dV += P^T dO   dK += scale dS^T Q                                   over the queries of all heads of a group, in order
//   dQ += dS K                                                          over the blocks of keys, in order, in memory
//
// A thread block owns 128 keys, 64 a warpgroup; K and V stay in shared memory, tiles of 64 queries of Q and dO come by TMA. P^T, rounded, is a
// register operand of dV. Both warpgroups write dS^T to shared memory. One tile later each makes from it the dK of its keys and half of the columns
// of dQ, so that a warpgroup's other work overlaps with its own products:
//
//   tensor cores   | S n | dQ n-1 | dK n-1 | dP n | dV n   | S n+1 | dQ n | ...
//   other units          | P n    P n      | dS n                  | P n+1
//
// The other units limit the loop, and the tensor cores wait. So no load from shared memory, which takes 500 clocks during products, lies between one
// product and the next, and dP begins at -delta. Products are issued when few are pending, because a warp stalls while many are.
//
// One thread adds the dQ of a tile to float32 sums in memory, by the copy engine. ORDERED: blocks of keys add in turn, of which each tile of
// queries keeps count, so sums are the same every time; the first one stores and nothing has to be cleared. A block waits only for blocks with
// smaller numbers, all of which have started. Causal: from the diagonal to the first keys, which takes blocks of few queries first: block j then
// comes to tile 2j + 2k when block j + 1 has left it.
//
// Shared memory:   | K: 128 rows | V: 128 rows | QUERY_STAGES x Q | STAGES x dO | 2 x dS^T: 128 rows of 64 | dQ of a tile, float |
//                  | QUERY_STAGES x bits of 128 keys | QUERY_STAGES x (-lse, delta) | barriers (`Barrier`) | number of the block |
//
// Compiled with HEAD_DIM (64 or 128: D rounded up, the rest is zeros), STAGES, ORDERED, BF16, CAUSAL.
#include "backward.cuh"

constexpr int TILE_BYTES = 64 * HEAD_DIM * 2;    // queries, or their dO
constexpr int SCORE_BYTES = BLOCK * 128;         // dS^T of 64 queries
constexpr int HALF = HEAD_DIM / 2;               // columns of dQ that a warpgroup makes
constexpr int HALF_BYTES = 64 * HALF * 4;        // dQ of 64 queries, of a warpgroup
constexpr int STATS_BYTES = 4 * 80;              // a number for each query
constexpr int QUERY_STAGES = STAGES + 1;         // the dK of a tile is made beside the scores of the next one

// barriers, 8 bytes each, behind the tiles
enum Barrier {
    QUERY_FULL,
    QUERY_EMPTY = QUERY_FULL + QUERY_STAGES,
    DOUT_FULL = QUERY_EMPTY + QUERY_STAGES,
    DOUT_EMPTY = DOUT_FULL + STAGES,
    FULL_OWN = DOUT_EMPTY + STAGES,
    SUMS_FULL,
    SUMS_EMPTY,
    BARRIERS
};
enum NamedBarrier { SCORES_STORED = 1 };  // 0 is __syncthreads
enum Warp { TILES, ADDS, BITS };          // the roles of the producer's warps; BITS: two of them

struct OnePassShared {
    u32 base;

    __device__ __forceinline__ explicit OnePassShared(const unsigned char* memory) : base(align_operands(shared_address(memory))) {}
    constexpr __device__ __forceinline__ explicit OnePassShared(u32 base) : base(base) {}
    constexpr __device__ __forceinline__ u32 keys(int warpgroup) const { return base + warpgroup * OWN_BYTES; }
    constexpr __device__ __forceinline__ u32 values(int warpgroup) const { return keys(WARPGROUPS + warpgroup); }
    constexpr __device__ __forceinline__ u32 query(int stage) const { return keys(2 * WARPGROUPS) + stage * TILE_BYTES; }
    constexpr __device__ __forceinline__ u32 dout(int stage) const { return query(QUERY_STAGES) + stage * TILE_BYTES; }
    constexpr __device__ __forceinline__ u32 dscores(int tile) const { return dout(STAGES) + (tile & 1) * SCORE_BYTES; }
    // four sums a thread, of [columns 8 c ..][warpgroup's thread]
    constexpr __device__ __forceinline__ u32 sums(int warpgroup) const { return dscores(0) + 2 * SCORE_BYTES + warpgroup * HALF_BYTES; }
    // 8 bytes a key: bits of the 64 queries
    constexpr __device__ __forceinline__ u32 bits(int stage) const { return sums(2) + stage * 8 * BLOCK; }
    // -lse (base 2) of the 64 queries, then delta: those of lane t, queries 8 i + 2 t + {0, 1}, lie together, 80 bytes after those of t - 1,
    // so that the four lanes read from different banks
    constexpr __device__ __forceinline__ u32 stats(int stage) const { return bits(QUERY_STAGES) + stage * 2 * STATS_BYTES; }
    constexpr __device__ __forceinline__ u32 barrier(int index) const { return stats(QUERY_STAGES) + 8 * index; }
    constexpr __device__ __forceinline__ u32 number() const { return barrier(BARRIERS); }
};
static_assert(OnePassShared(0u).number() + 8 + EIGHT_ROWS <= SHARED_BYTES, "the launch asks for too little shared memory");

// 128 keys of one key head, and the tiles of queries that see them: those from `begin` on, of each head of the group
struct KeyBlock {
    int batch, kv_head, block, begin, stretch;

    __device__ __forceinline__ KeyBlock(const Sizes& sizes, int number) {
        int blocks = key_blocks(sizes), owner = number / blocks, kv_heads = sizes.heads / sizes.group, tiles = query_tiles(sizes);
        batch = owner / kv_heads;
        kv_head = owner % kv_heads;
        block = CAUSAL ? blocks - 1 - number % blocks : number % blocks;
        // A block that no query sees meets the last tile, of which no bit is set: its dK and dV are zeros like any others.
        begin = CAUSAL ? min(block * BLOCK / 64, tiles - 1) : 0;
        stretch = tiles - begin;
    }
    static __device__ __forceinline__ int key_blocks(const Sizes& sizes) { return (sizes.kv_len + BLOCK - 1) / BLOCK; }
    static __device__ __forceinline__ int query_tiles(const Sizes& sizes) { return (sizes.q_len + 63) / 64; }
    __device__ __forceinline__ int first_key() const { return block * BLOCK; }
    __device__ __forceinline__ int steps(const Sizes& sizes) const { return sizes.group * stretch; }
    // how many blocks add to the dQ of a tile before this one; negative: it has nothing to add
    __device__ __forceinline__ int turn(int tile, const Sizes& sizes) const {
        return CAUSAL ? min(tile * 64 / BLOCK, key_blocks(sizes) - 1) - block : block;
    }
};

// The place, of N in shared memory, that each tile of a ring takes, one after the other
template <int N>
struct Ring {
    int stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage < N) return;
        stage = 0;
        parity ^= 1;
    }
};

// The places of the tiles of a thread block, one after the other
struct Place {
    const KeyBlock& work;
    int head, tile;

    __device__ __forceinline__ Place(const KeyBlock& work, const Sizes& sizes) : work(work), head(work.kv_head * sizes.group), tile(work.begin) {}
    __device__ __forceinline__ void advance() {
        if (++tile < work.begin + work.stretch) return;
        tile = work.begin;
        head++;
    }
    __device__ __forceinline__ int problem(const Sizes& sizes) const { return work.batch * sizes.heads + head; }
};

// One thread that requests K, V and the tiles of Q and dO.
struct Loader {
    const TensorMap &query_map, &key_map, &value_map, &dout_map;
    const Sizes& sizes;
    const KeyBlock& work;
    OnePassShared shared;

    __device__ __forceinline__ void load_own() {
        int b = sizes.present & 4 ? work.batch : 0, h = sizes.present & 8 ? work.kv_head : 0;
        int vb = sizes.present & 16 ? work.batch : 0, vh = sizes.present & 32 ? work.kv_head : 0;
        u32 barrier = shared.barrier(FULL_OWN);
        barrier_expect(barrier, 2 * WARPGROUPS * OWN_BYTES);
        for (int w = 0; w < WARPGROUPS; w++) {
            copy_rows(shared.keys(w), key_map, barrier, work.first_key() + 64 * w, h, b);
            copy_rows(shared.values(w), value_map, barrier, work.first_key() + 64 * w, vh, vb);
        }
    }

    __device__ __forceinline__ void run() {
        load_own();
        Place place(work, sizes);
        Ring<QUERY_STAGES> queries;
        Ring<STAGES> douts;
        for (int n = 0; n < work.steps(sizes); n++, place.advance(), queries.advance(), douts.advance()) {
            int row = 64 * place.tile;
            u32 full = await_empty(QUERY_FULL + queries.stage, QUERY_EMPTY + queries.stage, queries.parity);
            copy_rows(shared.query(queries.stage), query_map, full, row, sizes.present & 2 ? place.head : 0, sizes.present & 1 ? work.batch : 0);
            full = await_empty(DOUT_FULL + douts.stage, DOUT_EMPTY + douts.stage, douts.parity);
            copy_rows(shared.dout(douts.stage), dout_map, full, row, sizes.present & 128 ? place.head : 0, sizes.present & 64 ? work.batch : 0);
        }
    }

    __device__ __forceinline__ u32 await_empty(int full, int empty, int parity) const {
        barrier_wait(shared.barrier(empty), parity ^ 1);
        barrier_expect(shared.barrier(full), TILE_BYTES);
        return shared.barrier(full);
    }
};

// A warp that loads the bits of 64 of the keys, transposed so that a consumer reads 64 bits, of 64 queries, for each of its two keys; the first
// one loads lse too, the second delta. Two warps share this: one takes half as long for a tile as all products of the tile.
struct Bits {
    const unsigned* kept;
    const float* numbers;  // lse or delta
    const Sizes& sizes;
    const KeyBlock& work;
    OnePassShared shared;
    int half;
    u32 near[2], far[2];  // of a tile, 64 bits of queries `lane` and `lane + 32`
    float stats[2];       // of both

    __device__ __forceinline__ void fetch(const unsigned* at, bool inside, u32 (&bits)[2]) const {
        int left = inside ? sizes.words - work.first_key() / 32 - 2 * half : 0;
        if (left > 0 && sizes.vectors) {
            uint2 two = *reinterpret_cast<const uint2*>(at);
            bits[0] = two.x, bits[1] = two.y;
        } else {
            bits[0] = left > 0 ? at[0] : 0;
            bits[1] = left > 1 ? at[1] : 0;
        }
    }

    // of the tile at `place`, from memory
    __device__ __forceinline__ void fetch(const Place& place) {
        int query = 64 * place.tile + lane_of();
        long long row = (long long)place.problem(sizes) * sizes.q_len + query;
        const unsigned* at = kept + row * sizes.words + work.first_key() / 32 + 2 * half;
        bool first = query < sizes.q_len, second = query + 32 < sizes.q_len;
        fetch(at, first, near);
        fetch(at + 32ll * sizes.words, second, far);
        stats[0] = first ? numbers[row] : 0.0f;
        stats[1] = second ? numbers[row + 32] : 0.0f;
    }

    __device__ __forceinline__ void store(int stage) const {
        int lane = lane_of();
        float factor = half ? 1.0f : -LOG2E;
        u32 to = shared.stats(stage) + half * STATS_BYTES + lane % 8 / 2 * 80 + (lane / 8 * 2 + lane % 2) * 4;
        store_shared(to, __float_as_uint(factor * stats[0]));
        store_shared(to + 32, __float_as_uint(factor * stats[1]));
#pragma unroll
        for (int i = 0; i < 2; i++)
            store_shared(shared.bits(stage) + 8 * (64 * half + 32 * i + lane), transpose_bits(near[i]), transpose_bits(far[i]));
    }

    __device__ __forceinline__ void run() {
        Place place(work, sizes);
        Ring<QUERY_STAGES> queries;
        int total = work.steps(sizes);
        fetch(place);
        for (int n = 0; n < total; n++, queries.advance()) {
            barrier_wait(shared.barrier(QUERY_EMPTY + queries.stage), queries.parity ^ 1);
            store(queries.stage);
            __syncwarp();
            if (lane_of() == 0) barrier_arrive(shared.barrier(QUERY_FULL + queries.stage));
            place.advance();
            if (n + 1 < total) fetch(place);  // before the wait: the bits come from memory
        }
    }
};

// One thread that adds the dQ of each tile to the sums in memory.
struct Adder {
    float* parked;   // 2 HALF_BYTES a tile of each head
    int* turns;      // blocks that have added, of each tile of each head
    const Sizes& sizes;
    const KeyBlock& work;
    OnePassShared shared;

    __device__ __forceinline__ void await_turn(const int* at, int turn) const {
        int now;
        do {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
        } while (now < turn);
        asm volatile("fence.proxy.async;" ::: "memory");
    }

    __device__ __forceinline__ void add(float* to, bool first) const {
        if (first)
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared.sums(0)), "n"(2 * HALF_BYTES)
                         : "memory");
        else
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(shared.sums(0)),
                         "n"(2 * HALF_BYTES)
                         : "memory");
        stores_commit();
        stores_wait_read();
    }

    __device__ __forceinline__ void run() const {
        Place place(work, sizes);
        for (int n = 0; n < work.steps(sizes); n++, place.advance()) {
            int index = place.problem(sizes) * KeyBlock::query_tiles(sizes) + place.tile, turn = work.turn(place.tile, sizes);
            if (ORDERED && turn > 0) await_turn(turns + index, turn);
            barrier_wait(shared.barrier(SUMS_FULL), n & 1);
            if (turn >= 0) add(parked + (long long)index * (HALF_BYTES / 2), ORDERED && turn == 0);
            barrier_arrive(shared.barrier(SUMS_EMPTY));
            if (ORDERED && turn >= 0) {
                asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
                asm volatile("fence.proxy.async;" ::: "memory");
                asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turns + index) : "memory");
            }
        }
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
};

// A warpgroup: 64 keys of a block, 16 a warp.
struct Consumer {
    const Sizes& sizes;
    OnePassShared shared;
    int warpgroup, t;
    float dkey[HEAD_DIM / 2], dvalue[HEAD_DIM / 2];
    float scores[32], dprobs[32];  // [8 queries][h][2 queries]
    float dquery[HALF / 2];        // of the tile before, 64 queries and this warpgroup's columns
    u32 probs[16];                 // rounded
    u32 words[2][2];               // bits of a tile, [h][32 queries]
    float shifts[8][2];            // -lse (base 2) of this lane's queries

    __device__ __forceinline__ Consumer(const Sizes& sizes, const OnePassShared& shared) : sizes(sizes), shared(shared), t(threadIdx.x % 4) {
        warpgroup = __shfl_sync(~0u, int(threadIdx.x) / 128 - 1, 0);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) dkey[i] = dvalue[i] = 0.0f;
    }

    __device__ __forceinline__ void release(int barrier) {
        if (threadIdx.x % 128 == 0) barrier_arrive(shared.barrier(barrier));
    }

    // dV += P^T dO: 64 keys, D, over 64 queries
    __device__ __forceinline__ void issue_dvalue(u32 douts) {
        u64 b = operand(douts, ROWS_64);
#pragma unroll
        for (int step = 0; step < 4; step++) Products<HEAD_DIM>::add_rows(dvalue, probs + 4 * step, advance(b, step * 16 * 128));
        products_commit();
    }

    // dK += dS^T Q: 64 keys, D, over 64 queries
    __device__ __forceinline__ void issue_dkey(int tile, u32 queries) {
        u64 a = operand(shared.dscores(tile) + warpgroup * ROWS_64), b = operand(queries, ROWS_64);
#pragma unroll
        for (int step = 0; step < 4; step++)
            Products<HEAD_DIM>::add_rows(dkey, advance(a, columns_at(step, ROWS_64)), advance(b, step * 16 * 128));
        products_commit();
    }

    // dQ = dS K over the keys of both warpgroups: 64 queries, and half of D
    __device__ __forceinline__ void issue_dquery(int tile) {
        u64 a = operand(shared.dscores(tile), ROWS_64), b = operand(shared.keys(0) + warpgroup * (HEAD_DIM == 128 ? ROWS_64 : 64), ROWS_64);
#pragma unroll
        for (int step = 0; step < BLOCK / 16; step++) {
            u64 rows = advance(a, step * 16 * 128), keys = advance(b, step / 4 * OWN_BYTES + step % 4 * 16 * 128);
            if (step == 0)
                Products<HALF>::set_transposed(dquery, rows, keys);
            else
                Products<HALF>::add_transposed(dquery, rows, keys);
        }
        products_commit();
    }

    // dP^T = V dO^T - delta
    __device__ __forceinline__ void issue_dprobs(u32 values, u32 douts) {
        u64 a = operand(values), b = operand(douts);
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++)
            Products<64>::add(dprobs, advance(a, columns_at(step, ROWS_64)), advance(b, columns_at(step, ROWS_64)));
        products_commit();
    }

    // writes the dQ of tile n to the place from which the adding thread reads it
    __device__ __forceinline__ void store_dquery(int n) {
        barrier_wait(shared.barrier(SUMS_EMPTY), (n & 1) ^ 1);
        u32 to = shared.sums(warpgroup) + threadIdx.x % 128 * 16;
#pragma unroll
        for (int c = 0; c < HALF / 8; c++)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + 2048 * c), "f"(dquery[4 * c]), "f"(dquery[4 * c + 1]),
                         "f"(dquery[4 * c + 2]), "f"(dquery[4 * c + 3])
                         : "memory");
    }

    __device__ __forceinline__ void hand_over() {
        fence_async();
        __syncwarp();
        if (lane_of() == 0) barrier_arrive(shared.barrier(SUMS_FULL));
    }

    __device__ __forceinline__ void load_sides(int stage) {
        u32 at = shared.bits(stage) + 8 * (threadIdx.x - 128 - threadIdx.x % 32) / 2 + 8 * (threadIdx.x % 32 / 4);
#pragma unroll
        for (int h = 0; h < 2; h++) load_shared(at + 64 * h, words[h][0], words[h][1]);
        load_stats(shifts, shared.stats(stage));
    }

    __device__ __forceinline__ void load_stats(float (&to)[8][2], u32 from) {
#pragma unroll
        for (int i = 0; i < 8; i++) load_shared(from + 80 * t + 8 * i, to[i][0], to[i][1]);
    }

    // 16 ones for each of two queries whose bit is set
    __device__ __forceinline__ u32 mask(int i, int h) const {
        return pair_mask(even_bits(words[h][i / 4], t), odd_bits(words[h][i / 4], t), i % 4);
    }

    // half of the scores -> weights, kept in float for dS, and rounded for dV
    __device__ __forceinline__ void exponentiate(int half) {
#pragma unroll
        for (int i = 4 * half; i < 4 * half + 4; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int e = 4 * i + 2 * h;
#pragma unroll
                for (int b = 0; b < 2; b++) scores[e + b] = exp2_fast(fmaf(scores[e + b], sizes.exponent, shifts[i][b]));
                probs[2 * i + h] = pack(scores[e], scores[e + 1]) & mask(i, h);
            }
    }

    // -delta, to which dP is added
    __device__ __forceinline__ void begin_dprobs(const float (&deltas)[8][2]) {
#pragma unroll
        for (int e = 0; e < 32; e++) dprobs[e] = -deltas[e / 4][e % 2];
    }

    // dS is masked once more, not multiplied by a masked weight: a key that is not kept may hold NaN.
    __device__ __forceinline__ void differentiate(u32 (&dscores)[16]) {
#pragma unroll
        for (int k = 0; k < 16; k++) dscores[k] = pack(scores[2 * k] * dprobs[2 * k], scores[2 * k + 1] * dprobs[2 * k + 1]) & mask(k / 2, k % 2);
    }

    __device__ __forceinline__ void store_dscores(int n, const u32 (&dscores)[16]) {
        int lane = lane_of(), row = int(threadIdx.x) / 32 % 4 * 16 + lane % 16;
        u32 block = shared.dscores(n) + warpgroup * ROWS_64;
#pragma unroll
        for (int i = 0; i < 8; i += 2) store_matrices(swizzled(block, row, i + lane / 16), dscores + 2 * i);
    }

    // dS^T of both warpgroups is there
    __device__ __forceinline__ void meet() {
        fence_async();
        // as an immediate: through `sync_threads` ptxas gives the kernel another schedule
        asm volatile("bar.sync %0, 256;" ::"n"(int(SCORES_STORED)) : "memory");
    }

    __device__ __forceinline__ void run(int total) {
        u32 keys = shared.keys(warpgroup), values = shared.values(warpgroup);
        u32 dscores[16];
#pragma unroll
        for (int i = 0; i < 16; i++) dscores[i] = 0;
        store_dscores(-1, dscores);
        barrier_wait(shared.barrier(FULL_OWN), 0);
        Ring<QUERY_STAGES> queries;
        Ring<STAGES> douts;
        for (int n = 0, before = 0; n < total; n++, before = queries.stage, queries.advance(), douts.advance()) {
            barrier_wait(shared.barrier(QUERY_FULL + queries.stage), queries.parity);
            load_sides(queries.stage);
            products_begin();
            issue_over_dim<64>(scores, keys, shared.query(queries.stage));  // S^T = K Q^T
            meet();
            // In the first turn dQ and dK are products of zeros: under a condition they would wait for all others.
            issue_dquery(n - 1);
            barrier_wait(shared.barrier(DOUT_FULL + douts.stage), douts.parity);
            products_wait<1>();
            exponentiate(0);  // P^T = exp(S^T - lse)
            products_begin();
            issue_dkey(n - 1, shared.query(before));
            exponentiate(1);
            float deltas[8][2];
            products_wait<1>();
            if (n > 0) store_dquery(n - 1);
            load_stats(deltas, shared.stats(queries.stage) + STATS_BYTES);
            begin_dprobs(deltas);
            products_begin();
            issue_dprobs(values, shared.dout(douts.stage));
            issue_dvalue(shared.dout(douts.stage));
            if (n > 0) hand_over();  // not earlier: the tensor cores would wait for the fence
            products_wait<1>();
            if (n > 0) release(QUERY_EMPTY + before);
            differentiate(dscores);  // dS^T = P^T (dP^T - delta)
            store_dscores(n, dscores);
            products_wait<0>();  // dV. A product that ran across the end of the loop would make ptxas serialise all of them
            release(DOUT_EMPTY + douts.stage);
        }
        meet();
        products_begin();
        issue_dquery(total - 1);
        issue_dkey(total - 1, shared.query((total - 1) % QUERY_STAGES));
        products_wait<0>();
        store_dquery(total - 1);
        hand_over();
    }
};

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1) backward_one_pass_sm90(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map,
    const __grid_constant__ TensorMap dout_map, const unsigned* kept, const float* lse, const float* delta, float* parked, int* turns,
    unsigned short* dkey, unsigned short* dvalue, int heads, int group, int q_len, int kv_len, int words, int head_dim, int present, int vectors,
    long long dkey_batch, long long dkey_head, long long dkey_row, long long dvalue_batch, long long dvalue_head, long long dvalue_row,
    float exponent, float scale) {
    extern __shared__ unsigned char memory[];
    const Sizes sizes{.heads = heads, .group = group, .q_len = q_len, .kv_len = kv_len, .seen = kv_len, .words = words, .counters = 0,
                      .head_dim = head_dim, .present = present, .vectors = vectors, .mask_batch = 0, .mask_head = 0, .mask_row = 0,
                      .exponent = exponent, .scale = scale, .spared = 1.0f, .threshold = 0};
    OnePassShared shared(memory);
    if (threadIdx.x == 0) {
        for (int s = 0; s < QUERY_STAGES; s++) {
            barrier_init(shared.barrier(QUERY_FULL + s), 3);  // the copies, and two warps that load bits
            barrier_init(shared.barrier(QUERY_EMPTY + s), WARPGROUPS);
        }
        for (int s = 0; s < STAGES; s++) {
            barrier_init(shared.barrier(DOUT_FULL + s), 1);
            barrier_init(shared.barrier(DOUT_EMPTY + s), WARPGROUPS);
        }
        barrier_init(shared.barrier(FULL_OWN), 1);
        barrier_init(shared.barrier(SUMS_FULL), 4 * WARPGROUPS);
        barrier_init(shared.barrier(SUMS_EMPTY), 1);
        barrier_fence();
        // behind the counts of turns: the number of the next block. A block must start after those that it waits for
        store_shared(shared.number(), atomicAdd(turns, 1));
    }
    __syncthreads();
    u32 number, unused;
    load_shared(shared.number(), number, unused);
    const KeyBlock work(sizes, __shfl_sync(~0u, int(number), 0));
    if (threadIdx.x < 128) {
        leave_registers<24>();
        int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0);
        if (warp == TILES) {
            Loader loader{.query_map = query_map, .key_map = key_map, .value_map = value_map, .dout_map = dout_map, .sizes = sizes, .work = work,
                          .shared = shared};
            if (threadIdx.x == 0) loader.run();
        } else if (warp == ADDS) {
            Adder adder{.parked = parked, .turns = turns + 1, .sizes = sizes, .work = work, .shared = shared};
            if (lane_of() == 0) adder.run();
        } else {
            int half = warp - BITS;
            Bits bits{.kept = kept, .numbers = half ? delta : lse, .sizes = sizes, .work = work, .shared = shared, .half = half};
            bits.run();
        }
    } else {
        take_registers<240>();
        Consumer consumer(sizes, shared);
        consumer.run(work.steps(sizes));
        int first = work.first_key() + 64 * consumer.warpgroup, rows = sizes.kv_len - first;
        store_rows(consumer.dvalue, 1.0f, dvalue + work.batch * dvalue_batch + work.kv_head * dvalue_head + first * dvalue_row, dvalue_row, rows, head_dim);
        store_rows(consumer.dkey, sizes.scale, dkey + work.batch * dkey_batch + work.kv_head * dkey_head + first * dkey_row, dkey_row, rows, head_dim);
    }
}
