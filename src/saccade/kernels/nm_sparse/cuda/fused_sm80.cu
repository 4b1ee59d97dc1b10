// Forward of N:M attention on sm_80 and later: Q K^T by mma, selection and softmax in registers, P V by mma.sp. See README.md here.
//
//   thread block     BLOCK_Q = 16 * WARPS queries of one head; tiles of BLOCK_KV keys from the last one that they see to the first
//   each warp        16 queries; K and V come by cp.async, STAGES tiles at a time
//
// How tiles lie in shared memory and products read them: tiles_half.cuh, tiles_tf32.cuh.
//
// Compiled with HEAD_DIM (D, a multiple of 16), BLOCK_KV, WARPS (4 or 8), STAGES (1 or 2), TF32 (with PAIRS), BF16, PAIRS (1: "1:2", 0: "2:4"),
// CAUSAL, STORES (the selection), DROPOUT, BLOCKS (a block mask; BLOCK_KV is 64), KEYS (a mask of keys), SELECTION, RESIDENT (thread blocks of
// a multiprocessor).
#define OVERLAP 0
#if TF32
#include "tiles_tf32.cuh"
#else
#include "tiles_half.cuh"
#endif

constexpr int BLOCK_Q = 16 * WARPS;

struct Warp : Operands {
    using Operands::Operands;

    template <bool MASKED>
    __device__ __forceinline__ void attend(int tile, int stage, u32* kept) {
        multiply_keys(stage);
        __syncwarp();  // else ptxas moves loads and comparisons across, and spills
        select<MASKED>(tile);
        if (overflows()) retry<MASKED>(tile);  // always at the first tile, whose reference is not known
        accept();
        if (STORES) store_selection(tile, kept);
        __syncwarp();
        multiply_values(stage);
    }
};

// whether these 64 queries see a tile
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
    extern __shared__ __align__(16) unsigned char memory[];
    const Sizes sizes{heads,     group,    q_len,   kv_len,     words,     counters, HEAD_DIM, problems, 0,        one,
                      out_batch, out_head, out_row, mask_batch, mask_head, mask_row, scale,    spared,   threshold,
                      key_bits, key_spans, key_words, keys_batch};
    int blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q, problem = blockIdx.x / blocks;
    int first = (blocks - 1 - int(blockIdx.x) % blocks) * BLOCK_Q;  // long blocks of a causal problem first
    int batch = problem / heads, head = problem % heads;
    query += batch * query_batch + head * query_head;
    key += batch * key_batch + head / group * key_head;
    value += batch * value_batch + head / group * value_head;
    block_mask += batch * mask_batch + head * mask_head;

    Warp warp(sizes, static_cast<u32>(__cvta_generic_to_shared(memory)));
#if DROPOUT
    warp.seed = *seed;
#endif
    int own = first + threadIdx.x / 128 * 64;
    warp.begin(problem, own);
    warp.copy_query(query, query_row, first);
    const int* span = key_spans + 2 * sizes.key_row(problem);
    int end = KEYS ? span[0] : CAUSAL ? min(kv_len, first + BLOCK_Q) : kv_len;
    int whole = KEYS ? span[1] : CAUSAL ? min(kv_len, own + 1) : kv_len;  // keys that all these rows see
    int tiles = (end + BLOCK_KV - 1) / BLOCK_KV;
    // the next tile that some warp sees, going down
    auto following = [&](int tile) {
        for (; tile >= 0; tile--) {
            bool seen = false;
            for (int w = 0; w < BLOCK_Q; w += 64) seen |= sees(block_mask, first + w, tile, sizes);
            if (seen) break;
        }
        return tile;
    };
    auto copy = [&](int tile, int stage) {
        if (tile >= 0)
            copy_tile(warp.keys(stage), warp.values(stage), key, value, key_row, value_row, tile * BLOCK_KV, kv_len);
        copies_commit();
    };
    int tile = following(tiles - 1), stage = 0;
    copy(tile, 0);
    for (int turn = 0; tile >= 0; turn++) {
        int next = following(tile - 1);
        if (STAGES == 2) copy(next, stage ^ 1);
        copies_wait<STAGES - 1>();
        settle_tile(warp.keys(stage), warp.values(stage));
        __syncthreads();
        if (turn == 0) warp.keep_query();
        if (sees(block_mask, own, tile, sizes)) {
            if ((tile + 1) * BLOCK_KV > whole)
                warp.attend<true>(tile, stage, kept);
            else
                warp.attend<false>(tile, stage, kept);
        }
        __syncthreads();
        if (STAGES == 1) copy(next, 0);
        if (STAGES == 2) stage ^= 1;
        tile = next;
    }
    copies_wait<0>();
    warp.store(out, lse);
}
