// Exact attention of long sequences on sm_90a, forward. A team of two warpgroups takes 128 queries of a (sequence, head) at a time, 64
// each; a warp for each team requests tiles from the copy engine, as far ahead as memory allows, also for the next queries.
//
//   S = Q K^T    m = running rowmax(scale S)    P = exp(scale S - m)    O = P V / rowsum(P)    lse = m + log(rowsum(P))
//
// With dropout O = (P kept) V / rowsum(P) / (1 - p), and lse is that of all weights.
//
// shared memory of a team:   | Q, then O: QUERY_SLOTS times 128 rows | K, V: STAGES chunks of 64 keys | what is told | selectors of a KEY_MASK: STAGES |
//                             | barriers |
// with a BIAS, behind all teams:   | BIAS_STAGES tiles of 128 queries and 64 keys | their barriers |
//
// The values of a chunk are multiplied while the scores of the next one become weights. The last chunk is as wide as its keys (16, 32 or 64). O is
// rescaled only where a row's maximum has grown by 2^8 since the last time. Source: FlashAttention-2 (Dao 2023), algorithm 1; the order of the
// products after FlashAttention-3, the rare rescaling after FlashAttention-4.
//
// With a BIAS, S = scale Q K^T + bias in base e, and m too. The teams of a block take the same queries of problems that share a matrix of the bias, so that
// a tile of it is read once for both. They synchronise only at its tiles, each with the chunks of its own row, and the team with fewer passes the
// rest. With a KEY_MASK all lanes of the warp that requests keys read the mask of a chunk, while it waits for memory, and write selectors beside the keys.
//
// Compiled with the macros of chunks_sm90.cuh, TEAMS (1 or 2), QUERY_SLOTS, STAGES, COMPUTE_REGISTERS, LOAD_REGISTERS and SHARED_BYTES, with a BIAS
// BIAS_STAGES and LATE_MAXIMA. The registers
// of all threads are those of the launch, rounded down to 8 a thread: a warpgroup that requests more waits for ever.
#include "chunks_sm90.cuh"
#include "ring.cuh"

constexpr int BLOCK_ROWS = 128, CHUNK_KEYS = 64, THREADS = 256 * TEAMS + 128;
constexpr float SLACK = BIAS ? 8.0f * LN2 : 8.0f;  // in base 2, or e with a bias; weights of 2^8 and their sums are far from the largest half
// 1: weights first, and the maxima of a chunk only where a thread's sum of them is larger than LARGEST_SUM; a warp then forms its scores once more.
#ifndef LATE_MAXIMA
#define LATE_MAXIMA 0
#endif
static_assert(!LATE_MAXIMA || (BIAS && HEAD_DIM == 32), "a warp forms scores from queries in registers, and bias that is not released");
constexpr float LARGEST_SUM = 4096.0f;
using QueryTile = Tile<HEAD_DIM, BLOCK_ROWS>;
using KeyTile = Tile<HEAD_DIM, CHUNK_KEYS>;
// With two teams a thread has 112 registers. Wider queries would exceed them, and ptxas would then wait for each product.
constexpr bool QUERY_IN_REGISTERS = HEAD_DIM == 32;
enum Barrier { QUERY, FREE = QUERY + QUERY_SLOTS, KEY = FREE + QUERY_SLOTS, VALUE = KEY + STAGES, READ = VALUE + STAGES, BARRIERS = READ + STAGES };
enum Meeting { OF_TEAM = 1, OF_WARPGROUP = OF_TEAM + TEAMS };

// of one team
struct LongForwardShared : Memory {
    const int team;

    __device__ __forceinline__ LongForwardShared(u32 all, int team) : Memory(all + team * BYTES), team(team) {}
    __device__ __forceinline__ u32 query(int slot) const { return base + slot * QueryTile::BYTES; }
    __device__ __forceinline__ u32 work(int slot) const { return base + WORKS_AT + 32 * slot; }
    __device__ __forceinline__ u32 key(int stage) const { return base + KEYS_AT + stage * 2 * KeyTile::BYTES; }
    __device__ __forceinline__ u32 value(int stage) const { return key(stage) + KeyTile::BYTES; }
    __device__ __forceinline__ u32 selectors(int stage) const { return base + SELECTORS_AT + stage * Selectors::BYTES; }
    __device__ __forceinline__ u32 barrier(int i) const { return base + BARRIERS_AT + 8 * i; }

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < QUERY_SLOTS; i++) {
            barrier_init(barrier(QUERY + i), 1);
            barrier_init(barrier(FREE + i), 2);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(barrier(KEY + i), 1);
            barrier_init(barrier(VALUE + i), 1);
            barrier_init(barrier(READ + i), 8);
        }
        barrier_fence();
    }

    static constexpr u32 KEYS_AT = QUERY_SLOTS * QueryTile::BYTES, WORKS_AT = KEYS_AT + STAGES * 2 * KeyTile::BYTES;
    static constexpr u32 SELECTORS_AT = WORKS_AT + QUERY_SLOTS * 32, BARRIERS_AT = SELECTORS_AT + KEY_MASK * STAGES * Selectors::BYTES;
    static constexpr u32 BYTES = (BARRIERS_AT + 8 * BARRIERS + 1023) / 1024 * 1024;
};

