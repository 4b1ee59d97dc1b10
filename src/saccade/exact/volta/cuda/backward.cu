// dK and dV of a block of keys, and dQ by additions in float32 memory, from scores computed again:
//
//     P = exp(scale Q K^T + bias - lse)   dP = dO V^T   dS = P (dP - delta)   dV = P'^T dO   dK = scale dS^T Q   dQ = scale dS K
//
// Shared memory:   | K | V | Q | dO | P' | dS | shift | delta | far |     as gradient.cuh draws it
//
// P' and dP are dropped as in forward. A block walks over all queries of all heads that share its keys, so dK and dV are written once.
//
// Macros: HEAD_DIM, WARPS, ROWS (queries of a tile, 32 or 64), BLOCKS, CAUSAL, MASK, LENGTHS, DROPOUT, HALF_SUMS (gradient.cuh says what
// stays in float32), ATOMIC (0: no dQ; see query_gradient.cu). Source: paper 001, section 3.3, its equation 4 corrected (dK = dS^T Q).
#include "gradient.cuh"

// as in forward.cu; dout like query; shift, delta, far as delta.cu writes them; dquery float32 [B, H, Tq, D], zeros before, without its factor
// `scale`. Grid: batch * kv_heads * kv_tiles.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) volta_backward(
    const Half* query, const Half* key, const Half* value, const unsigned char* mask, const int* lengths, const int64* seed,
    const Half* dout, const float* shift, const float* delta, const float2* far, float* dquery, Half* dkey, Half* dvalue, int64 query_batch,
    int64 query_head, int64 query_row, int64 key_batch, int64 key_head, int64 key_row, int64 value_batch, int64 value_head,
    int64 value_row, int64 mask_batch, int64 mask_head, int64 mask_row, int64 mask_column, int64 dout_batch, int64 dout_head,
    int64 dout_row, int64 dkey_batch, int64 dkey_head, int64 dkey_row, int64 dvalue_batch, int64 dvalue_head, int64 dvalue_row,
    int heads, int group, int q_len, int kv_len, int kv_tiles, int threshold, float factor, float inverse, float scale) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int owner = blockIdx.x / kv_tiles, kv_heads = heads / group, batch = owner / kv_heads, kv_head = owner % kv_heads;
    const int first_key = (int)(blockIdx.x % kv_tiles) * KEYS;
    Numbers n = {.factor = factor, .inverse = inverse, .q_len = q_len, .kv_end = kv_len};
    if (LENGTHS) n.kv_end = min(kv_len, lengths[batch]);
    const Tiles tiles = tiles_of(shared_memory);
    {
        Share<KEYS, THREADS> moved;
        moved.load(key + batch * key_batch + kv_head * key_head, key_row, first_key, n.kv_end);
        moved.store(tiles.keys);
        moved.load(value + batch * value_batch + kv_head * value_head, value_row, first_key, n.kv_end);
        moved.store(tiles.values);
    }
    Sums dkeys[MINE][2][2], dvalues[MINE][2][2];
#pragma unroll
    for (int i = 0; i < MINE * 4; i++) clear(dkeys[i / 4][i / 2 % 2][i % 2]), clear(dvalues[i / 4][i / 2 % 2][i % 2]);

    const int first_tile = CAUSAL ? first_key / ROWS * ROWS : 0;
    const int members = first_key < n.kv_end ? group : 0;  // nothing is computed for keys that no query sees
#pragma unroll 1
    for (int member = 0; member < members; member++) {
        const int head = kv_head * group + member;
        const int64 problem = (int64)batch * heads + head;
        const Half* queries = query + batch * query_batch + head * query_head;
        const Half* douts = dout + batch * dout_batch + head * dout_head;
        const Mask seen = mask_of(mask, batch * mask_batch + head * mask_head, mask_row, mask_column);
        Dropout dropout = {.key0 = 0, .key1 = 0, .problem = (u32)problem, .groups = (u32)(kv_len + 3) / 4, .threshold = (u32)threshold};
        if (DROPOUT) dropout.key0 = (u32)*(const u64*)seed, dropout.key1 = (u32)(*(const u64*)seed >> 32);
#pragma unroll 1
        for (int first_query = first_tile; first_query < q_len; first_query += ROWS) {
            Share<ROWS, THREADS> moved;
            moved.load(queries, query_row, first_query, q_len);
            __syncthreads();  // all warps have read the tile before
            moved.store(tiles.queries);
            moved.load(douts, dout_row, first_query, q_len);
            moved.store(tiles.douts);
            load_rows(tiles, {.shift = shift + problem * q_len, .delta = delta + problem * q_len, .far = far + problem * q_len}, first_query, q_len);
            __syncthreads();
            float dscores[ROW_TILES][GROUPS][8];
            // P' and dS of the tile
            make_gradients<true>(dscores, tiles, seen, dropout, n, first_query, first_key, warp, lane);
            __syncthreads();
#pragma unroll
            for (int m = 0; m < MINE; m++) {
                const int pair = warp + WARPS * m;
                if (PAIRS % WARPS && pair >= PAIRS) continue;
                multiply_transposed(dvalues[m], tiles.weights, tiles.douts, pair, lane);   // dV += P'^T dO
                multiply_transposed(dkeys[m], tiles.dscores, tiles.queries, pair, lane);  // dK += dS^T Q
#if ATOMIC
                float dqueries[ROW_TILES][2][8];
#if HALF_SUMS
                Sums products[ROW_TILES][2];
#else
                Sums(&products)[ROW_TILES][2] = dqueries;
#endif
#pragma unroll
                for (int i = 0; i < ROW_TILES * 2; i++) clear(products[i / 2][i % 2]);
                multiply_dscores(products, tiles, pair, lane);  // dQ += dS K
#if HALF_SUMS
#pragma unroll
                for (int i = 0; i < ROW_TILES * 2; i++) as_floats(dqueries[i / 2][i % 2], products[i / 2][i % 2], lane);
#endif
                // from the lane's first row and column on, all offsets are constants
                const int rows_left = q_len - first_query - row_of(lane);
                const int columns_left = HEAD_DIM - 16 * pair - paired_column(lane, 0, 0);
                float* to = dquery + (problem * q_len + first_query + row_of(lane)) * HEAD_DIM + 16 * pair + paired_column(lane, 0, 0);
#pragma unroll
                for (int i = 0; i < ROW_TILES * 16; i++) {
                    const int row = i / 16 * 32 + (i & 2), column = paired_column(0, i % 8, i / 8 % 2);
                    if (row < rows_left && (DIM == HEAD_DIM || column < columns_left))
                        atomicAdd(to + row * HEAD_DIM + column, dqueries[i / 16][i / 8 % 2][i % 8]);
                }
#endif
            }
        }
    }
    dkey += batch * dkey_batch + kv_head * dkey_head;
    dvalue += batch * dvalue_batch + kv_head * dvalue_head;
#pragma unroll
    for (int m = 0; m < MINE; m++) {
        const int pair = warp + WARPS * m;
        if (PAIRS % WARPS && pair >= PAIRS) continue;
#pragma unroll
        for (int s = 0; s < 2; s++) {
            const int row = first_key + 8 * chunk_of(lane) + 4 * s + (lane & 3);
            store_pair(dvalue + row * dvalue_row, dvalues[m][s], inverse, pair, row < kv_len, lane);
            store_pair(dkey + row * dkey_row, dkeys[m][s], scale, pair, row < kv_len, lane);
        }
    }
}
