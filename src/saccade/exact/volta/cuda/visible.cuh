// Whether a query sees a key, and the bias on a score. MASK: 0 none, 1 bytes (0 = hidden), 2 float16 added, 3 float32 added.
#pragma once
#include "instruction.cuh"

// the shift of a row that is far (far.cuh); no other row has it
#define FAR_SHIFT MINUS_INFINITY

// scores are in base 2 once they are biased; without a bias their factor is applied in the exponent
#define FACTORED (MASK < 2)

struct Mask {
    const unsigned char* base;  // of this batch row and head
    int64 row, column;          // strides in elements
};

__device__ __forceinline__ Mask mask_of(const unsigned char* mask, int64 offset, int64 row, int64 column) {
    return {.base = mask + offset * (MASK == 2 ? 2 : MASK == 3 ? 4 : 1), .row = row, .column = column};
}

// a score with its bias, -inf where the key is not visible. factor: scale * log2(e)
template <bool CHECKED>
__device__ __forceinline__ float finish(float score, float factor, const Mask& mask, int query, int key, int q_len, int kv_end) {
    if (!FACTORED) score *= factor;
    const bool inside = !CHECKED || (query < q_len && key < kv_end && !(CAUSAL && key > query));
    if (MASK && inside) {
        const int64 at = query * mask.row + key * mask.column;
        if constexpr (MASK == 1) {
            if (!mask.base[at]) score = MINUS_INFINITY;
        } else if constexpr (MASK == 2) {
            score = fmaf(floats_of(((const Half*)mask.base)[at]).x, LOG2E, score);
        } else {
            // a bias beyond 2.36e38 would overflow in base 2, and -inf hides a key
            const float bias = ((const float*)mask.base)[at], biased = fmaf(bias, LOG2E, score);
            score = biased > LARGEST && bias <= LARGEST ? LARGEST : biased < -LARGEST && bias >= -LARGEST ? -LARGEST : biased;
        }
    }
    return inside ? score : MINUS_INFINITY;
}
