// Attention of packed sequences by tiles of tokens, forward: out and lse of TILE consecutive tokens of a head a thread block.
//
//   S = Q K^T    m = running rowmax(scale S)    P = exp(scale S - m)    O = P V / rowsum(P)    lse = m + log(rowsum(P))
//
// shared memory:   | Q: TILE rows | K: ROWS | V: ROWS |
//
// All rows that a tile needs are requested together, and awaited once; a tile whose sequences have more than MOST rows walks over chunks of them.
// Then each warp works independently: 16 queries over the keys of their sequences, up to STEP at a time, in registers. Products have 16 rows, not a
// warpgroup's 64: a warp computes exponentials and masks for 48 keys, and a warpgroup would for 96 or 128.
// Source: FlashAttention-2 (Dao 2023), algorithm 1; traffic: q, k, v in once but for what neighbouring tiles share in L2, out and lse out.
//
// Compiled with the macros of tokens.cuh, GROUPED (1: query heads share a key head), STEP (keys: 32, 48 or 64), BLOCKS (of a multiprocessor, which bounds registers), SHARED_BYTES.
#include "tokens.cuh"

constexpr int QUERY_BYTES = TILE * PITCH;
static_assert(SHARED_BYTES == QUERY_BYTES + 2 * TILE_BYTES, "what the launch asks for");

// 16 queries of a warp
struct Queries {
    const u32 keys, values;  // tiles
    const int lane;
    const float exponent;  // scale * log2(e), positive
    u32 query[HEAD_DIM / 16][4];
    float out[HEAD_DIM / 2], top[2], sum[2];  // top: the maximum that weights are relative to, in base 2

