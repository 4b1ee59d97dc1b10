// Forward of dynamic mask attention on sm_90a: rows of K and V gathered by index, S = Q K^T and P V by wgmma. See README.md here.
//
//   gatherer         one warpgroup: tiles of BLOCK_N listed keys into a ring of STAGES places (gather.cuh)
//   each warpgroup   64 rows of a block:  S of tile i and P V of tile i - 1 are issued together, then the weights of tile i are made
//
// A block is BLOCK_Q queries x GROUP heads of a key head = 64 * WARPGROUPS rows: row r is query r / GROUP_PAD, head r % GROUP_PAD. Its list
// has the keys that all its queries see first, so that only the last tiles are masked. Thread blocks are persistent: the gatherer is in the
// next block while this one is finished, and Q of the next is copied behind the last S of this one.
//
// Lane 4g + t of a warp holds rows g and g + 8, written [h] for h = 0, 1, and columns 8i + 2t + {0, 1} of each column group i of 8. Two
// neighbouring weights rounded to 16 bits share a register, and these registers are the operand of P V as they are.
//
// Weights are exp(s - r) for a reference r that is not the running maximum: the largest score of the first tile, raised (and O and the sum
// rescaled) only when the weights of a lane in one tile add up to more than LIMIT. So no maximum is taken in the loop; r only has to keep
// weights inside the format, and the sum, needed anyhow, tells. NaN fails the comparison too and comes out of `raise`.
//
// Compiled with HEAD_DIM, BLOCK_N, WARPGROUPS (2, 3), STAGES, GROUP, GROUP_PAD, HAS_SCORES, OVERLAP (weights are made while P V of the same
// warpgroup runs), TURNS (warpgroups issue their products in turn), EARLY_BIAS (the bias is read before the products are issued), BF16.
#define INDICES 0
#define EMPTY_TILES 1
#include "gather.cuh"
#include "wgmma.cuh"

constexpr int ROWS = 64 * WARPGROUPS;
constexpr int BLOCK_Q = ROWS / GROUP_PAD;
constexpr int QUERY_BYTES = 64 * HEAD_DIM * 2;  // of one warpgroup

constexpr float LIMIT = 16384.0f;  // a weight times this still fits half precision
constexpr float UNSEEN = 1e30f;    // offset of a row that has seen no key: finite, so that -inf plus it is no NaN

#if !OVERLAP
#define coming packed
#endif

struct Sizes {
    int q_len, kv_len, kv_heads;
    int owners, blocks, total;  // B * Hkv; of an owner; of all
    int one;      // 1, see `Consumer::retry`
    float scale;  // of exponents, base 2
    const Number* query;
    const int *counts, *wholes;
    Number* out;
    float* lse;
    long long query_batch, query_head, query_row, out_batch, out_head, out_row;
};

// volatile: what follows of it is computed where it is used. Kept in registers all along, it would be spilled.
__device__ __forceinline__ int thread_of() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// A number that all lanes have, so that the compiler knows: branches that it takes for divergent cost products their pipeline.
__device__ __forceinline__ int uniform(int x) {
    return __reduce_or_sync(~0u, x);
}

template <class Pair>
__device__ __forceinline__ Pair load_pair(u32 address) {
    Pair pair;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(*reinterpret_cast<u32*>(&pair.x)), "=r"(*reinterpret_cast<u32*>(&pair.y)) : "r"(address));
    return pair;
}

__device__ __forceinline__ void copy_4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// row r of a block: which query of which head it is
struct Row {
    long long batch;
    int head, query;
    bool there;

    __device__ __forceinline__ Row(int index, int r, const Sizes& sizes) {
        Work work(index, sizes.owners, sizes.blocks);
        batch = work.owner / sizes.kv_heads;
        head = work.owner % sizes.kv_heads * GROUP + r % GROUP_PAD;
        query = work.block * BLOCK_Q + r / GROUP_PAD;
        there = r % GROUP_PAD < GROUP && query < sizes.q_len;
    }
    __device__ __forceinline__ long long query_at(const Sizes& sizes) const {
        return batch * sizes.query_batch + head * sizes.query_head + query * sizes.query_row;
    }
    __device__ __forceinline__ long long out_at(const Sizes& sizes) const {
        return batch * sizes.out_batch + head * sizes.out_head + query * sizes.out_row;
    }
    __device__ __forceinline__ long long lse_at(const Sizes& sizes) const {
        return (batch * sizes.kv_heads * GROUP + head) * sizes.q_len + query;
    }
};

