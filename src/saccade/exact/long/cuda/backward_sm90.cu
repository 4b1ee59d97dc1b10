// Gradients of long sequences on sm_90a: a thread block takes one (sequence, key head) at a time, without atomics.
//
//   P = exp(scale Q K^T - lse)    dV = P^T dO    dP = dO V^T    dS = P (dP - delta)    dK = scale dS^T Q    dQ = scale dS K
//   delta = rowsum(dO O) - dlse
//
// With dropout dV = (P kept)^T dO / (1 - p) and dS = P (dP kept / (1 - p) - delta): -delta is added after dP, onto which it is summed without.
//
// Keys come in rounds of 128, queries in chunks of 64. The four warpgroups of a block:
//
//   keys 0, 1   own 64 keys of a round each and form everything transposed: S^T = K Q^T, dP^T = V dO^T; P^T and dS^T stay in registers as left
//               factors of dV and dK; dS^T goes to shared memory too
//   queries     adds up dQ = dS K, and stores unfinished sums in device memory between the rounds: each thread its own numbers, in the same order in
//               every run
//   loads       requests tiles, and computes delta in the first round
//
// shared memory:   | K, V: two rounds | Q, dO: STAGES chunks | dS^T: two chunks | O: two chunks | tiles of the bias: STAGES | -lse, -delta of each chunk |
//                  | rounds | barriers |
//
// With GROUPED heads a round meets the chunks of all query heads that share its keys, one head after another: their dK and dV add up in the registers
// where those of one head do, and unfinished dQ has a place for each head.
//
// Barriers, each with one that says that its memory was read: KEYS (a round's K and V are there, and what it is), CHUNK (a chunk's Q and dO),
// ROWS (the numbers of its rows), SCORES (dS^T is written). Source: FlashAttention-2 (Dao 2023), algorithm 2, with roles as in FlashAttention-3
// (Shah et al. 2024); traffic: Q and dO once from memory, then from L2 once a round.
//
// With a BIAS a chunk comes with its tile of 64 queries and 128 keys, which is read transposed, and with numbers of its queries that another kernel found
// (rows_of_bias.cuh): lse has lost the logarithm of the sum where scores are near finfo.min. Another kernel computes the gradient of the bias. A
// KEY_MASK is two bytes for a thread and a round, those of its two keys.
//
// With a WINDOW a block takes the keys of a segment, so that a long sequence occupies many blocks. Queries whose window begins in a segment
// are its own: it writes their dQ, and goes on to the rounds behind its end that their windows reach, of which it writes no dK and dV. A round meets only
// the chunks that see its keys, and unfinished dQ has a place for as many chunks as a window reaches at a time. A segment has SEGMENT rounds. If SEGMENT
// is 1, each block has an equal share of all rounds, one after another, and its part of a sequence is a segment.
//
// Compiled with the macros of chunks_sm90.cuh, STAGES, SEGMENT, OWN_DELTA (0: delta is given, since O does not fit beside the others), KEY_REGISTERS,
// QUERY_REGISTERS, LOAD_REGISTERS and SHARED_BYTES.
#include "chunks_sm90.cuh"
#include "ring.cuh"

#ifndef SEGMENT
#define SEGMENT 1
#endif
#if BIAS
#include "rows_of_bias.cuh"
#endif

constexpr int CHUNK_ROWS = 64, ROUND_ROWS = 128, ROUNDS_KNOWN = 4;
constexpr int ROUND_BITS = 10;  // of the number of a round, which shares a word with those of its segment's first round and end
using KeyTile = Tile<HEAD_DIM, ROUND_ROWS>;
using QueryTile = Tile<HEAD_DIM, CHUNK_ROWS>;
using ScoreTile = Tile<CHUNK_ROWS, ROUND_ROWS>;  // rows are keys
constexpr bool NARROW = HEAD_DIM == 128;  // registers are scarce: S is dead before dP is formed
constexpr int PART = HEAD_DIM < 64 ? HEAD_DIM : 64;  // columns of dQ at a time
enum Barrier { KEYS, KEYS_READ = 2, SCORES = 4, SCORES_READ = 6, CHUNK = 8, ROWS = CHUNK + STAGES, CHUNK_READ = ROWS + STAGES, BARRIERS = CHUNK_READ + STAGES };
enum Meeting { OF_KEYS = 1, OF_ALL_KEYS = 3, OF_LOADS = 4 };

struct LongBackwardShared : Memory {
    using Memory::Memory;
    __device__ __forceinline__ u32 key(int n) const { return base + KEYS_AT + n % 2 * 2 * KeyTile::BYTES; }
    __device__ __forceinline__ u32 value(int n) const { return key(n) + KeyTile::BYTES; }
    __device__ __forceinline__ u32 query(int stage) const { return base + QUERIES_AT + stage * 2 * QueryTile::BYTES; }
    __device__ __forceinline__ u32 dout(int stage) const { return query(stage) + QueryTile::BYTES; }
    __device__ __forceinline__ u32 dscores(int n) const { return base + SCORES_AT + n % 2 * ScoreTile::BYTES; }
    __device__ __forceinline__ u32 out(int n) const { return base + OUT_AT + n % 2 * QueryTile::BYTES; }
    // 64 queries and the 64 keys of a warpgroup
    __device__ __forceinline__ u32 bias(int stage, int warpgroup) const { return base + BIAS_AT + (2 * stage + warpgroup) * BIAS_BLOCK_BYTES; }
    // of each two queries -lse in base 2, then -delta; with a bias, then whether a query of each 16 is a far one
    __device__ __forceinline__ u32 rows(int stage) const { return base + ROWS_AT + stage * ROW_BYTES; }
    __device__ __forceinline__ u32 far(int stage) const { return rows(stage) + 8 * CHUNK_ROWS; }
    __device__ __forceinline__ u32 round(int n) const { return base + ROUNDS_AT + n % ROUNDS_KNOWN * 32; }
    __device__ __forceinline__ u32 barrier(int i) const { return base + BARRIERS_AT + 8 * i; }

