// Requests of tiles and numbers of rows for backward of long sequences; see backward_sm90.cu.
#pragma once
#include "backward_rounds.cuh"

// The inputs: maps of the tensors, and the numbers of each query, at [batch][head][row]. delta is written in the first round if OWN_DELTA.
struct Inputs {
    const TensorMap &query, &key, &value, &dout, &out;
    const float *lse, *dlse;  // with a bias, lse is the shift and delta -delta |inverse| of NumbersOfRows
    float* delta;
    long long row_batch, row_head;
    BiasOf bias;
    NumbersOfRows numbers;
};

// The warpgroup that requests tiles. Two threads share a row: one has its lse, the other its delta.
struct Loads {
    const LongBackwardShared shared;
    const Inputs& in;
    const Group group;
    const int thread = thread_of() % 128;
    const bool arriving = arriving_lane();
    int number = 0, loads = 0;  // rounds and chunks requested so far
    // the chunk before, whose row numbers are still to be passed on
    bool pending = false, fresh = false;  // fresh: its delta is to be computed
    bool inside, kept;            // whether the row of this thread exists; whether its delta is needed again
    long long place;              // of its numbers
    float row;                    // lse, or delta; with a bias, the shift of the scores, or -delta
    bool is_far = false;          // of a bias

    __device__ __forceinline__ Loads(LongBackwardShared shared, const Inputs& in, Group group) : shared(shared), in(in), group(group) {}

    // K and V of a round, and the round's numbers
    __device__ __forceinline__ void ask_round(const Round& round) {
        if (number >= 2) barrier_wait(shared.barrier(KEYS_READ + number % 2), (number / 2 - 1) & 1);
        if (WINDOW) sync_threads(OF_LOADS, 128);  // a round without chunks could end before a slow warp has seen this phase, which then never comes
        if (thread == 0) {
            const u32 barrier = shared.barrier(KEYS + number % 2);
            write_round(shared.round(number), round);
            if (round.start < 0) {
                barrier_arrive(barrier);
            } else {
                const int groups = round.keys() > 64 ? 2 : 1;
                const Item& it = round.item;
                barrier_expect(barrier, 2 * groups * KeyTile::GROUP_BYTES);
                for (int g = 0; g < groups; g++) {
                    KeyTile::load(shared.key(number), in.key, barrier, g, it.k_first + round.start + 64 * g, it.head, it.batch);
                    KeyTile::load(shared.value(number), in.value, barrier, g, it.k_first + round.start + 64 * g, it.head, it.batch);
                }
            }
        }
        number++;
    }

    // a chunk of a query head
    __device__ __forceinline__ void ask_chunk(const Round& round, int head, int c) {
        const int stage = stage_of(loads), first = c * CHUNK_ROWS;
        const bool computes = OWN_DELTA && round.opens(c);
        const Item& it = round.item;
        if (loads >= STAGES) barrier_wait(shared.barrier(CHUNK_READ + stage), (loads / STAGES - 1) & 1);
        if (OWN_DELTA) sync_threads(OF_LOADS, 128);  // all have read the O of the chunk before the last one
        if (thread == 0) {
            const u32 barrier = shared.barrier(CHUNK + stage);
            const int blocks = BIAS ? (round.keys() > 64 ? 2 : 1) : 0;
            barrier_expect(barrier, (computes ? 3 : 2) * QueryTile::GROUP_BYTES + blocks * BIAS_BLOCK_BYTES);
            QueryTile::load(shared.query(stage), in.query, barrier, 0, it.q_first + first, head, it.batch);
            QueryTile::load(shared.dout(stage), in.dout, barrier, 0, it.q_first + first, head, it.batch);
            if (computes) QueryTile::load(shared.out(loads), in.out, barrier, 0, it.q_first + first, head, it.batch);
#if BIAS
            for (int block = 0; block < blocks; block++)
                in.bias.load(shared.bias(stage, block), barrier, round.start + 64 * block, first, head, it.batch);
#endif
        }
        // Its latency is hidden while the row numbers of the chunk before are passed on; but a delta that this round reads may be one of those.
        if (!computes && fresh) tell_rows();
        const int own = first + thread / 2;
        const bool here = own < it.q_len;
        const long long at = it.batch * in.row_batch + head * in.row_head + it.q_first + own;
        const float* from = thread % 2 == 0 ? in.lse : computes ? in.dlse : in.delta;
#if BIAS
        const float read = here ? from[at] : 0.0f, inverse = here ? in.numbers.inverse[at] : 1.0f;
        is_far = here && thread % 2 == 0 && NumbersOfRows::is_far(read, inverse);
        const float x = thread % 2 ? read / fabsf(inverse) : NumbersOfRows::exponent(here ? read : MINUS_INFINITY, inverse);
#else
        const float x = here && from ? from[at] : 0.0f;
#endif
        tell_rows();
        pending = true, fresh = computes, inside = here, place = at, row = x;
        kept = round.rounds() > 1;
        loads++;
        if (!OWN_DELTA) tell_rows();  // with two stages, the chunk after the next one waits for this one
    }

