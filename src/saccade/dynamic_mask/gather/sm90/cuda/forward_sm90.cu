// Forward of dynamic mask attention on sm_90a: rows of K and V gathered by index, S = Q K^T and P V by wgmma. See README.md of this family.
//
//   gatherer            one warpgroup: tiles of BLOCK_N listed keys into a ring of STAGES places (gather.cuh)
//   WARPGROUPS more     64 rows of a block each: S of tile i and P V of tile i - 1 are issued together; then, while the others' products
//                       run, the weights of tile i are made. With TURNS they issue in turn
//
// A block is BLOCK_Q queries x GROUP heads of a key head, 64 WARPGROUPS rows: row r is query r / GROUP_PAD, head r % GROUP_PAD. Its list
// has the keys that all its queries see first. They end a tile, so that only tiles of the others are masked: one or two, the last of 32
// keys where that is enough. Thread blocks are persistent: the gatherer is in the next block while this one is finished, and Q of the next
// is copied behind the first S of this one (QUERY_PLACES 2) or behind its last.
//
// Lane 4g + t of a warp holds rows g and g + 8, written [h] for h = 0, 1, and columns 8i + 2t + {0, 1} of each column group i of 8. Two
// neighbouring weights rounded to 16 bits share a register, and these registers are the operand of P V.
//
// Weights are exp(s - r) for a reference r that is not the running maximum: the largest score of the first tile, raised (and O and the sum
// rescaled) only when the weights of a lane in one tile add up to more than LIMIT. So no maximum is taken in the loop: r only has to keep weights
// inside the format, and the sum, which is needed anyhow, shows whether it does. NaN fails the comparison too and comes out of `raise`.
// Instruction issue limits the loop: one more instruction for each weight costs its issue time (docs/notes/dynamic_mask.md), while the exponentials
// cost nothing. Hence references near 0 are 0 (`settle`), bias is read by 16 bytes, and addresses grow by constants.
// Registers limit WARPGROUPS: scores, O, weights and bias take 128 of 160 at D = 128 with three, 96 of 112 at D = 64 with four.
//
// Shared memory:   | Q of each warpgroup, QUERY_PLACES times; O leaves through it at D = 64 | ring: K, V, notes, full and empty (gather.cuh) |
//
// Compiled with HEAD_DIM, BLOCK_N (64), STAGES, RUNS, GROUP, GROUP_PAD (a power of two), WARPGROUPS, TURNS, QUERY_PLACES (2 with HEAD_DIM 64),
// CONSUMER_REGISTERS, GATHERER_REGISTERS, HAS_SCORES, BF16.
#define INDICES 0
#define WHOLE_TILES 1
#define PAIRED_NOTES 1
#include "dependent.cuh"
#include "gather.cuh"
#include "accumulator.cuh"
#include "mma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

static_assert(QUERY_PLACES == 1 || HEAD_DIM == 64, "O goes by way of rows of 128 bytes");
constexpr int BLOCK_Q = 64 * WARPGROUPS / GROUP_PAD;
constexpr int QUERY_BYTES = 64 * HEAD_DIM * 2;  // of one warpgroup
static_assert(QUERY_PLACES * WARPGROUPS * QUERY_BYTES + Ring::BYTES + EIGHT_ROWS <= SHARED_BYTES, "the launch asks for too little shared memory");
// named barriers, one a warpgroup: its turn to issue products; its four warps. 0 is __syncthreads
enum NamedBarrier { TURN = 1, OF_WARPGROUP = TURN + WARPGROUPS };

// Largest sum of weights of a lane in a tile, a quarter of what half precision holds; and references for which 0 does as well. In a first
// tile no lane's 16 weights then reach LIMIT.
constexpr float LIMIT = BF16 ? 4294967296.0f : 16384.0f;
constexpr float NEAR_BELOW = BF16 ? -24.0f : -2.0f, NEAR_ABOVE = BF16 ? 24.0f : 8.0f;
// offset of a row that has seen no key: finite, so that -inf plus it is no NaN, and no less than that of any row that has
constexpr float UNSEEN = LARGEST;

struct Sizes {
    int q_len, kv_len, kv_heads, batches;
    float scale;  // of exponents, base 2
    const Number* query;
    Number* out;
    float* lse;
    long long query_batch, query_head, query_row, out_batch, out_head, out_row;
};

