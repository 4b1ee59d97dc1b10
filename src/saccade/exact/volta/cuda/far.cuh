// Rows whose log-sum-exp is far from 0: beyond FAR float32 has the logarithm of the sum to 1/8,192 or worse, and beyond 2^23 not at all. Such
// a row's scores are computed once more here, by the instruction, the order of sums and the bias that backward uses, for their exact maximum
// and the sum of the exponentials relative to it. Backward then takes P = exp2((s - maximum) - log2(sum)), in which both steps are exact
// where it matters.
//
// A block has FAR_ROWS rows that follow each other in [B, H, Tq], maybe of several problems, which it takes one after the other: each of its
// warps multiplies all rows by 8 keys at a time, read directly from memory.
//
// Macros: HEAD_DIM, THREADS, CAUSAL, MASK, LENGTHS, HALF_SUMS (as in backward: the maximum has to be that of the scores that backward finds).
#pragma once
#include "sums.cuh"
#include "visible.cuh"

#define FAR 1024.0f
#define FAR_ROWS 32
#define FAR_WARPS (THREADS / 32)
static_assert(FAR_ROWS <= THREADS, "a thread writes a row");

// whether an lse has lost too much; that of a row that sees no key is -inf and has lost nothing, NaN stays as it is
__device__ __forceinline__ bool is_far(float lse) { return fabsf(lse) > FAR && lse != MINUS_INFINITY; }

// a maximum, and a sum of exponentials relative to it
struct Anchor {
    float most, total;

    // relative to the larger of two maxima; `rest`: what scores are multiplied by in the exponent
    __device__ __forceinline__ void join(float other_most, float other_total, float rest) {
        const float top = fmaxf(most, other_most), from = top == MINUS_INFINITY ? 0.0f : top;
        total = total * exp2_fast((most - from) * rest) + other_total * exp2_fast((other_most - from) * rest);
        most = top;
    }
};

// One problem's operands, and where its rows begin: row i of the block is query first_query + i, which is none below 0 and from q_len on.
struct FarRows {
    const Half *queries, *keys;
    int64 query_row, key_row;
    Mask mask;
    float factor;
    int first_query, q_len, kv_end;

    __device__ __forceinline__ bool has(int row) const { return first_query + row >= 0 && first_query + row < q_len; }

    // raw scores of all rows and 8 keys, as `multiply_heads` of gradient.cuh sums them
    __device__ __forceinline__ void multiply_keys(float (&scores)[8], int first_key, int lane) const {
        const int key = first_key + (lane & 3) + 4 * (lane >> 4);
        const bool real = has(lane), listed = key < kv_end;
        const Half *left = queries + (first_query + lane) * query_row, *right = keys + key * key_row;
        Sums c;
        clear(c);
#pragma unroll 2
        for (int step = 0; step < HEAD_DIM / 8; step++) {
            uint4 a = make_uint4(0, 0, 0, 0), b = make_uint4(0, 0, 0, 0);
            if (real) a = *(const uint4*)(left + 8 * step);
            if (listed) b = *(const uint4*)(right + 8 * step);
            multiply<ROWS_FIRST, COLUMNS_FIRST>(c, a.x, a.y, b.x, b.y);
            multiply<ROWS_FIRST, COLUMNS_FIRST>(c, a.z, a.w, b.z, b.w);
        }
        widen(scores, c);
    }

    // of the lane's rows and the keys of a warp
    __device__ __forceinline__ void walk(Anchor (&anchors)[LANE_ROWS], int warp, int lane) const {
        const float rest = FACTORED ? factor : 1.0f;
        const int end = CAUSAL ? min(kv_end, first_query + FAR_ROWS) : kv_end;
        // a row in front of the problem's first has no place in its mask
#if HALF_SUMS
        const int own[1] = {has(lane) ? first_query + lane : q_len};
#else
        const int own[2] = {has(row_of(lane)) ? first_query + row_of(lane) : q_len, has(row_of(lane) + 2) ? first_query + row_of(lane) + 2 : q_len};
#endif
#pragma unroll 1
        for (int first_key = 8 * warp; first_key < end; first_key += 8 * FAR_WARPS) {
            float scores[8];
            multiply_keys(scores, first_key, lane);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int r = row_index(i);
                const float score = finish<true>(scores[i], factor, mask, own[r], first_key + held_column(lane, i), q_len, kv_end);
                anchors[r].join(score, 1.0f, rest);
            }
        }
    }
};

// anchors of the rows of each lane of all warps -> the thread of each row of the block, in `found`
__device__ __forceinline__ void gather_anchors(Anchor (&anchors)[LANE_ROWS], Anchor& found, float rest, int warp, int lane) {
    __shared__ Anchor of[FAR_WARPS][FAR_ROWS];
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
        if (LANE_ROWS == 2) anchors[r].join(shuffle_xor(anchors[r].most, 2), shuffle_xor(anchors[r].total, 2), rest);
        if (first_of_row(lane)) of[warp][held_row(lane) + 2 * r] = anchors[r];
    }
    __syncthreads();
    found = {MINUS_INFINITY, 0.0f};
    if (warp == 0)
        for (int w = 0; w < FAR_WARPS; w++) found.join(of[w][lane].most, of[w][lane].total, rest);
    __syncthreads();  // read, before the next problem's are written
}