// the tiles of the bias, of all teams
struct BiasTiles {
#if BIAS
    u32 base;

    enum Barrier { TILE, READ = BIAS_STAGES, BARRIERS = 2 * BIAS_STAGES };
    using Tiles = Tile<64, BLOCK_ROWS>;
    static_assert((BIAS_STAGES & (BIAS_STAGES - 1)) == 0, "a place is a tile's number modulo BIAS_STAGES");
    static constexpr u32 BYTES = BIAS_STAGES * Tiles::BYTES + 8 * BARRIERS;

    __device__ __forceinline__ BiasTiles(u32 all) : base(all + TEAMS * LongForwardShared::BYTES) {}
    __device__ __forceinline__ u32 tile(int n) const { return base + n % BIAS_STAGES * Tiles::BYTES; }
    __device__ __forceinline__ u32 filled(int n) const { return base + BIAS_STAGES * Tiles::BYTES + 8 * (TILE + n % BIAS_STAGES); }
    __device__ __forceinline__ u32 read(int n) const { return base + BIAS_STAGES * Tiles::BYTES + 8 * (READ + n % BIAS_STAGES); }
    static __device__ __forceinline__ int parity(int n) { return n / BIAS_STAGES & 1; }

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < BIAS_STAGES; i++) {
            barrier_init(filled(i), 1);
            barrier_init(read(i), 8 * TEAMS);
        }
        barrier_fence();
    }
#else
    static constexpr u32 BYTES = 0;

    __device__ __forceinline__ BiasTiles(u32) {}
    __device__ __forceinline__ void init_barriers() const {}
#endif
};
static_assert(TEAMS * LongForwardShared::BYTES + BiasTiles::BYTES <= SHARED_BYTES, "the launch asks for too little shared memory");

// 128 queries of an item, from `first` on; a negative one is the end.
struct QueryBlock {
    Item item;
    int first;
    int tiles = 0;  // of the bias, of this team and the others of the block; an item without queries has but these to pass

    // keys that some query sees: before `end`, and from chunk `first_chunk` on
    __device__ __forceinline__ int end() const { return CAUSAL ? between(0, first + BLOCK_ROWS + item.reach(), item.k_len) : item.k_len; }
    __device__ __forceinline__ int chunks() const { return (end() + CHUNK_KEYS - 1) / CHUNK_KEYS; }
    __device__ __forceinline__ int first_chunk() const { return WINDOW ? between(0, first + item.back(), item.k_len) / CHUNK_KEYS : 0; }

    __device__ __forceinline__ void tell_to(u32 place) const {
        const int all[8] = {item.head, item.told_row(), item.q_first, item.q_len, item.k_first, item.k_len, first, tiles};
        tell(place, all);
    }
    static __device__ __forceinline__ QueryBlock from(u32 place, const Window& window) {
        const int head = told(place, 0), row = told(place, 1);
        return QueryBlock{Item{head, Item::batch_of(row), told(place, 2), told(place, 3), told(place, 4), told(place, 5), 0, row, window}, told(place, 6), BIAS ? told(place, 7) : 0};
    }
};

__device__ __forceinline__ int slot_of(int work) {
    return work % QUERY_SLOTS;
}
__device__ __forceinline__ int slot_parity(int work) {
    return work / QUERY_SLOTS & 1;
}

// keys that the products of a chunk take if `left` are left
__device__ __forceinline__ int width_of(int left) {
    return left > 32 ? 64 : left > 16 ? 32 : 16;
}

// One warpgroup: 64 queries of an item.
struct Rows {
    const LongForwardShared shared;
    const int warpgroup;
    const float exponent;  // scale * log2(e), positive; with a bias, the scale
    const MaskBits mask;
    const Dropout& dropout;
    const BiasTiles bias;
    int slot;
    u32 query[QUERY_IN_REGISTERS ? HEAD_DIM / 4 : 1];
    float out[HEAD_DIM / 2];
    u32 weights[CHUNK_KEYS / 4];  // of a chunk, whose values are not multiplied yet
    float top[2], sum[2];  // the maximum that weights are relative to, in base 2, or e with a bias

