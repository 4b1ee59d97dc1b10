// dK and dV of long sequences, and dS for dQ; see backward_sm90.cu.
#pragma once
#include "backward_rounds.cuh"

// One of the two warpgroups that own keys.
struct Keys {
    const LongBackwardShared shared;
    const int warpgroup;
    const float exponent;  // scale * log2(e); with a bias, the scale
    const Group group;
    const MaskBits mask;
    const Dropout& dropout;
    const Window window;
    const NumbersOfRows numbers;
    const KeyMask key_mask;
    const bool arriving = arriving_lane();
    u32 selectors[2];  // of a KEY_MASK, of this lane's keys
    float dkey[HEAD_DIM / 2], dvalue[HEAD_DIM / 2];
    int step = 0, number = 0;  // chunks, and rounds, so far

    __device__ __forceinline__ Keys(LongBackwardShared shared, int warpgroup, float exponent, Group group, MaskBits mask, const Dropout& dropout, Window window,
                                    NumbersOfRows numbers, KeyMask key_mask)
        : shared(shared), warpgroup(warpgroup), exponent(exponent), group(group), mask(mask), dropout(dropout), window(window), numbers(numbers), key_mask(key_mask) {}

    // S^T, or onto -delta dP^T - delta: 64 keys x N queries
    template <int N, bool ADDS>
    __device__ __forceinline__ void multiply(float (&d)[N / 2], u32 keys, u32 queries) {
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; s++) {
            u64 left = KeyTile::columns(shared.low(keys), 64 * warpgroup, s), right = QueryTile::columns(shared.low(queries), 0, s);
            if (s == 0 && !ADDS) Products<N>::set(d, left, right);
            else Products<N>::add(d, left, right);
        }
        products_commit();
    }

    // A chunk of a query head whose queries fill N columns. survivors: which of its weights dropout leaves (dropout.cuh).
    template <int N>
    __device__ __forceinline__ void chunk(const Round& round, int head, int c, u32 survivors) {
        const int stage = stage_of(step), row = own_row(round.start + 64 * warpgroup);
        const u32 shown = mask.of(round.item, head, row, round.item.k_rows, c);  // its latency is hidden by the product S
        const u32 query = shared.query(stage), dout = shared.dout(stage), rows = shared.rows(stage) + int(threadIdx.x) % 4 * 16;
        float scores[N / 2], dweights[N / 2];
        float2 shift[N / 8];
        products_begin();
        multiply<N, false>(scores, shared.key(number), query);
        if (!NARROW) {  // while S is under way
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                const float4 x = load_floats(rows + 64 * i);
                shift[i] = make_float2(x.x, x.y);
                if (!DROPOUT) begin_at<N>(dweights, i, x);
            }
            products_begin();
            multiply<N, !DROPOUT>(dweights, shared.value(number), dout);
        }
        products_wait<NARROW ? 0 : 1>();
        add_bias<N>(scores, round.item, head, c, stage);
        const float by = BIAS ? LOG2E : exponent;
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            if (NARROW) {
                const float4 x = load_floats(rows + 64 * i);
                shift[i] = make_float2(x.x, x.y);
            }
            const float2 x = shift[i];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                scores[4 * i + 2 * h] = exp2_fast(fmaf(scores[4 * i + 2 * h], by, x.x));
                scores[4 * i + 2 * h + 1] = exp2_fast(fmaf(scores[4 * i + 2 * h + 1], by, x.y));
            }
        }
        if (MASK) {
#pragma unroll
            for (int e = 0; e < N / 2; e++)
                if (!mask.shows(shown, e)) scores[e] = 0.0f;
        }
        hide<N>(scores, round.item, c * CHUNK_ROWS, round.start + 64 * warpgroup);
        u32 weights[N / 4], dscores[N / 4];
#pragma unroll
        for (int i = 0; i < N / 4; i++) weights[i] = pack(scores[2 * i], scores[2 * i + 1]);
        if (NARROW) {
            if (!DROPOUT) {
#pragma unroll
                for (int i = 0; i < N / 8; i++) begin_at<N>(dweights, i, load_floats(rows + 64 * i));
            }
            products_begin();
            multiply<N, !DROPOUT>(dweights, shared.value(number), dout);
        }
        products_wait<0>();
        float4 pair;  // the numbers of two queries
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const float2 p = NARROW ? floats_of(weights[i]) : make_float2(scores[2 * i], scores[2 * i + 1]);
            if (DROPOUT) {
                const bool left = Dropout::leaves(survivors, 2 * i), right = Dropout::leaves(survivors, 2 * i + 1);
                if (i % 2 == 0) pair = load_floats(rows + 32 * i);
                weights[i] = pack(left ? p.x : 0.0f, right ? p.y : 0.0f);
                dweights[2 * i] = fmaf(left ? dweights[2 * i] : 0.0f, dropout.inverse, pair.z);
                dweights[2 * i + 1] = fmaf(right ? dweights[2 * i + 1] : 0.0f, dropout.inverse, pair.w);
            }
            dscores[i] = pack(p.x * dweights[2 * i], p.y * dweights[2 * i + 1]);
        }
        products_begin();
