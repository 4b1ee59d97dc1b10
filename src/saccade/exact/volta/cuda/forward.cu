// out = dropout(softmax(scale Q K^T + bias)) V and its log-sum-exp, in one pass over the keys; products sum in float32 or float16.
//
// A warp owns 32 * ROW_TILES queries, whose scores, weights and sums stay in its registers. Weights become the left operand of the second
// product by two exchanges between lanes l and l ^ 2 for each 8 x 8 tile (by none with float16 sums). All quad-pairs read the same keys and
// values, and values are multiplied without rearrangement. There are two barriers a tile; the keys of the next tile and the values of this one are on
// their way through registers meanwhile.
//
// Shared memory:   | K: KEYS rows | V: KEYS rows | Q: ROWS rows |     rows of STRIDE numbers, see tile.cuh
//
// Macros: HEAD_DIM, WARPS, ROW_TILES, KEYS (of a tile, 16 or 32), BLOCKS (a multiprocessor shall hold), CAUSAL, MASK, LENGTHS,
// DROPOUT, HALF_SUMS (the softmax is in float32 all the same).
// Source: paper 001, section 3.2; online softmax: Milakov and Gimelshein, 2018.
#include "dropout.cuh"
#include "sums.cuh"
#include "tile.cuh"
#include "visible.cuh"

#define THREADS (32 * WARPS)
#define ROWS (32 * WARPS * ROW_TILES)
#define GROUPS (KEYS / 8)   // 8-wide products of a tile of keys
#define STEPS (DIM / 8)     // 16-byte steps along the head dim
#define PAIRS (DIM / 16)    // pairs of 8-wide products along the head dim
#if HALF_SUMS
#define SLACK 4.0f
#define HEADROOM SLACK  // weights of at most 1, so that sums of n values meet 65,504 no earlier than their own sum does
#else
#define SLACK 8.0f  // weights up to 256 are as exact in float16 as those up to 1
#define HEADROOM 0.0f
#endif

static_assert(TILE_BYTES(2 * KEYS + ROWS) <= SHARED_BYTES, "the launch asks for too little shared memory");
extern __shared__ __align__(128) unsigned char shared_memory[];

struct State {
    Sums sums[ROW_TILES][2 * PAIRS];
    float most[ROW_TILES][LANE_ROWS], total[ROW_TILES][LANE_ROWS];  // most: what weights are relative to, but for HEADROOM
};

__device__ __forceinline__ void multiply_keys(
    float (&scores)[ROW_TILES][GROUPS][8], const Half* queries, const Half* keys, int lane) {
    const int l = lane & 3, h = lane >> 4;
    Sums products[ROW_TILES][GROUPS];
#pragma unroll
    for (int i = 0; i < ROW_TILES * GROUPS; i++) clear(products[i / GROUPS][i % GROUPS]);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint4 a[ROW_TILES];
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) a[t] = read_chunk(queries, 32 * t + lane, 8 * step);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const uint4 b = read_chunk(keys, 8 * g + l + 4 * h, 8 * step);
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) {
                multiply<ROWS_FIRST, COLUMNS_FIRST>(products[t][g], a[t].x, a[t].y, b.x, b.y);
                multiply<ROWS_FIRST, COLUMNS_FIRST>(products[t][g], a[t].z, a[t].w, b.z, b.w);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES * GROUPS; i++) widen(scores[i / GROUPS][i % GROUPS], products[i / GROUPS][i % GROUPS]);
}

// Scores become weights relative to a reference score, which may be below the largest so far by at most SLACK powers of two. If the reference rises,
// earlier sums are rescaled to it. It seldom rises: rescaling 64 x D sums costs as much as the weights.
template <bool CHECKED>
__device__ __forceinline__ void soften(
    State& state, float (&scores)[ROW_TILES][GROUPS][8], const Mask& mask, float factor, int first_query, int first_key, int q_len,
    int kv_end, int lane) {
    const float rest = FACTORED ? factor : 1.0f;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
        float most[LANE_ROWS], shift[LANE_ROWS];
#pragma unroll
        for (int r = 0; r < LANE_ROWS; r++) most[r] = state.most[t][r];
#pragma unroll
        for (int i = 0; i < 8 * GROUPS; i++) {
            float& score = scores[t][i / 8][i % 8];
            const int query = first_query + 32 * t + held_row(lane) + 2 * row_index(i);
            const int key = first_key + i / 8 * 8 + held_column(lane, i % 8);
            if (CHECKED || MASK) score = finish<CHECKED>(score, factor, mask, query, key, q_len, kv_end);
            most[row_index(i)] = fmaxf(most[row_index(i)], score);
        }
        bool rises = false;
#pragma unroll
        for (int r = 0; r < LANE_ROWS; r++) {
            most[r] = row_max(most[r]);
            // by their difference: beyond 2^27 the sum with SLACK may be rounded up by another SLACK, and a weight of 2^16 is infinite in float16
            if ((most[r] - state.most[t][r]) * rest > SLACK) rises = true;
            else most[r] = state.most[t][r];
            shift[r] = most[r] == MINUS_INFINITY ? 0.0f : most[r] * rest + HEADROOM;
        }
        if (any_lane(rises)) {
            float shrunk[LANE_ROWS];
#pragma unroll
            for (int r = 0; r < LANE_ROWS; r++) {
                shrunk[r] = exp2_fast(fmaf(state.most[t][r], rest, HEADROOM - shift[r]));
                state.most[t][r] = most[r];
                state.total[t][r] *= shrunk[r];
            }
#pragma unroll
            for (int i = 0; i < 2 * PAIRS; i++) scale_rows(state.sums[t][i], shrunk);
        }
#pragma unroll
        for (int i = 0; i < 8 * GROUPS; i++) {
            float& score = scores[t][i / 8][i % 8];
            score = exp2_fast(fmaf(score, rest, -shift[row_index(i)]));
            state.total[t][row_index(i)] += score;
        }
    }
}

