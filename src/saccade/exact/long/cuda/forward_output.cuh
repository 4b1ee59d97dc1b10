// Writes out and lse of a warpgroup's queries; see forward_sm90.cu.
#pragma once
#include "forward_rows.cuh"

struct Output {
    const TensorMap& map;
    Number* out;
    float* lse;
    Strides strides;
    long long row_batch, row_head;
    int head_dim;

    // Through the memory of this warpgroup's queries, by the copy engine, which may still read it when this returns (`finish`). But the rows behind
    // the last query of a packed sequence belong to another one.
    __device__ __forceinline__ void write(const Rows& rows, const Item& it, int first_query) const {
        const int group = rows.warpgroup, first = own_row(first_query);
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first + 8 * h;
            const float sum = quad_sum(rows.sum[h]);
            factor[h] = sum == 0.0f ? 0.0f : reciprocal(sum);
            if (DROPOUT) factor[h] *= rows.dropout.inverse;
            if (row < it.q_len && threadIdx.x % 4 == 0)
                lse[it.batch * row_batch + it.head * row_head + it.q_first + row] = sum == 0.0f ? MINUS_INFINITY : BIAS ? fmaf(log2_fast(sum), LN2, rows.top[h]) : (log2_fast(sum) + rows.top[h]) * LN2;
        }
        if (PACKED && first_query + 64 > it.q_len) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = first + 8 * h;
                store_row<HEAD_DIM>(rows.out, h, factor[h], out + strides.at(it.batch, it.head, it.q_first + row), head_dim, row < it.q_len);
            }
            sync_threads(OF_WARPGROUP + 2 * rows.shared.team + group, 128);  // all have read their queries
            return;
        }
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; s++) {
            u32 words[4];
            round_columns(words, rows.out + 8 * s, factor[0], factor[1]);
            store_matrices(QueryTile::fragment(rows.shared.query(rows.slot), 64 * group, s), words);
        }
        fence_async();
        sync_threads(OF_WARPGROUP + 2 * rows.shared.team + group, 128);
        if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (int block = 0; block < QueryTile::BLOCKS; block++)
                store_4d(map, rows.shared.query(rows.slot) + block * QueryTile::BLOCK_BYTES + group * 64 * QueryTile::PITCH,
                         block * (QueryTile::PITCH / 2),
                         it.q_first + first_query, it.head, it.batch);
            stores_commit();
        }
    }
};