#pragma unroll
        for (int s = 0; s < N / 16; s++) Products<HEAD_DIM>::add_rows(dvalue, weights + 4 * s, QueryTile::rows(shared.low(dout), 16 * s));
#pragma unroll
        for (int s = 0; s < N / 16; s++) Products<HEAD_DIM>::add_rows(dkey, dscores + 4 * s, QueryTile::rows(shared.low(query), 16 * s));
        products_commit();
        if (step >= 2) barrier_wait(shared.barrier(SCORES_READ + step % 2), (step / 2 - 1) & 1);
#pragma unroll
        for (int s = 0; s < N / 16; s++) store_matrices(ScoreTile::fragment(shared.dscores(step), 64 * warpgroup, s), dscores + 4 * s);
        fence_async();
        warp_arrives(shared.barrier(SCORES + step % 2), arriving);
        products_wait<0>();
        warp_arrives(shared.barrier(CHUNK_READ + stage_of(step)), arriving);
        step++;
    }

    // scale S^T + bias^T, less the maximum of far queries
    template <int N>
    __device__ __forceinline__ void add_bias(float (&scores)[N / 2], const Item& item, int head, int c, int stage) const {
#if BIAS
        const int lane = int(threadIdx.x) % 32, column = int(threadIdx.x) / 32 % 4 * 2 + lane / 8 % 2;
#pragma unroll
        for (int s = 0; s < N / 16; s++) {
            u32 words[4];
            load_transposed(words, Tile<64, 64>::chunk(shared.bias(stage, warpgroup), 0, 16 * s + lane / 16 * 8 + lane % 8, column));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 added = KeyMask::numbers_of(words[j], selectors[j % 2]);
                float &x = scores[8 * s + 2 * j], &y = scores[8 * s + 2 * j + 1];
                x = fmaf(x, exponent, added.x), y = fmaf(y, exponent, added.y);
            }
        }
        const float4 far = load_floats(shared.far(stage));
        if (far.x + far.y + far.z + far.w == 0.0f) return;
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const float maximum = numbers.maximum(item, head, c * CHUNK_ROWS + 8 * i + own_column() + b);
                scores[4 * i + b] -= maximum, scores[4 * i + 2 + b] -= maximum;
            }