    __device__ __forceinline__ void begin(int place) {
        slot = place;
        if (QUERY_IN_REGISTERS) {
#pragma unroll
            for (int s = 0; s < HEAD_DIM / 16; s++) load_matrices(query + 4 * s, QueryTile::fragment(shared.query(slot), 64 * warpgroup, s));
        }
#pragma unroll
        for (int e = 0; e < HEAD_DIM / 2; e++) out[e] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; h++) top[h] = MINUS_INFINITY, sum[h] = 0.0f;
    }

    // The first N keys of a chunk, which begins at key `first`; MASKED: some of them may not exist or not be seen. FIRST: of an item; otherwise the
    // values of the chunk before are multiplied while the scores of this one are turned into weights. The weights are multiplied later.
    template <int N, bool MASKED, bool FIRST>
    __device__ __forceinline__ void chunk(int n, const Item& item, int first_query, int first, int tile, bool arriving) {
        const int stage = __shfl_sync(~0u, stage_of(n), 0);
        // `own_row` gives some builds another schedule here
        const int row = first_query + int(threadIdx.x) / 32 % 4 * 16 + int(threadIdx.x) % 32 / 4;
        const u32 shown = mask.of(item, item.head, row, item.q_len, first / CHUNK_KEYS);  // its latency is hidden by the product of the scores
        float scores[N / 2];
        barrier_wait(shared.barrier(KEY + stage), parity_of(n));
        products_begin();
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; s++) {
            u64 right = KeyTile::columns(shared.low(shared.key(stage)), 0, s);
            if (!QUERY_IN_REGISTERS) {
                u64 left = QueryTile::columns(shared.low(shared.query(slot)), 64 * warpgroup, s);
                if (s == 0) Products<N>::set(scores, left, right);
                else Products<N>::add(scores, left, right);
            } else {
                if (s == 0) Products<N>::set(scores, query + 4 * s, right);
                else Products<N>::add(scores, query + 4 * s, right);
            }
        }
        products_commit();
        if (!FIRST) values<CHUNK_KEYS>(n - 1);
        u32 survivors;
        // while the products are under way
        if (DROPOUT) survivors = dropout.of_queries<N>(dropout.problem(item.sequence, item.head), first_query, first);
        products_wait<FIRST ? 0 : 1>();
        add_bias<N>(scores, stage, tile, arriving);
        hide<N, MASKED>(scores, item, row, first, shown);
        float factor[2];  // of O, written where a row has risen; of the first chunk O is 0
        bool risen;
        if (LATE_MAXIMA) {
            // the scores of a query that has seen no key yet may all be far below 0
            const bool early = FIRST || __any_sync(~0u, fminf(top[0], top[1]) == MINUS_INFINITY);
            risen = early && rise<N>(scores, factor);
            float more[2] = {0.0f, 0.0f};
            weigh<N>(scores, more);
            if (!FIRST && !early && __any_sync(~0u, !(fmaxf(more[0], more[1]) <= LARGEST_SUM))) {
                form_again<N>(scores, stage, tile);
                hide<N, MASKED>(scores, item, apart(row), apart(first), apart(shown));  // else 32 comparisons are kept for this
                risen = rise<N>(scores, factor);
                more[0] = more[1] = 0.0f;
                weigh<N>(scores, more);
            }
            release_bias(tile, arriving);
            sum[0] += more[0], sum[1] += more[1];
        } else {
            risen = rise<N>(scores, factor);
            weigh<N>(scores, sum);
        }
        if (DROPOUT) {  // behind the sum, which is that of all weights
#pragma unroll
            for (int e = 0; e < N / 2; e++)
                if (!Dropout::leaves(survivors, e)) scores[e] = 0.0f;
        }
        if (!FIRST) {
            products_wait<0>();  // the weights of the chunk before are read from these registers
            if (risen) scale_rows(out, factor);
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < N / 8; i++) weights[2 * i + h] = pack(scores[4 * i + 2 * h], scores[4 * i + 2 * h + 1]);
    }

    // scale S + bias, of a tile of the bias and the keys of a stage
    template <int N>
    __device__ __forceinline__ void add_bias(float (&scores)[N / 2], int stage, int tile, bool arriving) const {
#if BIAS
        u32 selectors[4];
        barrier_wait(bias.filled(tile), BiasTiles::parity(tile));
#pragma unroll
        for (int s = 0; s < N / 16; s++) {
            u32 words[4];
            if (KEY_MASK && s % 2 == 0) Selectors::load(selectors, shared.selectors(stage), s / 2);
            load_matrices(words, BiasTiles::Tiles::fragment(bias.tile(tile), 64 * warpgroup, s));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 added = KeyMask::numbers_of(words[j], selectors[s % 2 * 2 + j / 2]);
                float &x = scores[8 * s + 2 * j], &y = scores[8 * s + 2 * j + 1];
                x = fmaf(x, exponent, added.x), y = fmaf(y, exponent, added.y);
            }
        }
        if (!LATE_MAXIMA) release_bias(tile, arriving);
