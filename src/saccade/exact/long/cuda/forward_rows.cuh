// Scores, weights and sums of the 64 queries of a warpgroup; see forward_sm90.cu.
#pragma once
#include "forward_blocks.cuh"

// One warpgroup: 64 queries of an item.
struct Rows {
    const LongForwardShared shared;
    const int warpgroup;
    const float exponent;  // scale * log2(e), positive; with a bias, the scale
    const MaskBits mask;
    const Dropout& dropout;
    const BiasTiles bias;
    int slot;
    u32 query[QUERY_IN_REGISTERS ? HEAD_DIM / 4 : 1];
    float out[HEAD_DIM / 2];
    u32 weights[CHUNK_KEYS / 4];  // of a chunk, whose values are not multiplied yet
    float top[2], sum[2];  // the maximum that weights are relative to, in base 2, or e with a bias

    __device__ __forceinline__ void begin(int place) {
        slot = place;
        if (QUERY_IN_REGISTERS) {
#pragma unroll
            for (int s = 0; s < HEAD_DIM / 16; s++) load_matrices(query + 4 * s, QueryTile::fragment(shared.query(slot), 64 * warpgroup, s));
        }
#pragma unroll
        for (int e = 0; e < HEAD_DIM / 2; e++) out[e] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; h++) top[h] = MINUS_INFINITY, sum[h] = 0.0f;
    }

    // The first N keys of a chunk, which begins at key `first`; MASKED: some of them may not exist or not be seen. FIRST: of an item; otherwise the
    // values of the chunk before are multiplied while the scores of this one are turned into weights. The weights are multiplied later.
    template <int N, bool MASKED, bool FIRST>
    __device__ __forceinline__ void chunk(int n, const Item& item, int first_query, int first, int tile, bool arriving) {
        const int stage = __shfl_sync(~0u, stage_of(n), 0);
        // `own_row` gives some builds another schedule here
        const int row = first_query + int(threadIdx.x) / 32 % 4 * 16 + int(threadIdx.x) % 32 / 4;
        const u32 shown = mask.of(item, item.head, row, item.q_len, first / CHUNK_KEYS);  // its latency is hidden by the product of the scores
        float scores[N / 2];
        barrier_wait(shared.barrier(KEY + stage), parity_of(n));
        products_begin();
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; s++) {
            u64 right = KeyTile::columns(shared.low(shared.key(stage)), 0, s);
            if (!QUERY_IN_REGISTERS) {
                u64 left = QueryTile::columns(shared.low(shared.query(slot)), 64 * warpgroup, s);
                if (s == 0) Products<N>::set(scores, left, right);
                else Products<N>::add(scores, left, right);
            } else {
                if (s == 0) Products<N>::set(scores, query + 4 * s, right);
                else Products<N>::add(scores, query + 4 * s, right);
            }
        }
        products_commit();
        if (!FIRST) values<CHUNK_KEYS>(n - 1);
        u32 survivors;
        // while the products are under way
        if (DROPOUT) survivors = dropout.of_queries<N>(dropout.problem(item.sequence, item.head), first_query, first);
        products_wait<FIRST ? 0 : 1>();
        add_bias<N>(scores, stage, tile, arriving);
        hide<N, MASKED>(scores, item, row, first, shown);
        float factor[2];  // of O, written where a row has risen; of the first chunk O is 0
        bool risen;
        if (LATE_MAXIMA) {
            // the scores of a query that has seen no key yet may all be far below 0
            const bool early = FIRST || __any_sync(~0u, fminf(top[0], top[1]) == MINUS_INFINITY);
            risen = early && rise<N>(scores, factor);
            float more[2] = {0.0f, 0.0f};
            weigh<N>(scores, more);
            if (!FIRST && !early && __any_sync(~0u, !(fmaxf(more[0], more[1]) <= LARGEST_SUM))) {
                form_again<N>(scores, stage, tile);
                hide<N, MASKED>(scores, item, apart(row), apart(first), apart(shown));  // else 32 comparisons are kept for this
                risen = rise<N>(scores, factor);
                more[0] = more[1] = 0.0f;
                weigh<N>(scores, more);
            }
            release_bias(tile, arriving);
            sum[0] += more[0], sum[1] += more[1];
        } else {
            risen = rise<N>(scores, factor);
            weigh<N>(scores, sum);
        }
        if (DROPOUT) {  // behind the sum, which is that of all weights
#pragma unroll
            for (int e = 0; e < N / 2; e++)
                if (!Dropout::leaves(survivors, e)) scores[e] = 0.0f;
        }
        if (!FIRST) {
            products_wait<0>();  // the weights of the chunk before are read from these registers
            if (risen) scale_rows(out, factor);
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < N / 8; i++) weights[2 * i + h] = pack(scores[4 * i + 2 * h], scores[4 * i + 2 * h + 1]);
    }

    // scale S + bias, of a tile of the bias and the keys of a stage
    template <int N>
    __device__ __forceinline__ void add_bias(float (&scores)[N / 2], int stage, int tile, bool arriving) const {
#if BIAS
        u32 selectors[4];
        barrier_wait(bias.filled(tile), BiasTiles::parity(tile));
#pragma unroll
        for (int s = 0; s < N / 16; s++) {
            u32 words[4];
            if (KEY_MASK && s % 2 == 0) Selectors::load(selectors, shared.selectors(stage), s / 2);
            load_matrices(words, BiasTiles::Tiles::fragment(bias.tile(tile), 64 * warpgroup, s));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 added = KeyMask::numbers_of(words[j], selectors[s % 2 * 2 + j / 2]);
                float &x = scores[8 * s + 2 * j], &y = scores[8 * s + 2 * j + 1];
                x = fmaf(x, exponent, added.x), y = fmaf(y, exponent, added.y);
            }
        }
        if (!LATE_MAXIMA) release_bias(tile, arriving);
