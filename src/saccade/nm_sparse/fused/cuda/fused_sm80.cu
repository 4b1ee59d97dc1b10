// Forward of N:M attention on sm_80 and later: Q K^T by mma, selection and softmax in registers, P V by mma.sp. See README.md of this family.
//
//   thread block     BLOCK_Q = 16 * TALL * WARPS queries of one head; tiles of BLOCK_KV keys from the last one that they see to the first
//   each warp        TALL x 16 queries, adjacent; K and V come by cp.async (tile_copies.cuh), STAGES tiles at a time
//
// A fragment of K or V that a warp reads is multiplied with all queries of the warp: with 16 queries a warp, reading shared memory took longer
// than the products. tiles_half.cuh and tiles_tf32.cuh describe the layout of tiles in shared memory and how products read them.
//
// On sm_90 an addition takes as long while `mma.sync` runs, in any warp, as without it. So two things count: how many instructions a tile takes, and
// that one of the two warps of a scheduler can always issue its next one. With STAGES of 3 or 4 the warps wait for no barrier of the whole block
// within a tile (turns.cuh), which is 3 to 12 % faster.
//
// Shared memory:   | STAGES x (K, V) | Q of the block (16-bit numbers) | STAGES > 2: the barrier of turns |
//
// Compiled with HEAD_DIM (D, a multiple of 16), BLOCK_KV, WARPS (4 or 8), TALL (1 or 2), STAGES (1 to 4), TF32 (with PAIRS), BF16, PAIRS (1:
// "1:2", 0: "2:4"), CAUSAL, STORES (the selection), DROPOUT, BLOCKS (a block mask; BLOCK_KV is 64), KEYS (a mask of keys), QUERY_BITS (a mask of
// queries and keys), BIAS (bytes of its numbers, or 0), SELECTION, RESIDENT (thread blocks of a multiprocessor), QUERY_STEPS (steps of 16 dims of which Q stays in registers), PARTS (1, or BLOCK_KV / 32: a tile's keys in
// parts, of which one is selected between products of others; TALL is 2, STAGES 3 or 4).
#define OVERLAP 0
#if TF32
#include "tiles_tf32.cuh"
#else
#include "tiles_half.cuh"
#endif
#include "turns.cuh"

constexpr int BLOCK_Q = 16 * TALL * WARPS;
constexpr bool TURNS = STAGES > 2;
constexpr int AHEAD = STAGES - 2;  // TURNS: tiles that are requested ahead of the current one
static_assert(!TURNS || !(BLOCKS || KEYS || TF32 || BIAS), "tiles follow each other, their last keys are at an edge, and are operands as they come");
static_assert(STAGES * STAGE_BYTES + BLOCK_Q * QUERY_ROW_BYTES + (TURNS ? 8 : 0) <= SHARED_BYTES, "the launch asks for too little shared memory");
static_assert(PARTS == 1 || (PARTS == STEPS && TALL == 2 && TURNS && !DROPOUT), "parts are products over 32 keys");
static_assert(SELECTION != SELECT_UNORDERED || !DROPOUT, "dropout reads codes in order");

// PARTS > 1
constexpr float CODES_OF_TWO = CODES_ZERO + (CODES_BEGIN > CODES_ZERO ? 0x8888 : 0);
// bfloat16 holds what float32 does: the sum of a row shows weights that are too large, so no check is made for each tile
constexpr bool SUM_GOES_ON = BF16;
constexpr float MOST = 1073741824.0f;  // no row has so many keys of weight 1

struct WarpRows : Operands {
    using Operands::Operands;

    // Work on a tile between its products with K and those with V. The first tile that a warp sees has no reference yet; with TURNS it is
    // the only tile that is MASKED.
    template <bool MASKED>
    __device__ __forceinline__ void weigh(int tile, u32* kept) {
#pragma unroll
        for (int m = 0; m < TALL; m++) {
            Rows& own = rows[m];
            own.add_bias();
            if (TURNS && MASKED) own.template raise<MASKED>(tile, 0, SPANS, 1.0f);
            own.template select<MASKED>(tile);
            if (!(TURNS && MASKED) && own.overflows()) own.template retry<MASKED>(tile);
            own.accept();
            if (STORES) own.store_selection(tile, kept);
        }
    }