struct Consumer {
    const Sizes& sizes;
    Ring ring;
    u32 query;  // address of this warpgroup's rows of Q
    int warpgroup, first_query;
    int count, whole;  // keys of the block, and those that all its queries see
    Place place;
    int before;  // stage of the tile whose weights wait for their values

    float scores[BLOCK_N / 2];  // [column group][h][2 keys]
    float out[HEAD_DIM / 2];    // [column group][h][2 columns]
    u32 packed[BLOCK_N / 4];    // weights as an operand, [column group][h]
#if OVERLAP
    u32 coming[BLOCK_N / 4];  // weights of the tile in hand
#endif
#if QUERY_REGISTERS
    u32 rows[HEAD_DIM / 4];  // Q as an operand
#endif
    float offset[2], sum[2], added[2];  // offset: -reference, in the exponent; added: to the sum by the tile in hand

    __device__ __forceinline__ Consumer(const Sizes& sizes, Ring ring, u32 queries) : sizes(sizes), ring(ring) {
        // the compiler takes what comes from a shuffle for the same in all lanes; loops that it takes for divergent serialise products
        warpgroup = __shfl_sync(~0u, int(threadIdx.x) / 128 - 1, 0);
        query = queries + warpgroup * QUERY_BYTES;
    }

    __device__ __forceinline__ int row_of(int h) const {
        int x = thread_of();
        return 64 * warpgroup + x % 128 / 32 * 16 + x % 32 / 4 + 8 * h;
    }

    // a barrier of the four warps of this warpgroup
    __device__ __forceinline__ void meet() const { asm volatile("bar.sync %0, 128;" ::"r"(1 + WARPGROUPS + warpgroup) : "memory"); }

    // warpgroups issue their products in turn; warpgroup w waits at barrier 1 + w
    __device__ __forceinline__ void take_turn() const {
#if TURNS
        asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory");
#endif
    }
    __device__ __forceinline__ void pass_turn() const {
#if TURNS
        asm volatile("bar.arrive %0, 256;" ::"r"(warpgroup == WARPGROUPS - 1 ? 1 : 2 + warpgroup) : "memory");
#endif
    }

    __device__ __forceinline__ void release(int stage) const {
        if (thread_of() % 32 == 0) barrier_arrive(ring.empty(stage));
    }

    // address of what `copy_query` brings beside Q
    __device__ __forceinline__ u32 counted() const { return ring.base + Ring::BYTES + 8 * warpgroup; }

    // rows of Q of a block, zeros where there are none, eight lanes or sixteen along a row; `count` and `whole`
    __device__ __forceinline__ void copy_query(int index) const {
        constexpr int ACROSS = HEAD_DIM / 8;
        int thread = thread_of() % 128, chunk = thread % ACROSS;
#pragma unroll
        for (int i = 0; i < 64; i += 128 / ACROSS) {
            int own = i + thread / ACROSS;
            Row row(index, 64 * warpgroup + own, sizes);
            // no branch: behind a divergent one products get their descriptors by way of vector registers. What is not there is not read.
            const Number* from = sizes.query + row.query_at(sizes) + chunk * 8;
            copy_16(query + chunk / 8 * 8192 + own * 128 + ((chunk ^ own) & 7) * 16, from, row.there);
        }
        // two registers across a whole block would be two that are spilled
        if (thread < 2) copy_4(counted() + 4 * thread, (thread ? sizes.wholes : sizes.counts) + Work(index, sizes.owners, sizes.blocks).list);
        copies_commit();
    }

