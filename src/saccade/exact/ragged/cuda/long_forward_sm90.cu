// Exact attention of sequences beyond 128 tokens on sm_90a, forward: 128 queries of a (sequence, head) at a time a thread block, 64 a warpgroup.
//
//   S = Q K^T    m = running rowmax(scale S)    P = exp(scale S - m)    O = P V / rowsum(P)    lse = m + log(rowsum(P))
//
// shared memory:   | Q: two times 128 rows | K, V: STAGES chunks of 64 keys | works | what is asked for | barriers |
//
// A persistent block; its first thread asks for tiles up to STAGES chunks ahead, those of the next 128 queries too. The last chunk is as wide as its
// keys (16, 32 or 64). O is scaled anew only where a row's maximum has grown by 2^8 since it was last. Source: FlashAttention-2 (Dao 2023), algorithm
// 1; the rare rescaling after FlashAttention-4.
//
// Barriers: QUERY (128 queries are there, and what they are), KEY, VALUE (a chunk), each with one that says that its memory was read.
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
constexpr int WORKS_KNOWN = 4;
enum Barrier { QUERY, QUERY_READ = 2, KEY = 4, VALUE = KEY + STAGES, READ = VALUE + STAGES, BARRIERS = READ + STAGES };
enum Meeting { OF_BOTH = 1 };

struct Shared {
    u32 base;
    constexpr __device__ __forceinline__ u32 query(int n) const { return base + n % 2 * QueryTile::BYTES; }
    constexpr __device__ __forceinline__ u32 key(int stage) const { return base + 2 * QueryTile::BYTES + stage * 2 * KeyTile::BYTES; }
    constexpr __device__ __forceinline__ u32 value(int stage) const { return key(stage) + KeyTile::BYTES; }
    constexpr __device__ __forceinline__ u32 work(int n) const { return key(STAGES) + n % WORKS_KNOWN * 32; }
    constexpr __device__ __forceinline__ u32 asked() const { return key(STAGES) + WORKS_KNOWN * 32; }
    constexpr __device__ __forceinline__ u32 barrier(int i) const { return asked() + 32 + 8 * i; }
};
static_assert(Shared{0}.barrier(BARRIERS) <= SHARED_BYTES, "the launch asks for too little shared memory");

// 128 queries of an item from `first` on; `first` is -1 behind the last work of a block.
struct Work {
    Item item;
    int first;

    __device__ __forceinline__ bool exists() const { return first >= 0; }
    // keys that the queries from `query` to `query + rows - 1` see, at least one of them each
    __device__ __forceinline__ int reach_of(int query, int rows) const {
        return query >= item.q_len ? 0 : CAUSAL ? between(0, query + rows + item.reach(), item.k_len) : item.k_len;
    }
    __device__ __forceinline__ int chunks() const { return (reach_of(first, BLOCK_ROWS) + CHUNK_KEYS - 1) / CHUNK_KEYS; }
};

__device__ __forceinline__ void write_work(u32 to, const Work& w) {
    tell(to, {w.item.head, w.item.batch, w.item.q_first, w.item.q_len, w.item.k_first, w.item.k_len, 0, w.first});
}
__device__ __forceinline__ Work read_work(u32 from) {
    return Work{Item{told(from, 0), told(from, 1), told(from, 2), told(from, 3), told(from, 4), told(from, 5), 0}, told(from, 7)};
}

// One warpgroup: 64 queries of an item.
struct Rows {
    const Shared shared;
    const int warpgroup;
    const float exponent;  // scale * log2(e), positive
    u32 tile;              // of Q
    u32 query[QUERY_IN_REGISTERS ? HEAD_DIM / 4 : 1];
    float out[HEAD_DIM / 2];
    float top[2], sum[2];  // the maximum that weights are relative to, in base 2