    static constexpr u32 KEYS_AT = 0, QUERIES_AT = 4 * KeyTile::BYTES, SCORES_AT = QUERIES_AT + STAGES * 2 * QueryTile::BYTES,
                         OUT_AT = SCORES_AT + 2 * ScoreTile::BYTES, BIAS_AT = OUT_AT + 2 * OWN_DELTA * QueryTile::BYTES,
                         ROWS_AT = BIAS_AT + BIAS * STAGES * 2 * BIAS_BLOCK_BYTES, ROW_BYTES = 8 * CHUNK_ROWS + BIAS * 16,
                         ROUNDS_AT = ROWS_AT + STAGES * ROW_BYTES, BARRIERS_AT = ROUNDS_AT + ROUNDS_KNOWN * 32;
};
static_assert(LongBackwardShared::BARRIERS_AT + 8 * BARRIERS <= SHARED_BYTES, "the launch asks for too little shared memory");

// chunks of queries from `first` to before `end`
struct Chunks {
    int first, end;

    __device__ __forceinline__ bool have(int chunk) const { return first <= chunk && chunk < end; }
};

// 128 keys of an item, and the chunks of queries that meet them
struct Round {
    Item item;
    int start;  // the first key; -1 behind the last round of the block
    int first, end;  // of a WINDOW: the rounds of its segment

    __device__ __forceinline__ int rounds() const { return max(1, (item.k_rows + ROUND_ROWS - 1) / ROUND_ROWS); }
    __device__ __forceinline__ int chunks() const { return max(!WINDOW, (item.q_len + CHUNK_ROWS - 1) / CHUNK_ROWS); }
    __device__ __forceinline__ int keys() const { return between(0, item.k_len - start, ROUND_ROWS); }
    // the rounds that a chunk meets in a window, one at least: those with a key that some query sees, or the nearest
    __device__ __forceinline__ int last_round() const { return max(0, item.k_len - 1) / ROUND_ROWS; }
    __device__ __forceinline__ int first_of(int chunk) const { return between(0, (chunk * CHUNK_ROWS + item.back()) >> 7, last_round()); }
    __device__ __forceinline__ int last_of(int chunk) const { return between(0, (chunk * CHUNK_ROWS + CHUNK_ROWS - 1 + item.reach()) >> 7, last_round()); }
    // the first chunk whose window begins in a round or behind it
    __device__ __forceinline__ int first_from(int round) const { return round == 0 ? 0 : between(0, (round * ROUND_ROWS - item.back() + 63) >> 6, chunks()); }

    // Whether dK and dV of its keys are another segment's; whether a chunk's dQ is this one's; whether the chunk is met for the first time, and whether
    // its dQ was begun before.
    __device__ __forceinline__ bool is_beyond() const { return WINDOW && start >= end * ROUND_ROWS; }
    __device__ __forceinline__ bool owns(int chunk) const { return !WINDOW || first_of(chunk) >= first; }
    __device__ __forceinline__ bool opens(int chunk) const {
        return WINDOW ? start == max(first_of(chunk), first) * ROUND_ROWS : start == 0;
    }
    __device__ __forceinline__ bool continues(int chunk) const { return WINDOW ? start > first_of(chunk) * ROUND_ROWS : start > 0; }
    // whether the block has this round to compute
    __device__ __forceinline__ bool is_there() const {
        if (!WINDOW) return start < rounds() * ROUND_ROWS;
        return is_beyond() ? first_chunk() < end_chunk() : start < rounds() * ROUND_ROWS;
    }

    // Without a window round 0 meets every chunk, so that every query gets a dQ; the last chunk meets every round, so that no round is empty.
    __device__ __forceinline__ int first_chunk() const {
        if (WINDOW) {
            if (start > last_round() * ROUND_ROWS) return chunks();
            const int met = start == 0 ? 0 : between(0, (start - item.reach()) >> 6, chunks());
            return is_beyond() ? max(met, first_from(first)) : met;
        }
        if (start == 0) return 0;
        if (start >= item.k_len) return chunks() - 1;
        return CAUSAL ? between(0, (start - item.reach()) / CHUNK_ROWS, chunks() - 1) : 0;
    }
    __device__ __forceinline__ int end_chunk() const {
        if (!WINDOW) return chunks();
        const int last = min(start / ROUND_ROWS, end - 1);
        return last >= last_round() ? chunks() : first_from(last + 1);
    }
    // The chunks that see a key of a warpgroup, with a WINDOW. It passes others that the round meets.
    __device__ __forceinline__ Chunks seeing(int warpgroup) const {
        const int key = start + 64 * warpgroup, behind = min(key + 64, item.k_len);
        return key < behind ? Chunks{(key - item.reach()) >> 6, (behind - item.back() + 63) >> 6} : Chunks{0, 0};
    }
    // the first key of the last round that a chunk meets
    __device__ __forceinline__ int last_start(int chunk) const {
        if (WINDOW) return last_of(chunk) * ROUND_ROWS;
        if (chunk == chunks() - 1) return (rounds() - 1) * ROUND_ROWS;
        int last = max(0, item.k_len - 1) / ROUND_ROWS;
        if (CAUSAL) last = between(0, (chunk * CHUNK_ROWS + CHUNK_ROWS - 1 + item.reach()) >> 7, last);
        return last * ROUND_ROWS;
    }
};

