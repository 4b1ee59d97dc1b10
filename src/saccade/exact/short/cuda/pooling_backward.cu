// Backward for one query (the CLS token), on the ordinary units: keys and values pass by once, from memory to registers.
//
//   s = K q    P = exp2(scale s - lse)    dP = V dO    delta = sum(P dP) - dlse                    s, P, dP: one number a key
//   dq = scale (sum (P dP) K - delta sum P K)    dV = P dO^T    dK = scale P (dP - delta) q^T      outer products
//
// In this form neither K nor V is needed after delta is known, only P and dP: two numbers a key, which stay in shared memory. A warp takes 32 / ACROSS
// rows at a time, 16 bytes a lane; AHEAD rows of a lane are requested before the first is used. Source: paper 002, q = 1; bytes moved are its minimum.
//
// Shared memory:   | P: MAX_KEYS | dP: MAX_KEYS | deltas: sum(P dP) of each warp | sums: sum (P dP) K and sum P K of each warp |
//
// Compiled with HEAD_DIM (32 to 256: D rounded up), WARPS, MAX_KEYS, BF16, HAS_DLSE.
#include "numbers.cuh"

constexpr int ACROSS = HEAD_DIM / 8;        // lanes along a row
constexpr int TOGETHER = 32 / ACROSS;       // rows of a warp at a time
constexpr int STEP = WARPS * TOGETHER;      // rows of a block at a time
constexpr int AHEAD = 4;                    // rows of a lane that are requested together
static_assert(ACROSS <= 32 && 32 % ACROSS == 0, "a row is at most a warp wide");

// eight neighbours in float32
struct Eight {
    float x[8];

    __device__ __forceinline__ Eight() {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = 0.0f;
    }
    __device__ __forceinline__ explicit Eight(const uint4& from) {
        const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 two = floats_of(words[i]);
            x[2 * i] = two.x, x[2 * i + 1] = two.y;
        }
    }
    __device__ __forceinline__ float dot(const Eight& other) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(x[i], other.x[i], sum);
        return sum;
    }
    __device__ __forceinline__ void add(float factor, const Eight& other) {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = fmaf(factor, other.x[i], x[i]);
    }
    __device__ __forceinline__ uint4 rounded(float factor) const {
        return make_uint4(pack(x[0] * factor, x[1] * factor), pack(x[2] * factor, x[3] * factor), pack(x[4] * factor, x[5] * factor),
                          pack(x[6] * factor, x[7] * factor));
    }
};

// Plain loads and stores: `no_allocate`, L2 prefetches and streaming stores each cost 2 to 5 %, mostly because they are `volatile`.
__device__ __forceinline__ uint4 load(const Number* from) {
    return *reinterpret_cast<const uint4*>(from);
}
__device__ __forceinline__ void store(Number* to, const uint4& x) {
    *reinterpret_cast<uint4*>(to) = x;
}

// over the lanes of a row
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int lanes = 1; lanes < ACROSS; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}
// over the rows of a warp
__device__ __forceinline__ float rows_sum(float x) {
#pragma unroll
    for (int lanes = ACROSS; lanes < 32; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    pooling_backward(const Number* query, const Number* key, const Number* value, const Number* dout, const float* lse, const float* dlse,
                     Number* dquery, Number* dkey, Number* dvalue, int heads, int kv_len, int head_dim, long long query_batch,
                     long long query_head, long long key_batch, long long key_head, long long key_row, long long value_batch,
                     long long value_head, long long value_row, long long dout_batch, long long dout_head, long long dquery_batch,
                     long long dquery_head, long long dkey_batch, long long dkey_head, long long dkey_row, long long dvalue_batch,
                     long long dvalue_head, long long dvalue_row, float scale) {
    __shared__ float weights[MAX_KEYS], dweights[MAX_KEYS], deltas[WARPS], sums[WARPS][2][HEAD_DIM];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % ACROSS * 8, first = warp * TOGETHER + lane / ACROSS;
    const int problem = blockIdx.x, batch = problem / heads, head = problem % heads;
    const bool inside = column < head_dim;  // D is a multiple of 8
    const uint4 none = make_uint4(0, 0, 0, 0);
    key += batch * key_batch + head * key_head + column;
    value += batch * value_batch + head * value_head + column;

    // s, P, dP of each key, and the sums that delta and dq are made of
    const float shift = lse[problem] * LOG2E;
    const Eight q(inside ? load(query + batch * query_batch + head * query_head + column) : none);
    const Eight gradient(inside ? load(dout + batch * dout_batch + head * dout_head + column) : none);
    Eight with_dweights, without;  // sum (P dP) K and sum P K
    float delta = 0.0f;
    for (int start = first; start - lane / ACROSS < kv_len; start += AHEAD * STEP) {  // the same for all lanes of a warp
        uint4 keys[AHEAD], values[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int row = start + i * STEP;
            bool there = inside && row < kv_len;
            keys[i] = there ? load(key + row * key_row) : none;
            values[i] = there ? load(value + row * value_row) : none;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int row = start + i * STEP;
            if (row - lane / ACROSS >= kv_len) break;
            Eight k(keys[i]), v(values[i]);
            float p = exp2_fast(fmaf(row_sum(k.dot(q)), scale * LOG2E, -shift)), dp = row_sum(v.dot(gradient));
            if (row >= kv_len) p = 0.0f;
            if (lane % ACROSS == 0 && row < kv_len) weights[row] = p, dweights[row] = dp;
            delta = fmaf(p, dp, delta);
            with_dweights.add(p * dp, k);
            without.add(p, k);
        }
    }
    delta = rows_sum(delta);
    if (lane == 0) deltas[warp] = delta;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float a = rows_sum(with_dweights.x[i]), b = rows_sum(without.x[i]);
        if (lane < ACROSS) sums[warp][0][column + i] = a, sums[warp][1][column + i] = b;
    }
    __syncthreads();
    delta = HAS_DLSE ? -dlse[problem] : 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) delta += deltas[w];
    // dq = scale (sum (P dP) K - delta sum P K)
    for (int i = 2 * threadIdx.x; i < head_dim; i += 64 * WARPS) {
        float pair[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float a = 0.0f, b = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) a += sums[w][0][i + j], b += sums[w][1][i + j];
            pair[j] = scale * (a - delta * b);
        }
        store_pair(dquery + batch * dquery_batch + head * dquery_head + i, pair[0], pair[1]);
    }
    // dV = P dO^T, dK = scale P (dP - delta) q^T
    if (!inside) return;
    dkey += batch * dkey_batch + head * dkey_head + column;
    dvalue += batch * dvalue_batch + head * dvalue_head + column;
    for (int row = first; row < kv_len; row += STEP) {
        float p = weights[row];
        store(dvalue + row * dvalue_row, gradient.rounded(p));
        store(dkey + row * dkey_row, q.rounded(p * scale * (dweights[row] - delta)));
    }
}