#endif
    }

    // -delta of the queries of column group i, for both rows of this lane
    template <int N>
    __device__ __forceinline__ void begin_at(float (&d)[N / 2], int i, const float4& x) {
        d[4 * i] = d[4 * i + 2] = x.z, d[4 * i + 1] = d[4 * i + 3] = x.w;
    }

    // P = 0 where a query does not see a key or one of them does not exist. Not left to lse: an infinite key makes a score of zeros NaN.
    template <int N>
    __device__ __forceinline__ void hide(float (&p)[N / 2], const Item& item, int first_query, int first_key) {
        bool whole = first_query + N <= item.q_len && first_key + 64 <= item.k_len && (!CAUSAL || first_key + 63 <= first_query + item.reach()) &&
                     (!WINDOW || first_key >= first_query + N - 1 + item.back());
        if (whole) return;
        int query = first_query + own_column(), row = own_row(first_key);
#pragma unroll
        for (int e = 0; e < N / 2; e++)
            if (!item.sees(column_at(query, e), row_at(row, e))) p[e] = 0.0f;
    }

    __device__ __forceinline__ void await_chunk() {
        barrier_wait(shared.barrier(CHUNK + stage_of(step)), parity_of(step));
        barrier_wait(shared.barrier(ROWS + stage_of(step)), parity_of(step));
    }

    // Zeros behind the last query of a chunk, where another sequence may hold NaN.
    __device__ __forceinline__ void clear_behind(int rows) {
        const int stage = stage_of(step), end = rows > 32 ? 64 : rows > 16 ? 32 : 16;
        if (rows >= end) return;
        QueryTile::clear(shared.query(stage), max(rows, 0), end, threadIdx.x % 256, 256);
        QueryTile::clear(shared.dout(stage), max(rows, 0), end, threadIdx.x % 256, 256);
        fence_async();
        sync_threads(OF_ALL_KEYS, 256);
    }

    // K and V of this warpgroup, with zeros behind the last key
    __device__ __forceinline__ void take_keys(int rows) {
        if (rows < 64) {
            KeyTile::clear(shared.key(number), 64 * warpgroup + rows, 64 * warpgroup + 64, threadIdx.x % 128, 128);
            KeyTile::clear(shared.value(number), 64 * warpgroup + rows, 64 * warpgroup + 64, threadIdx.x % 128, 128);
            fence_async();
            sync_threads(OF_KEYS + warpgroup, 128);
        }
    }

    // which weights of a chunk of a query head survive, drawn before its tiles are there
    __device__ __forceinline__ u32 survivors_of(const Round& round, int head, int c) const {
        if (!DROPOUT) return 0;
        const u32 problem = dropout.problem(round.item.sequence, head);
        return dropout.of_keys<CHUNK_ROWS>(problem, c * CHUNK_ROWS, round.start + 64 * warpgroup);
    }

    __device__ __forceinline__ void read_mask(const Round& round) {
        const int first = own_row(round.start + 64 * warpgroup);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const bool shown = key_mask.at(round.item.batch, first + 8 * h, round.item.k_len);
            selectors[h] = selectors_of(shown, shown);
        }
    }

    // the chunks of a query head
    __device__ __forceinline__ void compute(const Round& round, int head) {
        int c = round.first_chunk();
        int whole = round.item.q_len / CHUNK_ROWS, end = 0;
        if (WINDOW) {
            const Chunks own = round.seeing(warpgroup);
            const int before = min(own.first, round.end_chunk());
            pass(round, c, before);
            c = max(c, before), end = min(own.end, round.end_chunk()), whole = min(whole, end);
        }
#pragma unroll 1
        for (; c < whole; c++) {
            const u32 survivors = survivors_of(round, head, c);
            await_chunk();
            chunk<64>(round, head, c, survivors);
        }
        if (WINDOW && c >= end) return pass(round, c, round.end_chunk());
        if (c >= round.end_chunk()) return;
        const int rows = round.item.q_len - c * CHUNK_ROWS;  // of the last chunk of all
        const u32 survivors = survivors_of(round, head, c);
        await_chunk();
        clear_behind(rows);
        if (rows > 32) chunk<64>(round, head, c, survivors);
        else if (rows > 16) chunk<32>(round, head, c, survivors);
        else chunk<16>(round, head, c, survivors);
    }

    // chunks that see no key of this warpgroup, or of which it has none
    __device__ __forceinline__ void pass(const Round& round, int first, int end) {
#pragma unroll 1
        for (int c = first; c < end; c++) {
            await_chunk();
            clear_behind(round.item.q_len - c * CHUNK_ROWS);
            if (step >= 2) barrier_wait(shared.barrier(SCORES_READ + step % 2), (step / 2 - 1) & 1);
            warp_arrives(shared.barrier(SCORES + step % 2), arriving);
            warp_arrives(shared.barrier(CHUNK_READ + stage_of(step)), arriving);
            step++;
        }
    }

    __device__ __forceinline__ void run(const Gradients& out) {
#pragma unroll 1
        for (;; number++) {
            barrier_wait(shared.barrier(KEYS + number % 2), number / 2 & 1);
            const Round round = read_round(shared.round(number), window);
            if (round.start < 0) return;
            const int rows = between(0, round.keys() - 64 * warpgroup, 64);
#pragma unroll
            for (int e = 0; e < HEAD_DIM / 2; e++) dkey[e] = dvalue[e] = 0.0f;
            if (KEY_MASK) read_mask(round);
            if (rows > 0 || warpgroup == 0) {
                take_keys(rows);
#pragma unroll 1
                for (int member = 0; member < group.members(); member++) compute(round, group.query_head(round.item.head, member));
            } else {
#pragma unroll 1
                for (int member = 0; member < group.members(); member++) pass(round, round.first_chunk(), round.end_chunk());
            }
            warp_arrives(shared.barrier(KEYS_READ + number % 2), arriving);
            const int first = own_row(round.start + 64 * warpgroup);
            const Item it = item_to_write(round, shared.round(number));
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = first + 8 * h;
                const bool there = row < it.k_rows && !round.is_beyond();
                store_row<HEAD_DIM>(dvalue, h, DROPOUT ? dropout.inverse : 1.0f, out.dvalue + out.dvalue_strides.at(it.batch, it.head, it.k_first + row), out.head_dim, there);
                store_row<HEAD_DIM>(dkey, h, out.scale, out.dkey + out.dkey_strides.at(it.batch, it.head, it.k_first + row), out.head_dim, there);
            }
        }
    }
};