    __device__ __forceinline__ void begin(u32 queries) {
        tile = queries;
        if (QUERY_IN_REGISTERS) {
#pragma unroll
            for (int s = 0; s < HEAD_DIM / 16; s++) load_matrices(query + 4 * s, QueryTile::fragment(tile, 64 * warpgroup, s));
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
        const int stage = stage_of(n);
        float scores[N / 2];
        barrier_wait(shared.barrier(KEY + stage), parity_of(n));
        products_begin();
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; s++) {
            u64 right = KeyTile::columns(shared.key(stage), begin, s);
            if (!QUERY_IN_REGISTERS) {
                u64 left = QueryTile::columns(tile, 64 * warpgroup, s);
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
        for (int s = 0; s < N / 16; s++) Products<HEAD_DIM>::add_rows(out, weights + 4 * s, KeyTile::rows(shared.value(stage), begin + 16 * s));
        products_commit();
    }

    // Zeros behind the last key: a weight of 0 times what another sequence or the padding holds there may be NaN. By both warpgroups, once both are
    // here.
    __device__ __forceinline__ void clear_behind(int n, int left) {
        const int stage = stage_of(n), end = left > 32 ? 64 : left > 16 ? 32 : 16;
        if (left >= end) return;
        barrier_wait(shared.barrier(VALUE + stage), parity_of(n));
        KeyTile::clear(shared.value(stage), left, end, threadIdx.x, 256);
        fence_async();
        meet(OF_BOTH, 256);
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
    Number* out;
    float* lse;
    Strides strides;
    long long row_batch, row_head;
    int head_dim;

    __device__ __forceinline__ void write(const Rows& rows, const Item& it, int first_query) const {
        const int first = first_query + int(threadIdx.x) / 32 % 4 * 16 + int(threadIdx.x) % 32 / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first + 8 * h;
            const float sum = quad_sum(rows.sum[h]);
            const bool none = sum == 0.0f;
            store_row<HEAD_DIM>(rows.out, h, none ? 0.0f : 1.0f / sum, out + strides.at(it.batch, it.head, it.q_first + row), head_dim,
                                row < it.q_len);
            if (row < it.q_len && threadIdx.x % 4 == 0)
                lse[it.batch * row_batch + it.head * row_head + it.q_first + row] = none ? MINUS_INFINITY : (log2_fast(sum) + rows.top[h]) * LN2;
        }
    }
};

// What a block asks for, in order: Q of 128 queries, then K and V chunk by chunk. One thread alone does; its counters lie in shared memory, since
// as registers all threads would have them.
struct Asking {
    const Shared shared;
    const Batch& batch;
    const TensorMap &query, &key, &value;

    enum Counter { INDEX, WORKS, CHUNK, CHUNKS, ASKED };
    __device__ __forceinline__ int get(Counter c) const {
        int x;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(shared.asked() + 4 * c) : "memory");
        return x;
    }
    __device__ __forceinline__ void set(Counter c, int x) const {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared.asked() + 4 * c), "r"(x) : "memory");
    }
    __device__ __forceinline__ void begin() const {
        set(INDEX, blockIdx.x);
        for (Counter c : {WORKS, CHUNK, CHUNKS, ASKED}) set(c, 0);
    }

    // Asks for what fits behind `released` chunks that this warpgroup has read, up to the work behind number `current`.
    __device__ __noinline__ void ahead(int released, int current) const {
        while (get(ASKED) < released + STAGES) {
            if (get(CHUNK) == get(CHUNKS)) {
                if (get(INDEX) < 0 || get(WORKS) > current + 1) return;
                next_work();
            } else {
                next_chunk();
            }
        }
    }

    __device__ __forceinline__ void next_work() const {
        const int blocks = (batch.max_q + BLOCK_ROWS - 1) / BLOCK_ROWS, works = get(WORKS);
        const long long all = (long long)batch.items() * blocks;
        Work work{Item{}, -1};
        long long index = get(INDEX);
        for (; index < all; index += gridDim.x) {
            // blocks of one head run beside each other and share its keys and values in L2; the longest of a causal one first
            work = {batch.item(int(index / blocks)), (blocks - 1 - int(index % blocks)) * BLOCK_ROWS};
            if (work.first < work.item.q_len) break;
        }
        if (index >= all) work.first = -1;
        const u32 barrier = shared.barrier(QUERY + works % 2);
        if (works >= 2) barrier_wait(shared.barrier(QUERY_READ + works % 2), (works / 2 - 1) & 1);
        write_work(shared.work(works), work);
        if (work.exists()) {
            barrier_expect(barrier, 2 * QueryTile::GROUP_BYTES);
            for (int g = 0; g < 2; g++)
                QueryTile::load(shared.query(works), query, barrier, g, work.item.q_first + work.first + 64 * g, work.item.head, work.item.batch);
        } else {
            barrier_arrive(barrier);
        }
        set(INDEX, work.exists() && index + gridDim.x < 0x7fffffff ? int(index + gridDim.x) : work.exists() ? 0x7fffffff : -1);
        set(WORKS, works + 1);
        set(CHUNK, 0);
        set(CHUNKS, work.exists() ? work.chunks() : 0);
    }

    __device__ __forceinline__ void next_chunk() const {
        const int chunk = get(CHUNK), asked = get(ASKED), stage = stage_of(asked);
        const u32 work = shared.work(get(WORKS) - 1);
        int x[5];  // head, batch, q_first, q_len, k_first
        for (int i = 0; i < 5; i++) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x[i]) : "r"(work + 4 * i) : "memory");
        const int row = x[4] + chunk * CHUNK_KEYS;
        if (asked >= STAGES) barrier_wait(shared.barrier(READ + stage), (asked / STAGES - 1) & 1);
        barrier_expect(shared.barrier(KEY + stage), KeyTile::GROUP_BYTES);
        KeyTile::load(shared.key(stage), key, shared.barrier(KEY + stage), 0, row, x[0], x[1]);
        barrier_expect(shared.barrier(VALUE + stage), KeyTile::GROUP_BYTES);
        KeyTile::load(shared.value(stage), value, shared.barrier(VALUE + stage), 0, row, x[0], x[1]);
        set(CHUNK, chunk + 1);
        set(ASKED, asked + 1);
    }
};

