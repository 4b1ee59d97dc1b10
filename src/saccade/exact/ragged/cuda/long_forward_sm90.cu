// Exact attention of sequences beyond 128 tokens on sm_90a, forward: 128 queries of a (sequence, head) at a time a thread block, 64 a warpgroup.
//
//   S = Q K^T    m = running rowmax(scale S)    P = exp(scale S - m)    O = P V / rowsum(P)    lse = m + log(rowsum(P))
//
// shared memory:   | Q, then O: 128 rows | K, V: STAGES chunks of 64 keys | barriers |     filled and emptied by the copy engine
//
// The last chunk is as wide as its keys (16, 32 or 64). O is scaled anew only where a row's maximum has grown by 2^8 since it was last. Blocks of a
// multiprocessor hide each other's latencies. Source: FlashAttention-2 (Dao 2023), algorithm 1; the rare rescaling after FlashAttention-4.
//
// Compiled with the macros of long_sm90.cuh, STAGES, BLOCKS_PER_SM and SHARED_BYTES.
#include "long_sm90.cuh"
#include "ring.cuh"

constexpr int BLOCK_ROWS = 128, CHUNK_KEYS = 64;
constexpr float SLACK = 8.0f;  // in base 2; weights of 2^8 and their sums are far from the largest half
using QueryTile = Tile<HEAD_DIM, BLOCK_ROWS>;
using KeyTile = Tile<HEAD_DIM, CHUNK_KEYS>;
// 128 registers a thread: beyond D = 32 the products read Q from shared memory, and at D = 128 they take 32 keys at a time. Short of registers, ptxas
// waits for each product.
constexpr bool QUERY_IN_REGISTERS = HEAD_DIM == 32;
constexpr int STEP_KEYS = HEAD_DIM == 128 ? 32 : 64;
enum Barrier { QUERY, KEY, VALUE = KEY + STAGES, READ = VALUE + STAGES, BARRIERS = READ + STAGES };
enum Meeting { OF_BOTH = 1, OF_WARPGROUP = 2 };

struct Shared : Memory {
    using Memory::Memory;
    __device__ __forceinline__ u32 query() const { return base; }
    __device__ __forceinline__ u32 key(int stage) const { return base + KEYS_AT + stage * 2 * KeyTile::BYTES; }
    __device__ __forceinline__ u32 value(int stage) const { return key(stage) + KeyTile::BYTES; }
    __device__ __forceinline__ u32 barrier(int i) const { return base + BARRIERS_AT + 8 * i; }

    static constexpr u32 KEYS_AT = QueryTile::BYTES, BARRIERS_AT = KEYS_AT + STAGES * 2 * KeyTile::BYTES;
};
static_assert(Shared::BARRIERS_AT + 8 * BARRIERS <= SHARED_BYTES, "the launch asks for too little shared memory");

// One warpgroup: 64 queries of an item.
struct Rows {
    const Shared shared;
    const int warpgroup;
    const float exponent;  // scale * log2(e), positive
    u32 query[QUERY_IN_REGISTERS ? HEAD_DIM / 4 : 1];
    float out[HEAD_DIM / 2];
    float top[2], sum[2];  // the maximum that weights are relative to, in base 2

