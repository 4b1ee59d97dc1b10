// dQ of 64 rows, and dV or dK of the keys of a tile; see backward_sm90.cu.
#pragma once
#include "backward_shared.cuh"

// Warpgroup HALF: rows 64 HALF and on of every block, and dV (0) or dK (1) of its keys.
template <int HALF>
struct Consumer {
    const Given& given;
    GatherShared shared;
    Place place;
    int lane, warp;         // of the warpgroup
    int multiplied = 0;     // parity of that barrier
    int drained = 1;        // with two parts, of that one
    int count, whole;       // of the list in hand: all keys, and those that every query sees
    long long own_keys;     // first key of the key head in hand, among all of them
    float shift[PARTS][2], delta[PARTS][2];
    int position;           // of the block's first query
    static constexpr int GRADIENT_COLUMNS = HEAD_DIM + (HALF && SUMS_INSIDE ? 8 : 0);  // columns of dV or dK, and sums
    float dquery[PARTS][HEAD_DIM / 2], key_gradient[GRADIENT_COLUMNS / 2], sums[4];
    float scores[32], dprobs[32];
    u32 probs[16], dscores[16];  // rounded

    __device__ __forceinline__ Consumer(const Given& given, const GatherShared& shared) : given(given), shared(shared) {
        lane = threadIdx.x % 32;
        warp = __shfl_sync(~0u, int(threadIdx.x) / 32 % 4, 0);
    }

    // row of a block that row i of this warpgroup is
    static __device__ __forceinline__ int row_of(int i) { return i / 64 * PART_ROWS + 64 * HALF + i % 64; }
    // row of a block that this lane has in registers, of a part
    static __device__ __forceinline__ int held_row(int part, int h) {
        int thread = thread_of() % 128;
        return row_of(64 * part) + thread / 32 * 16 + thread % 32 / 4 + 8 * h;
    }

    // Q, dO and O of a block: this thread's part of its warpgroup's rows, and numbers of the rows that its lane holds
    struct Rows {
        uint4 query[LOADS], dout[LOADS], out[LOADS];
        float lse[PARTS][2], dlse[PARTS][2];
        int count, whole;
    };

