// Forward of dynamic mask attention on sm_90a: rows of K and V gathered by index, S = Q K^T and P V by wgmma. See README.md here.
//
//   gatherer            one warpgroup: tiles of BLOCK_N listed keys into a ring of STAGES places (gather.cuh)
//   WARPGROUPS more     64 rows of a block each: S of tile i and P V of tile i - 1 are issued together; then, while the others' products
//                       run, the weights of tile i are made. With TURNS they issue in turn: a little faster at D = 128, slower at D = 64
//
// A block is BLOCK_Q queries x GROUP heads of a key head, 64 WARPGROUPS rows: row r is query r / GROUP_PAD, head r % GROUP_PAD. Its list
// has the keys that all its queries see first, so that only the last tiles are masked. Thread blocks are persistent: the gatherer is in
// the next block while this one is finished, and Q of the next is copied behind the last S of this one.
//
// Lane 4g + t of a warp holds rows g and g + 8, written [h] for h = 0, 1, and columns 8i + 2t + {0, 1} of each column group i of 8. Two
// neighbouring weights rounded to 16 bits share a register, and these registers are the operand of P V as they are.
//
// Weights are exp(s - r) for a reference r that is not the running maximum: the largest score of the first tile, raised (and O and the sum
// rescaled) only when the weights of a lane in one tile add up to more than LIMIT. So no maximum is taken in the loop; r only has to keep
// weights inside the format, and the sum, needed anyhow, tells. NaN fails the comparison too and comes out of `raise`.
//
// Registers bound WARPGROUPS: scores, O, weights and bias take 128 of 160 at D = 128 with three, 96 of 112 at D = 64 with four.
//
// Compiled with HEAD_DIM, BLOCK_N (64), STAGES, GROUP, GROUP_PAD (a power of two), WARPGROUPS, TURNS, CONSUMER_REGISTERS,
// GATHERER_REGISTERS, HAS_SCORES, BF16.
#define INDICES 0
#include "dependent.cuh"
#include "gather.cuh"
#include "wgmma.cuh"

constexpr int BLOCK_Q = 64 * WARPGROUPS / GROUP_PAD;
constexpr int QUERY_BYTES = 64 * HEAD_DIM * 2;  // of one warpgroup

constexpr float LIMIT = 16384.0f;  // a weight times this still fits half precision
constexpr float UNSEEN = 1e30f;    // offset of a row that has seen no key: finite, so that -inf plus it is no NaN

struct Sizes {
    int q_len, kv_len, kv_heads;
    float scale;  // of exponents, base 2
    const Number* query;
    Number* out;
    float* lse;
    long long query_batch, query_head, query_row, out_batch, out_head, out_row;
};

