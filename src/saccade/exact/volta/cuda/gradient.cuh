// The work of the kernels of backward on a tile of ROWS queries and KEYS keys: scores and dP by products along the head dim, dropped
// weights P' and score gradients dS = P (dP - delta) to shared memory, in float16; and products with those.
//
// P' and dS go through shared memory because each is an operand of two products that sum over different axes (P'^T dO, dS^T Q over
// queries, dS K over keys), and because so the sums of a tile are spread over all warps: 2 * KEYS * DIM floats of dK and dV are
// more than a warp that keeps P' to itself could hold at D = 128. A warp multiplies for all rows and 16 columns in WARPS * 16.
//
// Shared memory:   | K: KEYS rows | V: KEYS rows | Q: ROWS rows | dO: ROWS rows | P': ROWS rows | dS: ROWS rows | shift: ROWS | delta: ROWS | far: ROWS |
//
// Rows of K, V, Q and dO are STRIDE numbers of float16 (tile.cuh), those of P' and dS PITCH of them; the others are float32.
//
// With HALF_SUMS products add in float16, as in forward: S, dP, and, each tile by itself, P'^T dO, dS^T Q and dS K; the sums of dV and dK over
// tiles too. In float32 stay shift (the lse) and delta, whose error would reach every number of a row; the exponent s - shift and dP - delta,
// differences of numbers that nearly cancel; and the additions to dQ in memory, one for each 64 keys in no order. S is then the very number that
// forward with HALF_SUMS had, so that the weights of a row still add up to 1. A sum beyond 65,504 is infinite, of dS^T Q and dS K before `scale`.
//
// P = exp2(s - shift), but exp2((s - maximum) - log2(sum)) in rows whose lse is too coarse (far.cuh): tiles without such a row and without an edge
// run no code for it.
#pragma once
#include "sums.cuh"
#include "dropout.cuh"
#include "tile.cuh"
#include "visible.cuh"

#define KEYS 64
#define THREADS (32 * WARPS)
#define ROW_TILES (ROWS / 32)
#define GROUPS (KEYS / 8 / WARPS)  // 8-wide products of a warp in a tile of scores
#define STEPS (DIM / 8)
#define PAIRS (DIM / 16)
#define MINE ((PAIRS + WARPS - 1) / WARPS)  // pairs of 8-wide products along the head dim that a warp sums
#define PITCH (KEYS + 8)                    // numbers from row to row of P' and dS: an odd number of chunks

static_assert(TILE_BYTES(2 * KEYS + 2 * ROWS) + 2 * ROWS * PITCH * 2 + 4 * ROWS * 4 <= SHARED_BYTES, "the launch asks for too little shared memory");
static_assert(ROWS <= THREADS, "a thread reads the numbers of a row");
extern __shared__ __align__(128) unsigned char shared_memory[];

struct Tiles {
    Half *keys, *values, *queries, *douts, *weights, *dscores;
    float *shift, *delta;  // of each query, as delta.cu writes them
    float2* far;           // maximum and log2(sum) of the queries whose shift is FAR_SHIFT
};

__device__ __forceinline__ Tiles tiles_of(unsigned char* memory) {
    Tiles t;
    t.keys = (Half*)memory;
    t.values = t.keys + KEYS * STRIDE;
    t.queries = t.values + KEYS * STRIDE;
    t.douts = t.queries + ROWS * STRIDE;
    t.weights = t.douts + ROWS * STRIDE;
    t.dscores = t.weights + ROWS * PITCH;
    t.shift = (float*)(t.dscores + ROWS * PITCH);
    t.delta = t.shift + ROWS;
    t.far = (float2*)(t.delta + ROWS);
    return t;
}

struct Numbers {
    float factor, inverse;  // scale * log2(e); 1 / (1 - dropout_p)
    int q_len, kv_end;
};

// what delta.cu found of the rows of a problem, [Tq] each
struct RowNumbers {
    const float *shift, *delta;
    const float2* far;
};

__device__ __forceinline__ void load_rows(const Tiles& t, const RowNumbers& of, int first_query, int q_len) {
    const int row = threadIdx.x;
    if (row >= ROWS) return;
    const bool inside = first_query + row < q_len;
    const float shift = inside ? of.shift[first_query + row] : -MINUS_INFINITY;
    t.shift[row] = shift;
    t.delta[row] = inside ? of.delta[first_query + row] : 0.0f;
    if (shift == FAR_SHIFT) t.far[row] = of.far[first_query + row];
}