    __device__ __forceinline__ void multiply_keys_of(int part, int stage) {
        u32 a[TALL][4];
#pragma unroll
        for (int i = 0; i < KEY_UNITS; i++) multiply_keys(part, i, stage, a);
    }

    __device__ __forceinline__ void multiply_values_of(int part, int stage) {
#pragma unroll
        for (int i = 0; i < VALUE_UNITS; i++) multiply_values(part, i, stage);
    }

    // what else is multiplied while weights of a part are selected: S of the next part, then P V of the one before
    static __device__ __forceinline__ constexpr int others(int part) { return (part + 1 < PARTS ? KEY_UNITS : 0) + (part ? VALUE_UNITS : 0); }
    __device__ __forceinline__ void multiply_other(int part, int i, int stage, u32 (&a)[TALL][4]) {
        if (part + 1 < PARTS && i < KEY_UNITS)
            multiply_keys(part + 1, i, stage, a);
        else
            multiply_values(part - 1, i - (part + 1 < PARTS ? KEY_UNITS : 0), stage);
    }

    // The weights of a part and their codes, as `share_metadata_of_two` takes them; BETWEEN other products, or alone. opaque_one: see
    // `Rows::retry`
    template <bool MASKED, bool BETWEEN>
    __device__ __forceinline__ void select_part(int part, int tile, int stage, float (&codes)[TALL], float opaque_one = 1.0f) {
        int edges[TALL][2];
        u32 a[TALL][4];
#pragma unroll
        for (int m = 0; m < TALL; m++) {
            codes[m] = CODES_OF_TWO;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                rows[m].added[h] = SUM_GOES_ON ? rows[m].sum[h] : -0.0f;
                edges[m][h] = rows[m].template edge<MASKED>(tile, h, opaque_one);
            }
        }
        constexpr int GROUPS = 4 * TALL;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            if (BETWEEN)
#pragma unroll
                for (int i = others(part) * g / GROUPS; i < others(part) * (g + 1) / GROUPS; i++) multiply_other(part, i, stage, a);
            int m = g / 4, q = 2 * part + g / 2 % 2;
            if (g % 4 == 0) rows[m].template select_row<MASKED, 0, 1>(tile, q, codes[m], edges[m][0], 0, opaque_one);
            if (g % 4 == 1) rows[m].template select_row<MASKED, 1, 256>(tile, q, codes[m], edges[m][1], 0, opaque_one);
            if (g % 4 == 2) rows[m].template select_row<MASKED, 0, 16>(tile, q, codes[m], edges[m][0], 0, opaque_one);
            if (g % 4 == 3) rows[m].template select_row<MASKED, 1, 4096>(tile, q, codes[m], edges[m][1], 0, opaque_one);
        }
    }

    template <bool MASKED>
    __device__ __forceinline__ void raise(int part, int tile, float opaque_one = 1.0f) {
#pragma unroll
        for (int m = 0; m < TALL; m++) rows[m].template raise<MASKED>(tile, 2 * part, 2 * part + 2, opaque_one);
    }

    // whether a sum is too large, or NaN
    __device__ __forceinline__ bool too_much(const float (&codes)[TALL]) const {
        float all = 0.0f;
#pragma unroll
        // 0 * codes makes the check wait for the codes: else ptxas keeps their comparisons over the check's branch, by 46 instructions a tile
        for (int m = 0; m < TALL; m++) all += fmaf(codes[m], 0.0f, rows[m].added[0] + rows[m].added[1]);
        return !(all <= (SUM_GOES_ON ? MOST : LIMIT));
    }

    __device__ __forceinline__ void accept(int part, const float (&codes)[TALL]) {
#pragma unroll
        for (int m = 0; m < TALL; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) rows[m].sum[h] = SUM_GOES_ON ? rows[m].added[h] : rows[m].sum[h] + rows[m].added[h];
        rows[0].metadata[part] = share_metadata_of_two(codes, rows[0].t);
    }

    // A tile that all rows see to its end. `ask` requests another tile, `land` waits for the next one's copies.
    template <class Ask, class Land>
    __device__ __forceinline__ void attend(int tile, int stage, u32* kept, Ask ask, Land land) {
        float codes[TALL];
        multiply_keys_of(0, stage);
        ask();
        if (AHEAD == 2) land();
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            select_part<false, true>(part, tile, stage, codes);
            if (__any_sync(~0u, too_much(codes))) {
                float opaque_one = float(rows[0].sizes.opaque_one);
                raise<false>(part, tile, opaque_one);
                select_part<false, false>(part, tile, stage, codes, opaque_one);
            }
            accept(part, codes);
            if (AHEAD == 1 && part == 0) land();
        }
        multiply_values_of(PARTS - 1, stage);
        if (STORES) store_selection(tile, kept);
    }

    // The first tile that the warp sees, of which some keys may be hidden, or whole parts; the reference is not known, so that it is found first.
    template <class Ask, class Land>
    __device__ __forceinline__ void attend_first(int tile, int stage, u32* kept, Ask ask, Land land) {
        int left = (CAUSAL ? min(rows[0].first_query + 16 * TALL, rows[0].sizes.kv_len) : rows[0].sizes.kv_len) - tile * BLOCK_KV;
        ask();
        land();
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            rows[0].metadata[part] = 0;
            if (32 * part < left) {
                float codes[TALL];
                multiply_keys_of(part, stage);
                raise<true>(part, tile);
                select_part<true, false>(part, tile, stage, codes);
                accept(part, codes);
                multiply_values_of(part, stage);
            }
        }
        if (STORES) store_selection(tile, kept);
    }

    // lane t = 0 stores the words of row g, 1 those of row g + 8, 2 and 3 the same of the other 16 rows
    __device__ __forceinline__ void store_selection(int tile, u32* kept) const {
        const Sizes& sizes = rows[0].sizes;
        int t = rows[0].t, query = rows[0].row(t % 2) + 16 * (t / 2), word = tile * (BLOCK_KV / 32);
        int last = (CAUSAL ? min(query, sizes.kv_len - 1) : sizes.kv_len - 1) - 32 * word;
        u32* to = kept + ((long long)rows[0].problem * sizes.q_len + query) * sizes.words + word;
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 32; i++) {
            u32 bits = selection_bits(rows[0].metadata[i], t) & bits_up_to(last - 32 * i);
            if (query < sizes.q_len && word + i < sizes.words) to[i] = bits;
        }
    }
};