    __device__ __forceinline__ Queries(u32 keys, u32 values, int lane, float exponent) : keys(keys), values(values), lane(lane), exponent(exponent) {}

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int e = 0; e < HEAD_DIM / 2; e++) out[e] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; h++) top[h] = MINUS_INFINITY, sum[h] = 0.0f;
    }

    // N keys from token `key` on, which lie in the tiles from `row` on
    template <int N>
    __device__ __forceinline__ void step(const Own& own, const Range (&seen)[2], int key, int row, const Survivors& survivors) {
        float scores[N / 2];
        multiply_rows<N>(scores, query, keys, row, lane);
        const Range own_columns[2] = {seen[0].from(key + lane % 4 * 2), seen[1].from(key + lane % 4 * 2)};
#pragma unroll
        for (int e = 0; e < N / 2; e++)
            if (!own_columns[half_of(e)].has(column_at(0, e))) scores[e] = MINUS_INFINITY;
        float most[2], factor[2];
        own_max(most, scores);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float higher = fmaxf(top[h], quad_max(most[h]) * exponent);
            const float shift = higher == MINUS_INFINITY ? 0.0f : higher;  // a query that has seen no key yet: -inf - -inf would be NaN
            factor[h] = exp2_fast(top[h] - shift);
            top[h] = higher;
            sum[h] *= factor[h];
#pragma unroll
            for (int e = 2 * h; e < N / 2; e += 4) {
                scores[e] = exp2_fast(fmaf(scores[e], exponent, -shift)), scores[e + 1] = exp2_fast(fmaf(scores[e + 1], exponent, -shift));
                sum[h] += scores[e] + scores[e + 1];
            }
        }
        if (DROPOUT) drop<N>(scores, own, key, survivors);  // behind the sum, which is that of all weights
        u32 weights[N / 4];
        round_weights<N>(weights, scores);
        scale_rows(out, factor);
        add_rows<N>(out, weights, values, row, lane);
    }

    template <int N>
    __device__ __forceinline__ void drop(float (&weights)[N / 2], const Own& own, int key, const Survivors& survivors) {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int from = 0; from < N; from += 32) {
                const u32 kept = own.there[h] ? survivors.of_query(own.token + 8 * h, own.first[h], key + from) >> lane % 4 * 2 : 0;
#pragma unroll
                for (int column = 0; column < 32 && from + column < N; column += 8)
#pragma unroll
                    for (int b = 0; b < 2; b++)
                        if (!(kept >> (column + b) & 1)) weights[(from + column) / 2 + 2 * h + b] = 0.0f;
            }
    }

    // the keys from token `key` to `end`
    __device__ __forceinline__ void walk(const Own& own, int key, int end, int row, const Survivors& survivors) {
        const Range seen[2] = {own.keys(0, end), own.keys(1, end)};
#pragma unroll 1
        for (; end - key > STEP; key += STEP, row += STEP) step<STEP>(own, seen, key, row, survivors);
        if (STEP >= 64 && end - key > 48) step<64>(own, seen, key, row, survivors);
        else if (STEP >= 48 && end - key > 32) step<48>(own, seen, key, row, survivors);
        else if (end - key > 16) step<32>(own, seen, key, row, survivors);
        else if (end > key) step<16>(own, seen, key, row, survivors);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    tokens_forward(const Number* query, const Number* key, const Number* value, const int* offsets, Number* out, float* lse,
#if DROPOUT
                   const u32* bits,
#endif
                   const void* tokens, const void* sequences,
#if DROPOUT
                   const void* words,
#endif
                   int query_row, int query_head, int key_row, int key_head, int value_row, int value_head, int out_row, int out_head,
#if DROPOUT
                   float inverse,
#endif
#if GROUPED
                   int group_size,
#endif
                   int heads, int head_dim, float exponent) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 queries = beginning_of(memory), keys = queries + QUERY_BYTES, values = keys + TILE_BYTES;
    const int total = number_of(tokens), lane = u32(threadIdx.x) % 32, warp = u32(threadIdx.x) / 32;
    const int tile = blockIdx.x / u32(heads), head = blockIdx.x - tile * heads, begin = tile * TILE;
#if GROUPED
    const int owner = head / u32(group_size);
#else
    const int owner = head;
#endif
    const Rows q(query, {query_row, query_head}, head), k(key, {key_row, key_head}, owner), v(value, {value_row, value_head}, owner);
    const RowsOf<Number> to(out, {out_row, out_head}, head);
    copy_rows<TILE>(queries, q, begin, min(TILE, total - begin), head_dim);  // before the bounds are there
    prefetch_rows(k, begin, total);
    prefetch_rows(v, begin, total);
    if (head_dim < HEAD_DIM) clear_columns(memory, 0, TILE + 2 * ROWS, head_dim);
    Survivors survivors{};
#if DROPOUT
    survivors = {bits + (long long)head * total * number_of(words), number_of(words), inverse};
#endif
    const Bounds bounds({offsets, number_of(sequences), total}, begin);
    Queries rows(keys, values, lane, exponent);
    bool held = false;
#pragma unroll 1
    for (Groups group(bounds, begin, total); group.are_left();) {
        const Own own(bounds, group, begin + 16 * warp, lane);
        const int end = CAUSAL ? min(group.high, group.stop) : group.high;
        rows.begin();
#pragma unroll 1
        for (int start = group.low; start < end; start += MOST) {
            const int number = min(end - start, MOST);
            if (held) __syncthreads();  // the chunk before is read
            copy_rows<MOST>(keys, k, start, number, head_dim);
            copy_rows<MOST>(values, v, start, number, head_dim);
            clear_behind(memory, QUERY_BYTES, number);
            clear_behind(memory, QUERY_BYTES + TILE_BYTES, number);
            copies_commit();
            copies_wait<0>();
            __syncthreads();
            if (!held) load_left(rows.query, queries, 16 * warp, lane), held = true;
            const int first = max(own.low, start);
            rows.walk(own, first, min(own.end_of_keys(), start + number), first - start, survivors);
        }
        bool found_nan = has_nan(rows.out, own.there);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int token = own.token + 8 * h;
            const float sum = quad_sum(rows.sum[h]), logarithm = log2_fast(sum);
            float factor = sum == 0.0f ? 0.0f : exp2_fast(-logarithm);
            if (DROPOUT) factor *= survivors.inverse;
            found_nan |= own.there[h] && sum != sum;
            store_row<HEAD_DIM>(rows.out, h, factor, to.row(token), head_dim, own.there[h]);
            if (own.there[h] && lane % 4 == 0)
                lse[(long long)head * total + token] = sum == 0.0f ? MINUS_INFINITY : (logarithm + rows.top[h]) * LN2;
        }
        group.next(__syncthreads_or(found_nan));
    }
}