__device__ __forceinline__ void write_round(u32 to, const Round& r) {
    const Item& it = r.item;
    const int place = WINDOW ? r.start / ROUND_ROWS | r.first << ROUND_BITS | r.end << 2 * ROUND_BITS : r.start;
    tell(to, {it.head, it.told_row(), it.q_first, it.q_len, it.k_first, it.k_len, it.k_rows, r.start < 0 ? -1 : place});
}
__device__ __forceinline__ Round read_round(u32 from, const Window& window) {
    const int head = told(from, 0), row = told(from, 1);
    const Item item{head, Item::batch_of(row), told(from, 2), told(from, 3), told(from, 4), told(from, 5), told(from, 6), row, window};
    const int place = told(from, 7);
    if (!WINDOW || place < 0) return Round{item, place, 0, 0};
    constexpr int ROUNDS = 1 << ROUND_BITS;
    return Round{item, place % ROUNDS * ROUND_ROWS, place >> ROUND_BITS & ROUNDS - 1, place >> 2 * ROUND_BITS};
}

// The rows of a round where results are written. With GROUPED heads they are read once more, for the loops around a chunk leave them no registers.
__device__ __forceinline__ Item item_to_write(const Round& round, u32 from) {
    return GROUPED ? read_round(from, round.item.window).item : round.item;
}

struct Gradients {
    Number *dquery, *dkey, *dvalue;
    Strides dquery_strides, dkey_strides, dvalue_strides;
    int head_dim;
    float scale;
};

#if BIAS
static_assert(!OWN_DELTA, "delta comes with the numbers of the rows");
#else
struct NumbersOfRows {};
#endif

// One of the two warpgroups that own keys.
struct Keys {
    const LongBackwardShared shared;
    const int warpgroup;
    const float exponent;  // scale * log2(e); with a bias, the scale
    const Group group;
    const MaskBits mask;
    const Dropout& dropout;
    const Window window;
    const NumbersOfRows numbers;
    const KeyMask key_mask;
    const bool arriving = arriving_lane();
    u32 selectors[2];  // of a KEY_MASK, of this lane's keys
    float dkey[HEAD_DIM / 2], dvalue[HEAD_DIM / 2];
    int step = 0, number = 0;  // chunks, and rounds, so far

    __device__ __forceinline__ Keys(LongBackwardShared shared, int warpgroup, float exponent, Group group, MaskBits mask, const Dropout& dropout, Window window,
                                    NumbersOfRows numbers, KeyMask key_mask)
        : shared(shared), warpgroup(warpgroup), exponent(exponent), group(group), mask(mask), dropout(dropout), window(window), numbers(numbers), key_mask(key_mask) {}

    // S^T, or onto -delta dP^T - delta: 64 keys x N queries
    template <int N, bool ADDS>
    __device__ __forceinline__ void multiply(float (&d)[N / 2], u32 keys, u32 queries) {
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; s++) {
            u64 left = KeyTile::columns(shared.low(keys), 64 * warpgroup, s), right = QueryTile::columns(shared.low(queries), 0, s);
            if (s == 0 && !ADDS) Products<N>::set(d, left, right);
            else Products<N>::add(d, left, right);
        }
        products_commit();
    }

    // A chunk of a query head whose queries fill N columns. survivors: which of its weights dropout leaves (dropout.cuh).
    template <int N>
    __device__ __forceinline__ void chunk(const Round& round, int head, int c, u32 survivors) {
        const int stage = stage_of(step), row = own_row(round.start + 64 * warpgroup);
        const u32 shown = mask.of(round.item, head, row, round.item.k_rows, c);  // its latency is hidden by the product S
        const u32 query = shared.query(stage), dout = shared.dout(stage), rows = shared.rows(stage) + int(threadIdx.x) % 4 * 16;
        float scores[N / 2], dweights[N / 2];
        float2 shift[N / 8];
        products_begin();
        multiply<N, false>(scores, shared.key(number), query);
        if (!NARROW) {  // while S is under way
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                const float4 x = load_floats(rows + 64 * i);
                shift[i] = make_float2(x.x, x.y);
                if (!DROPOUT) begin_at<N>(dweights, i, x);
            }
            products_begin();
            multiply<N, !DROPOUT>(dweights, shared.value(number), dout);
        }
        products_wait<NARROW ? 0 : 1>();
        add_bias<N>(scores, round.item, head, c, stage);
        const float by = BIAS ? LOG2E : exponent;
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            if (NARROW) {
                const float4 x = load_floats(rows + 64 * i);
                shift[i] = make_float2(x.x, x.y);
            }
            const float2 x = shift[i];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                scores[4 * i + 2 * h] = exp2_fast(fmaf(scores[4 * i + 2 * h], by, x.x));
                scores[4 * i + 2 * h + 1] = exp2_fast(fmaf(scores[4 * i + 2 * h + 1], by, x.y));
            }
        }
        if (MASK) {
#pragma unroll
            for (int e = 0; e < N / 2; e++)
                if (!mask.shows(shown, e)) scores[e] = 0.0f;
        }
        hide<N>(scores, round.item, c * CHUNK_ROWS, round.start + 64 * warpgroup);
        u32 weights[N / 4], dscores[N / 4];
