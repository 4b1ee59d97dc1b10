// The rule of selection on the neighbouring scores of one row that a thread owns, 16 of a 16-bit type or 8 float32: 16 bytes of kept ones
// and 16 bits of metadata, four for every four scores (two float32): index of the first kept one in the low two bits, of the second in the
// high two. Larger wins, by value; an equal one at a lower index wins; NaN wins over all.
#pragma once
#include "number.cuh"
#include "pick.cuh"

#define INFINITE __int_as_float(0x7f800000)
#define OWNED (2 * PER_CHUNK)

// where codes start: from 2^23 on a float holds every integer of 16 bits exactly (pick.cuh)
#define CODES (8388608.0f + (TF32 ? 0x4444 : 0x8888))

// `kept` times `scale`; `probe` is NaN if any score is, and the result is then wrong: call `prune_with_nan`
__device__ __forceinline__ u32 prune(const float (&s)[OWNED], float scale, u32 (&kept)[4], float& probe) {
    float codes = CODES;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float unit = (float)(1 << (4 * i));
        float largest;
        float first, second;
        if constexpr (TF32)
            pick_one(s[2 * i], s[2 * i + 1], scale, unit, first, codes, largest);
        else if constexpr (TWO_OF_FOUR)
            pick_two_of_four(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3], scale, unit, first, second, codes, largest);
        else
            pick_one_of_each(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3], scale, unit, first, second, codes, largest);
        kept[i] = TF32 ? __float_as_uint(first) : pack(first, second);
        probe = i == 0 ? largest : probe + largest;
    }
    return __float_as_uint(codes) & 0xffffu;
}

__device__ __forceinline__ float rank_of(float x) { return x != x ? INFINITE : x; }

// the same for scores that hold NaN: rare, and twice as long
__device__ __forceinline__ u32 prune_with_nan(const float (&s)[OWNED], float scale, u32 (&kept)[4]) {
    u32 metadata = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (TF32) {
            const float a = s[2 * i], b = s[2 * i + 1];
            const bool later = rank_of(b) > rank_of(a);
            kept[i] = __float_as_uint((later ? b : a) * scale);
            metadata |= (later ? 0xEu : 0x4u) << (4 * i);
        } else {
            const float a = s[4 * i], b = s[4 * i + 1], c = s[4 * i + 2], d = s[4 * i + 3];
            const float ra = rank_of(a), rb = rank_of(b), rc = rank_of(c), rd = rank_of(d);
            const bool both01 = TWO_OF_FOUR && fminf(ra, rb) >= fmaxf(rc, rd);
            const bool both23 = TWO_OF_FOUR && !both01 && fminf(rc, rd) > fmaxf(ra, rb);
            const float first = both01 ? a : both23 ? c : rb > ra ? b : a, second = both01 ? b : both23 ? d : rd > rc ? d : c;
            kept[i] = pack(first * scale, second * scale);
            metadata |= (both01 ? 0x4u : both23 ? 0xEu : (rb > ra ? 0x1u : 0x0u) | (rd > rc ? 0xCu : 0x8u)) << (4 * i);
        }
    }
    return metadata;
}
