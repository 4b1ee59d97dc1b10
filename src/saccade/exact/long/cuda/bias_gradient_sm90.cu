// The gradient of a bias that rows share, on sm_90a: a thread block owns a tile of 128 queries and 128 keys of a matrix of the bias, and walks the rows
// and heads that share it, or a part of them. No atomics; sums stay in registers, in the order of the rows.
//
//   S = scale Q K^T + bias    P = exp(S - lse)    dP = dO V^T    dbias = sum of P (dP - delta)
//
// With dropout dP is kept / (1 - p) times what it is without.
//
// Two warpgroups own 64 queries each and take the keys in two halves. While one waits for products, the other computes exponentials. A third requests tiles.
//
// shared memory:   | Q, dO, K, V: STAGES times | what is told, c, -delta and m of each query, selectors of a KEY_MASK: STAGES times | barriers |
//
// The first tile of the ring is that of the bias, which stays in registers. P is exp2(log2(e) (S - m) + c), where m is 0 but for queries whose
// lse has lost the logarithm of its sum (rows_of_bias.cuh).
//
// Compiled with the macros of chunks_sm90.cuh, STAGES, COMPUTE_REGISTERS, LOAD_REGISTERS and SHARED_BYTES.
#include "chunks_sm90.cuh"
#include "ring.cuh"
#include "rows_of_bias.cuh"

constexpr int SIDE = 128, HALF = 64, THREADS = 384;
using RowTile = Tile<HEAD_DIM, SIDE>;
enum Barrier { FULL, ROWS = STAGES, READ = 2 * STAGES, BARRIERS = 3 * STAGES };

struct BiasGradientShared : Memory {
    using Memory::Memory;
    __device__ __forceinline__ u32 query(int stage) const { return base + stage * 4 * RowTile::BYTES; }
    __device__ __forceinline__ u32 dout(int stage) const { return query(stage) + RowTile::BYTES; }
    __device__ __forceinline__ u32 key(int stage) const { return query(stage) + 2 * RowTile::BYTES; }
    __device__ __forceinline__ u32 value(int stage) const { return query(stage) + 3 * RowTile::BYTES; }
    // 64 queries and 64 keys of the bias, in the first stage
    __device__ __forceinline__ u32 bias(int group, int half) const { return base + (2 * group + half) * BIAS_BLOCK_BYTES; }
    __device__ __forceinline__ u32 member(int stage) const { return base + ROWS_AT + stage * ROW_BYTES; }
    __device__ __forceinline__ u32 row(int stage, int i) const { return member(stage) + 16 + 16 * i; }
    __device__ __forceinline__ u32 selectors(int stage, int half) const { return row(stage, SIDE) + half * Selectors::BYTES; }
    __device__ __forceinline__ u32 barrier(int i) const { return base + BARRIERS_AT + 8 * i; }

    static constexpr u32 ROWS_AT = STAGES * 4 * RowTile::BYTES, ROW_BYTES = 16 + 16 * SIDE + KEY_MASK * 2 * Selectors::BYTES,
                         BARRIERS_AT = ROWS_AT + STAGES * ROW_BYTES;
};
static_assert(BiasGradientShared::BARRIERS_AT + 8 * BARRIERS <= SHARED_BYTES, "the launch asks for too little shared memory");
static_assert(4 * BIAS_BLOCK_BYTES <= 4 * RowTile::BYTES, "the tile of the bias does not fit a stage");

// The work of a block: a tile of a matrix (window, owner) of the bias, and members first .. end - 1 of those that share it.
struct Work {
    int query, key, window, owner, part, first, end;

    static __device__ __forceinline__ Work of(int number, const Batch& batch, const BiasOf& bias, int each) {
        const int k_tiles = (batch.max_k + SIDE - 1) / SIDE, q_tiles = (batch.max_q + SIDE - 1) / SIDE;
        const int rest = number / k_tiles, matrix = rest / q_tiles, part = matrix / bias.owners / bias.windows;
        const int members = batch.sequences / bias.windows * (batch.heads / bias.owners);
        return Work{.query = rest % q_tiles * SIDE, .key = number % k_tiles * SIDE, .window = matrix / bias.owners % bias.windows,
                    .owner = matrix % bias.owners, .part = part, .first = part * each, .end = min(part * each + each, members)};
    }
};