#pragma unroll
        for (int i = 0; i < N / 4; i++) weights[i] = pack(scores[2 * i], scores[2 * i + 1]);
        if (NARROW) {
            if (!DROPOUT) {
#pragma unroll
                for (int i = 0; i < N / 8; i++) begin_at<N>(dweights, i, load_floats(rows + 64 * i));
            }
            products_begin();
            multiply<N, !DROPOUT>(dweights, shared.value(number), dout);
        }
        products_wait<0>();
        float4 pair;  // the numbers of two queries
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const float2 p = NARROW ? floats_of(weights[i]) : make_float2(scores[2 * i], scores[2 * i + 1]);
            if (DROPOUT) {
                const bool left = Dropout::leaves(survivors, 2 * i), right = Dropout::leaves(survivors, 2 * i + 1);
                if (i % 2 == 0) pair = load_floats(rows + 32 * i);
                weights[i] = pack(left ? p.x : 0.0f, right ? p.y : 0.0f);
                dweights[2 * i] = fmaf(left ? dweights[2 * i] : 0.0f, dropout.inverse, pair.z);
                dweights[2 * i + 1] = fmaf(right ? dweights[2 * i + 1] : 0.0f, dropout.inverse, pair.w);
            }
            dscores[i] = pack(p.x * dweights[2 * i], p.y * dweights[2 * i + 1]);
        }
        products_begin();
#pragma unroll
        for (int s = 0; s < N / 16; s++) Products<HEAD_DIM>::add_rows(dvalue, weights + 4 * s, QueryTile::rows(shared.low(dout), 16 * s));
#pragma unroll
        for (int s = 0; s < N / 16; s++) Products<HEAD_DIM>::add_rows(dkey, dscores + 4 * s, QueryTile::rows(shared.low(query), 16 * s));
        products_commit();
        if (step >= 2) barrier_wait(shared.barrier(SCORES_READ + step % 2), (step / 2 - 1) & 1);
#pragma unroll
        for (int s = 0; s < N / 16; s++) store_matrices(ScoreTile::fragment(shared.dscores(step), 64 * warpgroup, s), dscores + 4 * s);
        fence_async();
        warp_arrives(shared.barrier(SCORES + step % 2), arriving);
        products_wait<0>();
        warp_arrives(shared.barrier(CHUNK_READ + stage_of(step)), arriving);
        step++;
    }

    // scale S^T + bias^T, less the maximum of far queries
    template <int N>
    __device__ __forceinline__ void add_bias(float (&scores)[N / 2], const Item& item, int head, int c, int stage) const {
#if BIAS
        const int lane = int(threadIdx.x) % 32, column = int(threadIdx.x) / 32 % 4 * 2 + lane / 8 % 2;
#pragma unroll
        for (int s = 0; s < N / 16; s++) {
            u32 words[4];
            load_transposed(words, Tile<64, 64>::chunk(shared.bias(stage, warpgroup), 0, 16 * s + lane / 16 * 8 + lane % 8, column));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 added = KeyMask::numbers_of(words[j], selectors[j % 2]);
                float &x = scores[8 * s + 2 * j], &y = scores[8 * s + 2 * j + 1];
                x = fmaf(x, exponent, added.x), y = fmaf(y, exponent, added.y);
            }
        }
        const float4 far = load_floats(shared.far(stage));
        if (far.x + far.y + far.z + far.w == 0.0f) return;
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const float maximum = numbers.maximum(item, head, c * CHUNK_ROWS + 8 * i + own_column() + b);
                scores[4 * i + b] -= maximum, scores[4 * i + 2 + b] -= maximum;
            }