#endif
    }
    __device__ __forceinline__ void release_bias(int tile, bool arriving) const {
#if BIAS
        warp_arrives(bias.read(tile), arriving);
#endif
    }

    // The scores of this warp's 16 queries and N keys once more. A warpgroup product would need all four warps.
    template <int N>
    __device__ __forceinline__ void form_again(float (&scores)[N / 2], int stage, int tile) const {
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            u32 keys[HEAD_DIM / 8];  // 8 keys, a register for each 8 columns
#pragma unroll
            for (int s = 0; s < HEAD_DIM / 32; s++)
                load_matrices(keys + 4 * s, KeyTile::chunk(shared.key(stage), s / 2, 8 * i + int(threadIdx.x) % 8, s % 2 * 4 + int(threadIdx.x) % 32 / 8));
            float* of = scores + 4 * i;
            of[0] = of[1] = of[2] = of[3] = 0.0f;
#pragma unroll
            for (int s = 0; s < HEAD_DIM / 16; s++) multiply(of, query + (QUERY_IN_REGISTERS ? 4 * s : 0), keys[2 * s], keys[2 * s + 1]);
        }
        add_bias<N>(scores, stage, tile, false);
    }

    template <int N, bool MASKED>
    __device__ __forceinline__ void hide(float (&scores)[N / 2], const Item& item, int row, int first, u32 shown) const {
        if (MASKED) {
            const int key = first + own_column();
#pragma unroll
            for (int e = 0; e < N / 2; e++)
                if (!item.sees(row_at(row, e), column_at(key, e))) scores[e] = MINUS_INFINITY;
        }
        if (MASK) {
#pragma unroll
            for (int e = 0; e < N / 2; e++)
                if (!mask.shows(shown, e)) scores[e] = MINUS_INFINITY;
        }
    }

    // scores become weights, which are added up
    template <int N>
    __device__ __forceinline__ void weigh(float (&scores)[N / 2], float (&sums)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float shift = top[h] == MINUS_INFINITY ? 0.0f : top[h];  // a query that has seen no key yet: -inf - -inf would be NaN
            const float by = BIAS ? factor_of(shift) : exponent, less = BIAS ? shift * by : shift;
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                float &x = scores[4 * i + 2 * h], &y = scores[4 * i + 2 * h + 1];
                x = exp2_fast(fmaf(x, by, -less)), y = exp2_fast(fmaf(y, by, -less));
                sums[h] += x + y;
            }
        }
    }

    // O += P V for the first N keys of a chunk, left under way
    template <int N>
    __device__ __forceinline__ void values(int n) {
        const int stage = __shfl_sync(~0u, stage_of(n), 0);
        barrier_wait(shared.barrier(VALUE + stage), parity_of(n));
        products_begin();
#pragma unroll
        for (int s = 0; s < N / 16; s++) Products<HEAD_DIM>::add_rows(out, weights + 4 * s, KeyTile::rows(shared.low(shared.value(stage)), 16 * s));
        products_commit();
    }

    // Zeros behind the last key: a weight of 0 times what another sequence or the padding holds there may be NaN. By both warpgroups, once both are
    // here; the copy engine has filled up plain dense rows with zeros.
    __device__ __forceinline__ void clear_behind(int n, int left, const Batch& batch) {
        const int stage = stage_of(n), end = width_of(left);
        if (left >= end || !(PACKED || batch.cu_k)) return;
        barrier_wait(shared.barrier(VALUE + stage), parity_of(n));
        KeyTile::clear(shared.value(stage), left, end, threadIdx.x % 256, 256);
        fence_async();
        sync_threads(OF_TEAM + shared.team, 256);
    }

    // Takes a larger maximum where a row has outgrown its own, and scales its sum of weights. Returns whether a row of this warp has, and by what the
    // rows of O are to be scaled once the values under way are added: all four warps of a warpgroup must wait for products together, so no wait may
    // depend on a condition of one warp.
    template <int N>
    __device__ __forceinline__ bool rise(const float (&scores)[N / 2], float (&factor)[2]) {
        float most[2];
        own_max(most, scores);
#pragma unroll
        for (int h = 0; h < 2; h++) most[h] = BIAS ? quad_max(most[h]) : quad_max(most[h]) * exponent;
        if (!__any_sync(~0u, most[0] > top[0] + SLACK || most[1] > top[1] + SLACK)) return false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float higher = fmaxf(top[h], most[h]);
            factor[h] = higher == MINUS_INFINITY ? 1.0f : exp2_fast(BIAS ? (top[h] - higher) * LOG2E : top[h] - higher);
            top[h] = higher;
            sum[h] *= factor[h];
        }
        return true;
    }
};