// whether some of `count` queries of one block of 64 see a tile
__device__ __forceinline__ bool sees(const unsigned char* mask, int query, int count, int tile, const Sizes& sizes) {
    if (query >= sizes.q_len || (CAUSAL && tile * BLOCK_KV >= query + count)) return false;
    return !BLOCKS || mask[query / 64 * sizes.mask_row + tile];
}

// Tile after tile, a turn each. A warp arrives for a turn early in the tile before it: by then the warp's copies for the turn's tile have landed,
// and the warp has finished the tile before that. It waits for the turn before it reads the turn's tile. When a warp requests a tile two or more
// places ahead, all warps have arrived for the current tile, so all have finished the tile whose place the new one takes. Every warp goes through all
// tiles, whether its queries see them or not: otherwise others would wait for its arrivals for ever.
template <class Warp>
__device__ __forceinline__ void go_in_turns(Warp& warp, KeyTiles& all_keys, ValueTiles& all_values, u32 turns, int tile, int own, u32* kept) {
    const int q_len = warp.rows[0].sizes.q_len, kv_len = warp.rows[0].sizes.kv_len;
    int to_copy = tile - 1, place = 1, stage = 0, turn = 0;
    auto ask = [&] {
        if (to_copy >= 0) {
            all_keys.copy(warp.keys(place), to_copy, kv_len);
            all_values.copy(warp.values(place), to_copy, kv_len);
        }
        copies_commit();
        to_copy--;
        place = place + 1 == STAGES ? 0 : place + 1;
    };
    auto land = [&] {
        copies_wait<AHEAD - 1>();
        turns_arrive(turns);
    };
    auto step = [&] {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        tile--;
    };
    all_keys.copy_first(warp.keys(0), tile, kv_len);
    all_values.copy_first(warp.values(0), tile, kv_len);
    copies_commit();
    if (AHEAD == 2) ask();
    land();
    // the first tile that this warp sees
    int seen = own >= q_len ? -1 : CAUSAL ? min(tile, (own + 16 * TALL - 1) / BLOCK_KV) : tile;
    for (; tile > seen; step()) {
        turns_wait(turns, turn++);
        ask();
        land();
    }
    turns_wait(turns, turn);
    if (PARTS > 1) warp.find_rows();
    warp.keep_query();
    for (; tile >= 0; step()) {
        turns_wait(turns, turn++);
        if constexpr (PARTS > 1) {
            if (tile == seen)
                warp.attend_first(tile, stage, kept, ask, land);
            else
                warp.attend(tile, stage, kept, ask, land);
        } else {
            warp.multiply_keys_of(0, stage);
            ask();
            if (AHEAD == 2) land();
            if (tile == seen)
                warp.template weigh<true>(tile, kept);
            else
                warp.template weigh<false>(tile, kept);
            if (AHEAD == 1) land();
            warp.multiply_values_of(0, stage);
        }
    }
}