// The warpgroup that requests tiles: a thread has the numbers of a query.
struct Loads {
    const BiasGradientShared shared;
    const Batch& batch;
    const BiasOf& bias;
    const TensorMap &query, &key, &value, &dout;
    const NumbersOfRows numbers;
    const float* terms;
    const Group group;
    const KeyMask mask;
    const int thread = thread_of() % 128;
    const bool arriving = arriving_lane();
    int step = 0;  // tiles of the ring, so far

    __device__ __forceinline__ Loads(BiasGradientShared shared, const Batch& batch, const BiasOf& bias, const TensorMap& query, const TensorMap& key,
                                     const TensorMap& value, const TensorMap& dout, NumbersOfRows numbers, const float* terms, Group group,
                                     KeyMask mask)
        : shared(shared), batch(batch), bias(bias), query(query), key(key), value(value), dout(dout), numbers(numbers), terms(terms), group(group), mask(mask) {}

    __device__ __forceinline__ void await_place() const {
        if (step >= STAGES) barrier_wait(shared.barrier(READ + stage_of(step)), (step / STAGES - 1) & 1);
    }
    // a member with keys before `limit`; a negative one is the end
    __device__ __forceinline__ void tell_member(int limit, int row, int head) {
        if (thread == 0) store_16(shared.member(stage_of(step)), limit, row, head, 0);
        warp_arrives(shared.barrier(ROWS + stage_of(step)), arriving);
        step++;
    }

    __device__ __forceinline__ void ask_bias(const Work& work) {
        if (thread == 0) {
            barrier_expect(shared.barrier(FULL), 4 * BIAS_BLOCK_BYTES);
            for (int i = 0; i < 4; i++)
                bias.load(shared.bias(i / 2, i % 2), shared.barrier(FULL), work.key + i % 2 * HALF, work.query + i / 2 * HALF, work.owner, work.window);
        }
        tell_member(0, 0, 0);
    }

    __device__ __forceinline__ void ask(const Work& work, const Item& item) {
        const int stage = stage_of(step), head = group.key_head(item.head), own = work.query + thread;
        await_place();
        if (thread == 0) {
            const u32 barrier = shared.barrier(FULL + stage);
            barrier_expect(barrier, 8 * RowTile::GROUP_BYTES);
            for (int g = 0; g < 2; g++) {
                RowTile::load(shared.query(stage), query, barrier, g, work.query + HALF * g, item.head, item.batch);
                RowTile::load(shared.key(stage), key, barrier, g, work.key + HALF * g, head, item.batch);
                RowTile::load(shared.dout(stage), dout, barrier, g, work.query + HALF * g, item.head, item.batch);
                RowTile::load(shared.value(stage), value, barrier, g, work.key + HALF * g, head, item.batch);
            }
        }
        float shift = MINUS_INFINITY, inverse = 1.0f, term = 0.0f;
        if (own < item.q_len) {
            const long long at = numbers.at(item, item.head, own);
            shift = numbers.shift[at], inverse = numbers.inverse[at], term = terms[at];
        }
        store_16(shared.row(stage, thread), __float_as_int(NumbersOfRows::exponent(shift, inverse)), __float_as_int(term / fabsf(inverse)),
                 __float_as_int(NumbersOfRows::maximum_of(shift, inverse)), 0);
        if (KEY_MASK && thread < SIDE / 2) {  // of two keys a thread
            const int k = work.key + 2 * thread;
            const u32 both = selectors_of(mask.at(item.batch, k, item.k_len), mask.at(item.batch, k + 1, item.k_len));
            store_4(Selectors::place(shared.selectors(stage, thread / 32), thread % 32), both);
        }
        tell_member(item.k_len, item.batch, item.head);
    }

    __device__ __forceinline__ void run(const Work& work) {
        const int each = batch.heads / bias.owners;
        ask_bias(work);
#pragma unroll 1
        for (int n = work.first; n < work.end; n++) {
            const int row = unsigned(n) / unsigned(each);
            const Item item = batch.item((work.window + row * bias.windows) * batch.heads + work.owner + (n - row * each), Window{});
            if (item.k_len > work.key) ask(work, item);
        }
        await_place();
        if (thread == 0) barrier_arrive(shared.barrier(FULL + stage_of(step)));
        tell_member(-1, 0, 0);
    }
};

