// P and dS of 64 queries a warpgroup, rounded into shared memory where products over queries read them.
#pragma once
#include "tiles_sm90.cuh"

// The numbers that a lane has of its two queries.
struct Rows {
    float shift[2];  // lse in base 2; infinite beyond the last query, whose weights are then 0

    __device__ __forceinline__ Rows(const float* lse, int problem, int q_len, int group) { load(lse, problem, q_len, group); }

    __device__ __forceinline__ void load(const float* lse, int problem, int q_len, int group) {
        load_pair(shift, lse, problem, q_len, group, -MINUS_INFINITY);
#pragma unroll
        for (int h = 0; h < 2; h++) shift[h] *= LOG2E;
    }

    // P = exp2(exponent S - shift), 0 where a key is not seen
    __device__ __forceinline__ u32 weights(const float* scores, int h, int row, int key, int kv_len, float exponent) const {
        float x = exp2_fast(fmaf(scores[0], exponent, -shift[h])), y = exp2_fast(fmaf(scores[1], exponent, -shift[h]));
        // The shift shows whether the query exists: an infinite key makes the scores of a zero row NaN, and no shift hides a NaN.
        bool there = !MASK_QUERIES || shift[h] < -MINUS_INFINITY;
        return pack(there && sees(row, key, kv_len) ? x : 0.0f, there && sees(row, key + 1, kv_len) ? y : 0.0f);
    }

    __device__ __forceinline__ void park_weights(const float (&scores)[ROWS / 2], u32 to, int group, int kv_len, float exponent) const {
        int row = first_row(group);
#pragma unroll
        for (int step = 0; step < ROWS / 16; step++) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int e = 8 * step + 2 * j, h = j % 2, key = column_at(own_column(), e);
                words[j] = weights(scores + e, h, row + 8 * h, key, kv_len, exponent);
            }
            store_matrices(to + fragment<ROWS>(group, step), words);
        }
    }
};

// scale dS = scale P (dP - delta), delta = rowsum(P dP) - dlse; over P in shared memory, and in registers as the operand of dQ
__device__ __forceinline__ void park_score_gradient(u32 (&dscores)[ROWS / 4], const float (&dweights)[ROWS / 2], const float (&dlse)[2], u32 at,
                                                    int group, float scale) {
    float delta[2] = {0.0f, 0.0f};
#pragma unroll
    for (int step = 0; step < ROWS / 16; step++) {
        u32 words[4];
        load_matrices(words, at + fragment<ROWS>(group, step));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 p = floats_of(words[j]);
            delta[j % 2] = fmaf(p.x, dweights[8 * step + 2 * j], fmaf(p.y, dweights[8 * step + 2 * j + 1], delta[j % 2]));
            dscores[4 * step + j] = words[j];
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        delta[h] = quad_sum(delta[h]);
        if (HAS_DLSE) delta[h] -= dlse[h];
        delta[h] *= -scale;
    }
#pragma unroll
    for (int step = 0; step < ROWS / 16; step++) {
        u32* words = dscores + 4 * step;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 p = floats_of(words[j]);
            const float* dp = dweights + 8 * step + 2 * j;
            words[j] = pack(p.x * fmaf(dp[0], scale, delta[j % 2]), p.y * fmaf(dp[1], scale, delta[j % 2]));
        }
        store_matrices(at + fragment<ROWS>(group, step), words);
    }
}