// The load is volatile, so that it is repeated when the weights of a tile are computed again. Otherwise ptxas keeps the first comparisons as
// predicates packed into registers, which takes 70 instructions a masked tile.
template <class Pair>
__device__ __forceinline__ Pair load_pair(u32 address) {
    Pair pair;
    u32 &x = *reinterpret_cast<u32*>(&pair.x), &y = *reinterpret_cast<u32*>(&pair.y);
    asm volatile("ld.volatile.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(address));
    return pair;
}

__device__ __forceinline__ float4 load_four(u32 address) {
    float4 four;
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                 : "r"(address));
    return four;
}

__device__ __forceinline__ uint4 load_16(u32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

// a block of queries of one key head, in the order of `QueryBlock`; also the way from one of a program to its next, without divisions
struct Block {
    int head, batch, number;

    __device__ __forceinline__ Block(int index, const Sizes& sizes) {
        head = index % sizes.kv_heads;
        batch = index / sizes.kv_heads % sizes.batches;
        number = index / sizes.kv_heads / sizes.batches;
    }
    __device__ __forceinline__ Block after(const Block& step, const Sizes& sizes) const {
        Block next = *this;
        next.head += step.head;
        next.batch += step.batch;
        next.number += step.number;
        if (next.head >= sizes.kv_heads) {
            next.head -= sizes.kv_heads;
            next.batch++;
        }
        if (next.batch >= sizes.batches) {
            next.batch -= sizes.batches;
            next.number++;
        }
        return next;
    }
    __device__ __forceinline__ int list(const Sizes& sizes, int blocks) const { return (batch * sizes.kv_heads + head) * blocks + number; }
};

struct Consumer {
    const Sizes& sizes;
    Ring ring;
    u32 query, other;  // address of this warpgroup's rows, and of the next block's
    int warpgroup, first_query;
    Place place;
    int before;  // stage of the tile whose weights wait for their values

    float scores[BLOCK_N / 2];  // [column group][h][2 keys]
    float out[HEAD_DIM / 2];    // [column group][h][2 columns]
    u32 packed[BLOCK_N / 4];    // weights as an operand, [column group][h]
    float offset[2], sum[2], added[2];  // offset: -reference, in the exponent; added: to the sum by the tile in hand

    __device__ __forceinline__ Consumer(const Sizes& sizes, Ring ring, u32 queries) : sizes(sizes), ring(ring) {
        // the compiler assumes that the result of a shuffle is the same in all lanes; in loops that it considers divergent, products are serialised
        warpgroup = __shfl_sync(~0u, int(threadIdx.x) / 128 - 1, 0);
        query = queries + warpgroup * QUERY_BYTES;
        other = query + (QUERY_PLACES - 1) * WARPGROUPS * QUERY_BYTES;
    }

    // Row g of this lane, of the block. A row i further, where i is a multiple of 4, 8 or 16 and row % 16 is less than that, is of member
    // row % GROUP_PAD + i % GROUP_PAD and query row / GROUP_PAD + i / GROUP_PAD: nothing is carried, and what i adds is constant.
    __device__ __forceinline__ int row() const {
        int x = thread_of();
        return 64 * warpgroup + x % 128 / 32 * 16 + x % 32 / 4;
    }

    // a barrier of the four warps of this warpgroup
    __device__ __forceinline__ void meet() const { sync_threads(OF_WARPGROUP - 1 + thread_of() / 128, 128); }

    // warpgroups issue their products in turn
    __device__ __forceinline__ void take_turn() const {
        if (TURNS) sync_threads(TURN + warpgroup, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (TURNS) pass_barrier(warpgroup == WARPGROUPS - 1 ? TURN : TURN + 1 + warpgroup, 256);
    }

    __device__ __forceinline__ void release(int stage) const {
        asm volatile("{ .reg .pred one; elect.sync _|one, 0xffffffff;\n"
                     "@one mbarrier.arrive.shared.b64 _, [%0]; }" ::"r"(ring.empty(stage))
                     : "memory");
    }

    // rows of Q of a block, zeros where there are none; eight lanes or sixteen along a row
    __device__ __forceinline__ void copy_query(const Block& block) const {
        constexpr int ACROSS = HEAD_DIM / 8, AT_ONCE = 128 / ACROSS;
        int thread = thread_of() % 128, chunk = thread % ACROSS, own = thread / ACROSS, first = 64 * warpgroup + own;
        int first_head = block.head * GROUP, member = first % GROUP_PAD, q = block.number * BLOCK_Q + first / GROUP_PAD;
        const Number* from = sizes.query + block.batch * sizes.query_batch + chunk * 8;
        const Number* row = from + (first_head + member) * sizes.query_head + q * sizes.query_row;
        // the swizzle of all rows of a thread is one: they are 8 apart, or 16
        u32 to = other + chunk / 8 * ROWS_64 + own * 128 + (((chunk ^ own) & 7) * 16);
#pragma unroll
        for (int i = 0; i < 64; i += AT_ONCE) {
            bool there = member + i % GROUP_PAD < GROUP && q + i / GROUP_PAD < sizes.q_len;  // see `row`
            const Number* at = row + i % GROUP_PAD * sizes.query_head + i / GROUP_PAD * sizes.query_row;
            copy_16(to + i * 128, there ? at : from, there);
        }
        copies_commit();
    }

    __device__ __forceinline__ void wait_query() const {
        copies_wait<0>();
        fence_async();
    }

    __device__ __forceinline__ void begin(const Block& block) {
        first_query = block.number * BLOCK_Q;
        u32 last = query;
        query = other;
        other = last;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            offset[h] = UNSEEN;
            sum[h] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) out[i] = 0.0f;
    }

    // the operand `bytes` behind the keys of a place: from that of the first place by an addition, for which the compiler takes six
    // instructions when it is made of the address
    __device__ __forceinline__ u64 operand_of(int stage, u32 bytes = 0, u32 leading = 16) const {
        u64 keys = operand(ring.keys(0));
        u32 low = u32(keys) + (((leading - 16) >> 4 << 16) + (bytes >> 4)) + stage * (TILE_BYTES >> 4);
        return keys >> 32 << 32 | low;
    }

    // scores = Q K^T of the first N keys of the tile in hand
    template <int N>
    __device__ __forceinline__ void issue_scores() {
        float(&to)[N / 2] = reinterpret_cast<float(&)[N / 2]>(scores);
        u64 a = operand(query), b = operand_of(place.stage);
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++) {
            u64 rows = advance(a, columns_at(step, ROWS_64)), columns = advance(b, columns_at(step, COLUMN_BYTES));
            if (step == 0)
                Products<N>::set(to, rows, columns);
            else
                Products<N>::add(to, rows, columns);
        }
        products_commit();
    }

    // out += P V of the tile whose weights are packed
    __device__ __forceinline__ void issue_values() {
        u64 b = operand_of(before, STAGES * TILE_BYTES, COLUMN_BYTES);
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; step++) Products<HEAD_DIM>::add_rows(out, packed + 4 * step, advance(b, step * 16 * 128));
        products_commit();
    }

    // exponents of two neighbours of row g + 8h without the reference, -inf where the row does not see the key
    template <bool MASKED>
    __device__ __forceinline__ float2 exponents(int i, int h, float2 bias, int2 start, int2 stop, int position) const {
        float x = scores[4 * i + 2 * h], y = scores[4 * i + 2 * h + 1];
        x = fmaf(x, sizes.scale, bias.x);
        y = fmaf(y, sizes.scale, bias.y);
        if (MASKED && !(position >= start.x && position < stop.x)) x = MINUS_INFINITY;
        if (MASKED && !(position >= start.y && position < stop.y)) y = MINUS_INFINITY;
        return make_float2(x, y);
    }

    // of this lane's first keys of the tile in hand
    __device__ __forceinline__ u32 notes() const { return ring.bias(place.stage) + u32(thread_of()) % 4 * 16; }

    // of the keys of this lane, base 2, -inf where there is none
    template <int GROUPS>
    __device__ __forceinline__ void load_bias(float2 (&bias)[GROUPS]) const {
        u32 from = notes();
#pragma unroll
        for (int i = 0; i < GROUPS; i += 2) {
            float4 four = load_four(from + 4 * note_at(8 * i));
            bias[i] = make_float2(four.x, four.y);
            bias[i + 1] = make_float2(four.z, four.w);
        }
    }

    // Calls act(i, h, exponents) for this lane's numbers of the first GROUPS column groups of the current tile. MASKED: `bias` is read here, because
    // registers cannot hold all of it
    template <bool MASKED, int GROUPS, class Act>
    __device__ __forceinline__ void each_pair(const float2 (&bias)[GROUPS], const Act& act) const {
        u32 from = notes();
        int position[2] = {0, 0};
        if (MASKED) {
            position[0] = first_query + sizes.kv_len - sizes.q_len + row() / GROUP_PAD;
            position[1] = position[0] + 8 / GROUP_PAD;
        }
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            u32 at = from + 4 * note_at(8 * i);
            float2 b = MASKED ? load_pair<float2>(at) : bias[i];
            int2 start = MASKED ? load_pair<int2>(at + NOTE_BYTES) : make_int2(0, 0);
            int2 stop = MASKED ? load_pair<int2>(at + 2 * NOTE_BYTES) : make_int2(0, 0);
#pragma unroll
            for (int h = 0; h < 2; h++) act(i, h, exponents<MASKED>(i, h, b, start, stop, position[h]));
        }
    }

    // the weights of the current tile as an operand, which no product may be reading, and their sum
    template <bool MASKED, bool SHIFTED, int GROUPS>
    __device__ __forceinline__ void weigh(const float2 (&bias)[GROUPS]) {
        each_pair<MASKED>(bias, [&](int i, int h, float2 x) {
            x.x = exp2_fast(SHIFTED ? x.x + offset[h] : x.x);
            x.y = exp2_fast(SHIFTED ? x.y + offset[h] : x.y);
            added[h] = i == 0 ? x.x : added[h] + x.x;
            added[h] += x.y;
            packed[2 * i + h] = pack(x.x, x.y);
        });
#pragma unroll
        for (int i = 2 * GROUPS; i < BLOCK_N / 4; i++) packed[i] = 0;
    }

    // whether a weight of these rows is too large for its format, or NaN
    __device__ __forceinline__ bool overflows() const { return __any_sync(~0u, !(added[0] <= LIMIT && added[1] <= LIMIT)); }

    // a reference for each row, at least as large as its scores in the current tile and the reference before
    template <bool MASKED, int GROUPS>
    __device__ __forceinline__ void refer(const float2 (&bias)[GROUPS]) {
        float most[2] = {MINUS_INFINITY, MINUS_INFINITY};
        each_pair<MASKED>(bias, [&](int i, int h, float2 x) { most[h] = max_nan(most[h], max_nan(x.x, x.y)); });
#pragma unroll
        for (int h = 0; h < 2; h++) offset[h] = min_nan(offset[h], -quad_max(most[h]));
    }

    // the references of a warp are 0 from here on if all are near it: an addition less for each weight
    __device__ __forceinline__ void settle() {
        bool near = true;
#pragma unroll
        for (int h = 0; h < 2; h++) near &= -offset[h] >= NEAR_BELOW && -offset[h] <= NEAR_ABOVE;
        if (__all_sync(~0u, near)) offset[0] = offset[1] = 0.0f;
    }
    __device__ __forceinline__ bool shifted() const { return __any_sync(~0u, offset[0] != 0.0f || offset[1] != 0.0f); }

    // Raises the reference, and rescales O and the sum to it.
    template <bool MASKED, int GROUPS>
    __device__ __forceinline__ void raise(const float2 (&bias)[GROUPS]) {
        float factor[2] = {-offset[0], -offset[1]};
        refer<MASKED>(bias);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            factor[h] = exp2_fast(offset[h] + factor[h]);
            sum[h] *= factor[h];
        }
        scale_rows(out, factor);
    }

    // Recomputes weights that were too large, with a reference that fits.
    template <bool MASKED, int N>
    __device__ __forceinline__ void retry() {
        float2 bias[N / 8];
        if (!MASKED) load_bias(bias);
        raise<MASKED>(bias);
        weigh<MASKED, true>(bias);
    }

    // the tile in hand becomes the one whose weights wait for their values
    __device__ __forceinline__ void accept() {
        sum[0] += added[0];
        sum[1] += added[1];
        before = place.stage;
        place.advance();
    }

    // The first tile of a block, before there are weights to multiply with V. whole: how many keys all rows see.
    __device__ __forceinline__ void first_tile(int whole, bool more, const Block& following) {
        float2 bias[BLOCK_N / 8];
        barrier_wait(ring.full(place.stage), place.parity);
        load_bias(bias);
        take_turn();
        products_begin();
        issue_scores<BLOCK_N>();  // S = Q K^T
        pass_turn();
        if (QUERY_PLACES == 2 && more) copy_query(following);
        products_wait<0>();
        // r, and P = exp(scale S + bias - r)
        if (whole > 0) {
            refer<false>(bias);
            // a row that sees few keys keeps its reference: the weight of the one that matters is then 1, which is not rounded
            if (whole >= BLOCK_N) settle();
            weigh<false, true>(bias);
        } else {
            refer<true>(bias);
            weigh<true, true>(bias);
        }
        accept();
    }

    template <bool MASKED, int N>
    __device__ __forceinline__ void next_tile() {
        float2 bias[N / 8];
        barrier_wait(ring.full(place.stage), place.parity);
        // The bias is loaded before the products: a load after them waits for the shared memory that the products read.
        if (!MASKED) load_bias(bias);
        take_turn();
        products_begin();
        issue_scores<N>();  // S = Q K^T
        issue_values();     // O += P V of the tile before
        pass_turn();
        products_wait<0>();
        release(before);
        // P = exp(scale S + bias - r)
        if (MASKED || shifted())
            weigh<MASKED, true>(bias);
        else
            weigh<MASKED, false>(bias);
        if (overflows()) retry<MASKED, N>();
        accept();
    }

    __device__ __forceinline__ void last_values() {
        products_begin();
        issue_values();  // O += P V
        products_wait<0>();
        release(before);
    }

    // `following`: the next block of this program, whose Q is requested when this one no longer needs its own
    __device__ __forceinline__ void attend(int count, int whole, bool more, const Block& following) {
        if (count > 0) {
            int rest = count - whole;
            first_tile(whole, more, following);
            if (whole == 0) rest -= BLOCK_N;
            for (int left = (whole - 1) / BLOCK_N; left > 0; left--) next_tile<false, BLOCK_N>();
            for (; rest > BLOCK_N / 2; rest -= BLOCK_N) next_tile<true, BLOCK_N>();
            for (; rest > 0; rest = 0) next_tile<true, BLOCK_N / 2>();
        }
        if (QUERY_PLACES == 1) meet();  // all four warps have their last scores
        if ((QUERY_PLACES == 1 || count == 0) && more) copy_query(following);
        // A loop of one turn at most, here and above: ptxas runs products under an `if` one by one.
        for (; count > 0; count = 0) last_values();
    }

    __device__ __forceinline__ void store(const Block& block) const {
        constexpr int MEMBERS = 8 % GROUP_PAD, QUERIES = 8 / GROUP_PAD;  // from row g to g + 8
        int first_head = block.head * GROUP, member = row() % GROUP_PAD, q = first_query + row() / GROUP_PAD;
        Number* rows = sizes.out + block.batch * sizes.out_batch + first_head * sizes.out_head;
        float* lse = sizes.lse + ((long long)block.batch * sizes.kv_heads * GROUP + first_head + member) * sizes.q_len + q;
        float inverse[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float total = quad_sum(sum[h]);
            // compared with 0, not tested by > 0: a NaN sum must stay NaN
            inverse[h] = total == 0.0f ? 0.0f : __fdividef(1.0f, total);
            bool there = member + h * MEMBERS < GROUP && q + h * QUERIES < sizes.q_len;
            Number* to = rows + (member + h * MEMBERS) * sizes.out_head + (q + h * QUERIES) * sizes.out_row;
            if (QUERY_PLACES == 1) store_row<HEAD_DIM>(out, h, inverse[h], to, HEAD_DIM, there);
            long long at = (long long)(h * MEMBERS) * sizes.q_len + h * QUERIES;
            if (there && thread_of() % 4 == 0) lse[at] = total == 0.0f ? MINUS_INFINITY : (log2_fast(total) - offset[h]) * LN2;
        }
        if (QUERY_PLACES == 2) store_rows(rows, inverse);
    }

    // Stores O through shared memory, where this warp's rows of Q were, so that complete rows of 128 bytes are written.
    __device__ __forceinline__ void store_rows(Number* to, const float (&factor)[2]) const {
        int x = thread_of(), lane = x % 32, first = x % 128 / 32 * 16;
        u32 area = query + first * 128, put = area + lane % 16 * 128;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i += 2) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int at = 4 * (i + j / 2) + 2 * (j % 2);
                words[j] = pack(out[at] * factor[j % 2], out[at + 1] * factor[j % 2]);
            }
            store_matrices(put + ((i + lane / 16) ^ (lane & 7)) * 16, words);
        }
        __syncwarp();
        int own = lane / 8, r = 64 * warpgroup + first + own, member = r % GROUP_PAD, q = first_query + r / GROUP_PAD;
        to += member * sizes.out_head + q * sizes.out_row + lane % 8 * 8;
        u32 get = area + own * 128 + ((lane ^ own) & 7) * 16;
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            uint4 values = load_16((get ^ i % 8 * 16) + i * 128);
            if (member + i % GROUP_PAD < GROUP && q + i / GROUP_PAD < sizes.q_len)
                *reinterpret_cast<uint4*>(to + i % GROUP_PAD * sizes.out_head + i / GROUP_PAD * sizes.out_row) = values;
        }
    }
};

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1) forward_sm90(
    const Number* query, const Number* key, const Number* value, const float* scores, const int* start, const int* stop, const int* lists,
    const int* counts, const int* wholes, Number* out, float* lse, long long query_batch, long long query_head, long long query_row,
    long long key_batch, long long key_head, long long value_batch, long long value_head, long long out_batch, long long out_head,
    long long out_row, u32 key_row, u32 value_row, int kv_heads, int q_len, int kv_len, int longest, int blocks, int owners, float scale
#if RUNS
    , const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map
#endif
) {
    extern __shared__ unsigned char memory[];
    const Gathered given{.key = key, .value = value, .scores = scores,
                         .start = start, .stop = stop, .lists = lists, .counts = counts,
                         .key_batch = key_batch, .key_head = key_head,
                         .value_batch = value_batch, .value_head = value_head,
                         .key_row = key_row, .value_row = value_row,
                         .kv_heads = kv_heads, .kv_len = kv_len,
                         .longest = longest, .blocks = blocks, .owners = owners, .wholes = wholes,
#if RUNS
                         .key_map = &key_map, .value_map = &value_map,
#endif
    };
    const Sizes sizes{.q_len = q_len, .kv_len = kv_len, .kv_heads = kv_heads, .batches = owners / kv_heads,
                      .scale = scale, .query = query, .out = out, .lse = lse,
                      .query_batch = query_batch, .query_head = query_head, .query_row = query_row,
                      .out_batch = out_batch, .out_head = out_head, .out_row = out_row};
    u32 queries = align_operands(shared_address(memory));
    Ring ring{queries + QUERY_PLACES * WARPGROUPS * QUERY_BYTES};
    if (threadIdx.x == 0) {
        ring.init(4 * WARPGROUPS);
        barrier_fence();
    }
    __syncthreads();
    wait_for_kernel_ahead();
    int total = owners * blocks;
    if (threadIdx.x < 128) {
        leave_registers<GATHERER_REGISTERS>();
        Gatherer(given, ring).run();
    } else {
        take_registers<CONSUMER_REGISTERS>();
        Consumer consumer(sizes, ring, queries);
        Block block(blockIdx.x, sizes), step(gridDim.x, sizes);
        consumer.copy_query(block);
        if (consumer.warpgroup == WARPGROUPS - 1) consumer.pass_turn();
        // of the current block; requested a block ahead
        int counted = counts[block.list(sizes, blocks)], wholly = wholes[block.list(sizes, blocks)];
        if (QUERY_PLACES == 2) consumer.wait_query();
        for (int index = blockIdx.x; index < total; index += gridDim.x) {
            int count = __shfl_sync(~0u, counted, 0), whole = __shfl_sync(~0u, unmasked(counted, wholly), 0);
            bool more = index + gridDim.x < total;
            Block following = block.after(step, sizes);
            consumer.begin(block);
            if (QUERY_PLACES == 1) consumer.wait_query();
            consumer.meet();
            consumer.attend(count, whole, more, following);
            if (QUERY_PLACES == 2) consumer.wait_query();  // before O is stored: the fence would wait for that
            if (more) {
                counted = counts[following.list(sizes, blocks)];
                wholly = wholes[following.list(sizes, blocks)];
            }
            consumer.store(block);
            block = following;
        }
    }
}
