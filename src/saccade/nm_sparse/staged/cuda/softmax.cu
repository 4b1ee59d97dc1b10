// Softmax of each row of kept scores, into another tensor or in place; pruned numbers do not count. A row without a score above -inf
// becomes zeros. LANES threads share a row and hold VECTORS chunks of 16 bytes each, so a row is read once.
//
//   m = max s    P = exp(s - m)    w = P / sum(P)
//
// Shared memory:   | m of each warp | sum(P) of each warp |     read where LANES is above 32, so that several warps share a row
//
// Macros: DTYPE, LANES (a power of two, 4 to 256), VECTORS, THREADS, CAUSAL.
#include "number.cuh"

// over the LANES threads of a row; `spare` holds a number of each warp
template <bool SUM>
__device__ __forceinline__ float combine(float x, float* spare) {
#pragma unroll
    for (int lanes = (LANES < 32 ? LANES : 32) / 2; lanes > 0; lanes /= 2) {
        const float other = __shfl_xor_sync(~0u, x, lanes);
        x = SUM ? x + other : fmaxf(x, other);
    }
    if constexpr (LANES > 32) {
        const int warp = threadIdx.x >> 5, first = threadIdx.x / LANES * (LANES / 32);
        if ((threadIdx.x & 31) == 0) spare[warp] = x;
        __syncthreads();
        x = spare[first];
#pragma unroll
        for (int i = 1; i < LANES / 32; i++) x = SUM ? x + spare[first + i] : fmaxf(x, spare[first + i]);
    }
    return x;
}

__device__ __forceinline__ void widen(const uint4& chunk, float (&x)[PER_CHUNK]) {
    const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (TF32) {
            x[i] = __uint_as_float(words[i]);
        } else {
            const float2 two = floats_of(words[i]);
            x[2 * i] = two.x, x[2 * i + 1] = two.y;
        }
    }
}

__device__ __forceinline__ uint4 narrow(const float (&x)[PER_CHUNK]) {
    if constexpr (TF32)
        return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
    else
        return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

// scores, weights: [all_rows, chunks] of 16 bytes; `rows` of them belong to one head
extern "C" __global__ void __launch_bounds__(THREADS) nm_softmax(
    const uint4* scores, uint4* weights, int64 all_rows, int rows, int chunks) {
    __shared__ float spare[2][THREADS / 32];
    const int lane = threadIdx.x % LANES;
    const int64 row = (int64)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const bool exists = row < all_rows;
    scores += exists ? row * chunks : 0;
    weights += exists ? row * chunks : 0;
    int visible = exists ? chunks : 0;
    if constexpr (CAUSAL) {
        const int last = (int)(row % rows) / (2 * PER_CHUNK) + 1;  // a chunk stands for 2 * PER_CHUNK keys
        if (last < visible) visible = last;
    }
    // m = max s
    float x[VECTORS][PER_CHUNK], most = MINUS_INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int chunk = lane + i * LANES;
        uint4 loaded = make_uint4(0, 0, 0, 0);
        if (chunk < visible) loaded = scores[chunk];
        widen(loaded, x[i]);
#pragma unroll
        for (int e = 0; e < PER_CHUNK; e++) {
            if (chunk >= visible) x[i][e] = MINUS_INFINITY;
            most = fmaxf(most, x[i][e]);
        }
    }
    most = combine<false>(most, spare[0]);
    // P = exp(s - m)
    const float shift = most == MINUS_INFINITY ? 0.0f : most;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
#pragma unroll
        for (int e = 0; e < PER_CHUNK; e++) {
            x[i][e] = exp2_fast((x[i][e] - shift) * LOG2E);  // subtracted first: in base 2 a score beyond 2.36e38 would overflow
            sum += x[i][e];
        }
    sum = combine<true>(sum, spare[1]);
    // w = P / sum(P)
    const float share = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int chunk = lane + i * LANES;
#pragma unroll
        for (int e = 0; e < PER_CHUNK; e++) x[i][e] *= share;
        if (exists && chunk < chunks) weights[chunk] = narrow(x[i]);
    }
}
