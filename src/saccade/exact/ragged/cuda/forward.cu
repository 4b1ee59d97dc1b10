// Forward of packed sequences of at most ROWS tokens: O = softmax(scale Q K^T) V of each sequence and head, sm_80 and later.
//
// A thread block takes every n-th (sequence, head) of its bucket of lengths. Each warp owns 16 queries and all keys; work is counted in tiles of
// 16, so that a sequence of 70 tokens costs 80 of 128. The tiles of the next sequence are copied while one is computed (STAGES 2).
//
//   shared memory, for each stage:  | Q [ROWS][HEAD_DIM] | K [ROWS][HEAD_DIM] | V [ROWS][HEAD_DIM] |
//
//   a warp, for each 64 keys:  S = Q K^T [16][64]  ->  running maximum and sum  ->  P = exp2(scale S - max)  ->  O += P V
//
// Macros: those of sequence.cuh, STAGES (1, 2), SHARED_BYTES.
#include "sequence.cuh"

static_assert(SHARED_BYTES == STAGES * 3 * TILE_BYTES, "what the launch asks for");
constexpr int STEP = 64;  // keys at a time

struct Tensors {
    const Number *query, *key, *value;
    Strides q, k, v;
};

__device__ __forceinline__ void copy_item(const Tensors& from, const Item& item, u32 stage) {
    copy_tile(stage, from.query, from.q, item.q_first, item.head, item.q_len);
    copy_tile(stage + TILE_BYTES, from.key, from.k, item.k_first, item.head, item.k_len);
    copy_tile(stage + 2 * TILE_BYTES, from.value, from.v, item.k_first, item.head, item.k_len);
}

extern "C" __global__ void __launch_bounds__(THREADS) ragged_forward(
    const Number* query, const Number* key, const Number* value, const int* cu_q, const int* cu_k, const int* members, const int* count,
    Number* out, float* lse, u64 total_q, u64 total_k, long long q_row, long long q_head, long long k_row, long long k_head,
    long long v_row, long long v_head, long long o_row, long long o_head, int max_q, int max_k, int heads, float factor) {
    extern __shared__ __align__(128) unsigned char memory[];
    const Batch batch{.cu_q = cu_q, .cu_k = cu_k, .members = members, .total_q = int(total_q), .total_k = int(total_k),
                      .max_q = max_q, .max_k = max_k, .heads = heads};
    const Tensors from{.query = query, .key = key, .value = value,
                       .q = {q_row, q_head}, .k = {k_row, k_head}, .v = {v_row, v_head}};
    const Strides to{o_row, o_head};
    u32 stage = shared_address(memory);
    const u32 other = STAGES == 2 ? stage ^ (stage + 3 * TILE_BYTES) : 0;  // to the other stage and back
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int total = *count * heads, index = blockIdx.x;
    if (index >= total) return;
    Walk walk(batch, index, gridDim.x, total);
    Item item = walk.take(), next = item;
    copy_item(from, item, stage);
    copies_commit();
    for (; index < total; index += gridDim.x) {
        bool more = index + int(gridDim.x) < total;
        next = walk.take();
        if (STAGES == 2) {
            if (more) copy_item(from, next, stage ^ other);
            copies_commit();
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        __syncthreads();
        int first = 16 * warp;  // of this warp's queries
        if (first < item.q_len) {
            u32 q[HEAD_DIM / 16][4];
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 16; i++) load_matrices(q[i], left_at(stage, first, i, lane));
            float o[HEAD_DIM / 8][4] = {}, top[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {};
            int reach = CAUSAL == 2 ? item.k_len - item.q_len : 0;
            int end = CAUSAL ? min(item.k_len, max(first + 16 + reach, 0)) : item.k_len;
#pragma unroll 1
            for (int start = 0; start < end; start += STEP) {
                // S = Q K^T
                float s[STEP / 8][4];
#pragma unroll
                for (int j = 0; j < STEP / 16; j++) {
                    bool there = start + 16 * j < end;
#pragma unroll
                    for (int i = 0; i < 8; i++) s[2 * j + i / 4][i % 4] = there ? 0.0f : MINUS_INFINITY;
                    if (!there) continue;
#pragma unroll
                    for (int i = 0; i < HEAD_DIM / 16; i++) {
                        u32 k[4];
                        load_matrices(k, right_at(stage + TILE_BYTES, start + 16 * j, i, lane));
                        multiply(s[2 * j], q[i], k[0], k[1]);
                        multiply(s[2 * j + 1], q[i], k[2], k[3]);
                    }
                }
                if (start + STEP > item.k_len || CAUSAL) {
#pragma unroll
                    for (int i = 0; i < STEP / 2; i++) {
                        int column = start + 8 * (i / 4) + 2 * t + i % 2, row = first + g + i % 4 / 2 * 8;
                        if (column >= item.k_len || (CAUSAL && column > row + reach)) s[i / 4][i % 4] = MINUS_INFINITY;
                    }
                }
                // the maximum of the scores, which scale > 0 keeps; then P = exp2(scale S - max)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float most = top[h];
#pragma unroll
                    for (int i = 0; i < STEP / 8; i++) most = max_nan(most, max_nan(s[i][2 * h], s[i][2 * h + 1]));
                    most = quad_max(most);
                    // a query that has seen no key yet: -inf - -inf would be NaN
                    float shift = most == MINUS_INFINITY ? 0.0f : most * factor, rescale = exp2_fast(top[h] * factor - shift);
                    top[h] = most;
                    float part = 0.0f;
#pragma unroll
                    for (int i = 0; i < STEP / 8; i++)
#pragma unroll
                        for (int b = 0; b < 2; b++) part += s[i][2 * h + b] = exp2_fast(s[i][2 * h + b] * factor - shift);
                    sum[h] = sum[h] * rescale + part;
                    if (start)
#pragma unroll
                        for (int i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
                            for (int b = 0; b < 2; b++) o[i][2 * h + b] *= rescale;
                }
                // O += P V
#pragma unroll
                for (int j = 0; j < STEP / 16; j++) {
                    if (start + 16 * j >= end) continue;
                    const float *left = s[2 * j], *right = s[2 * j + 1];
                    u32 p[4] = {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]), pack(right[2], right[3])};
#pragma unroll
                    for (int i = 0; i < HEAD_DIM / 16; i++) {
                        u32 v[4];
                        load_transposed(v, left_at(stage + 2 * TILE_BYTES, start + 16 * j, i, lane));
                        multiply(o[2 * i], p, v[0], v[1]);
                        multiply(o[2 * i + 1], p, v[2], v[3]);
                    }
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float whole = quad_sum(sum[h]);
                int row = first + g + 8 * h;
                bool there = row < item.q_len;
                Number* at = out + to.at(item.q_first + row, item.head);
                store_row<HEAD_DIM>(reinterpret_cast<const float(&)[HEAD_DIM / 2]>(o), h, whole == 0.0f ? 0.0f : 1.0f / whole, at, HEAD_DIM, there);
                if (there && t == 0)
                    lse[(long long)item.head * total_q + item.q_first + row] =
                        whole == 0.0f ? MINUS_INFINITY : (log2_fast(whole) + top[h] * factor) * LN2;
            }
        }
        __syncthreads();
        if (STAGES == 1 && more) {
            copy_item(from, next, stage);
            copies_commit();
        }
        item = next;
        stage ^= other;
    }
}
