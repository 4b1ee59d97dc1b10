// Gradients of packed sequences by tiles of tokens: dq, dk and dv of TILE consecutive tokens of a key head a thread block, without atomics.
//
//   P = exp(scale Q K^T - lse)    dV = P^T dO    dP = dO V^T    dS = P (dP - delta)    dK = scale dS^T Q    dQ = scale dS K
//   delta = rowsum(dO O) - dlse
//
// shared memory:   | Q | dO | K | V: ROWS rows each | -lse in base 2 and delta of each row of Q |
//
// A warp takes its 16 tokens as queries, over the keys of their sequences, and then as keys, over the queries of the same rows, transposed: three and
// four products, and no sum leaves the warp. All rows that a tile needs are requested together, and awaited once; delta is computed meanwhile.
// If a tile's sequences have more than MOST rows, its own rows stay in one pair of tiles and chunks of the others pass through the other pair.
// With GROUPED heads dK and dV of all query heads of a key head add up in registers.
// Source: FlashAttention-2 (Dao 2023), algorithm 2; traffic: q, k, v, dout, out, lse in, dq, dk, dv out, but for what neighbours share in L2.
//
// Compiled with the macros of tokens.cuh, HAS_DLSE, GROUPED, BLOCKS (of a multiprocessor, which bounds registers), SHARED_BYTES.
#include "tokens.cuh"

static_assert(SHARED_BYTES == 4 * TILE_BYTES + 8 * ROWS, "what the launch asks for");

struct BackwardShared {
    unsigned char* memory;
    u32 base;
    float2* numbers;  // of each row of Q: -lse in base 2, and delta

    __device__ __forceinline__ u32 query() const { return base; }
    __device__ __forceinline__ u32 dout() const { return base + TILE_BYTES; }
    __device__ __forceinline__ u32 key() const { return base + 2 * TILE_BYTES; }
    __device__ __forceinline__ u32 value() const { return base + 3 * TILE_BYTES; }
};

// the offsets are unchecked
__device__ __forceinline__ int inside_tile(int row) {
    return min(max(row, 0), ROWS - 1);
}

// the addresses from which the rows of a query head are loaded
struct QueryHead {
    const Rows query, dout, out;
    const float *lse, *dlse;
    const int head_dim;

    // Starts the copies of rows of Q and dO, from token `first` on, and computes their numbers: dO is read twice, but nothing waits for the copies. All
    // loads are issued before the first result is used.
    //
    // delta of 16 rows is the diagonal of dO O^T. A lane loads 16 bytes of a row at a time: columns of both factors are then in another order, the same for
    // both. Products need a fourth of the instructions of sums by threads.
    __device__ __forceinline__ void load(const BackwardShared& shared, int first, int rows) const {
        copy_rows<MOST>(shared.query(), query, first, rows, head_dim);
        copy_rows<MOST>(shared.dout(), dout, first, rows, head_dim);
        constexpr int TURNS = ROWS / TILE, PARTS = HEAD_DIM / 32;
        const int lane = u32(threadIdx.x) % 32, g = lane / 4, t = lane % 4, own_row = int(u32(threadIdx.x) / 32 * 16) + g;
        const bool on_diagonal = t == g / 2;
        uint4 o[TURNS][2][PARTS], d[TURNS][2][PARTS];
        float shift[TURNS][2], delta[TURNS][2];
#pragma unroll
        for (int i = 0; i < TURNS; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = i * TILE + own_row + 8 * h;
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    const int column = 32 * part + 8 * t;
                    o[i][h][part] = d[i][h][part] = make_uint4(0, 0, 0, 0);
                    if (row < rows && column < head_dim) {
                        o[i][h][part] = *reinterpret_cast<const uint4*>(out.row(first + row) + column);
                        d[i][h][part] = *reinterpret_cast<const uint4*>(dout.row(first + row) + column);
                    }
                }
                shift[i][h] = MINUS_INFINITY, delta[i][h] = 0.0f;
                if (row < rows && on_diagonal) {
                    shift[i][h] = lse[first + row];
                    if (HAS_DLSE) delta[i][h] = -dlse[first + row];
                }
            }
        clear_behind(shared.memory, 0, rows);
        clear_behind(shared.memory, TILE_BYTES, rows);
#pragma unroll
        for (int i = 0; i < TURNS; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float sums[4] = {};
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    const uint4 &a = d[i][0][part], &b = d[i][1][part], &c = o[i][h][part];
                    const u32 first_half[4] = {a.x, b.x, a.y, b.y}, second_half[4] = {a.z, b.z, a.w, b.w};
                    multiply(sums, first_half, c.x, c.y);
                    multiply(sums, second_half, c.z, c.w);
                }
                delta[i][h] += g % 2 ? sums[2 * h + 1] : sums[2 * h];
                // a row without a key has weights of 0, and not NaN
                const float x = shift[i][h] == MINUS_INFINITY ? shift[i][h] : -shift[i][h] * LOG2E;
                if (on_diagonal) shared.numbers[i * TILE + own_row + 8 * h] = make_float2(x, delta[i][h]);
            }
    }
};