#endif
    }

    // -delta of the queries of column group i, for both rows of this lane
    template <int N>
    __device__ __forceinline__ void begin_at(float (&d)[N / 2], int i, const float4& x) {
        d[4 * i] = d[4 * i + 2] = x.z, d[4 * i + 1] = d[4 * i + 3] = x.w;
    }

    // P = 0 where a query does not see a key or one of them does not exist. Not left to lse: an infinite key makes a score of zeros NaN.
    template <int N>
    __device__ __forceinline__ void hide(float (&p)[N / 2], const Item& item, int first_query, int first_key) {
        bool whole = first_query + N <= item.q_len && first_key + 64 <= item.k_len && (!CAUSAL || first_key + 63 <= first_query + item.reach()) &&
                     (!WINDOW || first_key >= first_query + N - 1 + item.back());
        if (whole) return;
        int query = first_query + own_column(), row = own_row(first_key);
#pragma unroll
        for (int e = 0; e < N / 2; e++)
            if (!item.sees(column_at(query, e), row_at(row, e))) p[e] = 0.0f;
    }

    __device__ __forceinline__ void await_chunk() {
        barrier_wait(shared.barrier(CHUNK + stage_of(step)), parity_of(step));
        barrier_wait(shared.barrier(ROWS + stage_of(step)), parity_of(step));
    }

    // Zeros behind the last query of a chunk, where another sequence may hold NaN.
    __device__ __forceinline__ void clear_behind(int rows) {
        const int stage = stage_of(step), end = rows > 32 ? 64 : rows > 16 ? 32 : 16;
        if (rows >= end) return;
        QueryTile::clear(shared.query(stage), max(rows, 0), end, threadIdx.x % 256, 256);
        QueryTile::clear(shared.dout(stage), max(rows, 0), end, threadIdx.x % 256, 256);
        fence_async();
        sync_threads(OF_ALL_KEYS, 256);
    }

    // K and V of this warpgroup, with zeros behind the last key
    __device__ __forceinline__ void take_keys(int rows) {
        if (rows < 64) {
            KeyTile::clear(shared.key(number), 64 * warpgroup + rows, 64 * warpgroup + 64, threadIdx.x % 128, 128);
            KeyTile::clear(shared.value(number), 64 * warpgroup + rows, 64 * warpgroup + 64, threadIdx.x % 128, 128);
            fence_async();
            sync_threads(OF_KEYS + warpgroup, 128);
        }
    }

    // which weights of a chunk of a query head survive, drawn before its tiles are there
    __device__ __forceinline__ u32 survivors_of(const Round& round, int head, int c) const {
        if (!DROPOUT) return 0;
        const u32 problem = dropout.problem(round.item.sequence, head);
        return dropout.of_keys<CHUNK_ROWS>(problem, c * CHUNK_ROWS, round.start + 64 * warpgroup);
    }

    __device__ __forceinline__ void read_mask(const Round& round) {
        const int first = own_row(round.start + 64 * warpgroup);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const bool shown = key_mask.at(round.item.batch, first + 8 * h, round.item.k_len);
            selectors[h] = selectors_of(shown, shown);
        }
    }

    // the chunks of a query head
    __device__ __forceinline__ void compute(const Round& round, int head) {
        int c = round.first_chunk();
        int whole = round.item.q_len / CHUNK_ROWS, end = 0;
        if (WINDOW) {
            const Chunks own = round.seeing(warpgroup);
            const int before = min(own.first, round.end_chunk());
            pass(round, c, before);
            c = max(c, before), end = min(own.end, round.end_chunk()), whole = min(whole, end);
        }
#pragma unroll 1
        for (; c < whole; c++) {
            const u32 survivors = survivors_of(round, head, c);
            await_chunk();
            chunk<64>(round, head, c, survivors);
        }
        if (WINDOW && c >= end) return pass(round, c, round.end_chunk());
        if (c >= round.end_chunk()) return;
        const int rows = round.item.q_len - c * CHUNK_ROWS;  // of the last chunk of all
        const u32 survivors = survivors_of(round, head, c);
        await_chunk();
        clear_behind(rows);
        if (rows > 32) chunk<64>(round, head, c, survivors);
        else if (rows > 16) chunk<32>(round, head, c, survivors);
        else chunk<16>(round, head, c, survivors);
    }

    // chunks that see no key of this warpgroup, or of which it has none
    __device__ __forceinline__ void pass(const Round& round, int first, int end) {
#pragma unroll 1
        for (int c = first; c < end; c++) {
            await_chunk();
            clear_behind(round.item.q_len - c * CHUNK_ROWS);
            if (step >= 2) barrier_wait(shared.barrier(SCORES_READ + step % 2), (step / 2 - 1) & 1);
            warp_arrives(shared.barrier(SCORES + step % 2), arriving);
            warp_arrives(shared.barrier(CHUNK_READ + stage_of(step)), arriving);
            step++;
        }
    }

    __device__ __forceinline__ void run(const Gradients& out) {
#pragma unroll 1
        for (;; number++) {
            barrier_wait(shared.barrier(KEYS + number % 2), number / 2 & 1);
            const Round round = read_round(shared.round(number), window);
            if (round.start < 0) return;
            const int rows = between(0, round.keys() - 64 * warpgroup, 64);
#pragma unroll
            for (int e = 0; e < HEAD_DIM / 2; e++) dkey[e] = dvalue[e] = 0.0f;
            if (KEY_MASK) read_mask(round);
            if (rows > 0 || warpgroup == 0) {
                take_keys(rows);
#pragma unroll 1
                for (int member = 0; member < group.members(); member++) compute(round, group.query_head(round.item.head, member));
            } else {
#pragma unroll 1
                for (int member = 0; member < group.members(); member++) pass(round, round.first_chunk(), round.end_chunk());
            }
            warp_arrives(shared.barrier(KEYS_READ + number % 2), arriving);
            const int first = own_row(round.start + 64 * warpgroup);
            const Item it = item_to_write(round, shared.round(number));
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = first + 8 * h;
                const bool there = row < it.k_rows && !round.is_beyond();
                store_row<HEAD_DIM>(dvalue, h, DROPOUT ? dropout.inverse : 1.0f, out.dvalue + out.dvalue_strides.at(it.batch, it.head, it.k_first + row), out.head_dim, there);
                store_row<HEAD_DIM>(dkey, h, out.scale, out.dkey + out.dkey_strides.at(it.batch, it.head, it.k_first + row), out.head_dim, there);
            }
        }
    }
};

// The warpgroup that adds up dQ.
struct Queries {
    const LongBackwardShared shared;
    float* parked;  // of this block
    const Group group;
    const Window window;
    const int places;  // for chunks of unfinished dQ; of a WINDOW
    const int thread = thread_of() % 128;
    const bool arriving = arriving_lane();
    const u64 kept = keep_in_cache();
    int step = 0, number = 0;  // chunks, and rounds, so far

    __device__ __forceinline__ Queries(LongBackwardShared shared, float* parked, Group group, Window window, int places)
        : shared(shared), parked(parked), group(group), window(window), places(places) {}

    // 64 columns of dQ += dS K over 16 STEPS keys, from key `first` on
    template <int STEPS>
    __device__ __forceinline__ void multiply(float (&dquery)[PART / 2], int block, int first) {
        products_begin();
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            Products<PART>::add_transposed(dquery, ScoreTile::rows(shared.low(shared.dscores(step)), first + 16 * s), KeyTile::rows(shared.low(shared.key(number)), first + 16 * s, block));
        products_commit();
        products_wait<0>();
    }

    // the same over the keys of the warpgroups that have written dS of a chunk
    __device__ __forceinline__ void multiply_seen(float (&dquery)[PART / 2], int block, const Round& round, int c) {
        const bool first = round.seeing(0).have(c), second = round.seeing(1).have(c);
        if (first && second) multiply<ROUND_ROWS / 16>(dquery, block, 0);
        else if (first || second) multiply<ROUND_ROWS / 32>(dquery, block, second ? 64 : 0);
    }