    // Q of the block that begins, copied long before; then that of the block `following`, if there is one, may be. No product may be reading Q.
    __device__ __forceinline__ void take_query(int following) {
        copies_wait<0>();
        fence_for_products();
        meet();
        int2 counts = load_pair<int2>(counted());
        count = uniform(counts.x);
        whole = uniform(counts.y);
#if QUERY_REGISTERS
        int row = thread_of() % 128 / 32 * 16 + thread_of() % 16, half = thread_of() % 32 / 16;
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++) {
            // fragments of 16 x 16: (row g, columns 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)
            u32 address = query + step / 4 * 8192 + row * 128 + ((step % 4 * 2 + half) ^ (row & 7)) * 16;
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(rows[4 * step]), "=r"(rows[4 * step + 1]), "=r"(rows[4 * step + 2]), "=r"(rows[4 * step + 3])
                         : "r"(address)
                         : "memory");
        }
        meet();
        if (following < sizes.total) copy_query(following);
#endif
    }

    __device__ __forceinline__ void begin(int index) {
        first_query = Work(index, sizes.owners, sizes.blocks).block * BLOCK_Q;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            offset[h] = UNSEEN;
            sum[h] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) out[i] = 0.0f;
    }

    // scores = Q K^T of the tile in hand
    __device__ __forceinline__ void issue_scores() {
        u64 a = operand(query), b = operand(ring.keys(place.stage));
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++) {
            u64 columns = advance(b, step / 4 * COLUMN_BYTES + step % 4 * 32);
#if QUERY_REGISTERS
            if (step == 0)
                Products<BLOCK_N>::set_from(scores, rows, columns);
            else
                Products<BLOCK_N>::add_from(scores, rows + 4 * step, columns);
#else
            u64 own = advance(a, step / 4 * 8192 + step % 4 * 32);
            if (step == 0)
                Products<BLOCK_N>::set(scores, own, columns);
            else
                Products<BLOCK_N>::add(scores, own, columns);
#endif
        }
        products_commit();
    }

    // out += P V of the tile whose weights are packed
    __device__ __forceinline__ void issue_values() {
        u64 b = operand(ring.values(before), COLUMN_BYTES);
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; step++) Products<HEAD_DIM>::add_rows(out, packed + 4 * step, advance(b, step * 16 * 128));
        products_commit();
    }

    // exponents of two neighbours of row g + 8h without the reference, -inf where the row does not see the key; `one` is 1
    template <bool MASKED>
    __device__ __forceinline__ float2 exponents(int i, int h, float2 bias, int2 start, int2 stop, int position, float one) const {
        float x = scores[4 * i + 2 * h] * one, y = scores[4 * i + 2 * h + 1] * one;
        x = HAS_SCORES ? fmaf(x, sizes.scale, bias.x) : x * sizes.scale;
        y = HAS_SCORES ? fmaf(y, sizes.scale, bias.y) : y * sizes.scale;
        if (MASKED && !(position >= start.x && position < stop.x)) x = MINUS_INFINITY;
        if (MASKED && !(position >= start.y && position < stop.y)) y = MINUS_INFINITY;
        return make_float2(x, y);
    }

    __device__ __forceinline__ u32 notes() const { return ring.bias(place.stage) + thread_of() % 4 * 8; }

    // of the keys of this lane, base 2
    __device__ __forceinline__ void load_bias(float2 (&bias)[BLOCK_N / 8]) const {
        u32 from = notes();
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; i++) bias[i] = HAS_SCORES ? load_pair<float2>(from + 32 * i) : make_float2(0.0f, 0.0f);
    }

    // act(i, h, exponents) for all that this lane holds of the tile in hand
    template <bool MASKED, class Act>
    __device__ __forceinline__ void each_pair(const float2 (&bias)[BLOCK_N / 8], float one, const Act& act) const {
        u32 from = notes();
        int position[2] = {0, 0};
        if (MASKED) {
            int base = first_query + sizes.kv_len - sizes.q_len;
            position[0] = base + row_of(0) / GROUP_PAD;
            position[1] = base + row_of(1) / GROUP_PAD;
        }
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; i++) {
            int2 start = MASKED ? load_pair<int2>(from + NOTE_BYTES + 32 * i) : make_int2(0, 0);
            int2 stop = MASKED ? load_pair<int2>(from + 2 * NOTE_BYTES + 32 * i) : make_int2(0, 0);
#pragma unroll
            for (int h = 0; h < 2; h++) act(i, h, exponents<MASKED>(i, h, bias[i], start, stop, position[h], one));
        }
    }

    // weights of the tile in hand as the coming operand, and what they add to the sum
    template <bool MASKED>
    __device__ __forceinline__ void weigh(const float2 (&bias)[BLOCK_N / 8], float one = 1.0f) {
        added[0] = added[1] = 0.0f;
        each_pair<MASKED>(bias, one, [&](int i, int h, float2 x) {
            x.x = exp2_fast(x.x + offset[h]);
            x.y = exp2_fast(x.y + offset[h]);
            added[h] += x.x;
            added[h] += x.y;
            coming[2 * i + h] = pack(x.x, x.y);
        });
    }

    // whether a weight of these rows is too large for its format, or NaN
    __device__ __forceinline__ bool overflows() const { return __any_sync(~0u, !(added[0] <= LIMIT && added[1] <= LIMIT)); }

    // a reference that is no less than any score of the tile; O and the sum follow
    template <bool MASKED>
    __device__ __forceinline__ void raise(const float2 (&bias)[BLOCK_N / 8], float one) {
        float most[2] = {MINUS_INFINITY, MINUS_INFINITY}, factor[2];
        each_pair<MASKED>(bias, one, [&](int i, int h, float2 x) { most[h] = max_nan(most[h], max_nan(x.x, x.y)); });
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float lower = min_nan(offset[h], -quad_max(most[h]));
            factor[h] = exp2_fast(lower - offset[h]);
            offset[h] = lower;
            sum[h] *= factor[h];
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) out[i] *= factor[i / 2 % 2];
    }

    // weights that are too large once more, with a reference that fits
    template <bool MASKED>
    __device__ __forceinline__ void retry() {
        // times a 1 that the compiler does not know: it would keep the comparisons of the first time for this one, in registers
        float one = float(sizes.one);
        float2 bias[BLOCK_N / 8];
        load_bias(bias);
        raise<MASKED>(bias, one);
        weigh<MASKED>(bias, one);
    }

    // the tile in hand becomes the operand; no product may be reading it
    __device__ __forceinline__ void accept() {
        sum[0] += added[0];
        sum[1] += added[1];
#if OVERLAP
        // A plain copy would be done away with: `weigh` would write registers that the running products read, and ptxas would wait after
        // each product instead.
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; i++) packed[i] = coming[i] * u32(sizes.one);
#endif
        before = place.stage;
        place.advance();
    }

    // the first tile of all: nothing to multiply with V yet
    __device__ __forceinline__ void first_scores() {
        barrier_wait(ring.full(place.stage), place.parity);
        take_turn();
        products_begin();
        issue_scores();
        pass_turn();
        products_wait<0>();
    }

    // weights of the first tile of a block, whose scores are there
    __device__ __forceinline__ void first_weights() {
        if (whole >= BLOCK_N)
            retry<false>();
        else
            retry<true>();
        accept();
    }

    // scores of the first tile of a block beside the last values of the block before
    __device__ __forceinline__ void between_blocks() {
        barrier_wait(ring.full(place.stage), place.parity);
        take_turn();
        products_begin();
        issue_scores();
        issue_values();
        pass_turn();
        products_wait<0>();
        release(before);
    }

    // once all four warps have their last scores of a block
    __device__ __forceinline__ void ask_query(int following) const {
        meet();
        copy_query(following);
    }

    // `last`: of its block, and there is a block `following`
    template <bool MASKED>
    __device__ __forceinline__ void next_tile(bool last, int following) {
        float2 bias[BLOCK_N / 8];
        barrier_wait(ring.full(place.stage), place.parity);
#if EARLY_BIAS
        // before the products: behind them loads wait for the shared memory that they read
        load_bias(bias);
#endif
        take_turn();
        products_begin();
        issue_scores();
        issue_values();
        pass_turn();
        products_wait<OVERLAP>();
#if !OVERLAP
        release(before);
#endif
#if !QUERY_REGISTERS
        if (last) ask_query(following);
#endif
#if !EARLY_BIAS
        load_bias(bias);
#endif
        weigh<MASKED>(bias);
        if (overflows()) {
#if OVERLAP
            products_wait<0>();
#endif
            retry<MASKED>();
        }
#if OVERLAP
        // behind the branch: ptxas moves a wait as far up as it can, here above `weigh`
        products_wait<0>();
        release(before);
#endif
        accept();
    }

    // the tiles of a block but the first
    __device__ __forceinline__ void other_tiles(int following) {
        bool more = following < sizes.total;
        int first = BLOCK_N, last = more ? count - BLOCK_N : count;
#if !QUERY_REGISTERS
        if (more && count <= BLOCK_N) ask_query(following);
#endif
        for (; first + BLOCK_N <= whole; first += BLOCK_N) next_tile<false>(first >= last, following);
        for (; first < count; first += BLOCK_N) next_tile<true>(first >= last, following);
    }

    __device__ __forceinline__ void store(int index) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float total = quad_sum(sum[h]);
            // compared with 0, not tested by > 0: a NaN sum must stay NaN
            float inverse = total == 0.0f ? 0.0f : 1.0f / total;
            Row row(index, row_of(h), sizes);
            if (!row.there) continue;
            Number* to = sizes.out + row.out_at(sizes) + thread_of() % 4 * 2;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i++) store_pair(to + 8 * i, out[4 * i + 2 * h] * inverse, out[4 * i + 2 * h + 1] * inverse);
            if (thread_of() % 4 == 0) sizes.lse[row.lse_at(sizes)] = total == 0.0f ? MINUS_INFINITY : (log2_fast(total) - offset[h]) * LN2;
        }
    }
};

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1) forward_sm90(
    const Number* query, const Number* key, const Number* value, const float* scores, const int* start, const int* stop, const int* lists,
    const int* counts, const int* wholes, Number* out, float* lse, long long query_batch, long long query_head, long long query_row,
    long long key_batch, long long key_head, long long value_batch, long long value_head, long long out_batch, long long out_head,
    long long out_row, u32 key_row, u32 value_row, int kv_heads, int q_len, int kv_len, int longest, int blocks, int owners, int one,
    float scale) {
    extern __shared__ unsigned char memory[];
    const Gathered given{key,       value,      scores,     start,   stop,      lists,    counts, key_batch, key_head,
                         value_batch, value_head, key_row, value_row, kv_heads, kv_len, longest,   blocks,   owners};
    const Sizes sizes{q_len,      kv_len,    kv_heads,  owners, blocks, owners * blocks, one,       scale,    query,  counts, wholes, out, lse, query_batch,
                      query_head, query_row, out_batch, out_head, out_row};
    u32 queries = (shared_address(memory) + 1023) & ~1023u;
    Ring ring{queries + WARPGROUPS * QUERY_BYTES};
    if (threadIdx.x == 0) {
        ring.init(4 * WARPGROUPS);
        barrier_fence();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(WARPGROUPS == 2 ? 40 : 32));
        Gatherer(given, ring).run();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WARPGROUPS == 2 ? 232 : 160));
        Consumer consumer(sizes, ring, queries);
        if (consumer.warpgroup == WARPGROUPS - 1) consumer.pass_turn();
        consumer.copy_query(blockIdx.x);
        consumer.take_query(blockIdx.x + gridDim.x);
        consumer.first_scores();
        // No way out of this loop but its end, where the scores of a tile that is empty are thrown away: with one in its middle, the
        // compiler takes all that follows for divergent.
        for (int index = blockIdx.x; index < sizes.total; index += gridDim.x) {
            int following = index + gridDim.x;
            consumer.begin(index);
            consumer.first_weights();
            consumer.other_tiles(following);
            consumer.take_query(following + gridDim.x);
            consumer.between_blocks();
            consumer.store(index);
        }
    }
}
