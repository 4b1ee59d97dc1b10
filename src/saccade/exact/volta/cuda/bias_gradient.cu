// dbias = dS, summed over the axes that the bias is broadcast along. A block owns 64 keys and ROWS queries of the bias, or all queries
// where its rows are one (all keys where its columns are), and adds up, in order, what shares them: deterministic, without additions in
// memory. It computes scores and dP once more.
//
// Shared memory:   | K | V | Q | dO | P' | dS | shift | delta | far |     as gradient.cuh draws it, P' and dS not used
// after the last tile:   | the sums of dS: ROWS rows of SUM_PITCH |
//
// Macros: as backward.cu, without ATOMIC.
#include "gradient.cuh"

#define SUM_PITCH (KEYS + 1)  // numbers from row to row of the sums in shared memory
static_assert(ROWS * SUM_PITCH * 4 <= SHARED_BYTES, "the launch asks for too little shared memory");

// as in backward.cu; dbias float32 [rows, bias_heads, Tq or 1, Tk or 1]. An axis has `programs` blocks, each of which takes `steps` of it.
// Grid: rows * bias_heads * q_programs * k_programs.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) volta_bias_gradient(
    const Half* query, const Half* key, const Half* value, const unsigned char* mask, const int* lengths, const int64* seed,
    const Half* dout, const float* shift, const float* delta, const float2* far, float* dbias, int64 query_batch, int64 query_head, int64 query_row,
    int64 key_batch, int64 key_head, int64 key_row, int64 value_batch, int64 value_head, int64 value_row, int64 mask_batch,
    int64 mask_head, int64 mask_row, int64 mask_column, int64 dout_batch, int64 dout_head, int64 dout_row, int heads, int group,
    int q_len, int kv_len, int bias_heads, int q_programs, int k_programs, int batch_steps, int head_steps, int q_steps, int k_steps,
    int bias_queries, int bias_keys, int threshold, float factor, float inverse) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int place = blockIdx.x;
    const int key_tile = place % k_programs, query_tile = (place /= k_programs) % q_programs;
    const int bias_head = (place /= q_programs) % bias_heads, bias_row = place / bias_heads;
    const Tiles tiles = tiles_of(shared_memory);
    Dropout dropout = {.key0 = 0, .key1 = 0, .problem = 0, .groups = (u32)(kv_len + 3) / 4, .threshold = (u32)threshold};
    if (DROPOUT) dropout.key0 = (u32)*(const u64*)seed, dropout.key1 = (u32)(*(const u64*)seed >> 32);
    float sums[ROW_TILES][GROUPS][8];
#pragma unroll
    for (int i = 0; i < ROW_TILES * GROUPS * 8; i++) sums[i / (8 * GROUPS)][i / 8 % GROUPS][i % 8] = 0.0f;

#pragma unroll 1
    for (int step = 0; step < batch_steps * head_steps * q_steps * k_steps; step++) {
        const int first_key = (key_tile + step % k_steps) * KEYS, first_query = (query_tile + step / k_steps % q_steps) * ROWS;
        const int member = step / (k_steps * q_steps), head = bias_head + member % head_steps, batch = bias_row + member / head_steps;
        const int64 problem = (int64)batch * heads + head;
        Numbers n = {.factor = factor, .inverse = inverse, .q_len = q_len, .kv_end = kv_len};
        if (LENGTHS) n.kv_end = min(kv_len, lengths[batch]);
        if (first_key >= n.kv_end) continue;  // the same for the whole block
        dropout.problem = (u32)problem;
        __syncthreads();  // all warps have read the tiles before
        {
            Share<ROWS, THREADS> moved;
            moved.load(query + batch * query_batch + head * query_head, query_row, first_query, q_len);
            moved.store(tiles.queries);
            moved.load(dout + batch * dout_batch + head * dout_head, dout_row, first_query, q_len);
            moved.store(tiles.douts);
        }
        {
            Share<KEYS, THREADS> moved;
            moved.load(key + batch * key_batch + head / group * key_head, key_row, first_key, n.kv_end);
            moved.store(tiles.keys);
            moved.load(value + batch * value_batch + head / group * value_head, value_row, first_key, n.kv_end);
            moved.store(tiles.values);
        }
        load_rows(tiles, {.shift = shift + problem * q_len, .delta = delta + problem * q_len, .far = far + problem * q_len}, first_query, q_len);
        __syncthreads();
        const Mask seen = mask_of(mask, batch * mask_batch + head * mask_head, mask_row, mask_column);
        float dscores[ROW_TILES][GROUPS][8];
        // dS of the tile
        make_gradients<false>(dscores, tiles, seen, dropout, n, first_query, first_key, warp, lane);
        // dbias += dS
#pragma unroll
        for (int i = 0; i < ROW_TILES * GROUPS * 8; i++)
            sums[i / (8 * GROUPS)][i / 8 % GROUPS][i % 8] += dscores[i / (8 * GROUPS)][i / 8 % GROUPS][i % 8];
    }

    // through shared memory, so that a thread can add up a row or a column in order
    float* all = (float*)shared_memory;
    __syncthreads();  // all warps have read the last tiles
#pragma unroll
    for (int i = 0; i < ROW_TILES * GROUPS * 8; i++) {
        const int row = i / (8 * GROUPS) * 32 + held_row(lane) + 2 * row_index(i), column = 8 * (GROUPS * warp + i / 8 % GROUPS) + held_column(lane, i % 8);
        all[row * SUM_PITCH + column] = sums[i / (8 * GROUPS)][i / 8 % GROUPS][i % 8];
    }
    __syncthreads();
    const int rows = bias_queries == 1 ? 1 : ROWS, columns = bias_keys == 1 ? 1 : KEYS;
    dbias += ((int64)bias_row * bias_heads + bias_head) * bias_queries * bias_keys;
    for (int i = threadIdx.x; i < rows * columns; i += THREADS) {
        const int row = i / columns, column = i % columns;
        const int query = query_tile * ROWS + row, key = key_tile * KEYS + column;
        float sum = 0.0f;
        for (int r = row; r < (rows == 1 ? ROWS : row + 1); r++)
            for (int c = column; c < (columns == 1 ? KEYS : column + 1); c++) sum += all[r * SUM_PITCH + c];
        if (query < bias_queries && key < bias_keys) dbias[(int64)query * bias_keys + key] = sum;
    }
}
