// Scores of 32 * WARPS queries against keys, pruned as they leave the registers: scale * Q K^T + bias -> kept scores and metadata.
//
// A warp owns 32 queries. Keys come in tiles of SPAN = 64 (32 of float32); inside a tile they are permuted, so that the accumulators of
// thread t of a quad hold the OWNED consecutive keys OWNED * t, ... of a row: column 2 t + b of the 8-wide product j is key
// OWNED * t + 2 j + b. A thread then prunes its own numbers, writes 16 bytes of kept scores a row, and its metadata is a whole 16-bit
// element of the CUTLASS layout (the paper permutes within 16 keys, Fig. 9, which leaves a quarter of an element in each thread).
// The permutation costs nothing: it is in the row addresses of ldmatrix.
//
// Shared memory:   | Q: ROWS rows | K: a ring of STAGES tiles of SPAN rows |     rows of STRIDE chunks of 16 bytes, see tile.cuh
//
// Macros: DTYPE, HEAD_DIM, TWO_OF_FOUR, MASK (0 none, 1 bool, 2 bias of the type of query, 3 float32 bias), CAUSAL, HIDES (there is a block
// mask), WARPS, STAGES, BLOCKS, QUERY_STAYS, PRESCALED (a bias, or a scale that is not positive: scores are scaled before they are compared).
#include "number.cuh"
#include "prune.cuh"
#include "tile.cuh"

#include "mma.cuh"

#define SPAN (4 * OWNED)
#define PRODUCTS (SPAN / 8)                        // 8-wide products of a tile
#define STEPS (HEAD_DIM * NUMBER_BYTES / 32)  // 32-byte steps along the head dim
#define CHUNKS (2 * STEPS)
#define STRIDE ROUND_UP(CHUNKS, 8)
#define ROWS (32 * WARPS)
#define THREADS (32 * WARPS)
#define HIDDEN 64  // queries and keys of a tile of the block mask: the rows of a warp lie in one, and so do the keys of a tile
#define QUERY_BYTES (ROWS * STRIDE * 16)
#define KEY_BYTES (SPAN * STRIDE * 16)
static_assert(QUERY_BYTES + STAGES * KEY_BYTES <= SHARED_BYTES, "the launch asks for too little shared memory");

// a number that differs in the eight keys of one 8-wide product, for `chunk_offset`
__device__ __forceinline__ int turn_of(int key) { return (key & 1) | (key / OWNED) << 1; }

template <int COUNT, bool PERMUTED>
__device__ __forceinline__ void fill_tile(u32 target, const Number* source, int64 stride, int first, int end) {
    typedef Share<CHUNKS, THREADS> Mine;
    const Number* from = source + first * stride;
#pragma unroll
    for (int i = 0; i < Mine::count(COUNT); i++) {
        const int row = Mine::row(i), chunk = Mine::chunk(i);
        if (COUNT * CHUNKS % THREADS && row >= COUNT) break;
        const bool valid = first + row < end;
        copy_16(target + chunk_offset<STRIDE>(row, PERMUTED ? turn_of(row) : row, chunk), Mine::of(from, stride, i), valid);
    }
}

__device__ __forceinline__ void load_query(u32 (&a)[4], u32 query, int row, int step, int lane) {
    row += lane & 15;
    load_matrices(a, query + chunk_offset<STRIDE>(row, row, 2 * step + (lane >> 4)));
    round_operand(a);
}

struct Mask {
    const unsigned char* base;  // of this batch and head
    int64 row, column;          // strides in elements
};

// one score, biased, -inf where the key is not visible; scaled first where that could change which is larger
template <bool CHECKED>
__device__ __forceinline__ float finish(float s, float scale, const Mask& mask, int query, int key, int q_len, int kv_len) {
    if (PRESCALED) s *= scale;
    const bool inside = !CHECKED || (query < q_len && key < kv_len);
    if (MASK && inside) {
        const int64 at = query * mask.row + key * mask.column;
        if constexpr (MASK == 1)
            s = mask.base[at] ? s : -INFINITE;
        else if constexpr (MASK == 3 || TF32)
            s += ((const float*)mask.base)[at];
        else
            s += floats_of(((const Number*)mask.base)[at]).x;
    }
    return inside && !(CHECKED && CAUSAL && key > query) ? s : -INFINITE;
}

