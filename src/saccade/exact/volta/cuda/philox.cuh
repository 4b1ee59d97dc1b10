// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011): the bits that saccade/engine/philox.py defines.
#pragma once
#include "instruction.cuh"

struct Dropout {
    uint32 key0, key1;
    uint32 problem;    // batch row * heads + head
    uint32 groups;     // of four keys in a row of weights
    uint32 threshold;  // a weight survives if its word, shifted to 24 bits, is at least this
};

__device__ __forceinline__ uint4 philox(uint32 c0, uint32 c1, uint32 k0, uint32 k1) {
    uint32 c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint64 first = (uint64)0xD2511F53u * c0, second = (uint64)0xCD9E8D57u * c2;
        c0 = (uint32)(second >> 32) ^ c1 ^ k0;
        c1 = (uint32)second;
        c2 = (uint32)(first >> 32) ^ c3 ^ k1;
        c3 = (uint32)first;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

// bit j: whether weight (query, first_key + j) survives; COUNT keys, first_key a multiple of 4
template <int COUNT>
__device__ __forceinline__ uint32 survivors(const Dropout& d, int query, int first_key) {
    uint32 bits = 0;
#pragma unroll
    for (int j = 0; j < COUNT; j += 4) {
        const uint4 words = philox((uint32)query * d.groups + (uint32)(first_key + j) / 4, d.problem, d.key0, d.key1);
        bits |= (uint32)((words.x >> 8) >= d.threshold) << j | (uint32)((words.y >> 8) >= d.threshold) << (j + 1) |
                (uint32)((words.z >> 8) >= d.threshold) << (j + 2) | (uint32)((words.w >> 8) >= d.threshold) << (j + 3);
    }
    return bits;
}