    __device__ __forceinline__ void begin() {
        if (QUERY_IN_REGISTERS) {
#pragma unroll
            for (int s = 0; s < HEAD_DIM / 16; s++) load_matrices(query + 4 * s, QueryTile::fragment(shared.query(), 64 * warpgroup, s));
        }
#pragma unroll
        for (int e = 0; e < HEAD_DIM / 2; e++) out[e] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; h++) top[h] = MINUS_INFINITY, sum[h] = 0.0f;
    }

    // The first N keys of a chunk, which begins at key `first`; MASKED: some of them may not exist or not be seen. O is left under way.
    template <int N, bool MASKED>
    __device__ __forceinline__ void chunk(int n, const Item& item, int first_query, int first) {
        if (N > STEP_KEYS) {
#pragma unroll
            for (int row = 0; row < N; row += STEP_KEYS) keys<STEP_KEYS, MASKED>(n, item, first_query, first, row);
        } else {
            keys<N, MASKED>(n, item, first_query, first, 0);
        }
    }

    // those from row `begin` of the chunk on
    template <int N, bool MASKED>
    __device__ __forceinline__ void keys(int n, const Item& item, int first_query, int first, int begin) {
        const int stage = __shfl_sync(~0u, stage_of(n), 0);
        float scores[N / 2];
        barrier_wait(shared.barrier(KEY + stage), parity_of(n));
        products_begin();
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; s++) {
            u64 right = KeyTile::columns(shared.low(shared.key(stage)), begin, s);
            if (!QUERY_IN_REGISTERS) {
                u64 left = QueryTile::columns(shared.low(shared.query()), 64 * warpgroup, s);
                if (s == 0) Products<N>::set(scores, left, right);
                else Products<N>::add(scores, left, right);
            } else {
                if (s == 0) Products<N>::set(scores, query + 4 * s, right);
                else Products<N>::add(scores, query + 4 * s, right);
            }
        }
        products_commit();
        products_wait<0>();
        if (MASKED) {
            const int row = first_query + int(threadIdx.x) / 32 % 4 * 16 + int(threadIdx.x) % 32 / 4, key = first + begin + 2 * (int(threadIdx.x) % 4);
#pragma unroll
            for (int e = 0; e < N / 2; e++)
                if (!item.sees(row + e / 2 % 2 * 8, key + e / 4 * 8 + e % 2)) scores[e] = MINUS_INFINITY;
        }
        rise<N>(scores);
        u32 weights[N / 4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float shift = top[h] == MINUS_INFINITY ? 0.0f : top[h];  // a query that has seen no key yet: -inf - -inf would be NaN
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                float x = exp2_fast(fmaf(scores[4 * i + 2 * h], exponent, -shift)), y = exp2_fast(fmaf(scores[4 * i + 2 * h + 1], exponent, -shift));
                sum[h] += x + y;
                weights[2 * i + h] = pack(x, y);
            }
        }
        barrier_wait(shared.barrier(VALUE + stage), parity_of(n));
        products_begin();
#pragma unroll
        for (int s = 0; s < N / 16; s++) Products<HEAD_DIM>::add_rows(out, weights + 4 * s, KeyTile::rows(shared.low(shared.value(stage)), begin + 16 * s));
        products_commit();
    }

    // Zeros behind the last key: a weight of 0 times what another sequence or the padding holds there may be NaN. By both warpgroups, once both are
    // here; the copy engine has filled up plain dense rows with zeros.
    __device__ __forceinline__ void clear_behind(int n, int left, const Batch& batch) {
        const int stage = stage_of(n), end = left > 32 ? 64 : left > 16 ? 32 : 16;
        if (left >= end || !(PACKED || batch.cu_k)) return;
        barrier_wait(shared.barrier(VALUE + stage), parity_of(n));
        KeyTile::clear(shared.value(stage), left, end, threadIdx.x, 256);
        fence_async();
        sync_threads(OF_BOTH, 256);
    }

    // Takes a larger maximum where a row has outgrown its own, and scales what it has summed up.
    template <int N>
    __device__ __forceinline__ void rise(const float (&scores)[N / 2]) {
        float most[2] = {MINUS_INFINITY, MINUS_INFINITY};
#pragma unroll
        for (int e = 0; e < N / 2; e++) most[e / 2 % 2] = fmaxf(most[e / 2 % 2], scores[e]);
#pragma unroll
        for (int h = 0; h < 2; h++) most[h] = quad_max(most[h]) * exponent;
        if (!__any_sync(~0u, most[0] > top[0] + SLACK || most[1] > top[1] + SLACK)) return;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float higher = fmaxf(top[h], most[h]), factor = higher == MINUS_INFINITY ? 1.0f : exp2_fast(top[h] - higher);
            top[h] = higher;
            sum[h] *= factor;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i++) out[4 * i + 2 * h] *= factor, out[4 * i + 2 * h + 1] *= factor;
        }
    }
};

struct Output {
    const TensorMap& map;
    Number* out;
    float* lse;
    Strides strides;
    long long row_batch, row_head;
    int head_dim;