    __device__ __forceinline__ void fetch(const QueryBlock& work, Rows& rows) const {
        int batch = work.owner / given.kv_heads, thread = thread_of() % 128, column = thread % ACROSS * 8;
        rows.count = given.counts[work.list];
        rows.whole = given.wholes[work.list];
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            int query, head;
            bool real = locate_row(given, work, row_of(n * (128 / ACROSS)) + thread / ACROSS, query, head);
            rows.query[n] = load_global(given.query + batch * given.query_batch + head * given.query_head + query * given.query_row + column, real);
            rows.dout[n] = load_global(given.dout + batch * given.dout_batch + head * given.dout_head + query * given.dout_row + column, real);
            rows.out[n] = load_global(given.out + batch * given.out_batch + head * given.out_head + query * given.out_row + column, real);
        }
#pragma unroll
        for (int i = 0; i < 2 * PARTS; i++) {
            int query, head;
            bool real = locate_row(given, work, held_row(i / 2, i % 2), query, head);
            long long row = place_of(given, work, query, head);
            rows.lse[i / 2][i % 2] = real ? given.lse[row] : MINUS_INFINITY;
            rows.dlse[i / 2][i % 2] = real && given.dlse ? given.dlse[row] : 0.0f;
        }
    }

    // into shared memory; delta = rowsum(dO O) - dlse on the way. Returns whether a row of the block is far
    __device__ __forceinline__ bool share_rows(const QueryBlock& work, const Rows& rows) {
        int thread = thread_of() % 128, chunk = thread % ACROSS;
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            int i = row_of(n * (128 / ACROSS)) / 64, row = n * (128 / ACROSS) % 64 + thread / ACROSS;
            u32 to = chunk / 8 * ROWS_64 + row * 128 + ((chunk % 8) ^ (row & 7)) * 16;
            store_shared(shared.query(i) + to, rows.query[n]);
            store_shared(shared.dout(i) + to, rows.dout[n]);
            float sum = dot(rows.dout[n], rows.out[n]);
#pragma unroll
            for (int other = 1; other < ACROSS; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
            if (chunk == 0) store_note(shared.delta(64 * i + row), __float_as_int(sum));
        }
        fence_async();
        bool far = false;
#pragma unroll
        for (int i = 0; i < 2 * PARTS; i++) far |= distance(rows.lse[i / 2][i % 2]) > FAR;
        // the compiler takes what comes from a shuffle for the same in all lanes
        int any = __shfl_sync(~0u, sync_threads_or<256>(ALL, far), 0);
        count = __shfl_sync(~0u, rows.count, 0);
        whole = __shfl_sync(~0u, rows.whole, 0);
        own_keys = (long long)work.owner * given.kv_len;
#pragma unroll
        for (int i = 0; i < 2 * PARTS; i++) {
            float lse = rows.lse[i / 2][i % 2];
            delta[i / 2][i % 2] = __int_as_float(load_shared(shared.delta(held_row(i / 2, i % 2)))) - rows.dlse[i / 2][i % 2];
            // a row that sees no key, or does not exist: its weights are 0
            shift[i / 2][i % 2] = lse == MINUS_INFINITY ? -MINUS_INFINITY : max_nan(min_nan(lse * LOG2E, LARGEST), -LARGEST);
        }
        position = given.kv_len - given.q_len + work.block * (ROWS >> given.group_shift);
        return any;
    }

    // d = A B^T over D, committed
    __device__ __forceinline__ void issue_over_dim(float (&d)[32], u32 rows, u32 keys) {
        u64 a = operand(rows), b = operand(keys);
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++) {
            u32 further = columns_at(step, ROWS_64);
            if (step == 0)
                Products<64>::set(d, a, b);
            else
                Products<64>::add(d, advance(a, further), advance(b, further));
        }
        products_commit();
    }

    __device__ __forceinline__ void wait_tile() const { barrier_wait(shared.ring().full(place.stage), place.parity); }

    template <int PART>
    __device__ __forceinline__ void issue_scores() {
        issue_over_dim(scores, shared.query(WARPGROUPS * PART + HALF), shared.ring().keys(place.stage));
    }

    template <int PART>
    __device__ __forceinline__ void issue_dprobs() {
        issue_over_dim(dprobs, shared.dout(WARPGROUPS * PART + HALF), shared.ring().values(place.stage));
    }

    // one of four steps over D = 64
    template <int PART>
    __device__ __forceinline__ void issue_dprobs(int step) {
        u64 a = operand(shared.dout(WARPGROUPS * PART + HALF)), b = operand(shared.ring().values(place.stage));
        if (step == 0)
            Products<64>::set(dprobs, a, b);
        else
            Products<64>::add(dprobs, advance(a, step * 32), advance(b, step * 32));
    }

    // Exponent of a weight. With key scores it is rounded as forward rounds it before the shift: keys that tie there tie here.
    __device__ __forceinline__ float exponent_of(float score, float bias, float shift) const {
        return HAS_SCORES ? fmaf(score, given.exponent, bias) - shift : fmaf(score, given.exponent, -shift);
    }

    // scores of eight keys -> weights, in float for dS
    template <int PART>
    __device__ __forceinline__ void exponentiate(int i) {
        float bias[2] = {0.0f, 0.0f};
        if (HAS_SCORES) load_shared(shared.ring().bias(place.stage) + 8 * (lane % 4) + 32 * i, bias[0], bias[1]);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float x = exponent_of(scores[4 * i + e], bias[e % 2], shift[PART][e / 2]);
            scores[4 * i + e] = PARTS == 1 ? exp2_fast(x) : exp2_here(x);
        }
    }

    // the weights rounded, for dV
    template <int PART>
    __device__ __forceinline__ void round_probs(int first) {
        if (first + BLOCK_N > whole) zero_hidden_weights<PART>();
#pragma unroll
        for (int i = 0; i < 16; i++) probs[i] = pack(scores[2 * i], scores[2 * i + 1]);
    }

    // no weight where a row does not see a key, or the list is over
    template <int PART>
    __device__ __forceinline__ void zero_hidden_weights() {
        int row = held_row(PART, 0), at[2] = {position + (row >> given.group_shift), position + ((row + 8) >> given.group_shift)};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int start[2], stop[2];
            u32 from = 32 * i + 8 * (thread_of() % 4);
            load_shared(shared.ring().start(place.stage) + from, start[0], start[1]);
            load_shared(shared.ring().stop(place.stage) + from, stop[0], stop[1]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                bool seen = at[e / 2] >= start[e % 2] && at[e / 2] < stop[e % 2];
                scores[4 * i + e] = seen ? scores[4 * i + e] : 0.0f;
            }
        }
    }

    // Maxima and sums of the rows of a part, with the tile in hand
    template <int PART>
    __device__ __forceinline__ void measure_part(float (&most)[2], float (&total)[2]) {
        products_begin();
        issue_scores<PART>();
        products_wait<0>();
        int row = held_row(PART, 0), at[2] = {position + (row >> given.group_shift), position + ((row + 8) >> given.group_shift)};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int start[2], stop[2];
            float bias[2] = {0.0f, 0.0f};
            u32 from = 32 * i + 8 * (lane % 4);
            load_shared(shared.ring().start(place.stage) + from, start[0], start[1]);
            load_shared(shared.ring().stop(place.stage) + from, stop[0], stop[1]);
            if (HAS_SCORES) load_shared(shared.ring().bias(place.stage) + from, bias[0], bias[1]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int h = e / 2, key = e % 2;
                float score = scores[4 * i + e];
                bool seen = at[h] >= start[key] && at[h] < stop[key];
                float top = seen ? fmaxf(most[h], fmaf(score, given.exponent, bias[key])) : most[h];
                // a row that has seen no key yet would compute -inf - -inf
                float from_top = top == MINUS_INFINITY ? 0.0f : top;
                total[h] = total[h] * exp2_fast(most[h] - from_top) + (seen ? exp2_fast(exponent_of(score, bias[key], from_top)) : 0.0f);
                most[h] = top;
            }
        }
    }

    // of a row, over the four lanes that share it
    static __device__ __forceinline__ void join_lanes(float& most, float& total) {
#pragma unroll
        for (int other = 1; other < 4; other *= 2) {
            float its_most = __shfl_xor_sync(~0u, most, other), its_total = __shfl_xor_sync(~0u, total, other);
            float top = fmaxf(most, its_most), from_top = top == MINUS_INFINITY ? 0.0f : top;
            total = total * exp2_fast(most - from_top) + its_total * exp2_fast(its_most - from_top);
            most = top;
        }
    }

    // For a block with a far row, whose list is walked once for this: the shift of every row is its maximum, and dO and delta are divided by
    // its sum.
    __device__ __forceinline__ void measure() {
        float most[PARTS][2], total[PARTS][2];
#pragma unroll
        for (int i = 0; i < 2 * PARTS; i++) most[i / 2][i % 2] = MINUS_INFINITY, total[i / 2][i % 2] = 0.0f;
        for (int first = 0; first < count; first += BLOCK_N) {
            wait_tile();
            measure_part<0>(most[0], total[0]);
            if constexpr (PARTS == 2) measure_part<1>(most[1], total[1]);
            __syncwarp();
            if (lane == 0) barrier_arrive(shared.ring().empty(place.stage));
            place.advance();
        }
#pragma unroll
        for (int i = 0; i < 2 * PARTS; i++) {
            float &x = most[i / 2][i % 2], &sum = total[i / 2][i % 2], &own = shift[i / 2][i % 2];
            join_lanes(x, sum);
            bool lost = !HAS_SCORES && fabsf(x) > TOO_FAR;
            float inverse = sum == 0.0f || lost ? 0.0f : 1.0f / sum;
            if (own == -MINUS_INFINITY)  // sees no key, or is none
                inverse = 1.0f;
            else
                own = lost ? -MINUS_INFINITY : x;
            delta[i / 2][i % 2] *= inverse;
            // where delta was, which the same warp has read
            if (lane % 4 == 0) store_note(shared.delta(held_row(i / 2, i % 2)), __float_as_int(inverse));
        }
        sync_threads(OF_WARPGROUP + HALF, 128);
        divide_dout();
        fence_async();
        sync_threads(OF_WARPGROUP + HALF, 128);
    }

    // rows of dO, each times its number in place of delta, by the threads that brought them
    __device__ __forceinline__ void divide_dout() const {
        int thread = thread_of() % 128, chunk = thread % ACROSS;
#pragma unroll
        for (int n = 0; n < LOADS; n++) {
            int i = row_of(n * (128 / ACROSS)) / 64, row = n * (128 / ACROSS) % 64 + thread / ACROSS;
            u32 at = shared.dout(i) + chunk / 8 * ROWS_64 + row * 128 + ((chunk % 8) ^ (row & 7)) * 16;
            float inverse = __int_as_float(load_shared(shared.delta(64 * i + row)));
            uint4 x = load_chunk(at);
            store_shared(at, make_uint4(times(x.x, inverse), times(x.y, inverse), times(x.z, inverse), times(x.w, inverse)));
        }
    }

    template <int PART>
    __device__ __forceinline__ void round_dscores() {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float d = delta[PART][i % 2];
            dscores[i] = pack(scores[2 * i] * (dprobs[2 * i] - d), scores[2 * i + 1] * (dprobs[2 * i + 1] - d));
        }
    }

    // P or dS with keys as rows, in a column block for each warpgroup. As rows of the block, which dV and dK read too, the kernel took 2 % longer
    __device__ __forceinline__ void store_by_keys(u32 to, const u32 (&pairs)[16]) const {
        u32 corner = HALF * ROWS_64 + lane / 16 * EIGHT_ROWS + lane % 8 * 128 + ((2 * warp + lane / 8 % 2) ^ (lane & 7)) * 16;
#pragma unroll
        for (int i = 0; i < 4; i++) store_transposed(to + corner + 2 * EIGHT_ROWS * i, pairs + 4 * i);
    }

    // one step of dV = P^T dO or dK = dS^T Q, of the first part, += of the second
    template <int PART>
    __device__ __forceinline__ void issue_key_gradient(int stage, int step) {
        u64 a = operand(HALF ? shared.dscores(PART, stage) : shared.probs(PART));
        u32 from = HALF ? shared.query(WARPGROUPS * PART) : shared.dout(WARPGROUPS * PART), further = step / 4 * OWN_BYTES + step % 4 * 16 * 128;
        u64 b = operand(from, GRADIENT_COLUMNS > HEAD_DIM ? shared.ones() - from : ROWS_64);
        u64 pairs = advance(a, columns_at(step, ROWS_64)), rows = advance(b, further);
        if (GRADIENT_COLUMNS > HEAD_DIM) rows -= u64(further >> 4) << 16;  // the ones stay where they are
        if (step == 0 && PART == 0)
            Products<GRADIENT_COLUMNS>::set_rows(key_gradient, pairs, rows);
        else
            Products<GRADIENT_COLUMNS>::add_rows(key_gradient, pairs, rows);
    }

    // dQ += dS K, from registers: the next dS is made only when S of the next part is there, which comes after this
    template <int PART>
    __device__ __forceinline__ void issue_dquery() {
        products_begin();
        u64 keys = operand(shared.ring().keys(place.stage), ROWS_64);
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; step++)
            Products<HEAD_DIM>::add_rows(dquery[PART], dscores + 4 * step, advance(keys, step * 16 * 128));
        products_commit();
    }

    // With two parts: P and dS of a part and the tile in hand, whose S is under way, to the other warpgroup, and dQ under way. Between the
    // exponentials dP is issued, and (AFTER) dV or dK of the part before, of the tile in place `stage`: 2 % less time than all of it before them.
    template <int PART, bool AFTER>
    __device__ __forceinline__ void differentiate_part(int first, int stage) {
        products_wait<0>();
        // dV and dK, which read the last P and dS of this part, are done too
        if (lane == 0) barrier_arrive(shared.multiplied());
        products_begin();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            exponentiate<PART>(i);  // P = exp(S - lse)
            if (i < 2) {
                issue_dprobs<PART>(2 * i);  // dP = dO V^T
                issue_dprobs<PART>(2 * i + 1);
                if (i == 1) products_commit();
            } else if (AFTER) {
#pragma unroll
                for (int step = 0; step < 8; step++)
                    if (step * 6 / 8 == i - 2) issue_key_gradient<1 - PART>(stage, step);  // dV = P^T dO or dK = dS^T Q
            }
        }
        if (AFTER) products_commit();
        round_probs<PART>(first);
        barrier_wait(shared.multiplied(), multiplied);
        multiplied ^= 1;
        store_by_keys(shared.probs(PART), probs);
        products_wait<AFTER>();
        round_dscores<PART>();  // dS = P (dP - delta)
        issue_dquery<PART>();   // dQ += dS K
        store_by_keys(shared.dscores(PART, place.stage), dscores);
        fence_async();
        sync_threads(ALL, 256);
    }

    // all products of a block with keys, the last under way. Returns the first key of the last tile, whose dV and dK are not handed over yet
    __device__ __forceinline__ int multiply_two() {
        wait_tile();
        products_begin();
        issue_scores<0>();  // S = Q K^T
        differentiate_part<0, false>(0, 0);
        products_begin();
        issue_scores<1>();
        differentiate_part<1, true>(0, place.stage);
        int first = 0;
        // A turn of the loop begins with the first part: where it began with the second, ptxas let all products run one by one.
        for (; first + BLOCK_N < count; first += BLOCK_N) {
            int stage = place.stage;
            place.advance();
            wait_tile();
            products_begin();
            issue_scores<0>();
            differentiate_part<0, true>(first + BLOCK_N, stage);
            products_begin();
            issue_scores<1>();
            products_wait<2>();
            hand_over(stage, first);
            differentiate_part<1, true>(first + BLOCK_N, place.stage);
        }
        products_begin();
#pragma unroll
        for (int step = 0; step < PART_ROWS / 16; step++) issue_key_gradient<1>(place.stage, step);
        products_commit();
        return first;
    }

    // With one part: P and dS of the current tile, once its products are complete
    __device__ __forceinline__ void differentiate(int first) {
        products_wait<1>();
#pragma unroll
        for (int i = 0; i < 8; i++) exponentiate<0>(i);  // P = exp(S - lse)
        round_probs<0>(first);
        products_wait<0>();
        if (lane == 0) barrier_arrive(shared.multiplied());
        round_dscores<0>();  // dS = P (dP - delta)
    }

    // P and dS to the other warpgroup; dQ += dS K, and dV = P^T dO or dK = dS^T Q under way
    __device__ __forceinline__ void exchange() {
        int row = 64 * HALF + 16 * warp + lane % 16;
        u32 to = row * 128 + ((lane / 16) ^ (lane & 7)) * 16;  // `swizzled`: `row` ends with the bits of `lane`
        // no warp still reads P of the tile before, or V of this one, whose place dS takes
        barrier_wait(shared.multiplied(), multiplied);
        multiplied ^= 1;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            store_matrices((shared.probs(0) + to) ^ (32 * i), probs + 4 * i);
            store_matrices((shared.dscores(0, place.stage) + to) ^ (32 * i), dscores + 4 * i);
        }
        fence_async();
        sync_threads(ALL, 256);
        products_begin();
        // dQ += dS K
        u64 own = operand(shared.dscores(0, place.stage) + HALF * (PAIR_BYTES / 2)), keys = operand(shared.ring().keys(place.stage), ROWS_64);
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; step++)
            Products<HEAD_DIM>::add_rows(dquery[0], advance(own, step * 32), advance(keys, step * 16 * 128));
        // dV = P^T dO or dK = dS^T Q
        u64 a = operand(HALF ? shared.dscores(0, place.stage) : shared.probs(0));
        u64 b = operand(HALF ? shared.query(0) : shared.dout(0), ROWS_64);