// 64 queries and 128 keys, of which only the first 64 exist if HALVES is 1.
template <int HALVES>
struct Sums {
    const BiasGradientShared shared;
    const int warpgroup;
    const float scale;
    const KeyMask mask;
    const Dropout& dropout;
    const bool arriving = arriving_lane();
    float sums[HALVES][HALF / 2];
    u32 bias[HALVES][HALF / 4];  // pairs of 16 bits: floats would leave no registers for dropout and masks

    __device__ __forceinline__ Sums(BiasGradientShared shared, int warpgroup, float scale, KeyMask mask, const Dropout& dropout)
        : shared(shared), warpgroup(warpgroup), scale(scale), mask(mask), dropout(dropout) {}

    __device__ __forceinline__ void await(int step) const {
        barrier_wait(shared.barrier(ROWS + stage_of(step)), parity_of(step));
        barrier_wait(shared.barrier(FULL + stage_of(step)), parity_of(step));
    }
    __device__ __forceinline__ void release(int step) const { warp_arrives(shared.barrier(READ + stage_of(step)), arriving); }

    __device__ __forceinline__ void begin() {
        await(0);
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int s = 0; s < HALF / 16; s++) {
                load_matrices(bias[half] + 4 * s, Tile<64, 64>::fragment(shared.bias(warpgroup, half), 0, s));
#pragma unroll
                for (int j = 0; j < 8; j++) sums[half][8 * s + j] = 0.0f;
            }
        release(0);
    }

    // D = A B^T over the columns of two tiles: 64 of A's rows and 64 of B's
    __device__ __forceinline__ void multiply(float (&d)[HALF / 2], u32 a, u32 b, int half) const {
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; s++) {
            const u64 left = RowTile::columns(shared.low(a), HALF * warpgroup, s), right = RowTile::columns(shared.low(b), HALF * half, s);
            if (s == 0) Products<HALF>::set(d, left, right);
            else Products<HALF>::add(d, left, right);
        }
        products_commit();
    }

    // first_query: of the warpgroup; first_key: of the half. rows: c, -delta and m of this thread's two queries
    __device__ __forceinline__ void add(int half, int stage, const Item& item, int first_query, int first_key, const float4 (&rows)[2], bool any_far) {
        float scores[HALF / 2], dweights[HALF / 2];
        products_begin();
        multiply(scores, shared.query(stage), shared.key(stage), half);
        multiply(dweights, shared.dout(stage), shared.value(stage), half);
        u32 survivors = 0, selectors[4];
        if (DROPOUT) survivors = dropout.of_queries<HALF>(dropout.problem(item.sequence, item.head), first_query, first_key);
        products_wait<1>();
#pragma unroll
        for (int i = 0; i < HALF / 4; i++) {
            if (KEY_MASK && i % 8 == 0) Selectors::load(selectors, shared.selectors(stage, half), i / 8);
            const float2 added = mask.numbers_of(apart(bias[half][i]), selectors[i / 2 % 4]);  // apart: else the compiler keeps the floats
            scores[2 * i] = fmaf(scores[2 * i], scale, added.x), scores[2 * i + 1] = fmaf(scores[2 * i + 1], scale, added.y);
        }
        if (any_far) {
#pragma unroll
            for (int e = 0; e < HALF / 2; e++) scores[e] -= rows[half_of(e)].z;
        }
#pragma unroll
        for (int e = 0; e < HALF / 2; e++) scores[e] = exp2_fast(fmaf(scores[e], LOG2E, rows[half_of(e)].x));
        products_wait<0>();
        if (first_key + HALF > item.k_len) {  // neither may be NaN where no key exists
#pragma unroll
            for (int e = 0; e < HALF / 2; e++)
                if (column_at(first_key + own_column(), e) >= item.k_len) scores[e] = dweights[e] = 0.0f;
        }
        if (DROPOUT) {
#pragma unroll
            for (int e = 0; e < HALF / 2; e++) dweights[e] = Dropout::leaves(survivors, e) ? dweights[e] * dropout.inverse : 0.0f;
        }
#pragma unroll
        for (int e = 0; e < HALF / 2; e++) sums[half][e] = fmaf(scores[e], dweights[e] + rows[half_of(e)].y, sums[half][e]);
    }

    __device__ __forceinline__ void run(const Work& work, int q_len) {
        const int first = work.query + HALF * warpgroup;
        begin();
#pragma unroll 1
        for (int step = 1;; step++) {
            const int stage = __shfl_sync(~0u, stage_of(step), 0);
            await(step);
            const int limit = told(shared.member(stage), 0), row = told(shared.member(stage), 1), head = told(shared.member(stage), 2);
            if (limit < 0) return;
            if (first < q_len) {
                Item item{};
                item.head = head, item.batch = item.sequence = row, item.q_len = q_len, item.k_len = limit;
                const float4 rows[2] = {load_floats(shared.row(stage, own_row(HALF * warpgroup))), load_floats(shared.row(stage, own_row(HALF * warpgroup) + 8))};
                const bool any_far = __any_sync(~0u, rows[0].z != 0.0f || rows[1].z != 0.0f);
#pragma unroll
                for (int half = 0; half < HALVES; half++) add(half, stage, item, first, work.key + HALF * half, rows, any_far);
            }
            release(step);
        }
    }

    // float32 [.., Tq, Tk] at the matrix of this work
    __device__ __forceinline__ void write(float* matrix, const Work& work, int q_len, int k_len) const {
        const int row = own_row(work.query + HALF * warpgroup);
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const int column = work.key + HALF * half + own_column();
#pragma unroll
            for (int e = 0; e < HALF / 2; e++)
                if (row_at(row, e) < q_len && column_at(column, e) < k_len)
                    matrix[(long long)row_at(row, e) * k_len + column_at(column, e)] = sums[half][e];
        }
    }
};

