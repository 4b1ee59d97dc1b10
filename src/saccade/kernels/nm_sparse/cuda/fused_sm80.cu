// Forward of N:M attention on sm_80 and later: Q K^T by mma, selection and softmax in registers, P V by mma.sp. See README.md here.
//
//   thread block     BLOCK_Q = 16 * TALL * WARPS queries of one head; tiles of BLOCK_KV keys from the last one that they see to the first
//   each warp        16 queries of each of TALL blocks of 64; K and V come by cp.async, STAGES tiles at a time
//
// Fragments of K and V that a warp reads are multiplied with all its TALL x 16 queries: by 16 queries alone, shared memory is read twice as
// long as the tensor cores need. How tiles lie in shared memory and products read them: tiles_half.cuh, tiles_tf32.cuh.
//
// Compiled with HEAD_DIM (D, a multiple of 16), BLOCK_KV, WARPS (4 or 8), TALL (1 or 2), STAGES (1 or 2), TF32 (with PAIRS), BF16, PAIRS (1:
// "1:2", 0: "2:4"), CAUSAL, STORES (the selection), DROPOUT, BLOCKS (a block mask; BLOCK_KV is 64), KEYS (a mask of keys), SELECTION, RESIDENT
// (thread blocks of a multiprocessor), QUERY_STEPS (steps of 16 dims of which Q stays in registers).
#define OVERLAP 0
#if TF32
#include "tiles_tf32.cuh"
#else
#include "tiles_half.cuh"
#endif

constexpr int BLOCK_Q = 16 * TALL * WARPS;

struct WarpRows : Operands {
    using Operands::Operands;

    // weights of the tile, whose scores are there
    template <bool MASKED>
    __device__ __forceinline__ void weigh(int tile, u32* kept) {
#pragma unroll
        for (int m = 0; m < TALL; m++) {
            Rows& own = rows[m];
#if SYNC
            __syncwarp();
#endif
            own.template select<MASKED>(tile);
            if (own.overflows()) own.template retry<MASKED>(tile);  // always at the first tile, whose reference is not known
            own.accept();
            if (STORES) own.store_selection(tile, kept);
        }
    }
};

// whether some of these 64 queries see a tile
__device__ __forceinline__ bool sees(const unsigned char* mask, int query, int tile, const Sizes& sizes) {
    if (query >= sizes.q_len || (CAUSAL && tile * BLOCK_KV > query + 63)) return false;
    return !BLOCKS || mask[query / 64 * sizes.mask_row + tile];
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
    int blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q, problem, first;
    auto place = [&] {
        int block = block_of();
        problem = block / blocks;
        first = (blocks - 1 - block % blocks) * BLOCK_Q;  // long blocks of a causal problem first
    };
    place();
    int batch = problem / heads, head = problem % heads;
    query += batch * query_batch + head * query_head;
    key += batch * key_batch + head / group * key_head;
    value += batch * value_batch + head / group * value_head;
    block_mask += batch * mask_batch + head * mask_head;

    WarpRows warp(sizes, static_cast<u32>(__cvta_generic_to_shared(shared_memory)));
    int own = first + (WARPS > 4 ? threadIdx.x / 128 * (64 * TALL) : 0);  // the first query of these four warps
#pragma unroll
    for (int m = 0; m < TALL; m++) {
#if DROPOUT
        warp.rows[m].seed = *seed;
#endif
        warp.rows[m].begin(problem, own + 64 * m);
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
            for (int w = 0; w < BLOCK_Q; w += 64) seen |= sees(block_mask, first + w, tile, sizes);
            if (seen) break;
        }
        return tile;
    };
    auto copy_keys = [&](int tile, int stage) {
        if (tile >= 0) copy_tile<true>(warp.keys(stage), key, key_row, tile * BLOCK_KV, kv_len);
        copies_commit();
    };
    auto copy_values = [&](int tile, int stage) {
        if (tile >= 0) copy_tile<false>(warp.values(stage), value, value_row, tile * BLOCK_KV, kv_len);
        copies_commit();
    };
    int tile = following(tiles - 1), stage = 0;
    copy_keys(tile, 0);
    if (STAGES == 2) copy_values(tile, 0);
    for (int turn = 0; tile >= 0; turn++) {
        int next = following(tile - 1);
        copies_wait<0>();
        settle_tile<true>(warp.keys(stage));
        if (STAGES == 2) settle_tile<false>(warp.values(stage));
        __syncthreads();  // and nobody reads the places of the tile before any more
        if (STAGES == 1) copy_values(tile, 0);
#if COPY_EARLY
        if (STAGES == 2) {
            copy_keys(next, stage ^ 1);
            copy_values(next, stage ^ 1);
        }
#endif
        if (turn == 0) warp.keep_query();
        bool seen = !BLOCKS && !(CAUSAL && WARPS > 4);
        for (int m = 0; m < TALL; m++) seen = seen || sees(block_mask, own + 64 * m, tile, sizes);
        bool masked = (tile + 1) * BLOCK_KV > whole;
        if (seen) warp.multiply_keys(stage);
        if (STAGES == 2) {
#if !COPY_EARLY
            copy_keys(next, stage ^ 1);
            copy_values(next, stage ^ 1);
#endif
        } else {
            copies_wait<0>();
            settle_tile<false>(warp.values(0));
            __syncthreads();
            copy_keys(next, 0);
        }
        if (seen) {
            if (masked)
                warp.weigh<true>(tile, kept);
            else
                warp.weigh<false>(tile, kept);
            warp.multiply_values(stage);
        }
        if (STAGES == 2) stage ^= 1;
        tile = next;
    }
    copies_wait<0>();
    place();  // again: kept over the tiles, it is spilled
    own = first + (WARPS > 4 ? threadIdx.x / 128 * (64 * TALL) : 0);
#pragma unroll
    for (int m = 0; m < TALL; m++) {
        warp.rows[m].problem = problem;
        warp.rows[m].first_query = own + 64 * m;
        warp.rows[m].store(out, lse);
    }
}
