// The weights of a tile that survive dropout, by the draw that all backends share (saccade/engine/philox.py): four adjacent keys of a query take the
// four words of one Philox call. No lane holds all four, so the lanes that share calls divide them among themselves and swap bits: each call is made
// once. Bit 4i + 2h + b says whether d[4i + 2h + b] survives (chunks_sm90.cuh).
#pragma once
#include "numbers.cuh"
#include "philox.cuh"

// threshold: a weight survives if its word is at least this. inverse: 1 / (1 - p). groups: of four keys, in a sequence of the most keys of the call.
struct Dropout {
    u64 seed;
    u32 threshold;
    float inverse;
    u32 heads, groups;

    static __device__ __forceinline__ Dropout of(u64 seed, u32 threshold, float inverse, int heads, int max_k) {
        return {.seed = seed, .threshold = threshold, .inverse = inverse, .heads = u32(heads), .groups = u32(max_k + 3) / 4};
    }
    __device__ __forceinline__ u32 problem(int sequence, int head) const { return u32(sequence) * heads + u32(head); }

    // Bit e, tested as the sign: this is one instruction in backward, where a shift to the right and a comparison were three.
    static __device__ __forceinline__ bool leaves(u32 survivors, int e) { return int(survivors << (31 - e)) < 0; }

    // rows queries, columns N keys: of lanes t = 2u and 2u + 1 one makes the call of query g and the other that of query g + 8
    template <int N>
    __device__ __forceinline__ u32 of_queries(u32 problem, int first_query, int first_key) const {
        const int lane = int(threadIdx.x) % 32, query = first_query + int(threadIdx.x) / 32 % 4 * 16 + lane / 4 + lane % 2 * 8;
        return swap<1, 2>(draw<N / 8>(problem, u32(query) * groups + u32(first_key / 4 + lane % 4 / 2), 2));
    }

    // rows keys, columns N queries: the four lanes of one t and g / 4 each call for one of two queries and one of two groups of keys
    template <int N>
    __device__ __forceinline__ u32 of_keys(u32 problem, int first_query, int first_key) const {
        const int lane = int(threadIdx.x) % 32, query = first_query + lane % 4 * 2 + lane / 4 % 2;
        const int group = first_key / 4 + int(threadIdx.x) / 32 % 4 * 4 + lane / 16 + lane / 8 % 2 * 2;
        return swap<8, 2>(swap<4, 1>(draw<N / 8>(problem, u32(query) * groups + u32(group), 8 * groups)));
    }

private:
    // bits 4i to 4i + 3: the four keys of call i; the counters of calls are `step` apart
    template <int CALLS>
    __device__ __forceinline__ u32 draw(u32 problem, u32 counter, u32 step) const {
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < CALLS; i++) {
            const Words words = philox(seed, counter + i * step, problem);
#pragma unroll
            for (int j = 0; j < 4; j++) bits |= u32(words.word[j] >= threshold) << (4 * i + j);
        }
        return bits;
    }

    // The first BY of each 2 BY bits of two lanes come together in the lower lane, and the last BY of both in the upper one: a step of a transpose.
    // The lanes' numbers differ in bit LANE.
    template <int LANE, int BY>
    static __device__ __forceinline__ u32 swap(u32 bits) {
        constexpr u32 FIRST = BY == 1 ? 0x55555555u : 0x33333333u;
        const u32 others = __shfl_xor_sync(~0u, bits, LANE);
        return threadIdx.x & LANE ? (bits & ~FIRST) | (others >> BY & FIRST) : (bits & FIRST) | (others & FIRST) << BY;
    }
};