#endif
    }
    __device__ __forceinline__ void release_bias(int tile, bool arriving) const {
#if BIAS
        warp_arrives(bias.read(tile), arriving);
#endif
    }

    // The scores of this warp's 16 queries and N keys once more. A warpgroup product would need all four warps.
    template <int N>
    __device__ __forceinline__ void form_again(float (&scores)[N / 2], int stage, int tile) const {
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            u32 keys[HEAD_DIM / 8];  // 8 keys, a register for each 8 columns
#pragma unroll
            for (int s = 0; s < HEAD_DIM / 32; s++)
                load_matrices(keys + 4 * s, KeyTile::chunk(shared.key(stage), s / 2, 8 * i + int(threadIdx.x) % 8, s % 2 * 4 + int(threadIdx.x) % 32 / 8));
            float* of = scores + 4 * i;
            of[0] = of[1] = of[2] = of[3] = 0.0f;
#pragma unroll
            for (int s = 0; s < HEAD_DIM / 16; s++) multiply(of, query + (QUERY_IN_REGISTERS ? 4 * s : 0), keys[2 * s], keys[2 * s + 1]);
        }
        add_bias<N>(scores, stage, tile, false);
    }

    template <int N, bool MASKED>
    __device__ __forceinline__ void hide(float (&scores)[N / 2], const Item& item, int row, int first, u32 shown) const {
        if (MASKED) {
            const int key = first + own_column();
#pragma unroll
            for (int e = 0; e < N / 2; e++)
                if (!item.sees(row_at(row, e), column_at(key, e))) scores[e] = MINUS_INFINITY;
        }
        if (MASK) {
#pragma unroll
            for (int e = 0; e < N / 2; e++)
                if (!mask.shows(shown, e)) scores[e] = MINUS_INFINITY;
        }
    }

    // scores become weights, which are added up
    template <int N>
    __device__ __forceinline__ void weigh(float (&scores)[N / 2], float (&sums)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float shift = top[h] == MINUS_INFINITY ? 0.0f : top[h];  // a query that has seen no key yet: -inf - -inf would be NaN
            const float by = BIAS ? factor_of(shift) : exponent, less = BIAS ? shift * by : shift;
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                float &x = scores[4 * i + 2 * h], &y = scores[4 * i + 2 * h + 1];
                x = exp2_fast(fmaf(x, by, -less)), y = exp2_fast(fmaf(y, by, -less));
                sums[h] += x + y;
            }
        }
    }

    // O += P V for the first N keys of a chunk, left under way
    template <int N>
    __device__ __forceinline__ void values(int n) {
        const int stage = __shfl_sync(~0u, stage_of(n), 0);
        barrier_wait(shared.barrier(VALUE + stage), parity_of(n));
        products_begin();
#pragma unroll
        for (int s = 0; s < N / 16; s++) Products<HEAD_DIM>::add_rows(out, weights + 4 * s, KeyTile::rows(shared.low(shared.value(stage)), 16 * s));
        products_commit();
    }

    // Zeros behind the last key: a weight of 0 times what another sequence or the padding holds there may be NaN. By both warpgroups, once both are
    // here; the copy engine has filled up plain dense rows with zeros.
    __device__ __forceinline__ void clear_behind(int n, int left, const Batch& batch) {
        const int stage = stage_of(n), end = width_of(left);
        if (left >= end || !(PACKED || batch.cu_k)) return;
        barrier_wait(shared.barrier(VALUE + stage), parity_of(n));
        KeyTile::clear(shared.value(stage), left, end, threadIdx.x % 256, 256);
        fence_async();
        sync_threads(OF_TEAM + shared.team, 256);
    }

    // Takes a larger maximum where a row has outgrown its own, and scales its sum of weights. Returns whether a row of this warp has, and by what the
    // rows of O are to be scaled once the values under way are added: all four warps of a warpgroup must wait for products together, so no wait may
    // depend on a condition of one warp.
    template <int N>
    __device__ __forceinline__ bool rise(const float (&scores)[N / 2], float (&factor)[2]) {
        float most[2];
        own_max(most, scores);
#pragma unroll
        for (int h = 0; h < 2; h++) most[h] = BIAS ? quad_max(most[h]) : quad_max(most[h]) * exponent;
        if (!__any_sync(~0u, most[0] > top[0] + SLACK || most[1] > top[1] + SLACK)) return false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float higher = fmaxf(top[h], most[h]);
            factor[h] = higher == MINUS_INFINITY ? 1.0f : exp2_fast(BIAS ? (top[h] - higher) * LOG2E : top[h] - higher);
            top[h] = higher;
            sum[h] *= factor[h];
        }
        return true;
    }
};

