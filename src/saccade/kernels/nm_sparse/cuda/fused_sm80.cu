// Forward of N:M attention on sm_80 and later: Q K^T by mma, selection and softmax in registers, P V by mma.sp. See README.md here.
//
//   thread block     BLOCK_Q = 16 * TALL * WARPS queries of one head; tiles of BLOCK_KV keys from the last one that they see to the first
//   each warp        TALL x 16 queries, adjacent; K and V come by cp.async (tile_copies.cuh), STAGES tiles at a time
//
// Fragments of K and V that a warp reads are multiplied with all its queries: by 16 queries alone, shared memory is read for longer than
// products run. How tiles lie in shared memory and products read them: tiles_half.cuh, tiles_tf32.cuh.
//
// Compiled with HEAD_DIM (D, a multiple of 16), BLOCK_KV, WARPS (4 or 8), TALL (1 or 2), STAGES (1 or 2), TF32 (with PAIRS), BF16, PAIRS (1:
// "1:2", 0: "2:4"), CAUSAL, STORES (the selection), DROPOUT, BLOCKS (a block mask; BLOCK_KV is 64), KEYS (a mask of keys), SELECTION, RESIDENT
// (thread blocks of a multiprocessor), QUERY_STEPS (steps of 16 dims of which Q stays in registers), PARTS (1 or more: a tile's keys in parts, of
// which one is selected between products of others).
#define OVERLAP 0
#if TF32
#include "tiles_tf32.cuh"
#else
#include "tiles_half.cuh"
#endif

constexpr int BLOCK_Q = 16 * TALL * WARPS;

struct WarpRows : Operands {
    using Operands::Operands;

    // A tile: what lies between its products with K, and those with V.
    template <bool MASKED>
    __device__ __forceinline__ void weigh(int tile, u32* kept) {
#pragma unroll
        for (int m = 0; m < TALL; m++) {
            Rows& own = rows[m];
            own.template select<MASKED>(tile);
            if (own.overflows()) own.template retry<MASKED>(tile);  // always at the first tile, whose reference is not known
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

    // weights of a part, between other products
    template <bool MASKED>
    __device__ __forceinline__ void select_between(int part, int tile, int stage) {
        constexpr int OWN = SPANS / PARTS, GROUPS = 2 * TALL * OWN;
        int edges[TALL][2];
        float codes[TALL];
        u32 seen = 0, a[TALL][4];
#pragma unroll
        for (int m = 0; m < TALL; m++) {
            rows[m].added[0] = rows[m].added[1] = 0.0f;
            for (int h = 0; h < 2; h++) edges[m][h] = rows[m].template edge<MASKED>(tile, h);
        }
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
#pragma unroll
            for (int i = others(part) * g / GROUPS; i < others(part) * (g + 1) / GROUPS; i++) multiply_other(part, i, stage, a);
            int m = g / (2 * OWN), q = part * OWN + g / 2 % OWN;
            Rows& own = rows[m];
            if (g % 2 == 0) {
                codes[m] = CODES_BEGIN;
                seen = own.template seen<MASKED>(tile, q);
                own.template select_row<MASKED, 0>(tile, q, codes[m], edges[m][0], seen, 1.0f);
            } else {
                own.template select_row<MASKED, 1>(tile, q, codes[m], edges[m][1], seen, 1.0f);
                own.words[q] = placed(codes[m], own.t);
                // plus 0: the check waits for codes too, else ptxas keeps their comparisons over its branch, 46 instructions a tile
                own.added[1] = fmaf(codes[m], 0.0f, own.added[1]);
            }
        }
    }

    // A tile in PARTS of its keys; `copies` asks for the next.
    template <bool MASKED, class Copies>
    __device__ __forceinline__ void attend(int tile, int stage, u32* kept, Copies copies) {
        constexpr int OWN = SPANS / PARTS;
        multiply_keys_of(0, stage);
        copies();
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            select_between<MASKED>(part, tile, stage);
            bool retried = false;
#pragma unroll
            for (int m = 0; m < TALL; m++) retried = retried || rows[m].too_much();
            if (__any_sync(~0u, retried)) {  // always at the first tile, whose reference is not known
#pragma unroll
                for (int m = 0; m < TALL; m++) rows[m].template retry<MASKED>(tile, part * OWN, (part + 1) * OWN);
            }
#pragma unroll
            for (int m = 0; m < TALL; m++) rows[m].accept(part * (STEPS / PARTS), (part + 1) * (STEPS / PARTS));
        }
        multiply_values_of(PARTS - 1, stage);
        if (STORES)
#pragma unroll
            for (int m = 0; m < TALL; m++) rows[m].store_selection(tile, kept);
    }
};
static_assert(SPANS % PARTS == 0 && STEPS % PARTS == 0 && (STAGES == 2 || PARTS == 1), "parts are whole products over keys, and all of K and V is there");

