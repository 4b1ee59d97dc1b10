// The rule of selection on four neighbouring scores, and its four bits of metadata: index of the first kept one in the low two bits,
// of the second in the high two. Larger wins, by value; an equal one at a lower index wins; NaN wins over all.
#pragma once
#include "number.cuh"

#define INFINITE __int_as_float(0x7f800000)

// With NANS false, NaN loses to any number: the caller looks at the returned `largest`, which is NaN if any score is.
template <bool NANS>
__device__ __forceinline__ uint32 prune(const float (&s)[4], float& first, float& second, float& largest) {
    float r[4];
#pragma unroll
    for (int i = 0; i < 4; i++) r[i] = NANS && s[i] != s[i] ? INFINITE : s[i];
    const bool later01 = r[1] > r[0], later23 = r[3] > r[2];
    const float most01 = max_or_nan(r[0], r[1]), most23 = max_or_nan(r[2], r[3]);
    uint32 code = (later01 ? 0x1u : 0x0u) | (later23 ? 0xCu : 0x8u);
    first = NANS ? (later01 ? s[1] : s[0]) : most01;
    second = NANS ? (later23 ? s[3] : s[2]) : most23;
    largest = most01 + most23;
#if TWO_OF_FOUR
    const float least01 = fminf(r[0], r[1]), least23 = fminf(r[2], r[3]);
    const bool both01 = least01 >= most23, both23 = least23 > most01;
    code = both01 ? 0x4u : (both23 ? 0xEu : code);
    first = both01 ? s[0] : (both23 ? s[2] : first);
    second = both01 ? s[1] : (both23 ? s[3] : second);
#endif
    return code;
}

// one of two float32 scores: metadata counts in 16-bit halves
template <bool NANS>
__device__ __forceinline__ uint32 prune_pair(float a, float b, float& kept, float& largest) {
    const float rank_a = NANS && a != a ? INFINITE : a, rank_b = NANS && b != b ? INFINITE : b;
    const bool later = rank_b > rank_a;
    largest = max_or_nan(rank_a, rank_b);
    kept = NANS ? (later ? b : a) : largest;
    return later ? 0xEu : 0x4u;
}

// The neighbouring scores of one row that a thread owns, 16 of a 16-bit type or 8 float32: 16 bytes of kept ones, 16 bits of metadata.
#define OWNED (2 * PER_CHUNK)

template <bool NANS>
__device__ __forceinline__ uint32 prune_owned(const float (&s)[OWNED], uint32 (&kept)[4], float& probe) {
    uint32 metadata = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float largest;
#if DTYPE == 2
        float only;
        metadata |= prune_pair<NANS>(s[2 * i], s[2 * i + 1], only, largest) << (4 * i);
        kept[i] = bits_of(only);
#else
        const float four[4] = {s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]};
        float first, second;
        metadata |= prune<NANS>(four, first, second, largest) << (4 * i);
        kept[i] = pack(first, second);
#endif
        probe = i == 0 ? largest : probe + largest;
    }
    return metadata;
}
