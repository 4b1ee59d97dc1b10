// A mask of keys together with a bias: a hidden key has a bias of -inf. The byte permutations that unpack a bias take the bytes of -inf in place of its own where
// a selector says so. Besides the selectors' own instructions, that costs none for a pair in bfloat16, and one for two pairs in half.
#pragma once
#include "long_instruction.cuh"
#include "numbers.cuh"

// Two neighbours of a bias as one register come from two keys, or from one: the selectors of both, `low` in the low half. In half one serves both.
__device__ __forceinline__ u32 selectors_of(bool low, bool high) {
    if (BF16) return (low ? 0x1066u : 0x5466u) | (high ? 0x32660000u : 0x54660000u);
    return (low ? 0x10u : 0x54u) | (high ? 0x3200u : 0x5400u);
}

#if KEY_MASK
struct KeyMask {
    const unsigned char* keys;
    long long batch;
    int column;

    // not 0: shown. Keys from `end` on are not read.
    __device__ __forceinline__ unsigned char at(int row, int key, int end) const {
        return key < end ? __ldg(keys + row * batch + (long long)key * column) : (unsigned char)0;
    }
    // the two numbers of a bias, or -inf
    static __device__ __forceinline__ float2 numbers_of(u32 pair, u32 selectors) {
        constexpr u32 HIDDEN = BF16 ? 0xFF80u : 0xFC00u;  // -inf, and two bytes of 0
        if (!BF16) return floats_of(bytes_of(pair, HIDDEN, selectors));
        return make_float2(__uint_as_float(bytes_of(pair, HIDDEN, selectors)), __uint_as_float(bytes_of(pair, HIDDEN, selectors >> 16)));
    }
};
#define KEY_MASK_OF_CALL KeyMask{key_mask, key_mask_batch, key_mask_column}
#else
struct KeyMask {
    __device__ __forceinline__ static constexpr unsigned char at(int, int, int) { return 1; }
    static __device__ __forceinline__ float2 numbers_of(u32 pair, u32) { return floats_of(pair); }
};
#define KEY_MASK_OF_CALL KeyMask{}
#endif

// The selectors of 64 keys in shared memory, in the order in which lanes read them: lane t of a quad has columns 8i + 2t + {0, 1}, and finds four
// numbers i side by side.
struct Selectors {
    static constexpr u32 BYTES = 128;

    // keys 2 lane and 2 lane + 1
    static __device__ __forceinline__ u32 place(u32 of, int lane) { return of + lane / 16 * 64 + lane % 4 * 16 + lane / 4 % 4 * 4; }
    // those of the lane's column groups 4j .. 4j + 3
    static __device__ __forceinline__ void load(u32 (&x)[4], u32 of, int j) { load_16(x, of + j * 64 + int(threadIdx.x) % 4 * 16); }
};