    template <int STEPS>
    __device__ __forceinline__ void chunk(const Round& round, int member, int c, const Gradients& out) {
        const int place = WINDOW ? member * places + c % places : GROUPED ? member * round.chunks() + c : c;
        if (!round.owns(c)) {
            barrier_wait(shared.barrier(SCORES + step % 2), step / 2 & 1);
            warp_arrives(shared.barrier(SCORES_READ + step % 2), arriving);
            return;
        }
#pragma unroll
        for (int block = 0; block < HEAD_DIM / PART; block++) {
            float dquery[PART / 2];
            float4* mine = reinterpret_cast<float4*>(parked + (long long)(place * (HEAD_DIM / PART) + block) * CHUNK_ROWS * PART) + thread;
            // requested before dS is formed
#pragma unroll
            for (int i = 0; i < PART / 8; i++) {
                float4 x = (WINDOW ? round.continues(c) : round.start > 0) ? load_kept(mine + 128 * i, kept) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                dquery[4 * i] = x.x, dquery[4 * i + 1] = x.y, dquery[4 * i + 2] = x.z, dquery[4 * i + 3] = x.w;
            }
            if (block == 0) barrier_wait(shared.barrier(SCORES + step % 2), step / 2 & 1);
            if (WINDOW) multiply_seen(dquery, block, round, c);
            else multiply<STEPS>(dquery, block, 0);
            if (block == HEAD_DIM / PART - 1) warp_arrives(shared.barrier(SCORES_READ + step % 2), arriving);
            if (round.start < round.last_start(c)) {
#pragma unroll
                for (int i = 0; i < PART / 8; i++)
                    store_kept(mine + 128 * i, make_float4(dquery[4 * i], dquery[4 * i + 1], dquery[4 * i + 2], dquery[4 * i + 3]), kept);
            } else {
                const Item it = item_to_write(round, shared.round(number));
                const int first = c * CHUNK_ROWS + thread / 32 * 16 + thread % 32 / 4, head = group.query_head(it.head, member);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int row = first + 8 * h;
                    Number* to = out.dquery + out.dquery_strides.at(it.batch, head, it.q_first + row) + block * PART;
                    store_row<PART>(dquery, h, out.scale, to, out.head_dim - block * PART, row < it.q_len);
                }
            }
        }
    }

    template <int STEPS>
    __device__ __forceinline__ void compute(const Round& round, const Gradients& out) {
#pragma unroll 1
        for (int member = 0; member < group.members(); member++) {
#pragma unroll 1
            for (int c = round.first_chunk(); c < round.end_chunk(); c++, step++) chunk<STEPS>(round, member, c, out);
        }
    }

    __device__ __forceinline__ void run(const Gradients& out) {
#pragma unroll 1
        for (;; number++) {
            barrier_wait(shared.barrier(KEYS + number % 2), number / 2 & 1);
            const Round round = read_round(shared.round(number), window);
            if (round.start < 0) return;
            if (WINDOW || round.keys() > 64) compute<ROUND_ROWS / 16>(round, out);
            else compute<ROUND_ROWS / 32>(round, out);
            warp_arrives(shared.barrier(KEYS_READ + number % 2), arriving);
        }
    }
};

// The inputs: maps of the tensors, and the numbers of each query, at [batch][head][row]. delta is written in the first round if OWN_DELTA.
struct Inputs {
    const TensorMap &query, &key, &value, &dout, &out;
    const float *lse, *dlse;  // with a bias, lse is the shift and delta -delta |inverse| of NumbersOfRows
    float* delta;
    long long row_batch, row_head;
    BiasOf bias;
    NumbersOfRows numbers;
};

// The warpgroup that requests tiles. Two threads share a row: one has its lse, the other its delta.
struct Loads {
    const LongBackwardShared shared;
    const Inputs& in;
    const Group group;
    const int thread = thread_of() % 128;
    const bool arriving = arriving_lane();
    int number = 0, loads = 0;  // rounds and chunks requested so far
    // the chunk before, whose row numbers are still to be passed on
    bool pending = false, fresh = false;  // fresh: its delta is to be computed
    bool inside, kept;            // whether the row of this thread exists; whether its delta is needed again
    long long place;              // of its numbers
    float row;                    // lse, or delta; with a bias, the shift of the scores, or -delta
    bool is_far = false;          // of a bias

    __device__ __forceinline__ Loads(LongBackwardShared shared, const Inputs& in, Group group) : shared(shared), in(in), group(group) {}

    // K and V of a round, and the round's numbers
    __device__ __forceinline__ void ask_round(const Round& round) {
        if (number >= 2) barrier_wait(shared.barrier(KEYS_READ + number % 2), (number / 2 - 1) & 1);
        if (WINDOW) sync_threads(OF_LOADS, 128);  // a round without chunks could end before a slow warp has seen this phase, which then never comes
        if (thread == 0) {
            const u32 barrier = shared.barrier(KEYS + number % 2);
            write_round(shared.round(number), round);
            if (round.start < 0) {
                barrier_arrive(barrier);
            } else {
                const int groups = round.keys() > 64 ? 2 : 1;
                const Item& it = round.item;
                barrier_expect(barrier, 2 * groups * KeyTile::GROUP_BYTES);
                for (int g = 0; g < groups; g++) {
                    KeyTile::load(shared.key(number), in.key, barrier, g, it.k_first + round.start + 64 * g, it.head, it.batch);
                    KeyTile::load(shared.value(number), in.value, barrier, g, it.k_first + round.start + 64 * g, it.head, it.batch);
                }
            }
        }
        number++;
    }

