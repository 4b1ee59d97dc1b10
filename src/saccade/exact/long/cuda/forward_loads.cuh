// Requests of tiles for forward of long sequences; see forward_sm90.cu.
#pragma once
#include "forward_blocks.cuh"

// The works of a block with a BIAS: all queries of a tile, of as many members as it has teams. Members are the problems that share a matrix of the bias,
// row by row and, if it has one head, head by head. Heads are adjacent in time, as in memory, and so are the tiles of one problem.
#if BIAS
struct Sharing {
    const Batch& batch;
    const BiasOf& bias;

    __device__ __forceinline__ int blocks() const { return (batch.max_q + BLOCK_ROWS - 1) / BLOCK_ROWS; }
    __device__ __forceinline__ int heads_each() const { return batch.heads / bias.owners; }
    __device__ __forceinline__ int members() const { return batch.sequences / bias.windows * heads_each(); }
    __device__ __forceinline__ int turns() const { return (members() + TEAMS - 1) / TEAMS; }
    __device__ __forceinline__ int all() const { return bias.windows * turns() * bias.owners * blocks(); }  // the launch fits 31 bits

    // member n of matrix (window, owner), without queries if there is none
    __device__ __forceinline__ Item item(int window, int owner, int n) const {
        if (n >= members()) return Item{};
        const int each = heads_each(), row = unsigned(n) / unsigned(each);
        return batch.item((window + row * bias.windows) * batch.heads + owner + (n - row * each), Window{});
    }
    __device__ __forceinline__ QueryBlock work(int number, int team) const {
        const int block = number % blocks(), owner = number / blocks() % bias.owners, left = number / blocks() / bias.owners;
        const int turn = left % turns(), window = left / turns();
        QueryBlock found{item(window, owner, turn * TEAMS + team), block * BLOCK_ROWS};
        for (int i = 0; i < TEAMS; i++) found.tiles = max(found.tiles, QueryBlock{item(window, owner, turn * TEAMS + i), 0}.chunks());
        return found;
    }
};

// The warp that requests tiles of the bias.
struct BiasLoads {
    const BiasTiles tiles;
    const Sharing sharing;
    int asked = 0;

    __device__ __forceinline__ void run() {
        const int all = sharing.all();
#pragma unroll 1
        for (int number = blockIdx.x; number < all; number += gridDim.x) {
            const QueryBlock work = sharing.work(number, 0);  // team 0 always has a member
            const int groups = work.first + 64 < sharing.batch.max_q ? 2 : 1;
#pragma unroll 1
            for (int c = 0; c < work.tiles; c++, asked++) {
                if (asked >= BIAS_STAGES) barrier_wait(tiles.read(asked), BiasTiles::parity(asked) ^ 1);
                barrier_expect(tiles.filled(asked), groups * BIAS_BLOCK_BYTES);
                for (int g = 0; g < groups; g++)
                    sharing.bias.load(tiles.tile(asked) + g * BIAS_BLOCK_BYTES, tiles.filled(asked), c * CHUNK_KEYS, work.first + 64 * g,
                                      work.item.head, work.item.batch);
            }
        }
    }
};
#endif

// The warp that requests tiles: one lane works, and tells the warpgroups which work each tile belongs to. With a KEY_MASK its other lanes work too.
struct Loads {
    const LongForwardShared shared;
    const Batch& batch;
    const TensorMap &query, &key, &value;
    const Group group;
    const Window window;
    const KeyMask mask;
    const bool asks;  // whether this is that lane
    int chunk = 0, works = 0;  // requested so far

    __device__ __forceinline__ void tell_and_ask(const QueryBlock& work) {
        const int slot = slot_of(works);
        if (works >= QUERY_SLOTS) barrier_wait(shared.barrier(FREE + slot), slot_parity(works) ^ 1);
        work.tell_to(shared.work(slot));
        works++;
        if (work.first < 0 || (BIAS && work.item.q_len == 0)) return barrier_arrive(shared.barrier(QUERY + slot));
        barrier_expect(shared.barrier(QUERY + slot), 2 * QueryTile::GROUP_BYTES);
        const Item& it = work.item;
        for (int g = 0; g < 2; g++)
            QueryTile::load(shared.query(slot), query, shared.barrier(QUERY + slot), g, it.q_first + work.first + 64 * g, it.head, it.batch);
    }

    __device__ __forceinline__ void ask_keys(const Item& it, int first) {
        const int stage = stage_of(chunk), head = group.key_head(it.head);
        if (KEY_MASK) __syncwarp();  // lanes that wait for a place would delay the lane that requests tiles
        const int mine = first + 2 * (int(threadIdx.x) % 32);
        const unsigned char even = mask.at(it.batch, mine, it.k_len), odd = mask.at(it.batch, mine + 1, it.k_len);
        if (chunk >= STAGES) barrier_wait(shared.barrier(READ + stage), (chunk / STAGES - 1) & 1);
        if (KEY_MASK) {
            store_4(Selectors::place(shared.selectors(stage), int(threadIdx.x) % 32), selectors_of(even, odd));
            __syncwarp();  // the arrival below is that of all lanes
        }
        if (asks) {
            barrier_expect(shared.barrier(KEY + stage), KeyTile::GROUP_BYTES);
            KeyTile::load(shared.key(stage), key, shared.barrier(KEY + stage), 0, it.k_first + first, head, it.batch);
            barrier_expect(shared.barrier(VALUE + stage), KeyTile::GROUP_BYTES);
            KeyTile::load(shared.value(stage), value, shared.barrier(VALUE + stage), 0, it.k_first + first, head, it.batch);
        }
        chunk++;
    }

#if BIAS
    __device__ __forceinline__ void run_shared(const Sharing& sharing) {
        const int all = sharing.all();
#pragma unroll 1
        for (int number = blockIdx.x; number < all; number += gridDim.x) {
            const QueryBlock work = sharing.work(number, shared.team);
            if (asks) tell_and_ask(work);
            if (work.item.q_len == 0) continue;
#pragma unroll 1
            for (int c = 0; c < work.chunks(); c++) ask_keys(work.item, c * CHUNK_KEYS);
        }
        if (asks) tell_and_ask(QueryBlock{Item{}, -1});
    }
#endif

    __device__ __forceinline__ void run() {
        const int blocks = IN_PARTS ? 1 : (batch.max_q + BLOCK_ROWS - 1) / BLOCK_ROWS, all = batch.items() * blocks;
        // Blocks of one head run at the same time and share its keys and values in L2; the longest of a causal one first. Teams take turns if a team
        // would otherwise always get the same blocks.
        const int teams = TEAMS * gridDim.x;
        const bool turns = CAUSAL && teams % blocks == 0;
        int round = 0;
#pragma unroll 1
        for (int number = TEAMS * blockIdx.x + shared.team; number < all; number += teams, round++) {
            const int index = unsigned(number) / unsigned(blocks), rest = number - index * blocks;
            const int first = (IN_PARTS ? batch.part(index) : blocks - 1 - (turns ? (rest + round) % blocks : rest)) * BLOCK_ROWS;
            const QueryBlock work{batch.item(index, window), first};
            if (first >= work.item.q_len) continue;
            tell_and_ask(work);
#pragma unroll 1
            for (int c = work.first_chunk(); c < work.chunks(); c++) ask_keys(work.item, c * CHUNK_KEYS);
        }
        tell_and_ask(QueryBlock{Item{}, -1});
    }
};