// whether some of `count` queries of one block of 64 see a tile
__device__ __forceinline__ bool sees(const unsigned char* mask, int query, int count, int tile, const Sizes& sizes) {
    if (query >= sizes.q_len || (CAUSAL && tile * BLOCK_KV >= query + count)) return false;
    return !BLOCKS || mask[query / 64 * sizes.mask_row + tile];
}

// The thread block's problem and the first of its queries. Long blocks of a causal problem first, and those of GROUPED problems in turns:
// one problem after the other, the last one's longest block would begin when others are through, and go on alone.
__device__ __forceinline__ void find_block(int& problem, int& first, int problems, int q_len) {
    constexpr int GROUPED = CAUSAL ? 16 : 1;
    int blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q, block = block_of();
    int begin = block / (blocks * GROUPED) * GROUPED, members = min(GROUPED, problems - begin), turn = block - begin * blocks;
    problem = begin + turn % members;
    first = (blocks - 1 - turn / members) * BLOCK_Q;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) fused_sm80(
    const Number* query, const Number* key, const Number* value, Number* out, float* lse, unsigned* kept,
    const unsigned char* block_mask, const u64* seed, const u32* key_bits, const int* key_spans, int heads, int group, int q_len, int kv_len, int words,
    int counters, int problems,
    int one, int key_words, int keys_batch, long long query_batch, long long query_head, long long query_row, long long key_batch,
    long long key_head,
    long long key_row, long long value_batch, long long value_head, long long value_row, long long out_batch, long long out_head,
    long long out_row, long long mask_batch, long long mask_head, long long mask_row, float scale, float spared, u32 threshold) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const Sizes sizes{heads,     group,    q_len,   kv_len,     words,     counters, HEAD_DIM, problems, 0,        one,
                      out_batch, out_head, out_row, mask_batch, mask_head, mask_row, scale,    spared,   threshold,
                      key_bits, key_spans, key_words, keys_batch};
    int problem, first;
    find_block(problem, first, problems, q_len);
    int batch = problem / heads, head = problem % heads;
    query += batch * query_batch + head * query_head;
    key += batch * key_batch + head / group * key_head;
    value += batch * value_batch + head / group * value_head;
    block_mask += batch * mask_batch + head * mask_head;

    WarpRows warp(sizes, static_cast<u32>(__cvta_generic_to_shared(shared_memory)));
    // the first query of this warp; shuffled, it is known to be the same for all its threads
    int own = first + __shfl_sync(~0u, threadIdx.x / 32, 0) * (16 * TALL);
#pragma unroll
    for (int m = 0; m < TALL; m++) {
#if DROPOUT
        warp.rows[m].seed = *seed;
#endif
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
    int tile = following(tiles - 1), stage = 0;
    KeyTiles all_keys(key, key_row, tile);
    ValueTiles all_values(value, value_row, tile);
    if (tile >= 0) all_keys.copy_first(warp.keys(0), tile, kv_len);
    copies_commit();
    if (STAGES == 2) {
        if (tile >= 0) all_values.copy_first(warp.values(0), tile, kv_len);
        copies_commit();
    }
    for (int turn = 0; tile >= 0; turn++) {
        int next = following(tile - 1);
        copies_wait<0>();
        settle_tile<KeyTiles>(warp.keys(stage));
        if (STAGES == 2) settle_tile<ValueTiles>(warp.values(stage));
        __syncthreads();  // and nobody reads the places of the tile before any more
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
        // 2 x 16 rows of D = 128 leave no registers to jump over a tile: what hides it is their mask
        bool seen = !BLOCKS && (!CAUSAL || (TALL == 2 && PARTS == 1));
        seen = seen || sees(block_mask, own, 16 * TALL, tile, sizes);
        bool masked = (tile + 1) * BLOCK_KV > whole;
        if (PARTS == 1) {
            // copies between: in one piece with the selection, ptxas puts the last products into it, which took 12 % longer at D = 128
            if (seen) warp.multiply_keys_of(0, stage);
            copies();
            if (seen) {
                if (masked)
                    warp.weigh<true>(tile, kept);
                else
                    warp.weigh<false>(tile, kept);
                warp.multiply_values_of(0, stage);
            }
        } else if (!seen) {
            copies();
        } else if (masked) {
            warp.attend<true>(tile, stage, kept, copies);
        } else {
            warp.attend<false>(tile, stage, kept, copies);
        }
        if (STAGES == 2) stage ^= 1;
        tile = next;
    }
    copies_wait<0>();
    find_block(problem, first, problems, q_len);  // again: kept over the tiles, it is spilled
    own = first + threadIdx.x / 32 * (16 * TALL);
#pragma unroll
    for (int m = 0; m < TALL; m++) {
        warp.rows[m].problem = problem;
        warp.rows[m].first_query = own + 16 * m;
        warp.rows[m].store(out, lse);
    }
}