    // a chunk of a query head
    __device__ __forceinline__ void ask_chunk(const Round& round, int head, int c) {
        const int stage = stage_of(loads), first = c * CHUNK_ROWS;
        const bool computes = OWN_DELTA && round.opens(c);
        const Item& it = round.item;
        if (loads >= STAGES) barrier_wait(shared.barrier(CHUNK_READ + stage), (loads / STAGES - 1) & 1);
        if (OWN_DELTA) sync_threads(OF_LOADS, 128);  // all have read the O of the chunk before the last one
        if (thread == 0) {
            const u32 barrier = shared.barrier(CHUNK + stage);
            const int blocks = BIAS ? (round.keys() > 64 ? 2 : 1) : 0;
            barrier_expect(barrier, (computes ? 3 : 2) * QueryTile::GROUP_BYTES + blocks * BIAS_BLOCK_BYTES);
            QueryTile::load(shared.query(stage), in.query, barrier, 0, it.q_first + first, head, it.batch);
            QueryTile::load(shared.dout(stage), in.dout, barrier, 0, it.q_first + first, head, it.batch);
            if (computes) QueryTile::load(shared.out(loads), in.out, barrier, 0, it.q_first + first, head, it.batch);
#if BIAS
            for (int block = 0; block < blocks; block++)
                in.bias.load(shared.bias(stage, block), barrier, round.start + 64 * block, first, head, it.batch);
#endif
        }
        // Its latency is hidden while the row numbers of the chunk before are passed on; but a delta that this round reads may be one of those.
        if (!computes && fresh) tell_rows();
        const int own = first + thread / 2;
        const bool here = own < it.q_len;
        const long long at = it.batch * in.row_batch + head * in.row_head + it.q_first + own;
        const float* from = thread % 2 == 0 ? in.lse : computes ? in.dlse : in.delta;
#if BIAS
        const float read = here ? from[at] : 0.0f, inverse = here ? in.numbers.inverse[at] : 1.0f;
        is_far = here && thread % 2 == 0 && NumbersOfRows::is_far(read, inverse);
        const float x = thread % 2 ? read / fabsf(inverse) : NumbersOfRows::exponent(here ? read : MINUS_INFINITY, inverse);
#else
        const float x = here && from ? from[at] : 0.0f;
#endif
        tell_rows();
        pending = true, fresh = computes, inside = here, place = at, row = x;
        kept = round.rounds() > 1;
        loads++;
        if (!OWN_DELTA) tell_rows();  // with two stages, the chunk after the next one waits for this one
    }

    // -lse and -delta of the last requested chunk
    __device__ __forceinline__ void tell_rows() {
        if (!pending) return;
        const int last = loads - 1, stage = stage_of(last);
        float x = row;
        if (OWN_DELTA && fresh) {
            barrier_wait(shared.barrier(CHUNK + stage), parity_of(last));
            const float delta = product(shared.out(last), shared.dout(stage)) - row;
            if (thread % 2 == 1) {
                x = delta;
                if (inside && kept) in.delta[place] = delta;
            }
        }
#if BIAS
        store_4(shared.rows(stage) + thread / 4 * 16 + thread % 2 * 8 + thread / 2 % 2 * 4, x);
        const bool any = __any_sync(~0u, is_far);
        if (thread % 32 == 0) store_4(shared.far(stage) + thread / 32 * 4, any ? 1.0f : 0.0f);
        warp_arrives(shared.barrier(ROWS + stage), arriving);
        pending = false;
        return;
#endif
        // a query that sees no key, or does not exist, has no weights
        if (thread % 2 == 0) x = inside && x > MINUS_INFINITY ? x * LOG2E : -MINUS_INFINITY;
        else x = inside ? x : 0.0f;
        store_4(shared.rows(stage) + thread / 4 * 16 + thread % 2 * 8 + thread / 2 % 2 * 4, -x);
        warp_arrives(shared.barrier(ROWS + stage), arriving);
        pending = fresh = false;
    }

    // rowsum(dO O) of the row of two threads
    __device__ __forceinline__ float product(u32 out, u32 dout) const {
        constexpr int MINE = QueryTile::CHUNKS / 2;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < QueryTile::BLOCKS * MINE; i++) {
            u32 o[4], d[4];
            const int block = i / MINE, chunk = thread % 2 * MINE + i % MINE;
            load_16(o, QueryTile::chunk(out, block, thread / 2, chunk));
            load_16(d, QueryTile::chunk(dout, block, thread / 2, chunk));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 a = floats_of(o[j]), b = floats_of(d[j]);
                sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
            }
        }
        return sum + __shfl_xor_sync(~0u, sum, 1);
    }

    // The blocks take works in rows, every second row backwards: works become smaller along the list, so the last block of one row comes first in the next.
    __device__ __forceinline__ static int there_and_back(int number, int all) {
        const int row = number / gridDim.x, width = min(int(gridDim.x), all - row * int(gridDim.x)), place = number - row * int(gridDim.x);
        return row % 2 ? row * int(gridDim.x) + width - 1 - place : number;
    }

    // all rounds of an item, or those of a segment and behind it
    __device__ __forceinline__ void walk(Round& round) {
#pragma unroll 1
        for (; round.is_there(); round.start += ROUND_ROWS) {
            ask_round(round);
            if (WINDOW && round.first_chunk() >= round.end_chunk()) tell_rows();  // no chunk follows that would pass on those of the one before
#pragma unroll 1
            for (int member = 0; member < group.members(); member++) {
                const int head = group.query_head(round.item.head, member);
#pragma unroll 1
                for (int c = round.first_chunk(), end = round.end_chunk(); c < end; c++) ask_chunk(round, head, c);
            }
        }
    }

    // The share of this block: of all rounds of each head, if PACKED, or of each head of a row.
    __device__ __forceinline__ void walk_share(const Batch& batch, const Window& window) {
        const int rounds = PACKED ? *batch.count : max(1, (batch.max_k + ROUND_ROWS - 1) / ROUND_ROWS), times = PACKED ? batch.heads : batch.items();
        const long long all = (long long)rounds * times;
        const int end = int(all * (blockIdx.x + 1) / gridDim.x);
#pragma unroll 1
        for (int number = int(all * blockIdx.x / gridDim.x); number < end;) {
            const int time = unsigned(number) / unsigned(rounds), at = number - time * rounds, index = PACKED ? at * batch.heads + time : time;
            Round round{batch.item(index, window), 0, PACKED ? batch.part(index) : at, 0};
            round.start = round.first * ROUND_ROWS, round.end = min(round.first + end - number, round.rounds());
            number += max(1, round.end - round.first);
            walk(round);
        }
    }

    __device__ __forceinline__ void run(const Batch& batch, const Window& window) {
        if (WINDOW && SEGMENT == 1) {
            walk_share(batch, window);
        } else {
            const int items = batch.items(), segments = WINDOW && !PACKED ? (batch.max_k + SEGMENT * ROUND_ROWS - 1) / (SEGMENT * ROUND_ROWS) : 1;
#pragma unroll 1
            for (int number = blockIdx.x; number < (WINDOW ? items * segments : items); number += gridDim.x) {
                const int index = WINDOW ? there_and_back(number, items * segments) : number;
                Round round{batch.item(WINDOW ? index % items : index, window), 0, 0, 0};
                if (WINDOW) round.first = (PACKED ? batch.part(index) : index / items) * SEGMENT, round.end = round.first + SEGMENT, round.start = round.first * ROUND_ROWS;
                walk(round);
            }
        }
        tell_rows();
        ask_round(Round{Item{}, -1, 0, 0});
    }
};