template <bool CHECKED>
__device__ __forceinline__ void store_tile(
    const float (&acc)[2][PRODUCTS][4], float scale, const Mask& mask, Number* values, u32* metadata, int first_query,
    int first_key, int q_len, int kv_len, int rows, int cols, int lane, bool hidden) {
    const int g = lane >> 2, t = lane & 3;
    u32 words[2] = {0, 0};
    const float rest = PRESCALED ? 1.0f : scale;
#pragma unroll
    for (int half = 0; half < 4; half++) {  // of 16 of the 32 queries: g, g + 8
        const int query = first_query + 8 * half + g, key = first_key + OWNED * t;
        float owned[OWNED], probe;
        u32 kept[4];
#pragma unroll
        for (int i = 0; i < OWNED; i++)
            owned[i] = hidden ? -INFINITE
                              : finish<CHECKED>(
                                    acc[half >> 1][i >> 1][2 * (half & 1) + (i & 1)], scale, mask, query, key + i, q_len, kv_len);
        u32 bits = prune(owned, rest, kept, probe);
        if (probe != probe) bits = prune_with_nan(owned, rest, kept);
        words[half >> 1] |= bits << (16 * (half & 1));
        uint4* to = (uint4*)(values + (int64)query * (cols / 2) + key / 2);
        *to = make_uint4(kept[0], kept[1], kept[2], kept[3]);
    }
    // word 4 g + 2 m + k of these 32 rows and 2 * OWNED keys: rows g and g + 8 of half m, keys OWNED * k, ..., so pairs of lanes swap
    const bool odd = t & 1;
    const u32 other = __shfl_xor_sync(~0u, odd ? words[0] : words[1], 1);
    const uint2 pair = odd ? make_uint2(other, words[1]) : make_uint2(words[0], other);
    const int column = (first_key / OWNED + t) / 2;
    *(uint2*)(metadata + (int64)column * rows + first_query + 4 * g + 2 * odd) = pair;
}

extern __shared__ __align__(128) unsigned char shared_memory[];

// query [B, H, Tq, D], key [B, Hkv, Tk, D] by strides (batch, head, row; the last is 1), mask by strides (batch, head, row, column),
// block_mask in bytes by strides (batch, head, row; the last is 1); values [B, H, rows, cols / 2], metadata 32-bit words
// [B, H, cols / (2 OWNED), rows]; rows is Tq up to a multiple of 32, cols is Tk up to a multiple of SPAN. Grid: batch * heads * q_tiles, splits of the tiles of keys.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) nm_scores(
    const Number* query, const Number* key, const unsigned char* mask, const unsigned char* block_mask, Number* values,
    u32* metadata, int64 query_batch, int64 query_head, int64 query_row, int64 key_batch, int64 key_head, int64 key_row,
    int64 mask_batch, int64 mask_head, int64 mask_row, int64 mask_column, int64 block_mask_batch, int64 block_mask_head,
    int64 block_mask_row, int heads, int group, int q_len, int kv_len, int rows, int cols, int q_tiles, int tiles_per_block,
    float scale) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int problem = blockIdx.x / q_tiles, batch = problem / heads, head = problem % heads;
    const int block_query = (blockIdx.x % q_tiles) * ROWS, first_query = block_query + 32 * warp;
    query += batch * query_batch + head * query_head;
    key += batch * key_batch + (head / group) * key_head;
    values += (int64)problem * rows * (cols / 2);
    metadata += (int64)problem * (cols / (2 * OWNED)) * rows;
    const int width = MASK == 1 ? 1 : MASK == 3 ? 4 : NUMBER_BYTES;
    const Mask seen = {mask + (batch * mask_batch + head * mask_head) * width, mask_row, mask_column};
    block_mask += batch * block_mask_batch + head * block_mask_head + first_query / HIDDEN * block_mask_row;
    const int first_tile = blockIdx.y * tiles_per_block, all_tiles = cols / SPAN;
    const int end_tile = first_tile + tiles_per_block < all_tiles ? first_tile + tiles_per_block : all_tiles;
    // tiles from here on lie above the diagonal: nothing is multiplied, masked scores are written
    const int seen_tiles = CAUSAL ? (block_query + ROWS + SPAN - 1) / SPAN : end_tile;
    const int end_product = seen_tiles < end_tile ? seen_tiles : end_tile;

    const u32 query_tile = shared_address(shared_memory), key_tiles = query_tile + QUERY_BYTES;
    if (first_tile < end_product) fill_tile<ROWS, false>(query_tile, query, query_row, block_query, q_len);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        if (first_tile + stage < end_product)
            fill_tile<SPAN, true>(key_tiles + stage * KEY_BYTES, key, key_row, (first_tile + stage) * SPAN, kv_len);
        copies_commit();
    }

    u32 queries[2][QUERY_STAYS ? STEPS : 1][4];
    float acc[2][PRODUCTS][4];