template <int HALVES>
__device__ __forceinline__ void compute(BiasGradientShared shared, int warpgroup, float scale, KeyMask mask, const Dropout& dropout, const Work& work,
                                        const Batch& batch, float* matrix) {
    Sums<HALVES> sums(shared, warpgroup, scale, mask, dropout);
    sums.run(work, batch.max_q);
    sums.write(matrix, work, batch.max_q, batch.max_k);
}

// dbias: [parts, W, owners, Tq, Tk]. each: members of a part. terms: -delta |inverse|.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    long_bias_gradient_sm90(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                            const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap dout_map,
                            const __grid_constant__ TensorMap bias_map, const int* lengths, const float* shift, const float* inverse_sums,
                            const float* terms, float* dbias,
#if KEY_MASK
                            const unsigned char* key_mask,
#endif
#if DROPOUT
                            const u64* seed, u32 threshold, float inverse,
#endif
#if KEY_MASK
                            long long key_mask_batch, int key_mask_column,
#endif
#if GROUPED
                            int group_size,
#endif
                            int bias_windows, int bias_owners, int sequences, int heads, int max_q, int max_k, int each, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const BiasGradientShared shared(shared_address(memory));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.barrier(FULL + i), 1);
            barrier_init(shared.barrier(ROWS + i), 4);
            barrier_init(shared.barrier(READ + i), 8);
        }
        barrier_fence();
    }
    __syncthreads();
    const Batch batch{.cu_q = nullptr, .cu_k = lengths, .members = nullptr, .count = nullptr, .sequences = sequences, .total_q = 0, .total_k = 0,
                      .max_q = max_q, .max_k = max_k, .heads = heads};
    const BiasOf bias = BIAS_OF_CALL;
    const Work work = Work::of(blockIdx.x, batch, bias, each);
    const int warpgroup = warpgroup_of();
    if (warpgroup == 2) {
        leave_registers<LOAD_REGISTERS>();
        Loads loads(shared, batch, bias, query_map, key_map, value_map, dout_map, {shift, inverse_sums, (long long)heads * max_q, max_q}, terms, GROUP,
                    KEY_MASK_OF_CALL);
        loads.run(work);
        return;
    }
    take_registers<COMPUTE_REGISTERS>();
    Dropout dropout{};
#if DROPOUT
    dropout = Dropout::of(*seed, threshold, inverse, heads, max_k);
#endif
    float* matrix = dbias + ((long long)(work.part * bias_windows + work.window) * bias_owners + work.owner) * max_q * max_k;
    if (max_k - work.key > HALF) compute<2>(shared, warpgroup, scale, KEY_MASK_OF_CALL, dropout, work, batch, matrix);
    else compute<1>(shared, warpgroup, scale, KEY_MASK_OF_CALL, dropout, work, batch, matrix);
}