struct Output {
    const TensorMap& map;
    Number* out;
    float* lse;
    Strides strides;
    long long row_batch, row_head;
    int head_dim;

    // Through the memory of this warpgroup's queries, by the copy engine, which may still read it when this returns (`finish`). But the rows behind
    // the last query of a packed sequence belong to another one.
    __device__ __forceinline__ void write(const Rows& rows, const Item& it, int first_query) const {
        const int group = rows.warpgroup, first = own_row(first_query);
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first + 8 * h;
            const float sum = quad_sum(rows.sum[h]);
            factor[h] = sum == 0.0f ? 0.0f : reciprocal(sum);
            if (DROPOUT) factor[h] *= rows.dropout.inverse;
            if (row < it.q_len && threadIdx.x % 4 == 0)
                lse[it.batch * row_batch + it.head * row_head + it.q_first + row] = sum == 0.0f ? MINUS_INFINITY : BIAS ? fmaf(log2_fast(sum), LN2, rows.top[h]) : (log2_fast(sum) + rows.top[h]) * LN2;
        }
        if (PACKED && first_query + 64 > it.q_len) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = first + 8 * h;
                store_row<HEAD_DIM>(rows.out, h, factor[h], out + strides.at(it.batch, it.head, it.q_first + row), head_dim, row < it.q_len);
            }
            sync_threads(OF_WARPGROUP + 2 * rows.shared.team + group, 128);  // all have read their queries
            return;
        }
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; s++) {
            u32 words[4];
            round_columns(words, rows.out + 8 * s, factor[0], factor[1]);
            store_matrices(QueryTile::fragment(rows.shared.query(rows.slot), 64 * group, s), words);
        }
        fence_async();
        sync_threads(OF_WARPGROUP + 2 * rows.shared.team + group, 128);
        if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (int block = 0; block < QueryTile::BLOCKS; block++)
                store_4d(map, rows.shared.query(rows.slot) + block * QueryTile::BLOCK_BYTES + group * 64 * QueryTile::PITCH,
                         block * (QueryTile::PITCH / 2),
                         it.q_first + first_query, it.head, it.batch);
            stores_commit();
        }
    }
};

// The works of a block with a BIAS: all queries of a tile, of as many members as it has teams. Members are the problems that share a matrix of the bias,
// row by row and, if it has one head, head by head. Heads are adjacent in time, as in memory, and so are the tiles of one problem.
#if BIAS
struct Sharing {
    const Batch& batch;
    const BiasOf& bias;

    __device__ __forceinline__ int blocks() const { return (batch.max_q + BLOCK_ROWS - 1) / BLOCK_ROWS; }
    __device__ __forceinline__ int heads_each() const { return batch.heads / bias.owners; }
    __device__ __forceinline__ int members() const { return batch.sequences / bias.windows * heads_each(); }
    __device__ __forceinline__ int turns() const { return (members() + TEAMS - 1) / TEAMS; }
    __device__ __forceinline__ int all() const { return bias.windows * turns() * bias.owners * blocks(); }  // the launch fits 31 bits

    // member n of matrix (window, owner), without queries if there is none
    __device__ __forceinline__ Item item(int window, int owner, int n) const {
        if (n >= members()) return Item{};
        const int each = heads_each(), row = unsigned(n) / unsigned(each);
        return batch.item((window + row * bias.windows) * batch.heads + owner + (n - row * each), Window{});
    }
    __device__ __forceinline__ QueryBlock work(int number, int team) const {
        const int block = number % blocks(), owner = number / blocks() % bias.owners, left = number / blocks() / bias.owners;
        const int turn = left % turns(), window = left / turns();
        QueryBlock found{item(window, owner, turn * TEAMS + team), block * BLOCK_ROWS};
        for (int i = 0; i < TEAMS; i++) found.tiles = max(found.tiles, QueryBlock{item(window, owner, turn * TEAMS + i), 0}.chunks());
        return found;
    }
};

// The warp that requests tiles of the bias.
struct BiasLoads {
    const BiasTiles tiles;
    const Sharing sharing;
    int asked = 0;

    __device__ __forceinline__ void run() {
        const int all = sharing.all();
#pragma unroll 1
        for (int number = blockIdx.x; number < all; number += gridDim.x) {
            const QueryBlock work = sharing.work(number, 0);  // team 0 always has a member
            const int groups = work.first + 64 < sharing.batch.max_q ? 2 : 1;
#pragma unroll 1
            for (int c = 0; c < work.tiles; c++, asked++) {
                if (asked >= BIAS_STAGES) barrier_wait(tiles.read(asked), BiasTiles::parity(asked) ^ 1);
                barrier_expect(tiles.filled(asked), groups * BIAS_BLOCK_BYTES);
                for (int g = 0; g < groups; g++)
                    sharing.bias.load(tiles.tile(asked) + g * BIAS_BLOCK_BYTES, tiles.filled(asked), c * CHUNK_KEYS, work.first + 64 * g,
                                      work.item.head, work.item.batch);
            }
        }
    }
};
#endif