// whether a row of the tile is far; of shifts that `differentiate` reads too
__device__ __forceinline__ bool any_far(const Tiles& tiles, int lane) {
    bool far = false;
#pragma unroll
    for (int row = held_row(lane); row < ROWS; row += 32) far |= tiles.shift[row] == FAR_SHIFT || (LANE_ROWS == 2 && tiles.shift[row + 2] == FAR_SHIFT);
    return any_lane(far);
}

// c = left right^T for this warp's keys, along the head dim
__device__ __forceinline__ void multiply_heads(float (&c)[ROW_TILES][GROUPS][8], const Half* left, const Half* right, int lane) {
    const int l = lane & 3, h = lane >> 4;
    Sums sums[ROW_TILES][GROUPS];
#pragma unroll
    for (int i = 0; i < ROW_TILES * GROUPS; i++) clear(sums[i / GROUPS][i % GROUPS]);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint4 a[ROW_TILES];
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) a[t] = read_chunk(left, 32 * t + lane, 8 * step);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const uint4 b = read_chunk(right, 8 * g + l + 4 * h, 8 * step);
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) {
                multiply<ROWS_FIRST, COLUMNS_FIRST>(sums[t][g], a[t].x, a[t].y, b.x, b.y);
                multiply<ROWS_FIRST, COLUMNS_FIRST>(sums[t][g], a[t].z, a[t].w, b.z, b.w);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES * GROUPS; i++) widen(c[i / GROUPS][i % GROUPS], sums[i / GROUPS][i % GROUPS]);
}

__device__ __forceinline__ void put(Half* tile, const float (&c)[8], int row, int column, int lane) {
    u32 a[4];
    as_operand(c, a, lane);
    *(uint4*)(tile + (row + lane) * PITCH + column) = make_uint4(a[0], a[1], a[2], a[3]);
}

// dS of this warp's keys in place of dP, from scores; CHECKED: where keys may be hidden, or rows be far; STORED: and P' and dS in shared memory, as float16
template <bool CHECKED, bool STORED>
__device__ __forceinline__ void differentiate(
    const Tiles& tiles, float (&scores)[ROW_TILES][GROUPS][8], float (&dweights)[ROW_TILES][GROUPS][8], const Mask& mask,
    const Dropout& dropout, const Numbers& n, int first_query, int first_key, int warp, int lane) {
    const float rest = FACTORED ? n.factor : 1.0f;
#pragma unroll
    for (int t = 0; t < ROW_TILES; t++) {
        const int row = 32 * t + held_row(lane);
#if HALF_SUMS
        float shift[1] = {tiles.shift[row]}, most[1] = {0.0f};
        const float delta[1] = {tiles.delta[row]};
#else
        float shift[2] = {tiles.shift[row], tiles.shift[row + 2]}, most[2] = {0.0f, 0.0f};
        const float delta[2] = {tiles.delta[row], tiles.delta[row + 2]};
#endif
#pragma unroll
        for (int r = 0; r < LANE_ROWS; r++)
            if (CHECKED && shift[r] == FAR_SHIFT) most[r] = tiles.far[row + 2 * r].x, shift[r] = tiles.far[row + 2 * r].y;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const int column = 8 * (GROUPS * warp + g);
            u32 bits[LANE_ROWS];
            if constexpr (DROPOUT) bits_of_rows(bits, survivors<8>(dropout, first_query + 32 * t + lane, first_key + column), lane);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int r = row_index(i), key = held_column(lane, i);
                float score = scores[t][g][i], dweight = dweights[t][g][i];
                if (CHECKED || MASK)
                    score = finish<CHECKED>(score, n.factor, mask, first_query + row + 2 * r, first_key + column + key, n.q_len, n.kv_end);
                if (CHECKED) score -= most[r];
                const float weight = exp2_fast(fmaf(score, rest, -shift[r]));
                float kept = weight;
                if constexpr (DROPOUT) {
                    const bool survives = bits[r] >> key & 1;
                    kept = survives ? weight : 0.0f;
                    dweight = survives ? dweight * n.inverse : 0.0f;
                }
                scores[t][g][i] = kept;
                dweights[t][g][i] = weight * (dweight - delta[r]);
            }
            if (STORED) {
                put(tiles.weights, scores[t][g], 32 * t, column, lane);
                put(tiles.dscores, dweights[t][g], 32 * t, column, lane);
            }
        }
    }
}