    // through the memory of this warpgroup's queries, by the copy engine; but the rows behind the last query of a packed sequence belong to another one
    __device__ __forceinline__ void write(const Rows& rows, const Item& it, int first_query) const {
        const int group = rows.warpgroup, first = first_query + int(threadIdx.x) / 32 % 4 * 16 + int(threadIdx.x) % 32 / 4;
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first + 8 * h;
            const float sum = quad_sum(rows.sum[h]);
            factor[h] = sum == 0.0f ? 0.0f : reciprocal(sum);
            if (row < it.q_len && threadIdx.x % 4 == 0)
                lse[it.batch * row_batch + it.head * row_head + it.q_first + row] = sum == 0.0f ? MINUS_INFINITY : (log2_fast(sum) + rows.top[h]) * LN2;
        }
        if (PACKED && first_query + 64 > it.q_len) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = first + 8 * h;
                store_row<HEAD_DIM>(rows.out, h, factor[h], out + strides.at(it.batch, it.head, it.q_first + row), head_dim, row < it.q_len);
            }
            return;
        }
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; s++) {
            const float* x = rows.out + 8 * s;
            const u32 words[4] = {pack(x[0] * factor[0], x[1] * factor[0]), pack(x[2] * factor[1], x[3] * factor[1]),
                                  pack(x[4] * factor[0], x[5] * factor[0]), pack(x[6] * factor[1], x[7] * factor[1])};
            store_matrices(QueryTile::fragment(rows.shared.query(), 64 * group, s), words);
        }
        fence_async();
        sync_threads(OF_WARPGROUP + group, 128);
        if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (int block = 0; block < QueryTile::BLOCKS; block++)
                store_4d(map, rows.shared.query() + block * QueryTile::BLOCK_BYTES + group * 64 * QueryTile::PITCH, block * (QueryTile::PITCH / 2),
                         it.q_first + first_query, it.head, it.batch);
            stores_commit();
            stores_wait_read();
        }
    }
};

// The chunks of keys that a block asks for, in order.
struct Asking {
    const Shared shared;
    const TensorMap &key, &value;
    int asked = 0;  // by this block so far

    __device__ __forceinline__ void next(const Item& item, int first) {
        const int stage = stage_of(asked);
        if (asked >= STAGES) barrier_wait(shared.barrier(READ + stage), (asked / STAGES - 1) & 1);
        barrier_expect(shared.barrier(KEY + stage), KeyTile::GROUP_BYTES);
        KeyTile::load(shared.key(stage), key, shared.barrier(KEY + stage), 0, item.k_first + first, item.head, item.batch);
        barrier_expect(shared.barrier(VALUE + stage), KeyTile::GROUP_BYTES);
        KeyTile::load(shared.value(stage), value, shared.barrier(VALUE + stage), 0, item.k_first + first, item.head, item.batch);
        asked++;
    }
};

extern "C" __global__ void __launch_bounds__(256, BLOCKS_PER_SM)
    long_forward_sm90(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                      const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap out_map, const int* cu_q, const int* cu_k, const int* members, const int* count,
                      Number* out, float* lse, const void* sequences, const void* total_q, const void* total_k, const void* max_q, const void* max_k,
                      const void* row_batch, const void* row_head, long long out_batch, long long out_head, long long out_row, int heads, int head_dim,
                      float exponent) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shared shared(shared_address(memory));
    const Batch batch{.cu_q = cu_q, .cu_k = cu_k, .members = members, .count = count,
                      .sequences = int(number_of(sequences)), .total_q = int(number_of(total_q)), .total_k = int(number_of(total_k)),
                      .max_q = int(number_of(max_q)), .max_k = int(number_of(max_k)), .heads = heads};
    const Output output{.map = out_map, .out = out, .lse = lse, .strides = {out_batch, out_head, out_row}, .row_batch = number_of(row_batch), .row_head = number_of(row_head),
                        .head_dim = head_dim};
    const int warpgroup = warpgroup_of(), blocks = (batch.max_q + BLOCK_ROWS - 1) / BLOCK_ROWS, works = batch.items() * blocks;
    const bool arriving = arriving_lane();
    Rows rows{.shared = shared, .warpgroup = warpgroup, .exponent = exponent};
    Asking asking{.shared = shared, .key = key_map, .value = value_map};
    if (threadIdx.x == 0) {
        barrier_init(shared.barrier(QUERY), 1);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.barrier(KEY + i), 1);
            barrier_init(shared.barrier(VALUE + i), 1);
            barrier_init(shared.barrier(READ + i), 8);
        }
        barrier_fence();
    }
    int n = 0, queries = 0;  // chunks, and blocks of queries, so far