__device__ __forceinline__ void drop(
    float (&weights)[ROW_TILES][GROUPS][8], const Dropout& dropout, int first_query, int first_key, int lane) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
        const u32 own = survivors<KEYS>(dropout, first_query + 32 * t + lane, first_key);
        u32 bits[LANE_ROWS];
        bits_of_rows(bits, own, lane);
#pragma unroll
        for (int i = 0; i < 8 * GROUPS; i++)
            if (!(bits[row_index(i)] >> (i / 8 * 8 + held_column(lane, i % 8)) & 1)) weights[t][i / 8][i % 8] = 0.0f;
    }
}

#if HALF_SUMS
// A tile's products are summed separately and added once, so that large sums, with their large roundings, are rounded KEYS / 4 times less often.
__device__ __forceinline__ void multiply_values(State& state, const float (&weights)[ROW_TILES][GROUPS][8], const Half* values, int lane) {
    const int l = lane & 3, h = lane >> 4;
    u32 a[ROW_TILES][GROUPS][4];
#pragma unroll
    for (int i = 0; i < ROW_TILES * GROUPS; i++) as_operand(weights[i / GROUPS][i % GROUPS], a[i / GROUPS][i % GROUPS], lane);
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        Sums tile[ROW_TILES][2];
#pragma unroll
        for (int i = 0; i < ROW_TILES * 2; i++) clear(tile[i / 2][i % 2]);
#pragma unroll
        for (int step = 0; step < 2 * GROUPS; step++) {
            const uint4 b = read_chunk(values, 4 * step + l, 16 * pair + 8 * h);
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) {
                const u32 a0 = a[t][step / 2][step % 2 * 2], a1 = a[t][step / 2][step % 2 * 2 + 1];
                multiply<ROWS_FIRST, ROWS_FIRST>(tile[t][0], a0, a1, b.x, b.y);
                multiply<ROWS_FIRST, ROWS_FIRST>(tile[t][1], a0, a1, b.z, b.w);
            }
        }
#pragma unroll
        for (int i = 0; i < ROW_TILES * 8; i++) {
            u32& sum = state.sums[i / 8][2 * pair + i / 4 % 2][i % 4];
            sum = add_halves(sum, tile[i / 8][i / 4 % 2][i % 4]);
        }
    }
}
#else
__device__ __forceinline__ void multiply_values(State& state, const float (&weights)[ROW_TILES][GROUPS][8], const Half* values, int lane) {
    const int l = lane & 3, h = lane >> 4;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        u32 a[ROW_TILES][4];
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) as_operand(weights[t][g], a[t], lane);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                const uint4 b = read_chunk(values, 8 * g + 4 * half + l, 16 * pair + 8 * h);
#pragma unroll
                for (int t = 0; t < ROW_TILES; t++) {
                    multiply<ROWS_FIRST, ROWS_FIRST>(state.sums[t][2 * pair], a[t][2 * half], a[t][2 * half + 1], b.x, b.y);
                    multiply<ROWS_FIRST, ROWS_FIRST>(state.sums[t][2 * pair + 1], a[t][2 * half], a[t][2 * half + 1], b.z, b.w);
                }
            }
    }
}
#endif

__device__ __forceinline__ void store(
    State& state, Half* out, int64 out_row, float* lse, float factor, float survival, int first_query, int q_len, int lane) {
    const float rest = FACTORED ? factor : 1.0f;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
        float share[LANE_ROWS];
#pragma unroll
        for (int r = 0; r < LANE_ROWS; r++) {
            const float total = row_sum(state.total[t][r]);
            const int query = first_query + 32 * t + held_row(lane) + 2 * r;
            const bool blind = state.most[t][r] == MINUS_INFINITY && total == 0.0f;
            share[r] = blind ? 0.0f : 1.0f / (total * survival);
            if (first_of_row(lane) && query < q_len)
                lse[query] = blind ? MINUS_INFINITY : (state.most[t][r] * rest + HEADROOM + log2_flushed(total)) * LN2;
        }
        const int query = first_query + 32 * t + lane;
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            u32 operands[2][4];
#pragma unroll
            for (int s = 0; s < 2; s++) {
                float x[8];
                widen(x, state.sums[t][2 * pair + s]);
#pragma unroll
                for (int i = 0; i < 8; i++) x[i] *= share[row_index(i)];
                as_operand(x, operands[s], lane);
            }
            const u32(&first)[4] = operands[0], (&second)[4] = operands[1];
            uint4* to = (uint4*)(out + query * out_row + 16 * pair);
            if (query < q_len) to[0] = make_uint4(first[0], first[1], second[0], second[1]);
            if (query < q_len && 16 * pair + 8 < HEAD_DIM) to[1] = make_uint4(first[2], first[3], second[2], second[3]);
        }
    }
}

