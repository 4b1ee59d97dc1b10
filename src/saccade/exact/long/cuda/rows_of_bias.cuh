// Numbers of each query of a call with a BIAS, at [batch][head][row], from which its weights are taken again: exp2(factor S + shift) |inverse|. Usually
// inverse is 1 and shift -lse in base 2. A far query, whose lse has lost the logarithm of the sum, has its maximum there and one over its sum; a negative
// inverse says that the factor is 1/4 and not log2(e). Weights are exp2(log2(e) (S - m) + c) for all of them, where m is 0 but for far ones.
#pragma once
#include "chunks_sm90.cuh"

struct NumbersOfRows {
    const float *shift, *inverse;
    long long batch, head;

    static __device__ __forceinline__ bool is_far(float shift, float inverse) {
        return inverse < 0.0f || (fabsf(shift) > 1024.0f * LOG2E && shift > MINUS_INFINITY);
    }
    // m
    static __device__ __forceinline__ float maximum_of(float shift, float inverse) {
        return is_far(shift, inverse) ? -shift * (inverse < 0.0f ? 4.0f : LN2) : 0.0f;
    }
    // c
    static __device__ __forceinline__ float exponent(float shift, float inverse) {
        return log2_fast(fabsf(inverse)) + (is_far(shift, inverse) ? 0.0f : shift);
    }

    __device__ __forceinline__ long long at(const Item& item, int head_index, int row) const { return item.batch * batch + head_index * head + row; }
    // m of a query, 0 of one that does not exist
    __device__ __forceinline__ float maximum(const Item& item, int head_index, int row) const {
        if (row >= item.q_len) return 0.0f;
        return maximum_of(shift[at(item, head_index, row)], inverse[at(item, head_index, row)]);
    }
};