// volatile: a tile that is weighed again is read again. Else the assembler keeps what was compared the first time, in predicates that it
// packs into registers, 70 instructions a masked tile
template <class Pair>
__device__ __forceinline__ Pair load_pair(u32 address) {
    Pair pair;
    u32 &x = *reinterpret_cast<u32*>(&pair.x), &y = *reinterpret_cast<u32*>(&pair.y);
    asm volatile("ld.volatile.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(address));
    return pair;
}

// 16 bytes, or zeros where `there` is false
__device__ __forceinline__ void copy_16_if(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

struct Consumer {
    const Sizes& sizes;
    Ring ring;
    u32 query;  // address of this warpgroup's rows
    int warpgroup, first_query;
    Place place;
    int before;  // stage of the tile whose weights wait for their values

    float scores[BLOCK_N / 2];  // [column group][h][2 keys]
    float out[HEAD_DIM / 2];    // [column group][h][2 columns]
    u32 packed[BLOCK_N / 4];    // weights as an operand, [column group][h]
    float offset[2], sum[2], added[2];  // offset: -reference, in the exponent; added: to the sum by the tile in hand

    __device__ __forceinline__ Consumer(const Sizes& sizes, Ring ring, u32 queries) : sizes(sizes), ring(ring) {
        // the compiler takes what comes from a shuffle for the same in all lanes; loops that it takes for divergent serialise products
        warpgroup = __shfl_sync(~0u, int(threadIdx.x) / 128 - 1, 0);
        query = queries + warpgroup * QUERY_BYTES;
    }

    __device__ __forceinline__ int row(int h) const {
        int x = thread_of();
        return 64 * warpgroup + x % 128 / 32 * 16 + x % 32 / 4 + 8 * h;
    }

    // a barrier of the four warps of this warpgroup
    __device__ __forceinline__ void meet() const { asm volatile("bar.sync %0, 128;" ::"r"(1 + WARPGROUPS + warpgroup) : "memory"); }

    // warpgroups issue their products in turn; warpgroup w waits at barrier 1 + w
    __device__ __forceinline__ void take_turn() const {
        if (TURNS) asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory");
    }
    __device__ __forceinline__ void pass_turn() const {
        if (TURNS) asm volatile("bar.arrive %0, 256;" ::"r"(warpgroup == WARPGROUPS - 1 ? 1 : 2 + warpgroup) : "memory");
    }

    __device__ __forceinline__ void release(int stage) const {
        if (thread_of() % 32 == 0) barrier_arrive(ring.empty(stage));
    }

    // rows of Q of a block, zeros where there are none; eight lanes or sixteen along a row
    __device__ __forceinline__ void copy_query(const Work& work) const {
        constexpr int ACROSS = HEAD_DIM / 8, AT_ONCE = 128 / ACROSS;
        int thread = thread_of() % 128, chunk = thread % ACROSS, own = thread / ACROSS, first = 64 * warpgroup + own;
        long long batch = work.owner / sizes.kv_heads;
        int first_head = work.owner % sizes.kv_heads * GROUP;
        const Number* from = sizes.query + batch * sizes.query_batch + chunk * 8;
        // the swizzle of all rows of a thread is one: they are 8 apart, or 16
        u32 to = query + chunk / 8 * 8192 + own * 128 + (((chunk ^ own) & 7) * 16);
#pragma unroll
        for (int i = 0; i < 64; i += AT_ONCE) {
            // written so that the compiler sees what the rows of a thread share
            int member = AT_ONCE % GROUP_PAD == 0 ? first % GROUP_PAD : (first + i) % GROUP_PAD;
            int q = work.block * BLOCK_Q + (AT_ONCE % GROUP_PAD == 0 ? first / GROUP_PAD + i / GROUP_PAD : (first + i) / GROUP_PAD);
            bool there = member < GROUP && q < sizes.q_len;
            long long at = there ? (first_head + member) * sizes.query_head + q * sizes.query_row : 0;
            copy_16_if(to + i * 128, from + at, there);
        }
        copies_commit();
    }

    __device__ __forceinline__ void wait_query() const {
        copies_wait<0>();
        fence_for_products();
        meet();
    }

    __device__ __forceinline__ void begin(const Work& work) {
        first_query = work.block * BLOCK_Q;
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
            u64 rows = advance(a, step / 4 * 8192 + step % 4 * 32), columns = advance(b, step / 4 * COLUMN_BYTES + step % 4 * 32);
            if (step == 0)
                Products<BLOCK_N>::set(scores, rows, columns);
            else
                Products<BLOCK_N>::add(scores, rows, columns);
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

    // exponents of two neighbours of row g + 8h without the reference, -inf where the row does not see the key
    template <bool MASKED>
    __device__ __forceinline__ float2 exponents(int i, int h, float2 bias, int2 start, int2 stop, int position) const {
        float x = scores[4 * i + 2 * h], y = scores[4 * i + 2 * h + 1];
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
    __device__ __forceinline__ void each_pair(const float2 (&bias)[BLOCK_N / 8], const Act& act) const {
        u32 from = notes();
        int position[2] = {0, 0};
        if (MASKED) {
            int base = first_query + sizes.kv_len - sizes.q_len;
            position[0] = base + row(0) / GROUP_PAD;
            position[1] = base + row(1) / GROUP_PAD;
        }
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; i++) {
            int2 start = MASKED ? load_pair<int2>(from + NOTE_BYTES + 32 * i) : make_int2(0, 0);
            int2 stop = MASKED ? load_pair<int2>(from + 2 * NOTE_BYTES + 32 * i) : make_int2(0, 0);
#pragma unroll
            for (int h = 0; h < 2; h++) act(i, h, exponents<MASKED>(i, h, bias[i], start, stop, position[h]));
        }
    }

    // weights of the tile in hand as an operand, which no product may be reading, and what they add to the sum
    template <bool MASKED>
    __device__ __forceinline__ void weigh(const float2 (&bias)[BLOCK_N / 8]) {
        added[0] = added[1] = 0.0f;
        each_pair<MASKED>(bias, [&](int i, int h, float2 x) {
            x.x = exp2_fast(x.x + offset[h]);
            x.y = exp2_fast(x.y + offset[h]);
            added[h] += x.x;
            added[h] += x.y;
            packed[2 * i + h] = pack(x.x, x.y);
        });
    }

    // whether a weight of these rows is too large for its format, or NaN
    __device__ __forceinline__ bool overflows() const { return __any_sync(~0u, !(added[0] <= LIMIT && added[1] <= LIMIT)); }

    // a reference of each row that is no less than its scores in the tile in hand, nor than the one before
    template <bool MASKED>
    __device__ __forceinline__ void refer(const float2 (&bias)[BLOCK_N / 8]) {
        float most[2] = {MINUS_INFINITY, MINUS_INFINITY};
        each_pair<MASKED>(bias, [&](int i, int h, float2 x) { most[h] = max_nan(most[h], max_nan(x.x, x.y)); });
#pragma unroll
        for (int h = 0; h < 2; h++) offset[h] = min_nan(offset[h], -quad_max(most[h]));
    }

    // the same; O and the sum follow
    template <bool MASKED>
    __device__ __forceinline__ void raise(const float2 (&bias)[BLOCK_N / 8]) {
        float factor[2] = {-offset[0], -offset[1]};
        refer<MASKED>(bias);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            factor[h] = exp2_fast(offset[h] + factor[h]);
            sum[h] *= factor[h];
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) out[i] *= factor[i / 2 % 2];
    }

    // weights that are too large once more, with a reference that fits
    template <bool MASKED>
    __device__ __forceinline__ void retry() {
        float2 bias[BLOCK_N / 8];
        load_bias(bias);
        raise<MASKED>(bias);
        weigh<MASKED>(bias);
    }

    // the tile in hand becomes the one whose weights wait for their values
    __device__ __forceinline__ void accept() {
        sum[0] += added[0];
        sum[1] += added[1];
        before = place.stage;
        place.advance();
    }

    template <bool MASKED>
    __device__ __forceinline__ void first_weights() {
        float2 bias[BLOCK_N / 8];
        load_bias(bias);
        refer<MASKED>(bias);
        weigh<MASKED>(bias);
    }

    // nothing to multiply with V yet; `whole`: all rows see all keys
    __device__ __forceinline__ void first_tile(bool whole) {
        barrier_wait(ring.full(place.stage), place.parity);
        take_turn();
        products_begin();
        issue_scores();
        pass_turn();
        products_wait<0>();
        if (whole)
            first_weights<false>();
        else
            first_weights<true>();
        accept();
    }

    template <bool MASKED>
    __device__ __forceinline__ void next_tile() {
        float2 bias[BLOCK_N / 8];
        barrier_wait(ring.full(place.stage), place.parity);
        // before the products: behind them loads wait for the shared memory that they read
        load_bias(bias);
        take_turn();
        products_begin();
        issue_scores();
        issue_values();
        pass_turn();
        products_wait<0>();
        release(before);
        weigh<MASKED>(bias);
        if (overflows()) retry<MASKED>();
        accept();
    }

    __device__ __forceinline__ void last_values() {
        products_begin();
        issue_values();
        products_wait<0>();
        release(before);
    }

    // `following`: the next block of this program, whose Q is asked for when this one needs its own no longer
    __device__ __forceinline__ void attend(int count, int whole, bool more, const Work& following) {
        if (count > 0) {
            first_tile(whole >= BLOCK_N);
            int first = BLOCK_N;
            for (; first + BLOCK_N <= whole; first += BLOCK_N) next_tile<false>();
            for (; first < count; first += BLOCK_N) next_tile<true>();
        }
        if (more) {
            meet();  // all four warps have their last scores
            copy_query(following);
        }
        // a loop of one turn at most: a product under an `if` is serialised
        for (; count > 0; count = 0) last_values();
    }

    __device__ __forceinline__ void store(const Work& work) const {
        int batch = work.owner / sizes.kv_heads, first_head = work.owner % sizes.kv_heads * GROUP;
        Number* rows = sizes.out + batch * sizes.out_batch + first_head * sizes.out_head;
        float* lse = sizes.lse + ((long long)batch * sizes.kv_heads * GROUP + first_head) * sizes.q_len;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float total = quad_sum(sum[h]);
            // compared with 0, not tested by > 0: a NaN sum must stay NaN
            float inverse = total == 0.0f ? 0.0f : __fdividef(1.0f, total);
            int member = row(h) % GROUP_PAD, q = first_query + row(h) / GROUP_PAD;
            bool there = member < GROUP && q < sizes.q_len;
            store_row<HEAD_DIM>(out, h, inverse, rows + member * sizes.out_head + q * sizes.out_row, HEAD_DIM, there);
            if (there && thread_of() % 4 == 0)
                lse[(long long)member * sizes.q_len + q] = total == 0.0f ? MINUS_INFINITY : (log2_fast(total) - offset[h]) * LN2;
        }
    }
};

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1) forward_sm90(
    const Number* query, const Number* key, const Number* value, const float* scores, const int* start, const int* stop, const int* lists,
    const int* counts, const int* wholes, Number* out, float* lse, long long query_batch, long long query_head, long long query_row,
    long long key_batch, long long key_head, long long value_batch, long long value_head, long long out_batch, long long out_head,
    long long out_row, u32 key_row, u32 value_row, int kv_heads, int q_len, int kv_len, int longest, int blocks, int owners, float scale) {
    extern __shared__ unsigned char memory[];
    const Gathered given{key,       value,      scores,     start,   stop,      lists,    counts, key_batch, key_head,
                         value_batch, value_head, key_row, value_row, kv_heads, kv_len, longest,   blocks,   owners};
    const Sizes sizes{q_len,       kv_len,     kv_heads,  scale,     query,    out,    lse,
                      query_batch, query_head, query_row, out_batch, out_head, out_row};
    u32 queries = (shared_address(memory) + 1023) & ~1023u;
    Ring ring{queries + WARPGROUPS * QUERY_BYTES};
    if (threadIdx.x == 0) {
        ring.init(4 * WARPGROUPS);
        barrier_fence();
    }
    __syncthreads();
    wait_for_kernel_ahead();
    int total = owners * blocks;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GATHERER_REGISTERS));
        Gatherer(given, ring).run();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        Consumer consumer(sizes, ring, queries);
        consumer.copy_query(Work(blockIdx.x, owners, blocks));
        if (consumer.warpgroup == WARPGROUPS - 1) consumer.pass_turn();
        // of the block in hand; asked for a block ahead
        int counted = counts[Work(blockIdx.x, owners, blocks).list], wholly = wholes[Work(blockIdx.x, owners, blocks).list];
        for (int index = blockIdx.x; index < total; index += gridDim.x) {
            int count = __shfl_sync(~0u, counted, 0), whole = __shfl_sync(~0u, wholly, 0), next = index + gridDim.x;
            Work work(index, owners, blocks), following(next, owners, blocks);
            consumer.begin(work);
            consumer.wait_query();
            consumer.attend(count, whole, next < total, following);
            if (next < total) {
                counted = counts[following.list];
                wholly = wholes[following.list];
            }
            consumer.store(work);
        }
    }
}