// Tile after tile, a barrier of the block in each.
template <class Following>
__device__ __forceinline__ void go_together(
    WarpRows& warp, KeyTiles& all_keys, ValueTiles& all_values, int tile, int own, int whole, const unsigned char* block_mask, Following following,
    u32* kept) {
    const Sizes& sizes = warp.rows[0].sizes;
    const int kv_len = sizes.kv_len;
    int stage = 0;
    if (tile >= 0) all_keys.copy_first(warp.keys(0), tile, kv_len);
    copies_commit();
    if (STAGES == 2) {
        if (tile >= 0) all_values.copy_first(warp.values(0), tile, kv_len);
        copies_commit();
    }
    for (int turn = 0; tile >= 0; turn++) {
        int next = following(tile - 1);
#pragma unroll
        for (int m = 0; m < TALL; m++) warp.rows[m].ask_bits(tile);
        copies_wait<0>();
        settle_tile<KeyTiles>(warp.keys(stage));
        if (STAGES == 2) settle_tile<ValueTiles>(warp.values(stage));
        __syncthreads();  // and no warp still reads the places of the tile before
        if (STAGES == 1) {
            if (turn)
                all_values.copy(warp.values(0), tile, kv_len);
            else
                all_values.copy_first(warp.values(0), tile, kv_len);
            copies_commit();
        }
        if (turn == 0) warp.keep_query();
        auto copies = [&] {
            if (STAGES == 2) {
                if (next >= 0) {
                    all_keys.copy(warp.keys(stage ^ 1), next, kv_len);
                    all_values.copy(warp.values(stage ^ 1), next, kv_len);
                    copies_commit();
                }
            } else {
                copies_wait<0>();
                settle_tile<ValueTiles>(warp.values(0));
                __syncthreads();
                if (next >= 0) all_keys.copy(warp.keys(0), next, kv_len);
                copies_commit();
            }
        };
        // 2 x 16 rows of D = 128 leave no registers for a jump over a hidden tile: there it is multiplied, and the mask of its rows hides it
        bool seen = !BLOCKS && (!CAUSAL || TALL == 2);
        seen = seen || sees(block_mask, own, 16 * TALL, tile, sizes);
        bool masked = QUERY_BITS || (tile + 1) * BLOCK_KV > whole;
        // The copies are issued between the products and the selection: otherwise ptxas moves the last products into the selection, and the kernel
        // took 12 % longer at D = 128.
        if (seen) {
#pragma unroll
            for (int m = 0; m < TALL; m++) warp.rows[m].ask_bias(tile);
            warp.multiply_keys_of(0, stage);
        }
        copies();
        if (seen) {
            if (masked)
                warp.weigh<true>(tile, kept);
            else
                warp.weigh<false>(tile, kept);
            warp.multiply_values_of(0, stage);
        }
        if (STAGES == 2) stage ^= 1;
        tile = next;
    }
}