// The warp that requests tiles: one lane works, and tells the warpgroups which work each tile belongs to. With a KEY_MASK its other lanes work too.
struct Loads {
    const LongForwardShared shared;
    const Batch& batch;
    const TensorMap &query, &key, &value;
    const Group group;
    const Window window;
    const KeyMask mask;
    const bool asks;  // whether this is that lane
    int chunk = 0, works = 0;  // requested so far

    __device__ __forceinline__ void tell_and_ask(const QueryBlock& work) {
        const int slot = slot_of(works);
        if (works >= QUERY_SLOTS) barrier_wait(shared.barrier(FREE + slot), slot_parity(works) ^ 1);
        work.tell_to(shared.work(slot));
        works++;
        if (work.first < 0 || (BIAS && work.item.q_len == 0)) return barrier_arrive(shared.barrier(QUERY + slot));
        barrier_expect(shared.barrier(QUERY + slot), 2 * QueryTile::GROUP_BYTES);
        const Item& it = work.item;
        for (int g = 0; g < 2; g++)
            QueryTile::load(shared.query(slot), query, shared.barrier(QUERY + slot), g, it.q_first + work.first + 64 * g, it.head, it.batch);
    }

    __device__ __forceinline__ void ask_keys(const Item& it, int first) {
        const int stage = stage_of(chunk), head = group.key_head(it.head);
        if (KEY_MASK) __syncwarp();  // lanes that wait for a place would delay the lane that requests tiles
        const int mine = first + 2 * (int(threadIdx.x) % 32);
        const unsigned char even = mask.at(it.batch, mine, it.k_len), odd = mask.at(it.batch, mine + 1, it.k_len);
        if (chunk >= STAGES) barrier_wait(shared.barrier(READ + stage), (chunk / STAGES - 1) & 1);
        if (KEY_MASK) {
            store_4(Selectors::place(shared.selectors(stage), int(threadIdx.x) % 32), selectors_of(even, odd));
            __syncwarp();  // the arrival below is that of all lanes
        }
        if (asks) {
            barrier_expect(shared.barrier(KEY + stage), KeyTile::GROUP_BYTES);
            KeyTile::load(shared.key(stage), key, shared.barrier(KEY + stage), 0, it.k_first + first, head, it.batch);
            barrier_expect(shared.barrier(VALUE + stage), KeyTile::GROUP_BYTES);
            KeyTile::load(shared.value(stage), value, shared.barrier(VALUE + stage), 0, it.k_first + first, head, it.batch);
        }
        chunk++;
    }

#if BIAS
    __device__ __forceinline__ void run_shared(const Sharing& sharing) {
        const int all = sharing.all();
#pragma unroll 1
        for (int number = blockIdx.x; number < all; number += gridDim.x) {
            const QueryBlock work = sharing.work(number, shared.team);
            if (asks) tell_and_ask(work);
            if (work.item.q_len == 0) continue;
#pragma unroll 1
            for (int c = 0; c < work.chunks(); c++) ask_keys(work.item, c * CHUNK_KEYS);
        }
        if (asks) tell_and_ask(QueryBlock{Item{}, -1});
    }
#endif

    __device__ __forceinline__ void run() {
        const int blocks = IN_PARTS ? 1 : (batch.max_q + BLOCK_ROWS - 1) / BLOCK_ROWS, all = batch.items() * blocks;
        // Blocks of one head run at the same time and share its keys and values in L2; the longest of a causal one first. Teams take turns if a team
        // would otherwise always get the same blocks.
        const int teams = TEAMS * gridDim.x;
        const bool turns = CAUSAL && teams % blocks == 0;
        int round = 0;
#pragma unroll 1
        for (int number = TEAMS * blockIdx.x + shared.team; number < all; number += teams, round++) {
            const int index = unsigned(number) / unsigned(blocks), rest = number - index * blocks;
            const int first = (IN_PARTS ? batch.part(index) : blocks - 1 - (turns ? (rest + round) % blocks : rest)) * BLOCK_ROWS;
            const QueryBlock work{batch.item(index, window), first};
            if (first >= work.item.q_len) continue;
            tell_and_ask(work);
#pragma unroll 1
            for (int c = work.first_chunk(); c < work.chunks(); c++) ask_keys(work.item, c * CHUNK_KEYS);
        }
        tell_and_ask(QueryBlock{Item{}, -1});
    }
};