struct Gradient {
    Number* at;
    Apart apart;

    __device__ __forceinline__ void write(const float (&d)[HEAD_DIM / 2], const Own& own, int head, float factor, int head_dim) const {
        const RowsOf<Number> rows(at, apart, head);
#pragma unroll
        for (int h = 0; h < 2; h++) store_row<HEAD_DIM>(d, h, factor, rows.row(own.token + 8 * h), head_dim, own.there[h]);
    }
};

// 16 tokens of a warp. As rows of products they are queries or keys, which see a range of the others each.
struct Tokens {
    const BackwardShared& shared;
    const int lane;
    const float exponent;  // scale * log2(e)
    const Survivors survivors;
    u32 left[HEAD_DIM / 16][4], right[HEAD_DIM / 16][4];  // Q and dO of the queries, or K and V of the keys

    __device__ __forceinline__ Tokens(const BackwardShared& shared, int lane, float exponent, const Survivors& survivors)
        : shared(shared), lane(lane), exponent(exponent), survivors(survivors) {}

    // row: of the warp's first token; those outside of the group may lie outside of the tile, and their results are not read
    __device__ __forceinline__ void take(u32 one, u32 other, int row) {
        const int inside = inside_tile(row + lane / 8 % 2 * 8 + lane % 8);
        const u32 first = place_of(one, inside, lane / 16), second = place_of(other, inside, lane / 16);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) load_matrices(left[i], at_step(first, i)), load_matrices(right[i], at_step(second, i));
    }

    // as queries, N keys from token `key` on, in `row` of the tiles: dQ += dS K
    template <int N>
    __device__ __forceinline__ void keys(float (&dquery)[HEAD_DIM / 2], const Own& own, const Range (&seen)[2], const float2 (&numbers)[2], int key, int row) {
        float p[N / 2], dp[N / 2];
        multiply_rows<N>(p, left, shared.key(), row, lane);
        multiply_rows<N>(dp, right, shared.value(), row, lane);
        const Range columns[2] = {seen[0].from(key + lane % 4 * 2), seen[1].from(key + lane % 4 * 2)};
        u32 kept[2] = {};
        if (DROPOUT) {
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (own.there[h]) kept[h] = survivors.of_query(own.token + 8 * h, own.first[h], key) >> lane % 4 * 2;
        }
#pragma unroll
        for (int e = 0; e < N / 2; e++) {
            const float2& row_numbers = numbers[half_of(e)];
            p[e] = columns[half_of(e)].has(column_at(0, e)) ? exp2_fast(fmaf(p[e], exponent, row_numbers.x)) : 0.0f;
            if (DROPOUT) dp[e] = kept[half_of(e)] >> column_at(0, e) % 32 & 1 ? dp[e] * survivors.inverse : 0.0f;
            p[e] *= dp[e] - row_numbers.y;
        }
        u32 dscores[N / 4];
        round_weights<N>(dscores, p);
        add_rows<N>(dquery, dscores, shared.key(), row, lane);
    }

    // as keys, N queries from token `query` on: dV += P^T dO, dK += dS^T Q
    template <int N>
    __device__ __forceinline__ void queries(float (&dkey)[HEAD_DIM / 2], float (&dvalue)[HEAD_DIM / 2], const Own& own, const Range (&seen)[2], int query, int row) {
        float p[N / 2], dp[N / 2];
        multiply_rows<N>(p, left, shared.query(), row, lane);
        multiply_rows<N>(dp, right, shared.dout(), row, lane);
        const int column = query + lane % 4 * 2;
        const Range columns[2] = {seen[0].from(column), seen[1].from(column)};
        const float2* numbers = shared.numbers + row + lane % 4 * 2;
        u32 weights[N / 4], dscores[N / 4];
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            const float2 pair[2] = {numbers[8 * i], numbers[8 * i + 1]};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float kept[2], ds[2];
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    const int e = 4 * i + 2 * h + b, other = column + 8 * i + b;
                    const bool sees = columns[h].has(8 * i + b);
                    const float weight = sees ? exp2_fast(fmaf(p[e], exponent, pair[b].x)) : 0.0f;
                    float dweight = dp[e];
                    kept[b] = weight;
                    if (DROPOUT) {
                        const float inverse = sees && survivors.has(other, own.first[h], own.token + 8 * h) ? survivors.inverse : 0.0f;
                        kept[b] *= inverse;
                        dweight = inverse == 0.0f ? 0.0f : dweight * inverse;
                    }
                    ds[b] = weight * (dweight - pair[b].y);
                }
                weights[2 * i + h] = pack(kept[0], kept[1]);
                dscores[2 * i + h] = pack(ds[0], ds[1]);
            }
        }
        add_rows<N>(dvalue, weights, shared.dout(), row, lane);
        add_rows<N>(dkey, dscores, shared.query(), row, lane);
    }

    __device__ __forceinline__ void walk_keys(float (&dquery)[HEAD_DIM / 2], const Own& own, const float2 (&numbers)[2], int key, int end, int row) {
        const Range seen[2] = {own.keys(0, end), own.keys(1, end)};
#pragma unroll 1
        for (; end - key > 16; key += 32, row += 32) keys<32>(dquery, own, seen, numbers, key, row);
        if (end > key) keys<16>(dquery, own, seen, numbers, key, row);
    }
    __device__ __forceinline__ void walk_queries(float (&dkey)[HEAD_DIM / 2], float (&dvalue)[HEAD_DIM / 2], const Own& own, int query, int end, int row) {
        const Range seen[2] = {own.queries(0, end), own.queries(1, end)};
#pragma unroll 1
        for (; end - query > 16; query += 32, row += 32) queries<32>(dkey, dvalue, own, seen, query, row);
        if (end > query) queries<16>(dkey, dvalue, own, seen, query, row);
    }
};

