// Metadata of a sparse product of 16-bit numbers over 32 keys, and the stored selection made of it.
//
// Lane 4g + t of a warp selected for rows g and g + 8, keys 4t .. 4t + 3 of each block of 16. A word of metadata holds the four codes of
// row g in its low half, those of row g + 8 in its high half, for 16 keys; the product takes the word of keys 0 to 15 from lane 4g, that
// of keys 16 to 31 from lane 4g + 1 (selector 0), and from 4g + 2 and 4g + 3 with selector 1.
#pragma once
#include "numbers.cuh"
#include "selection.cuh"

// a lane's codes of two rows, summed on 2^23 (selection.cuh), at their place in the word
__device__ __forceinline__ u32 placed(float codes, int t) {
    // one multiply-add, on the float units, in place of a subtraction and a shift
    return __float_as_uint(codes) * (1u << (4 * t)) - (0x4B000000u << (4 * t));
}

// words of 2 x 16 keys, a lane's codes each -> the metadata register: even lanes hold keys 0 to 15, odd lanes 16 to 31
__device__ __forceinline__ u32 share_metadata(u32 low_keys, u32 high_keys, int t) {
    u32 mine = t & 1 ? high_keys : low_keys, yours = t & 1 ? low_keys : high_keys;
    mine |= __shfl_xor_sync(~0u, yours, 1);
    return mine | __shfl_xor_sync(~0u, mine, 2);
}

// The metadata register of 2 x 16 rows and 32 keys: that of the first 16 rows in lanes t = 0 and 1 (selector 0), of the others in 2 and 3 (selector 1).
// codes[m]: a lane's, each 16 ^ (q + 2 h) times the code of row g + 8 h and its keys of the q-th 16, on 2^23. Four codes of each of four lanes
// go to the lane that holds the metadata of those keys: bytes to the half of the lanes, then digits within it.
__device__ __forceinline__ u32 share_metadata_of_two(const float* codes, int t) {
    u32 mine = __byte_perm(__float_as_uint(codes[0]), __float_as_uint(codes[1]), 0x5410);
    mine = __byte_perm(mine, __shfl_xor_sync(~0u, mine, 2), t & 2 ? 0x3726 : 0x5140);
    u32 yours = __shfl_xor_sync(~0u, mine, 1), own = t & 1 ? 0xF0F0F0F0u : 0x0F0F0F0Fu;
    return (mine & own) | (__funnelshift_l(yours, yours, t & 1 ? 28 : 4) & ~own);
}

// eight codes -> eight masks of four bits, one a key
__device__ __forceinline__ u32 masks_of_codes(u32 codes) {
    constexpr u32 ones = 0x11111111u;
    u32 p0 = codes & ones, p1 = (codes >> 1) & ones;         // index of the first
    u32 q0 = (codes >> 2) & ones, q1 = (codes >> 3) & ones;  // of the second
    if constexpr (SELECTION == SELECT_UNORDERED)
        return (ones & ((~p0 & ~p1) | (~q0 & ~q1))) | (((p0 & ~p1) | (q0 & ~q1)) << 1) | (((p1 & ~p0) | (q1 & ~q0)) << 2) | (((p0 & p1) | (q0 & q1)) << 3);
    return (ones & ~p0 & ~p1) | (((p0 & ~p1) | (q0 & ~q1)) << 1) | (((p1 & ~p0) | (q1 & ~q0)) << 2) | ((q0 & q1) << 3);
}

// metadata register -> 32 bits of selection, in lane t = 0 of row g, in lane t = 1 of row g + 8
__device__ __forceinline__ u32 selection_bits(u32 metadata, int t) {
    u32 mine = masks_of_codes(metadata), yours = __shfl_xor_sync(~0u, mine, 1);
    return t & 1 ? __byte_perm(yours, mine, 0x7632) : __byte_perm(mine, yours, 0x5410);
}

// the same of TF32, whose keys take two of the four bits of a code each: 16 bits of selection
__device__ __forceinline__ u32 selection_of_pairs(u32 metadata, int t) {
    u32 bits = selection_bits(metadata, t) & 0x55555555u;  // every second bit of 32, brought together
    bits = (bits | bits >> 1) & 0x33333333u;
    bits = (bits | bits >> 2) & 0x0F0F0F0Fu;
    bits = (bits | bits >> 4) & 0x00FF00FFu;
    return (bits | bits >> 8) & 0x0000FFFFu;
}

// bits of the keys up to and with key `last` of a word, whose first key is 0; none for a negative one
__device__ __forceinline__ u32 bits_up_to(int last) {
    return last < 0 ? 0u : last >= 31 ? ~0u : (2u << last) - 1u;
}