// A warpgroup's way through the works that it is told.
struct Computing {
    Rows rows;
    const Output& output;
    const Batch& batch;
    const Window window;
    const bool arriving;
    bool unread = false;  // the copy engine may read the queries' memory of the work before
    int chunk = 0, works = 0;
    int tile = 0;  // of the bias, the first of a work

    // the queries' memory of the work before is free
    __device__ __forceinline__ void finish() {
        if (!unread) return;
        if (threadIdx.x % 128 == 0) {
            stores_wait_read();
            barrier_arrive(rows.shared.barrier(FREE + slot_of(works - 1)));
        }
        unread = false;
    }
    // a chunk of keys that this warpgroup no longer reads
    __device__ __forceinline__ void release(int at) { warp_arrives(rows.shared.barrier(READ + stage_of(at)), arriving); }

    // Chunk c of an item, of which this warpgroup sees keys before `mine`, and each of its queries those before `whole`, if not those before its
    // window: its scores become weights. Returns how many keys it has.
    template <bool FIRST>
    __device__ __forceinline__ int next(const Item& item, int first, int mine, int whole, int c) {
        const int begin = c * CHUNK_KEYS;
        int keys = CHUNK_KEYS;
        if (c < whole / CHUNK_KEYS && (!WINDOW || begin >= first + 63 + item.back())) {
            rows.chunk<CHUNK_KEYS, false, FIRST>(chunk, item, first, begin, tile + c, arriving);
        } else {
            rows.clear_behind(chunk, item.k_len - begin, batch);
            keys = width_of(mine - begin);
            if (keys == CHUNK_KEYS) rows.chunk<CHUNK_KEYS, true, FIRST>(chunk, item, first, begin, tile + c, arriving);
            else if (keys == 32) rows.chunk<32, true, FIRST>(chunk, item, first, begin, tile + c, arriving);
            else rows.chunk<16, true, FIRST>(chunk, item, first, begin, tile + c, arriving);
        }
        if (!FIRST) release(chunk - 1);  // of which the products have ended
        chunk++;
        return keys;
    }

    __device__ __forceinline__ void pass_tile(int c) {
#if BIAS
        barrier_wait(rows.bias.filled(tile + c), BiasTiles::parity(tile + c));
        warp_arrives(rows.bias.read(tile + c), arriving);
#endif
    }

    // the chunks before `end` that only the other warpgroup needs
    __device__ __forceinline__ void pass(const QueryBlock& work, int& c, int end) {
#pragma unroll 1
        for (; c < end; c++, chunk++) {
            barrier_wait(rows.shared.barrier(KEY + stage_of(chunk)), parity_of(chunk));
            barrier_wait(rows.shared.barrier(VALUE + stage_of(chunk)), parity_of(chunk));
            rows.clear_behind(chunk, work.item.k_len - c * CHUNK_KEYS, batch);
            release(chunk);
            pass_tile(c);  // beside its keys: the other warpgroup waits for the tiles behind it
        }
    }

    // the tiles of the bias from the c-th on, which only other teams need
    __device__ __forceinline__ void pass_tiles(const QueryBlock& work, int c) {
        if (!BIAS) return;
#pragma unroll 1
        for (; c < work.tiles; c++) pass_tile(c);
        tile += work.tiles;
    }

    __device__ __forceinline__ void compute(const QueryBlock& work) {
        const Item& item = work.item;
        const int first = work.first + 64 * rows.warpgroup, chunks = work.chunks();
        // keys that some query, and that every query, of this warpgroup sees
        const int mine = first >= item.q_len ? 0 : CAUSAL ? between(0, first + 64 + item.reach(), item.k_len) : item.k_len;
        const int whole = CAUSAL ? between(0, first + 1 + item.reach(), mine) : mine;
        int c = 0;
        if (WINDOW) c = work.first_chunk();  // so that kernels without a window keep their machine code
        const int own = WINDOW ? max(c, between(0, first + item.back(), item.k_len) / CHUNK_KEYS) : 0;  // the first chunk of this warpgroup
        if (own * CHUNK_KEYS < mine) {
            if (WINDOW) pass(work, c, own);
            int last = next<true>(item, first, mine, whole, c++);  // keys of the last chunk
            finish();
#pragma unroll 1
            while (c * CHUNK_KEYS < mine) last = next<false>(item, first, mine, whole, c++);
            if (last == CHUNK_KEYS) rows.values<CHUNK_KEYS>(chunk - 1);
            else if (last == 32) rows.values<32>(chunk - 1);
            else rows.values<16>(chunk - 1);
            products_wait<0>();
            release(chunk - 1);
        }
        pass(work, c, chunks);
        pass_tiles(work, c);
        finish();
        output.write(rows, item, first);
    }