    // -lse and -delta of the last requested chunk
    __device__ __forceinline__ void tell_rows() {
        if (!pending) return;
        const int last = loads - 1, stage = stage_of(last);
        float x = row;
        if (OWN_DELTA && fresh) {
            barrier_wait(shared.barrier(CHUNK + stage), parity_of(last));
            const float delta = product(shared.out(last), shared.dout(stage)) - row;
            if (thread % 2 == 1) {
                x = delta;
                if (inside && kept) in.delta[place] = delta;
            }
        }
#if BIAS
        store_4(shared.rows(stage) + thread / 4 * 16 + thread % 2 * 8 + thread / 2 % 2 * 4, x);
        const bool any = __any_sync(~0u, is_far);
        if (thread % 32 == 0) store_4(shared.far(stage) + thread / 32 * 4, any ? 1.0f : 0.0f);
        warp_arrives(shared.barrier(ROWS + stage), arriving);
        pending = false;
        return;
#endif
        // a query that sees no key, or does not exist, has no weights
        if (thread % 2 == 0) x = inside && x > MINUS_INFINITY ? x * LOG2E : -MINUS_INFINITY;
        else x = inside ? x : 0.0f;
        store_4(shared.rows(stage) + thread / 4 * 16 + thread % 2 * 8 + thread / 2 % 2 * 4, -x);
        warp_arrives(shared.barrier(ROWS + stage), arriving);
        pending = fresh = false;
    }

    // rowsum(dO O) of the row of two threads
    __device__ __forceinline__ float product(u32 out, u32 dout) const {
        constexpr int MINE = QueryTile::CHUNKS / 2;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < QueryTile::BLOCKS * MINE; i++) {
            u32 o[4], d[4];
            const int block = i / MINE, chunk = thread % 2 * MINE + i % MINE;
            load_16(o, QueryTile::chunk(out, block, thread / 2, chunk));
            load_16(d, QueryTile::chunk(dout, block, thread / 2, chunk));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 a = floats_of(o[j]), b = floats_of(d[j]);
                sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
            }
        }
        return sum + __shfl_xor_sync(~0u, sum, 1);
    }

    // The blocks take works in rows, every second row backwards: works become smaller along the list, so the last block of one row comes first in the next.
    __device__ __forceinline__ static int there_and_back(int number, int all) {
        const int row = number / gridDim.x, width = min(int(gridDim.x), all - row * int(gridDim.x)), place = number - row * int(gridDim.x);
        return row % 2 ? row * int(gridDim.x) + width - 1 - place : number;
    }

    // all rounds of an item, or those of a segment and behind it
    __device__ __forceinline__ void walk(Round& round) {
#pragma unroll 1
        for (; round.is_there(); round.start += ROUND_ROWS) {
            ask_round(round);
            if (WINDOW && round.first_chunk() >= round.end_chunk()) tell_rows();  // no chunk follows that would pass on those of the one before
#pragma unroll 1
            for (int member = 0; member < group.members(); member++) {
                const int head = group.query_head(round.item.head, member);
#pragma unroll 1
                for (int c = round.first_chunk(), end = round.end_chunk(); c < end; c++) ask_chunk(round, head, c);
            }
        }
    }

    // The share of this block: of all rounds of each head, if PACKED, or of each head of a row.
    __device__ __forceinline__ void walk_share(const Batch& batch, const Window& window) {
        const int rounds = PACKED ? *batch.count : max(1, (batch.max_k + ROUND_ROWS - 1) / ROUND_ROWS), times = PACKED ? batch.heads : batch.items();
        const long long all = (long long)rounds * times;
        const int end = int(all * (blockIdx.x + 1) / gridDim.x);
#pragma unroll 1
        for (int number = int(all * blockIdx.x / gridDim.x); number < end;) {
            const int time = unsigned(number) / unsigned(rounds), at = number - time * rounds, index = PACKED ? at * batch.heads + time : time;
            Round round{batch.item(index, window), 0, PACKED ? batch.part(index) : at, 0};
            round.start = round.first * ROUND_ROWS, round.end = min(round.first + end - number, round.rounds());
            number += max(1, round.end - round.first);
            walk(round);
        }
    }

    __device__ __forceinline__ void run(const Batch& batch, const Window& window) {
        if (WINDOW && SEGMENT == 1) {
            walk_share(batch, window);
        } else {
            const int items = batch.items(), segments = WINDOW && !PACKED ? (batch.max_k + SEGMENT * ROUND_ROWS - 1) / (SEGMENT * ROUND_ROWS) : 1;
#pragma unroll 1
            for (int number = blockIdx.x; number < (WINDOW ? items * segments : items); number += gridDim.x) {
                const int index = WINDOW ? there_and_back(number, items * segments) : number;
                Round round{batch.item(WINDOW ? index % items : index, window), 0, 0, 0};
                if (WINDOW) round.first = (PACKED ? batch.part(index) : index / items) * SEGMENT, round.end = round.first + SEGMENT, round.start = round.first * ROUND_ROWS;
                walk(round);
            }
        }
        tell_rows();
        ask_round(Round{Item{}, -1, 0, 0});
    }
};