// query, key, value, out: [B, H or Hkv, T, D] by strides (batch, head, row; the last is 1), rows on 16 bytes; mask by four strides;
// lse float32 [B, H, Tq]. Grid: batch * heads * q_tiles.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) volta_forward(
    const Half* query, const Half* key, const Half* value, const unsigned char* mask, const int* lengths, const int64* seed, Half* out,
    float* lse, int64 query_batch, int64 query_head, int64 query_row, int64 key_batch, int64 key_head, int64 key_row,
    int64 value_batch, int64 value_head, int64 value_row, int64 mask_batch, int64 mask_head, int64 mask_row, int64 mask_column,
    int64 out_batch, int64 out_head, int64 out_row, int heads, int group, int q_len, int kv_len, int q_tiles, int threshold,
    float factor, float survival) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int problem = blockIdx.x / q_tiles, batch = problem / heads, head = problem % heads;
    // the last queries first: causal, they see most keys
    const int block_query = (q_tiles - 1 - (int)(blockIdx.x % q_tiles)) * ROWS, first_query = block_query + 32 * ROW_TILES * warp;
    query += batch * query_batch + head * query_head;
    key += batch * key_batch + head / group * key_head;
    value += batch * value_batch + head / group * value_head;
    out += batch * out_batch + head * out_head;
    lse += (int64)problem * q_len;
    const Mask seen = mask_of(mask, batch * mask_batch + head * mask_head, mask_row, mask_column);
    const int kv_end = LENGTHS ? min(kv_len, lengths[batch]) : kv_len;
    const int end = CAUSAL ? min(kv_end, block_query + ROWS) : kv_end;
    const u64 drawn = DROPOUT ? (u64)*seed : 0;
    const Dropout dropout = {.key0 = (u32)drawn, .key1 = (u32)(drawn >> 32), .problem = (u32)problem, .groups = (u32)(kv_len + 3) / 4,
                             .threshold = (u32)threshold};

    Half* keys = (Half*)shared_memory;
    Half* values = (Half*)(shared_memory + TILE_BYTES(KEYS));
    Half* queries = (Half*)(shared_memory + 2 * TILE_BYTES(KEYS));
    // 32 rows at a time: all together would take more registers than the loop has
#pragma unroll 1
    for (int row = 0; row < ROWS; row += 32) {
        Share<32, THREADS> some;
        some.load(query, query_row, block_query + row, q_len);
        some.store(queries + row * STRIDE);
    }
    queries += 32 * ROW_TILES * warp * STRIDE;

    State state;
#pragma unroll
    for (int i = 0; i < ROW_TILES * 2 * PAIRS; i++) clear(state.sums[i / (2 * PAIRS)][i % (2 * PAIRS)]);
#pragma unroll
    for (int i = 0; i < ROW_TILES * LANE_ROWS; i++) {
        state.most[i / LANE_ROWS][i % LANE_ROWS] = MINUS_INFINITY;
        state.total[i / LANE_ROWS][i % LANE_ROWS] = 0.0f;
    }

    Share<KEYS, THREADS> moved;
    if (end > 0) {
        moved.load(key, key_row, 0, kv_end);
        moved.store(keys);
    }
#pragma unroll 1
    for (int first_key = 0; first_key < end; first_key += KEYS) {
        __syncthreads();  // keys are loaded, and all warps have read the values of the tile before
        moved.load(value, value_row, first_key, kv_end);
        const bool needed = !CAUSAL || first_key < first_query + 32 * ROW_TILES;
        float scores[ROW_TILES][GROUPS][8];
        if (needed) multiply_keys(scores, queries, keys, lane);  // S = Q K^T
        moved.store(values);
        __syncthreads();  // values are loaded, and all warps have read the keys
        const bool more = first_key + KEYS < end;
        if (more) moved.load(key, key_row, first_key + KEYS, kv_end);
        if (needed) {
            // P = exp(scale S + bias - m), m as `soften` says
            const bool whole = first_key + KEYS <= kv_end && !(CAUSAL && first_key + KEYS - 1 > first_query) &&
                               !(MASK && first_query + 32 * ROW_TILES > q_len);
            if (whole) soften<false>(state, scores, seen, factor, first_query, first_key, q_len, kv_end, lane);
            else soften<true>(state, scores, seen, factor, first_query, first_key, q_len, kv_end, lane);
            if (DROPOUT) drop(scores, dropout, first_query, first_key, lane);
            multiply_values(state, scores, values, lane);  // O += P V
        }
        if (more) moved.store(keys);
    }
    store(state, out, out_row, lse, factor, survival, first_query, q_len, lane);
}