extern "C" __global__ void __launch_bounds__(512, 1)
    long_backward_sm90(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                       const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap dout_map,
                       const __grid_constant__ TensorMap out_map,
#if BIAS
                       const __grid_constant__ TensorMap bias_map,
#endif
                       const int* cu_q, const int* cu_k, const int* members, const int* count,
                       const float* lse, const float* dlse, float* delta, float* parked, Number* dquery, Number* dkey, Number* dvalue,
#if BIAS
                       const float* inverse_sums,
#endif
#if MASK
                       const u64* mask_bits,
#endif
#if KEY_MASK
                       const unsigned char* key_mask,
#endif
                       const void* sequences, const void* total_q, const void* total_k, const void* max_q, const void* max_k, const void* row_batch,
                       const void* row_head, const void* parked_block,
#if DROPOUT
                       const u64* seed, u32 threshold, float inverse,
#endif
                       long long dquery_batch, long long dquery_head, long long dquery_row,
                       long long dkey_batch, long long dkey_head, long long dkey_row, long long dvalue_batch, long long dvalue_head,
                       long long dvalue_row,
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
                       int heads, int head_dim, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const LongBackwardShared shared(shared_address(memory));
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(shared.barrier(KEYS + i), 1);
            barrier_init(shared.barrier(KEYS_READ + i), 12);
            barrier_init(shared.barrier(SCORES + i), 8);
            barrier_init(shared.barrier(SCORES_READ + i), 4);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.barrier(CHUNK + i), 1);
            barrier_init(shared.barrier(ROWS + i), 4);
            barrier_init(shared.barrier(CHUNK_READ + i), 8);
        }
        barrier_fence();
    }
    __syncthreads();
    const Gradients gradients{.dquery = dquery, .dkey = dkey, .dvalue = dvalue,
                              .dquery_strides = {dquery_batch, dquery_head, dquery_row},
                              .dkey_strides = {dkey_batch, dkey_head, dkey_row},
                              .dvalue_strides = {dvalue_batch, dvalue_head, dvalue_row},
                              .head_dim = head_dim, .scale = scale};
    const Group group = GROUP;
#if BIAS
    const NumbersOfRows numbers{lse, inverse_sums, number_of(row_batch), number_of(row_head)};
#else
    const NumbersOfRows numbers{};
#endif
    const int warpgroup = warpgroup_of();
    if (warpgroup == 3) {
        leave_registers<LOAD_REGISTERS>();
        const Batch batch{.cu_q = cu_q, .cu_k = cu_k, .members = members, .count = count,
                          .sequences = int(number_of(sequences)), .total_q = int(number_of(total_q)), .total_k = int(number_of(total_k)),
                          .max_q = int(number_of(max_q)), .max_k = int(number_of(max_k)), .heads = heads};
        const Inputs in{.query = query_map, .key = key_map, .value = value_map, .dout = dout_map, .out = out_map,
                        .lse = lse, .dlse = dlse, .delta = delta, .row_batch = number_of(row_batch), .row_head = number_of(row_head),
                        .bias = BIAS_OF_CALL, .numbers = numbers};
        Loads loads(shared, in, group);
        loads.run(batch, WINDOW_OF_CALL);
    } else if (warpgroup == 2) {
        leave_registers<QUERY_REGISTERS>();
        Queries queries(shared, parked + blockIdx.x * number_of(parked_block), group, WINDOW_OF_CALL,
                        int(number_of(parked_block)) / (group.members() * CHUNK_ROWS * HEAD_DIM));
        queries.run(gradients);
    } else {
        take_registers<KEY_REGISTERS>();
        Dropout dropout{};
#if DROPOUT
        dropout = Dropout::of(*seed, threshold, inverse, heads * group.members(), int(number_of(max_k)));  // heads are those of keys
#endif
        Keys keys(shared, warpgroup, BIAS ? scale : scale * LOG2E, group, MASK_BITS, dropout, WINDOW_OF_CALL, numbers,
                  KEY_MASK_OF_CALL);
        keys.run(gradients);
    }
}