extern "C" __global__ void __launch_bounds__(256, BLOCKS_PER_SM)
    long_forward_sm90(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                      const __grid_constant__ TensorMap value_map, const int* cu_q, const int* cu_k, const int* members, const int* count,
                      Number* out, float* lse, long long sequences, long long total_q, long long total_k, long long max_q, long long max_k,
                      long long row_batch, long long row_head, long long out_batch, long long out_head, long long out_row, int heads, int head_dim,
                      float exponent) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Shared shared{shared_address(memory)};
    const Batch batch{.cu_q = cu_q, .cu_k = cu_k, .members = members, .count = count,
                      .sequences = int(sequences), .total_q = int(total_q), .total_k = int(total_k),
                      .max_q = int(max_q), .max_k = int(max_k), .heads = heads};
    const Output output{.out = out, .lse = lse, .strides = {out_batch, out_head, out_row}, .row_batch = row_batch, .row_head = row_head,
                        .head_dim = head_dim};
    const Asking asking{.shared = shared, .batch = batch, .query = query_map, .key = key_map, .value = value_map};
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(shared.barrier(QUERY + i), 1);
            barrier_init(shared.barrier(QUERY_READ + i), 8);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.barrier(KEY + i), 1);
            barrier_init(shared.barrier(VALUE + i), 1);
            barrier_init(shared.barrier(READ + i), 8);
        }
        barrier_fence();
        asking.begin();
    }
    __syncthreads();
    const int warpgroup = warpgroup_of();
    const bool foreign = PACKED || cu_k;  // behind the last key lies what belongs to nobody; the copy engine fills plain dense rows up with zeros
    Rows rows{.shared = shared, .warpgroup = warpgroup, .exponent = exponent};
    int n = 0;  // chunks so far
#pragma unroll 1
    for (int number = 0;; number++) {
        if (threadIdx.x == 0) asking.ahead(n, number);
        barrier_wait(shared.barrier(QUERY + number % 2), number / 2 & 1);
        const Work work = read_work(shared.work(number));
        if (!work.exists()) return;
        const Item& item = work.item;
        const int first = work.first + 64 * warpgroup, chunks = work.chunks();
        // keys that a query of this warpgroup sees, and those that each of them sees
        const int mine = work.reach_of(first, 64), whole = CAUSAL ? between(0, first + 1 + item.reach(), mine) : mine;
        rows.begin(shared.query(number));
        int c = 0;
        // the chunk before the n-th is no longer read
        auto release = [&]() {
            warp_arrives(shared.barrier(READ + stage_of(n - 1)));
            if (threadIdx.x == 0) asking.ahead(n, number);
        };
#pragma unroll 1
        for (; c < whole / CHUNK_KEYS; c++, n++) {
            rows.chunk<64, false>(n, item, first, c * CHUNK_KEYS);
            if (c > 0) release();  // its products ended before those of this chunk's scores
        }
#pragma unroll 1
        for (; c * CHUNK_KEYS < mine; c++, n++) {
            const int left = item.k_len - c * CHUNK_KEYS;
            if (foreign) rows.clear_behind(n, left);
            if (left > 32) rows.chunk<64, true>(n, item, first, c * CHUNK_KEYS);
            else if (left > 16) rows.chunk<32, true>(n, item, first, c * CHUNK_KEYS);
            else rows.chunk<16, true>(n, item, first, c * CHUNK_KEYS);
            if (c > 0) release();
        }
        products_wait<0>();
        if (c > 0) release();
#pragma unroll 1
        for (; c < chunks; c++) {  // those that the other warpgroup alone needs
            barrier_wait(shared.barrier(KEY + stage_of(n)), parity_of(n));
            barrier_wait(shared.barrier(VALUE + stage_of(n)), parity_of(n));
            if (foreign) rows.clear_behind(n, item.k_len - c * CHUNK_KEYS);
            n++;
            release();
        }
        warp_arrives(shared.barrier(QUERY_READ + number % 2));
        output.write(rows, item, first);
    }
}
