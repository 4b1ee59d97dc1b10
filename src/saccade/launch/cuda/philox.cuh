// Philox4x32-10 (Salmon et al., SC 2011), the dropout draw of every backend: saccade/engine/philox.py.
#pragma once
#include "numbers.cuh"

struct Words {
    u32 word[4];
};

__device__ __forceinline__ Words philox(u64 key, u32 c0, u32 c1) {
    u32 k0 = u32(key), k1 = u32(key >> 32), c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {c0, c1, c2, c3};
}
