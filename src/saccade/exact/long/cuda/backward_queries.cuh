// dQ of long sequences; see backward_sm90.cu.
#pragma once
#include "backward_rounds.cuh"

// The warpgroup that adds up dQ.
struct Queries {
    const LongBackwardShared shared;
    float* parked;  // of this block
    const Group group;
    const Window window;
    const int places;  // for chunks of unfinished dQ; of a WINDOW
    const int thread = thread_of() % 128;
    const bool arriving = arriving_lane();
    const u64 kept = keep_in_cache();
    int step = 0, number = 0;  // chunks, and rounds, so far

    __device__ __forceinline__ Queries(LongBackwardShared shared, float* parked, Group group, Window window, int places)
        : shared(shared), parked(parked), group(group), window(window), places(places) {}

    // 64 columns of dQ += dS K over 16 STEPS keys, from key `first` on
    template <int STEPS>
    __device__ __forceinline__ void multiply(float (&dquery)[PART / 2], int block, int first) {
        products_begin();
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            Products<PART>::add_transposed(dquery, ScoreTile::rows(shared.low(shared.dscores(step)), first + 16 * s), KeyTile::rows(shared.low(shared.key(number)), first + 16 * s, block));
        products_commit();
        products_wait<0>();
    }

    // the same over the keys of the warpgroups that have written dS of a chunk
    __device__ __forceinline__ void multiply_seen(float (&dquery)[PART / 2], int block, const Round& round, int c) {
        const bool first = round.seeing(0).have(c), second = round.seeing(1).have(c);
        if (first && second) multiply<ROUND_ROWS / 16>(dquery, block, 0);
        else if (first || second) multiply<ROUND_ROWS / 32>(dquery, block, second ? 64 : 0);
    }

    template <int STEPS>
    __device__ __forceinline__ void chunk(const Round& round, int member, int c, const Gradients& out) {
        const int place = WINDOW ? member * places + c % places : GROUPED ? member * round.chunks() + c : c;
        if (!round.owns(c)) {
            barrier_wait(shared.barrier(SCORES + step % 2), step / 2 & 1);
            warp_arrives(shared.barrier(SCORES_READ + step % 2), arriving);
            return;
        }
#pragma unroll
        for (int block = 0; block < HEAD_DIM / PART; block++) {
            float dquery[PART / 2];
            float4* mine = reinterpret_cast<float4*>(parked + (long long)(place * (HEAD_DIM / PART) + block) * CHUNK_ROWS * PART) + thread;
            // requested before dS is formed
#pragma unroll
            for (int i = 0; i < PART / 8; i++) {
                float4 x = (WINDOW ? round.continues(c) : round.start > 0) ? load_kept(mine + 128 * i, kept) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                dquery[4 * i] = x.x, dquery[4 * i + 1] = x.y, dquery[4 * i + 2] = x.z, dquery[4 * i + 3] = x.w;
            }
            if (block == 0) barrier_wait(shared.barrier(SCORES + step % 2), step / 2 & 1);
            if (WINDOW) multiply_seen(dquery, block, round, c);
            else multiply<STEPS>(dquery, block, 0);
            if (block == HEAD_DIM / PART - 1) warp_arrives(shared.barrier(SCORES_READ + step % 2), arriving);
            if (round.start < round.last_start(c)) {
#pragma unroll
                for (int i = 0; i < PART / 8; i++)
                    store_kept(mine + 128 * i, make_float4(dquery[4 * i], dquery[4 * i + 1], dquery[4 * i + 2], dquery[4 * i + 3]), kept);
            } else {
                const Item it = item_to_write(round, shared.round(number));
                const int first = c * CHUNK_ROWS + thread / 32 * 16 + thread % 32 / 4, head = group.query_head(it.head, member);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int row = first + 8 * h;
                    Number* to = out.dquery + out.dquery_strides.at(it.batch, head, it.q_first + row) + block * PART;
                    store_row<PART>(dquery, h, out.scale, to, out.head_dim - block * PART, row < it.q_len);
                }
            }
        }
    }

    template <int STEPS>
    __device__ __forceinline__ void compute(const Round& round, const Gradients& out) {
#pragma unroll 1
        for (int member = 0; member < group.members(); member++) {
#pragma unroll 1
            for (int c = round.first_chunk(); c < round.end_chunk(); c++, step++) chunk<STEPS>(round, member, c, out);
        }
    }

    __device__ __forceinline__ void run(const Gradients& out) {
#pragma unroll 1
        for (;; number++) {
            barrier_wait(shared.barrier(KEYS + number % 2), number / 2 & 1);
            const Round round = read_round(shared.round(number), window);
            if (round.start < 0) return;
            if (WINDOW || round.keys() > 64) compute<ROUND_ROWS / 16>(round, out);
            else compute<ROUND_ROWS / 32>(round, out);
            warp_arrives(shared.barrier(KEYS_READ + number % 2), arriving);
        }
    }
};
