// Backward of packed sequences of at most ROWS tokens, every gradient of a sequence and head in one pass, sm_80 and later.
//
// A thread block takes every n-th (sequence, head) of its bucket of lengths. Scores are held transposed: each warp owns 16 keys and walks over the
// queries, so that P^T and dS^T are left factors in registers; dS^T goes to shared memory too, for dQ, of which each warp owns 16 queries.
//
//   shared memory, for each stage:  | Q [ROWS][HEAD_DIM] | K | V | dO |
//                 once:             | dS^T [ROWS keys][ROWS queries] | lse, delta: float [ROWS] each |
//
//   a warp, for each 16 queries:  S^T = K Q^T,  dP^T = V dO^T,  P^T = exp2(scale S^T - lse),  dS^T = P^T (dP^T - delta)
//                                 dV += P^T dO,  dK += dS^T Q
//   then                          dQ = dS K
//
// delta = rowsum(dO O) - dlse, from out, which is read once: a sum over the keys would need all of dP before any of dS.
// Macros: those of sequence.cuh, STAGES (1, 2), HAS_DLSE, SHARED_BYTES.
#include "sequence.cuh"

constexpr int PAIRS_PITCH = ROWS * 2;
static_assert(SHARED_BYTES == STAGES * 4 * TILE_BYTES + ROWS * PAIRS_PITCH + 8 * ROWS, "what the launch asks for");
constexpr bool HOLDS = HEAD_DIM <= 64;  // K and V of a warp stay in registers; at 128 they take those of the sums

struct Tensors {
    const Number *query, *key, *value, *dout;
    Strides q, k, v, d;
};

__device__ __forceinline__ void copy_item(const Tensors& from, const Item& item, u32 stage) {
    copy_tile(stage, from.query, from.q, item.q_first, item.head, item.q_len);
    copy_tile(stage + TILE_BYTES, from.key, from.k, item.k_first, item.head, item.k_len);
    copy_tile(stage + 2 * TILE_BYTES, from.value, from.v, item.k_first, item.head, item.k_len);
    copy_tile(stage + 3 * TILE_BYTES, from.dout, from.d, item.q_first, item.head, item.q_len);
}

// where 8 queries of a key of dS^T lie
__device__ __forceinline__ u32 pairs_at(u32 pairs, int key, int chunk) {
    return pairs + key * PAIRS_PITCH + (chunk ^ key % 8) * 16;
}

// a number passed as a pointer: only pointers change from call to call of a launch
__device__ __forceinline__ int number_of(const void* given) {
    return int(reinterpret_cast<unsigned long long>(given));
}

extern "C" __global__ void __launch_bounds__(THREADS) ragged_backward(
    const Number* query, const Number* key, const Number* value, const int* cu_q, const int* cu_k, const int* members, const int* count,
    const Number* dout, const Number* out, const float* lse, const float* dlse, Number* dquery, Number* dkey, Number* dvalue,
    const void* total_q, const void* total_k, const void* max_q, const void* max_k, long long query_row, long long query_head,
    long long key_row, long long key_head, long long value_row, long long value_head, long long dout_row, long long dout_head,
    long long out_row, long long out_head, long long dquery_row, long long dquery_head, long long dkey_row, long long dkey_head,
    long long dvalue_row, long long dvalue_head, int heads, float scale) {
    extern __shared__ __align__(128) unsigned char memory[];
    const Batch batch{.cu_q = cu_q, .cu_k = cu_k, .members = members, .total_q = number_of(total_q), .total_k = number_of(total_k),
                      .max_q = number_of(max_q), .max_k = number_of(max_k), .heads = heads};
    const Tensors from{.query = query, .key = key, .value = value, .dout = dout,
                       .q = {query_row, query_head}, .k = {key_row, key_head}, .v = {value_row, value_head}, .d = {dout_row, dout_head}};
    const Strides outs{out_row, out_head}, to_q{dquery_row, dquery_head}, to_k{dkey_row, dkey_head}, to_v{dvalue_row, dvalue_head};
    u32 stage = shared_address(memory);
    const u32 pairs = stage + STAGES * 4 * TILE_BYTES;
    float* shifts = reinterpret_cast<float*>(memory + STAGES * 4 * TILE_BYTES + ROWS * PAIRS_PITCH);
    float* deltas = shifts + ROWS;
    const u32 other = STAGES == 2 ? stage ^ (stage + 4 * TILE_BYTES) : 0;  // to the other stage and back
    const float factor = scale * LOG2E;
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
        // half a row of out for each lane, and lse: requested before the wait for the tiles
        int own = 16 * warp + lane / 2;
        bool real = own < item.q_len;
        uint4 o[HEAD_DIM / 16] = {};
        float log_sum = MINUS_INFINITY, grown = 0.0f;
        if (real) {
            const Number* row = out + outs.at(item.q_first + own, item.head) + lane % 2 * (HEAD_DIM / 2);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 16; i++) o[i] = reinterpret_cast<const uint4*>(row)[i];
            long long at = (long long)item.head * batch.total_q + item.q_first + own;
            log_sum = lse[at];
            if (HAS_DLSE) grown = dlse[at];
        }
        if (STAGES == 2) {
            if (more) copy_item(from, next, stage ^ other);
            copies_commit();
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        __syncthreads();
        const u32 q_tile = stage, k_tile = stage + TILE_BYTES, v_tile = stage + 2 * TILE_BYTES, d_tile = stage + 3 * TILE_BYTES;
        // delta = rowsum(dO O) - dlse; lse in base 2, +inf for a query that sees no key, or does not exist
        float delta = 0.0f;
        if (real) {
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 16; i++) {
                uint4 d;
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
                             : "r"(chunk_at(d_tile, own, lane % 2 * (CHUNKS / 2) + i)));
                const u32 left[4] = {o[i].x, o[i].y, o[i].z, o[i].w}, right[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float2 a = floats_of(left[j]), b = floats_of(right[j]);
                    delta += a.x * b.x + a.y * b.y;
                }
            }
        }
        delta += __shfl_xor_sync(~0u, delta, 1);
        if (lane % 2 == 0) {
            shifts[own] = log_sum == MINUS_INFINITY ? -MINUS_INFINITY : log_sum * LOG2E;
            deltas[own] = delta - grown;
        }
        __syncthreads();

        int first = 16 * warp, reach = CAUSAL == 2 ? item.k_len - item.q_len : 0;
        float dk[HEAD_DIM / 8][4] = {}, dv[HEAD_DIM / 8][4] = {};
        bool owns_keys = first < item.k_len;
        if (owns_keys) {
            u32 k[HOLDS ? HEAD_DIM / 16 : 1][4], v[HOLDS ? HEAD_DIM / 16 : 1][4];
            if (HOLDS) {
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 16; i++) {
                    load_matrices(k[HOLDS ? i : 0], left_at(k_tile, first, i, lane));
                    load_matrices(v[HOLDS ? i : 0], left_at(v_tile, first, i, lane));
                }
            }