__device__ __forceinline__ void clear(float (&d)[HEAD_DIM / 2]) {
#pragma unroll
    for (int e = 0; e < HEAD_DIM / 2; e++) d[e] = 0.0f;
}

// all copies have landed, and the numbers computed meanwhile are written
__device__ __forceinline__ void await_rows() {
    copies_commit();
    copies_wait<0>();
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    tokens_backward(const Number* query, const Number* key, const Number* value, const int* offsets, const Number* dout, const Number* out,
                    const float* lse, const float* dlse, Number* dquery, Number* dkey, Number* dvalue,
#if DROPOUT
                    const u32* bits,
#endif
                    const void* tokens, const void* sequences,
#if DROPOUT
                    const void* words,
#endif
                    int query_row, int query_head, int key_row, int key_head, int value_row, int value_head, int dout_row, int dout_head, int out_row,
                    int out_head, int dquery_row, int dquery_head, int dkey_row, int dkey_head, int dvalue_row, int dvalue_head,
#if DROPOUT
                    float inverse,
#endif
#if GROUPED
                    int group_size,
#endif
                    int owners, int head_dim, float scale) {
    extern __shared__ __align__(128) unsigned char memory[];
    const BackwardShared shared{memory, beginning_of(memory), reinterpret_cast<float2*>(memory + 4 * TILE_BYTES)};
    const int total = number_of(tokens), lane = u32(threadIdx.x) % 32, warp = u32(threadIdx.x) / 32;
    const int tile = blockIdx.x / u32(owners), owner = blockIdx.x - tile * owners, begin = tile * TILE;
#if GROUPED
    const int members = group_size;
#else
    constexpr int members = 1;
#endif
    const Rows k(key, {key_row, key_head}, owner), v(value, {value_row, value_head}, owner);
    const Gradient to_query{dquery, {dquery_row, dquery_head}}, to_key{dkey, {dkey_row, dkey_head}}, to_value{dvalue, {dvalue_row, dvalue_head}};
    const Rows own_rows[5] = {k, v, Rows(query, {query_row, query_head}, owner * members), Rows(dout, {dout_row, dout_head}, owner * members),
                              Rows(out, {out_row, out_head}, owner * members)};
#pragma unroll
    for (int i = 0; i < 5; i++) prefetch_rows(own_rows[i], begin, total);
    if (head_dim < HEAD_DIM) clear_columns(memory, 0, 4 * ROWS, head_dim);
    const Bounds bounds({offsets, number_of(sequences), total}, begin);
    bool used = false;  // other warps may still read the tiles
#pragma unroll 1
    for (Groups group(bounds, begin, total); group.are_left();) {
        const Own own(bounds, group, begin + 16 * warp, lane);
        // the keys that the tile's queries see, and the queries that see its keys
        const int k_low = group.low, k_high = CAUSAL ? max(k_low, min(group.high, group.stop)) : group.high;
        const int q_low = CAUSAL ? max(group.low, group.begin) : group.low, q_high = max(q_low, group.high);
        const bool whole = max(k_high - k_low, q_high - q_low) <= MOST;
        float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2];
        clear(dk), clear(dv);
        bool found_nan = false;
#pragma unroll 1
        for (int member = 0; member < members; member++) {
            const int head = owner * members + member;
            const QueryHead from{Rows(query, {query_row, query_head}, head), Rows(dout, {dout_row, dout_head}, head), Rows(out, {out_row, out_head}, head),
                                 lse + (long long)head * total, dlse + (long long)head * total, head_dim};
            Survivors survivors{};
#if DROPOUT
            survivors = {bits + (long long)head * total * number_of(words), number_of(words), inverse};
#endif
            Tokens warp_tokens(shared, lane, scale * LOG2E, survivors);
            float dq[HEAD_DIM / 2];
            float2 numbers[2] = {};
            clear(dq);
            const int q_start = whole ? q_low : group.begin;  // the token in row 0 of Q
#pragma unroll 1
            for (int start = k_low; start < k_high; start += MOST) {
                const int rows = min(k_high - start, MOST);
                if (used) __syncthreads();
                copy_rows<MOST>(shared.key(), k, start, rows, head_dim);
                copy_rows<MOST>(shared.value(), v, start, rows, head_dim);
                clear_behind(memory, 2 * TILE_BYTES, rows);
                clear_behind(memory, 3 * TILE_BYTES, rows);
                if (start == k_low) from.load(shared, q_start, whole ? q_high - q_low : group.stop - group.begin);
                await_rows();
                used = true;
                if (start == k_low) {
                    const int row = begin + 16 * warp - q_start;
                    warp_tokens.take(shared.query(), shared.dout(), row);
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        if (own.there[h]) numbers[h] = shared.numbers[inside_tile(row + lane / 4 + 8 * h)];
                }
                const int first = max(own.low, start);
                warp_tokens.walk_keys(dq, own, numbers, first, min(own.end_of_keys(), start + rows), first - start);
            }
            to_query.write(dq, own, head, scale, head_dim);
            found_nan |= has_nan(dq, own.there);
            // the same tokens as keys
            const int k_start = whole ? k_low : group.begin;
            bool taken = false;
#pragma unroll 1
            for (int start = q_low; start < q_high; start += MOST) {
                const int rows = min(q_high - start, MOST);
                if (!whole) {
                    __syncthreads();
                    if (!taken) {
                        copy_rows<TILE>(shared.key(), k, group.begin, group.stop - group.begin, head_dim);
                        copy_rows<TILE>(shared.value(), v, group.begin, group.stop - group.begin, head_dim);
                    }
                    from.load(shared, start, rows);
                    await_rows();
                }
                if (!taken) warp_tokens.take(shared.key(), shared.value(), begin + 16 * warp - k_start);
                taken = true;
                const int first = max(own.begin_of_queries(), start);
                warp_tokens.walk_queries(dk, dv, own, first, min(own.high, start + rows), first - start);
            }
        }
        to_key.write(dk, own, owner, scale, head_dim);
        to_value.write(dv, own, owner, 1.0f, head_dim);
        found_nan |= has_nan(dk, own.there) | has_nan(dv, own.there);
        group.next(__syncthreads_or(found_nan));
    }
}