#pragma unroll
        for (int step = 0; step < ROWS / 16; step++) {
            u64 rows = advance(a, step * 16 * 128), columns = advance(b, step / 4 * OWN_BYTES + step % 4 * 16 * 128);
            if (step == 0)
                Products<HEAD_DIM>::set_transposed(key_gradient, rows, columns);
            else
                Products<HEAD_DIM>::add_transposed(key_gradient, rows, columns);
        }
        if (HALF && HAS_SCORES) {
            u64 ones = operand(shared.ones());  // dscores = dS^T 1
#pragma unroll
            for (int step = 0; step < ROWS / 16; step++) {
                if (step == 0)
                    set_sums(sums, advance(a, step * 16 * 128), ones);
                else
                    add_sums(sums, advance(a, step * 16 * 128), ones);
            }
        }
        products_commit();
    }

    // as `multiply_two`
    __device__ __forceinline__ int multiply_one() {
        wait_tile();
        products_begin();
        issue_scores<0>();  // S = Q K^T
        issue_dprobs<0>();  // dP = dO V^T
        differentiate(0);
        int first = 0;
        for (; first + BLOCK_N < count; first += BLOCK_N) {
            exchange();
            int stage = place.stage;
            place.advance();
            wait_tile();
            products_begin();
            issue_scores<0>();
            issue_dprobs<0>();
            products_wait<2>();
            hand_over(stage, first);
            differentiate(first + BLOCK_N);
        }
        exchange();
        return first;
    }

    // dV or dK of a tile's keys, handed to the copy engine; the tile's place is freed
    __device__ __forceinline__ void hand_over(int stage, int first) {
        int index = load_shared(shared.ring().index(stage) + 4 * (16 * warp + lane % 16));
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.ring().empty(stage));
        float* to = (HALF ? given.dkey : given.dvalue) + (own_keys + index) * HEAD_DIM;
        bool listed = 16 * warp + lane % 16 < count - first;
        u32 area = shared.area(4 * HALF + warp), line = area + lane / 4 * LINE_BYTES + lane % 4 * 8;
        barrier_wait(shared.drained(4 * HALF + warp), PARTS == 1 ? multiplied : drained);  // which has changed since the tile before
        drained ^= 1;
        float factor = HALF ? given.scale : 1.0f;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 4; i++) {
            int h = i % 2, e = 2 * i;
            store_shared(line + 8 * h * LINE_BYTES + 32 * (i / 2), key_gradient[e] * factor, key_gradient[e + 1] * factor);
        }
        u32 behind = area + lane % 16 * LINE_BYTES + 4 * HEAD_DIM;
        if (lane < 16) store_shared(behind, listed ? u64(to) : 0);
        if (HALF && HAS_SCORES && lane % 4 < 2) {
            const float *column = SUMS_INSIDE ? key_gradient + HEAD_DIM / 2 : sums;  // of rows g and g + 8
            store_note(area + (lane / 4 + lane % 4 * 8) * LINE_BYTES + 4 * HEAD_DIM + 8, __float_as_int(lane % 4 ? column[2] : column[0]));
        }
        fence_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.staged(4 * HALF + warp));
    }

    // dQ and the additions of a block
    __device__ __forceinline__ void differentiate_block() {
#pragma unroll
        for (int i = 0; i < PARTS * HEAD_DIM / 2; i++) dquery[i / (HEAD_DIM / 2)][i % (HEAD_DIM / 2)] = 0.0f;
        if (count == 0) return;
        int first;
        if constexpr (PARTS == 1)
            first = multiply_one();
        else
            first = multiply_two();
        products_wait<0>();
        hand_over(place.stage, first);
        place.advance();
    }

    __device__ __forceinline__ void store(const QueryBlock& work) const {
        int batch = work.owner / given.kv_heads;
#pragma unroll
        for (int n = 0; n < 2 * PARTS; n++) {
            int query, head, h = n % 2;
            bool real = locate_row(given, work, held_row(n / 2, h), query, head);
            Number* to = given.dquery + batch * given.dquery_batch + head * given.dquery_head + query * given.dquery_row;
            store_row<HEAD_DIM>(dquery[n / 2], h, given.scale, to, HEAD_DIM, real);
        }
    }

    __device__ __forceinline__ void run() {
        Rows rows;
        fetch(QueryBlock(blockIdx.x, given.owners, given.blocks), rows);
        for (int index = blockIdx.x; index < given.total; index += gridDim.x) {
            QueryBlock work(index, given.owners, given.blocks);
            // a loop of one turn at most: ptxas runs products under an `if` one by one
            for (bool far = share_rows(work, rows); far; far = false) measure();
            differentiate_block();
            store(work);
            // Rows are fetched in every turn, the last included: under a condition they would take registers over the whole loop.
            fetch(QueryBlock(min(index + int(gridDim.x), given.total - 1), given.owners, given.blocks), rows);
            sync_threads(ALL, 256);  // the other warpgroup reads the rows of this block too
        }
    }
};