#pragma unroll 1
            for (int start = 0; start < item.q_len; start += 16) {
                // S^T = K Q^T, dP^T = V dO^T
                float s[2][4] = {}, dp[2][4] = {};
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 16; i++) {
                    int held = HOLDS ? i : 0;
                    if (!HOLDS) {
                        load_matrices(k[0], left_at(k_tile, first, i, lane));
                        load_matrices(v[0], left_at(v_tile, first, i, lane));
                    }
                    u32 b[4];
                    load_matrices(b, right_at(q_tile, start, i, lane));
                    multiply(s[0], k[held], b[0], b[1]);
                    multiply(s[1], k[held], b[2], b[3]);
                    load_matrices(b, right_at(d_tile, start, i, lane));
                    multiply(dp[0], v[held], b[0], b[1]);
                    multiply(dp[1], v[held], b[2], b[3]);
                }
                // P^T = exp2(scale S^T - lse), dS^T = P^T (dP^T - delta)
                u32 p[4], ds[4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int column = start + 8 * i + 2 * t;
                    float2 shift = *reinterpret_cast<float2*>(shifts + column), row = *reinterpret_cast<float2*>(deltas + column);
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        int line = first + g + 8 * h;
                        float a = exp2_fast(s[i][2 * h] * factor - shift.x), b = exp2_fast(s[i][2 * h + 1] * factor - shift.y);
                        if (line >= item.k_len || (CAUSAL && line > column + reach)) a = 0.0f;
                        if (line >= item.k_len || (CAUSAL && line > column + 1 + reach)) b = 0.0f;
                        p[2 * i + h] = pack(a, b);
                        ds[2 * i + h] = pack(a * (dp[i][2 * h] - row.x), b * (dp[i][2 * h + 1] - row.y));
                        u32 to = pairs_at(pairs, line, start / 8 + i) + 4 * t;
                        asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(ds[2 * i + h]) : "memory");
                    }
                }
                // dV += P^T dO, dK += dS^T Q
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 16; i++) {
                    u32 b[4];
                    load_transposed(b, left_at(d_tile, start, i, lane));
                    multiply(dv[2 * i], p, b[0], b[1]);
                    multiply(dv[2 * i + 1], p, b[2], b[3]);
                    load_transposed(b, left_at(q_tile, start, i, lane));
                    multiply(dk[2 * i], ds, b[0], b[1]);
                    multiply(dk[2 * i + 1], ds, b[2], b[3]);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = first + g + 8 * h;
                bool there = row < item.k_len;
                store_row<HEAD_DIM>(reinterpret_cast<const float(&)[HEAD_DIM / 2]>(dv), h, 1.0f,
                                    dvalue + to_v.at(item.k_first + row, item.head), HEAD_DIM, there);
                store_row<HEAD_DIM>(reinterpret_cast<const float(&)[HEAD_DIM / 2]>(dk), h, scale,
                                    dkey + to_k.at(item.k_first + row, item.head), HEAD_DIM, there);
            }
        }
        __syncthreads();
        if (first < item.q_len) {
            // dQ = dS K
            float dq[HEAD_DIM / 8][4] = {};
#pragma unroll 1
            for (int start = 0; start < item.k_len; start += 16) {
                u32 a[4];
                load_transposed(a, pairs_at(pairs, start + lane / 16 * 8 + lane % 8, first / 8 + lane / 8 % 2));
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 16; i++) {
                    u32 b[4];
                    load_transposed(b, left_at(k_tile, start, i, lane));
                    multiply(dq[2 * i], a, b[0], b[1]);
                    multiply(dq[2 * i + 1], a, b[2], b[3]);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = first + g + 8 * h;
                store_row<HEAD_DIM>(reinterpret_cast<const float(&)[HEAD_DIM / 2]>(dq), h, scale,
                                    dquery + to_q.at(item.q_first + row, item.head), HEAD_DIM, row < item.q_len);
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