#pragma unroll 1
    for (int work = blockIdx.x; work < works; work += gridDim.x) {
        // blocks of one head run beside each other and share its keys and values in L2; the longest of a causal one first
        const int index = unsigned(work) / unsigned(blocks);
        const Item item = same_in_all_lanes(batch.item(index));
        const int first_block = (blocks - 1 - (work - index * blocks)) * BLOCK_ROWS, first = first_block + 64 * warpgroup;
        if (first_block >= item.q_len) continue;
        // keys that some query of the block, and of this warpgroup, sees; and those that every query of it sees
        const int end = CAUSAL ? between(0, first_block + BLOCK_ROWS + item.reach(), item.k_len) : item.k_len;
        const int mine = first >= item.q_len ? 0 : CAUSAL ? between(0, first + 64 + item.reach(), item.k_len) : item.k_len;
        const int whole = CAUSAL ? between(0, first + 1 + item.reach(), mine) : mine;
        const int chunks = (end + CHUNK_KEYS - 1) / CHUNK_KEYS;
        if (threadIdx.x == 0) {
            barrier_expect(shared.barrier(QUERY), 2 * QueryTile::GROUP_BYTES);
            for (int g = 0; g < 2; g++)
                QueryTile::load(shared.query(), query_map, shared.barrier(QUERY), g, item.q_first + first_block + 64 * g, item.head, item.batch);
            for (int c = 0; c < min(STAGES, chunks); c++) asking.next(item, c * CHUNK_KEYS);
        }
        __syncthreads();  // barriers are there; and the memory of queries holds none of the block before
        barrier_wait(shared.barrier(QUERY), queries++ & 1);
        rows.begin();
        int c = 0;
        // A chunk of keys that this warpgroup no longer reads, `number` of the item; the first thread asks for another one in its place.
        auto release = [&](int number, int at) {
            warp_arrives(shared.barrier(READ + stage_of(at)), arriving);
            if (threadIdx.x == 0 && number + STAGES < chunks) asking.next(item, (number + STAGES) * CHUNK_KEYS);
        };
#pragma unroll 1
        for (; c < whole / CHUNK_KEYS; c++, n++) {
            rows.chunk<64, false>(n, item, first, c * CHUNK_KEYS);
            if (c > 0) release(c - 1, n - 1);  // its products ended before those of this chunk's scores
        }
#pragma unroll 1
        for (; c * CHUNK_KEYS < mine; c++, n++) {
            const int left = item.k_len - c * CHUNK_KEYS;
            rows.clear_behind(n, left, batch);
            if (left > 32) rows.chunk<64, true>(n, item, first, c * CHUNK_KEYS);
            else if (left > 16) rows.chunk<32, true>(n, item, first, c * CHUNK_KEYS);
            else rows.chunk<16, true>(n, item, first, c * CHUNK_KEYS);
            if (c > 0) release(c - 1, n - 1);
        }
        products_wait<0>();
        if (c > 0) release(c - 1, n - 1);
#pragma unroll 1
        for (; c < chunks; c++, n++) {  // those that the other warpgroup alone needs
            barrier_wait(shared.barrier(KEY + stage_of(n)), parity_of(n));
            barrier_wait(shared.barrier(VALUE + stage_of(n)), parity_of(n));
            rows.clear_behind(n, item.k_len - c * CHUNK_KEYS, batch);
            release(c, n);
        }
        output.write(rows, item, first);
        if (work + int(gridDim.x) < works) __syncthreads();  // the queries of the next block take the place of these
    }
}
