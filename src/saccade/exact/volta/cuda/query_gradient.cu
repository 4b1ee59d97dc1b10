// dQ = scale dS K of a block of queries, summed over the keys in order: with backward.cu without its additions to memory, the
// deterministic backward. It computes scores and dP once more, 7 products in place of 5.
//
// Shared memory:   | K | V | Q | dO | P' | dS | shift | delta | far |     as gradient.cuh draws it
//
// Macros: as backward.cu, without ATOMIC.
#include "gradient.cuh"

// as in backward.cu; dquery float16 by strides. Grid: batch * heads * q_tiles.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) volta_query_gradient(
    const Half* query, const Half* key, const Half* value, const unsigned char* mask, const int* lengths, const int64* seed,
    const Half* dout, const float* shift, const float* delta, const float2* far, Half* dquery, int64 query_batch, int64 query_head, int64 query_row,
    int64 key_batch, int64 key_head, int64 key_row, int64 value_batch, int64 value_head, int64 value_row, int64 mask_batch,
    int64 mask_head, int64 mask_row, int64 mask_column, int64 dout_batch, int64 dout_head, int64 dout_row, int64 dquery_batch,
    int64 dquery_head, int64 dquery_row, int heads, int group, int q_len, int kv_len, int q_tiles, int threshold, float factor,
    float inverse, float scale) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int problem = blockIdx.x / q_tiles, batch = problem / heads, head = problem % heads;
    const int first_query = (q_tiles - 1 - (int)(blockIdx.x % q_tiles)) * ROWS;
    key += batch * key_batch + head / group * key_head;
    value += batch * value_batch + head / group * value_head;
    Numbers n = {.factor = factor, .inverse = inverse, .q_len = q_len, .kv_end = kv_len};
    if (LENGTHS) n.kv_end = min(kv_len, lengths[batch]);
    const int end = CAUSAL ? min(n.kv_end, first_query + ROWS) : n.kv_end;
    const Mask seen = mask_of(mask, batch * mask_batch + head * mask_head, mask_row, mask_column);
    Dropout dropout = {.key0 = 0, .key1 = 0, .problem = (u32)problem, .groups = (u32)(kv_len + 3) / 4, .threshold = (u32)threshold};
    if (DROPOUT) dropout.key0 = (u32)*(const u64*)seed, dropout.key1 = (u32)(*(const u64*)seed >> 32);
    const Tiles tiles = tiles_of(shared_memory);
    {
        Share<ROWS, THREADS> moved;
        moved.load(query + batch * query_batch + head * query_head, query_row, first_query, q_len);
        moved.store(tiles.queries);
        moved.load(dout + batch * dout_batch + head * dout_head, dout_row, first_query, q_len);
        moved.store(tiles.douts);
    }
    const int64 rows = (int64)problem * q_len;
    load_rows(tiles, {.shift = shift + rows, .delta = delta + rows, .far = far + rows}, first_query, q_len);
    Sums dqueries[MINE][ROW_TILES][2];
#pragma unroll
    for (int i = 0; i < MINE * ROW_TILES * 2; i++) clear(dqueries[i / (2 * ROW_TILES)][i / 2 % ROW_TILES][i % 2]);

#pragma unroll 1
    for (int first_key = 0; first_key < end; first_key += KEYS) {
        Share<KEYS, THREADS> moved;
        moved.load(key, key_row, first_key, n.kv_end);
        __syncthreads();  // all warps have read the tile before
        moved.store(tiles.keys);
        moved.load(value, value_row, first_key, n.kv_end);
        moved.store(tiles.values);
        __syncthreads();
        float dscores[ROW_TILES][GROUPS][8];
        // dS of the tile
        make_gradients<true>(dscores, tiles, seen, dropout, n, first_query, first_key, warp, lane);
        __syncthreads();
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            if (PAIRS % WARPS && warp + WARPS * m >= PAIRS) continue;
#if HALF_SUMS  // a tile is summed separately, as in multiply_transposed
            Sums products[ROW_TILES][2];
#pragma unroll
            for (int i = 0; i < ROW_TILES * 2; i++) clear(products[i / 2][i % 2]);
            multiply_dscores(products, tiles, warp + WARPS * m, lane);  // dQ += dS K
#pragma unroll
            for (int i = 0; i < ROW_TILES * 2; i++) add(dqueries[m][i / 2][i % 2], products[i / 2][i % 2]);
#else
            multiply_dscores(dqueries[m], tiles, warp + WARPS * m, lane);  // dQ += dS K
#endif
        }
    }
    dquery += batch * dquery_batch + head * dquery_head;
#pragma unroll
    for (int m = 0; m < MINE; m++) {
        if (PAIRS % WARPS && warp + WARPS * m >= PAIRS) continue;
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
            const int row = first_query + 32 * t + lane;
            store_pair(dquery + row * dquery_row, dqueries[m][t], scale, warp + WARPS * m, row < q_len, lane);
        }
    }
}
