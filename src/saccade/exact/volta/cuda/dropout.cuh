// The weights that survive dropout, by the draws that all backends share: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011), as
// saccade/engine/philox.py defines it.
//
// The function differs from that of launch/cuda/philox.cuh, which computes the two halves of a product separately. With that one, 57 of 81
// configurations of forward and dQ (all with dropout) have other machine code, which nobody has timed on the GPUs that these kernels are for.
#pragma once
#include "instruction.cuh"

struct Dropout {
    u32 key0, key1;
    u32 problem;    // batch row * heads + head
    u32 groups;     // of four keys in a row of weights
    u32 threshold;  // a weight survives if its word, shifted to 24 bits, is at least this
};

__device__ __forceinline__ uint4 philox(u32 c0, u32 c1, u32 k0, u32 k1) {
    u32 c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 first = (u64)0xD2511F53u * c0, second = (u64)0xCD9E8D57u * c2;
        c0 = (u32)(second >> 32) ^ c1 ^ k0;
        c1 = (u32)second;
        c2 = (u32)(first >> 32) ^ c3 ^ k1;
        c3 = (u32)first;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

// bit j: whether weight (query, first_key + j) survives; COUNT keys, first_key a multiple of 4
template <int COUNT>
__device__ __forceinline__ u32 survivors(const Dropout& d, int query, int first_key) {
    u32 bits = 0;
#pragma unroll
    for (int j = 0; j < COUNT; j += 4) {
        const uint4 words = philox((u32)query * d.groups + (u32)(first_key + j) / 4, d.problem, d.key0, d.key1);
        bits |= (u32)((words.x >> 8) >= d.threshold) << j | (u32)((words.y >> 8) >= d.threshold) << (j + 1) |
                (u32)((words.z >> 8) >= d.threshold) << (j + 2) | (u32)((words.w >> 8) >= d.threshold) << (j + 3);
    }
    return bits;
}