    // a work of which this team has no problem
    __device__ __forceinline__ void idle(const QueryBlock& work) {
        finish();
        pass_tiles(work, 0);
        sync_threads(OF_WARPGROUP + 2 * rows.shared.team + rows.warpgroup, 128);  // otherwise a slow warp would miss the work that replaces this one
        if (threadIdx.x % 128 == 0) barrier_arrive(rows.shared.barrier(FREE + slot_of(works)));
    }

    __device__ __forceinline__ void run() {
        const LongForwardShared& shared = rows.shared;
#pragma unroll 1
        while (true) {
            const int slot = slot_of(works);
            barrier_wait(shared.barrier(QUERY + slot), slot_parity(works));
            const QueryBlock work = QueryBlock::from(shared.work(slot), window);
            if (work.first < 0) break;
            if (BIAS && work.item.q_len == 0) {
                idle(work);
                works++;
                continue;
            }
            rows.begin(slot);
            compute(work);
            works++, unread = true;
            if (QUERY_SLOTS == 1) finish();
        }
        finish();  // the copy engine reads this memory until then
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    long_forward_sm90(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                      const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap out_map,
#if BIAS
                      const __grid_constant__ TensorMap bias_map,
#endif
                      const int* cu_q, const int* cu_k, const int* members, const int* count,
                      Number* out, float* lse,
#if MASK
                      const u64* mask_bits,
#endif
#if KEY_MASK
                      const unsigned char* key_mask,
#endif
                      const void* sequences, const void* total_q, const void* total_k, const void* max_q, const void* max_k,
                      const void* row_batch, const void* row_head,
#if DROPOUT
                      const u64* seed, u32 threshold, float inverse,
#endif
                      long long out_batch, long long out_head, long long out_row,
#if MASK
                      long long mask_batch, long long mask_head, long long mask_row,
#endif
#if KEY_MASK
                      long long key_mask_batch, int key_mask_column,
#endif
#if GROUPED
                      int group_size,
#endif
#if WINDOW
                      int window_left, int window_right,
#endif
#if BIAS
                      int bias_windows, int bias_owners,
#endif
                      int heads, int head_dim, float exponent) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Batch batch{.cu_q = cu_q, .cu_k = cu_k, .members = members, .count = count,
                      .sequences = int(number_of(sequences)), .total_q = int(number_of(total_q)), .total_k = int(number_of(total_k)),
                      .max_q = int(number_of(max_q)), .max_k = int(number_of(max_k)), .heads = heads};
    const BiasTiles bias_tiles(shared_address(memory));
    if (threadIdx.x < TEAMS) LongForwardShared(shared_address(memory), threadIdx.x).init_barriers();
    if (BIAS && threadIdx.x == 0) bias_tiles.init_barriers();
    __syncthreads();
    const int warpgroup = warpgroup_of();
    if (warpgroup == 2 * TEAMS) {
        leave_registers<LOAD_REGISTERS>();
        const int warp = thread_of() % 128 / 32;
        Loads loads{.shared = LongForwardShared(shared_address(memory), warp), .batch = batch, .query = query_map, .key = key_map, .value = value_map,
                    .group = GROUP, .window = WINDOW_OF_CALL, .mask = KEY_MASK_OF_CALL, .asks = !KEY_MASK || thread_of() % 32 == 0};
#if BIAS
        const BiasOf bias = BIAS_OF_CALL;
        const Sharing sharing{batch, bias};
        if (warp < TEAMS && (KEY_MASK || thread_of() % 32 == 0)) loads.run_shared(sharing);
        if (warp == TEAMS && thread_of() % 32 == 0) BiasLoads{bias_tiles, sharing}.run();
#else
        if (warp < TEAMS && thread_of() % 32 == 0) loads.run();
#endif
        return;
    }
    take_registers<COMPUTE_REGISTERS>();
    const Output output{.map = out_map, .out = out, .lse = lse, .strides = {out_batch, out_head, out_row},
                        .row_batch = number_of(row_batch), .row_head = number_of(row_head), .head_dim = head_dim};
    Dropout dropout{};
#if DROPOUT
    dropout = Dropout::of(*seed, threshold, inverse, heads, batch.max_k);
#endif
    Computing computing{.rows = Rows{.shared = LongForwardShared(shared_address(memory), warpgroup / 2), .warpgroup = warpgroup % 2, .exponent = exponent,
                                     .mask = MASK_BITS, .dropout = dropout, .bias = bias_tiles},
                        .output = output, .batch = batch, .window = WINDOW_OF_CALL, .arriving = arriving_lane()};
    computing.run();
}