// this warp's dS of the tile and, if STORED, the tile's P' and dS; needs keys, values, queries, dO and rows in shared memory
template <bool STORED>
__device__ __forceinline__ void make_gradients(
    float (&dscores)[ROW_TILES][GROUPS][8], const Tiles& tiles, const Mask& mask, const Dropout& dropout, const Numbers& n, int first_query,
    int first_key, int warp, int lane) {
    float scores[ROW_TILES][GROUPS][8];
    const int mine = 8 * GROUPS * warp * STRIDE;
    multiply_heads(scores, tiles.queries, tiles.keys + mine, lane);    // S = Q K^T
    multiply_heads(dscores, tiles.douts, tiles.values + mine, lane);  // dP = dO V^T
    // P = exp(scale S + bias - lse), dS = P (dP - delta)
    const bool whole = first_key + KEYS <= n.kv_end && !(CAUSAL && first_key + KEYS - 1 > first_query) && !(MASK && first_query + ROWS > n.q_len) &&
                       !any_far(tiles, lane);
    if (whole) differentiate<false, STORED>(tiles, scores, dscores, mask, dropout, n, first_query, first_key, warp, lane);
    else differentiate<true, STORED>(tiles, scores, dscores, mask, dropout, n, first_query, first_key, warp, lane);
}

// c += dS K for one pair of columns: [ROWS, 16]
__device__ __forceinline__ void multiply_dscores(Sums (&c)[ROW_TILES][2], const Tiles& tiles, int pair, int lane) {
    const int l = lane & 3, h = lane >> 4;
#pragma unroll
    for (int g = 0; g < KEYS / 8; g++) {
        uint4 a[ROW_TILES];
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) a[t] = *(const uint4*)(tiles.dscores + (32 * t + lane) * PITCH + 8 * g);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 b = read_chunk(tiles.keys, 8 * g + 4 * half + l, 16 * pair + 8 * h);
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) {
                const u32 a0 = half ? a[t].z : a[t].x, a1 = half ? a[t].w : a[t].y;
                multiply<ROWS_FIRST, ROWS_FIRST>(c[t][0], a0, a1, b.x, b.y);
                multiply<ROWS_FIRST, ROWS_FIRST>(c[t][1], a0, a1, b.z, b.w);
            }
        }
    }
}

// of the 64 keys: a lane reads 8 neighbours of a row of P' or dS, the first four for one product, the others for the next. The two
// quad-pairs that read together take chunks 4 apart, so that four rows of both meet no bank twice.
__device__ __forceinline__ int chunk_of(int lane) { return 4 * (lane >> 2 & 1) + 2 * (lane >> 3 & 1) + (lane >> 4); }

// sums += left^T right for one pair of columns: [KEYS, 16], left P' or dS, right dO or Q
__device__ __forceinline__ void multiply_transposed(Sums (&sums)[2][2], const Half* left, const Half* right, int pair, int lane) {
    const int l = lane & 3, h = lane >> 4;
#if HALF_SUMS  // the tile by itself, and added once: roundings of the large sum are ROWS / 4 times fewer
    Sums c[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) clear(c[i / 2][i % 2]);
#else
    Sums(&c)[2][2] = sums;
#endif
#pragma unroll
    for (int row = 0; row < ROWS; row += 4) {
        const uint4 a = *(const uint4*)(left + (row + l) * PITCH + 8 * chunk_of(lane)), b = read_chunk(right, row + l, 16 * pair + 8 * h);
        multiply<COLUMNS_FIRST, ROWS_FIRST>(c[0][0], a.x, a.y, b.x, b.y);
        multiply<COLUMNS_FIRST, ROWS_FIRST>(c[0][1], a.x, a.y, b.z, b.w);
        multiply<COLUMNS_FIRST, ROWS_FIRST>(c[1][0], a.z, a.w, b.x, b.y);
        multiply<COLUMNS_FIRST, ROWS_FIRST>(c[1][1], a.z, a.w, b.z, b.w);
    }
#if HALF_SUMS
#pragma unroll
    for (int i = 0; i < 4; i++) add(sums[i / 2][i % 2], c[i / 2][i % 2]);
#endif
}

// 16 columns of this lane's row of a result, times a factor, if the row `exists`
__device__ __forceinline__ void store_pair(Half* to, const Sums (&sums)[2], float factor, int pair, bool exists, int lane) {
    u32 first[4], second[4];
    float c[2][8];
    widen(c[0], sums[0]);
    widen(c[1], sums[1]);
#pragma unroll
    for (int i = 0; i < 16; i++) c[i / 8][i % 8] *= factor;
    as_operand(c[0], first, lane);
    as_operand(c[1], second, lane);
    if (exists) *(uint4*)(to + 16 * pair) = make_uint4(first[0], first[1], second[0], second[1]);
    if (exists && 16 * pair + 8 < HEAD_DIM) *(uint4*)(to + 16 * pair + 8) = make_uint4(first[2], first[3], second[2], second[3]);
}