// The thread block's problem and the first of its queries. The long blocks of a causal problem come first, and `grouped` problems take turns:
// with one problem after the other, the longest block of the last problem would begin when other multiprocessors are already done, and would run
// alone. `grouped` is so large that the blocks of a group fill some 128 multiprocessors four times; with 16 problems of 2,048 queries all blocks
// began at once.
__device__ __forceinline__ void find_block(int& problem, int& first, int problems, int q_len) {
    int blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q, block = block_of(), grouped = CAUSAL ? max(16, 512 * RESIDENT / blocks) : 1;
    int begin = block / (blocks * grouped) * grouped, members = min(grouped, problems - begin), turn = block - begin * blocks;
    problem = begin + turn % members;
    first = (blocks - 1 - turn / members) * BLOCK_Q;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) fused_sm80(
    const Number* query, const Number* key, const Number* value, Number* out, float* lse, unsigned* kept,
    const unsigned char* block_mask, const u64* seed, const u32* key_bits, const int* key_spans, int heads, int group, int q_len, int kv_len, int words,
    int counters, int problems, int opaque_one, int key_words, int keys_batch,
#if QUERY_BITS
    int keys_head, int keys_query,
#endif
#if BIAS
    const unsigned char* bias, long long bias_batch, long long bias_head, long long bias_row, int bias_columns, float score_scale,
#endif
    long long query_batch, long long query_head,
    long long query_row, long long key_batch, long long key_head, long long key_row, long long value_batch, long long value_head,
    long long value_row, long long out_batch, long long out_head, long long out_row, long long mask_batch,
    long long mask_head, long long mask_row, float scale, float spared, u32 threshold) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const Sizes sizes{.heads = heads, .group = group,
                      .q_len = q_len, .kv_len = kv_len,
                      .words = words, .counters = counters,
                      .head_dim = HEAD_DIM, .problems = problems,
                      .present = 0, .opaque_one = opaque_one,
                      .out_batch = out_batch, .out_head = out_head, .out_row = out_row,
                      .mask_batch = mask_batch, .mask_head = mask_head, .mask_row = mask_row,
                      .scale = scale, .spared = spared, .threshold = threshold,
                      .key_bits = key_bits, .key_spans = key_spans,
                      .key_words = key_words, .keys_batch = keys_batch,
#if QUERY_BITS
                      .keys_head = keys_head, .keys_query = keys_query,
#endif
#if BIAS
                      .bias = bias, .bias_batch = bias_batch, .bias_head = bias_head, .bias_row = bias_row,
                      .bias_columns = bias_columns, .score_scale = score_scale,
#endif
                      .whole = 0, .parts = 0};
    int problem, first;
    find_block(problem, first, problems, q_len);
    int batch = problem / heads, head = problem % heads;
    query += batch * query_batch + head * query_head;
    key += batch * key_batch + head / group * key_head;
    value += batch * value_batch + head / group * value_head;
    block_mask += batch * mask_batch + head * mask_head;

    WarpRows warp(sizes, shared_address(shared_memory));
    const u32 turns = warp.keys(STAGES) + BLOCK_Q * QUERY_ROW_BYTES;
    if constexpr (TURNS) {
        if (threadIdx.x == 0) turns_begin(turns, WARPS);
        __syncthreads();
    }
    // the first query of this warp; shuffled, it is known to be the same for all its threads
    int own = first + __shfl_sync(~0u, threadIdx.x / 32, 0) * (16 * TALL);
#pragma unroll
    for (int m = 0; m < TALL; m++) {
        if constexpr (DROPOUT) warp.rows[m].seed = *seed;
        warp.rows[m].begin(problem, own + 16 * m);
    }
    warp.copy_query(query, query_row, first);
    const int* span = key_spans + 2 * sizes.key_row(problem);
    int end = KEYS ? span[0] : CAUSAL ? min(kv_len, first + BLOCK_Q) : kv_len;
    int whole = KEYS ? span[1] : CAUSAL ? min(kv_len, own + 1) : kv_len;  // keys that all these rows see
    int tiles = (end + BLOCK_KV - 1) / BLOCK_KV;
    // the next tile that some warp sees, going down
    auto following = [&](int tile) {
        if (!BLOCKS) return tile;
        for (; tile >= 0; tile--) {
            bool seen = false;
            for (int w = 0; w < BLOCK_Q; w += 64) seen |= sees(block_mask, first + w, 64, tile, sizes);
            if (seen) break;
        }
        return tile;
    };
    // only the first tile that is copied may be the last of the keys, which is not whole
    int tile = following(tiles - 1);
    KeyTiles all_keys(key, key_row, tile);
    ValueTiles all_values(value, value_row, tile);
    if constexpr (TURNS)
        go_in_turns(warp, all_keys, all_values, turns, tile, own, kept);
    else
        go_together(warp, all_keys, all_values, tile, own, whole, block_mask, following, kept);
    copies_wait<0>();
    find_block(problem, first, problems, q_len);  // computed again: kept in registers over the tiles, the results were spilled
    own = first + threadIdx.x / 32 * (16 * TALL);
#pragma unroll
    for (int m = 0; m < TALL; m++) {
        warp.rows[m].problem = problem;
        warp.rows[m].first_query = own + 16 * m;
        warp.rows[m].store(out, lse);
    }
}