#pragma unroll 1
    for (int tile = first_tile; tile < end_tile; tile++) {
#pragma unroll
        for (int i = 0; i < 2 * PRODUCTS * 4; i++) acc[i / (4 * PRODUCTS)][i / 4 % PRODUCTS][i % 4] = 0.0f;
        // one answer for the whole warp; a warp without rows has none in the block mask either
        const bool hidden = HIDES && (first_query >= rows || !block_mask[tile * SPAN / HIDDEN]);
        if (tile < end_product) {
            copies_wait<STAGES - 2>();
            __syncthreads();
            const int ahead = tile + STAGES - 1;
            if (ahead < end_product)
                fill_tile<SPAN, true>(key_tiles + (ahead - first_tile) % STAGES * KEY_BYTES, key, key_row, ahead * SPAN, kv_len);
            copies_commit();
            if (QUERY_STAYS && tile == first_tile)
#pragma unroll
                for (int i = 0; i < 2 * STEPS; i++)
                    load_query(queries[i / STEPS][i % STEPS], query_tile, 32 * warp + 16 * (i / STEPS), i % STEPS, lane);
            // S = Q K^T, 32 bytes of the head dim a step
            const u32 keys = key_tiles + (tile - first_tile) % STAGES * KEY_BYTES;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                if (hidden) break;
                if constexpr (!QUERY_STAYS) {
                    load_query(queries[0][0], query_tile, 32 * warp, step, lane);
                    load_query(queries[1][0], query_tile, 32 * warp + 16, step, lane);
                }
                // matrices: product j, both chunks of the step; product j + 1, both chunks. Two rows further for each product
                const int column = lane & 7, first_row = OWNED * (column >> 1) + (column & 1) + 2 * (lane >> 4);
                const u32 from = keys + chunk_offset<STRIDE>(first_row, column, 2 * step + ((lane >> 3) & 1));
#pragma unroll
                for (int j = 0; j < PRODUCTS; j += 2) {
                    u32 b[4];
                    load_matrices(b, from + 2 * j * STRIDE * 16);
                    round_operand(b);
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        const u32(&a)[4] = queries[m][QUERY_STAYS ? step : 0];
                        multiply(acc[m][j], a, b[0], b[1]);
                        multiply(acc[m][j + 1], a, b[2], b[3]);
                    }
                }
            }
        }
        // of scale S + bias, the kept numbers of each group and their metadata
        if (first_query < rows) {
            const int first_key = tile * SPAN;
            const bool whole = first_query + 32 <= q_len && first_key + SPAN <= kv_len && !(CAUSAL && first_key + SPAN - 1 > first_query);
            if (whole)
                store_tile<false>(acc, scale, seen, values, metadata, first_query, first_key, q_len, kv_len, rows, cols, lane, hidden);
            else
                store_tile<true>(acc, scale, seen, values, metadata, first_query, first_key, q_len, kv_len, rows, cols, lane, hidden);
        }
    }
}
