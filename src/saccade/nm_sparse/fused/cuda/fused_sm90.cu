// Forward of N:M attention on sm_90a: Q K^T by wgmma, selection and softmax in registers, P V by sparse wgmma. See README.md of this family.
//
//   producer warp    K and V tiles by TMA into rings of STAGES tiles, Q once a block; K with its keys permuted
//   each warpgroup   64 queries:  S of tile i, then P V of tile i - 1, while the other warpgroups select and exponentiate
//
// A tile of BLOCK_KV keys lies in shared memory as two halves j = 0, 1: row 8 q + 2 t + b of half j is key 16 q + 4 t + 2 j + b. Lane 4 g + t of a
// warp then holds keys 16 q + 4 t .. + 3 of a row, two from each half, as a sparse product needs them.
//
// Shared memory:   | Q of each warpgroup | K: STAGES tiles | V: STAGES tiles | barriers (`Barrier`) | BLOCKS: a byte for each key tile, OWN_TILES a bit |
//
// Compiled with HEAD_DIM (64, 128, 192, 256: D rounded up, the rest is zeros), BLOCK_KV, WARPGROUPS, STAGES, RESIDENT (thread blocks of one
// warpgroup that share a multiprocessor), EARLY (of so many problems block 0 comes first, see block_order.cuh), QUERY_STEPS, PERSISTENT,
// OVERLAP (select while P V of the same warpgroup runs), BF16, PAIRS (1: "1:2", 0: "2:4"), CAUSAL, STORES (the selection), DROPOUT,
// BLOCKS (a block mask; BLOCK_KV is 64), KEYS (a mask of keys), QUERY_BITS (a mask of queries and keys), BIAS (bytes of its numbers, or 0), SPLIT (blocks of the last wave by parts
// of their keys, see `last_wave.py`), SELECTION.
#define TALL 0  // a warpgroup has 64 queries
#define SCORE_GROUP(q, j) ((j) * (BLOCK_KV / 16) + (q))
#include "rows.cuh"

#include "block_order.cuh"
#include "mma.cuh"
#include "ring.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

static_assert(QUERY_STEPS <= HEAD_DIM / 16);
// A thread block of one warpgroup visits the tiles that its 64 queries see, and no other.
#define OWN_TILES (BLOCKS && WARPGROUPS == 1)
static_assert(WARPGROUPS > 1 ? RESIDENT == 1 : OWN_TILES && !PERSISTENT && RESIDENT > 1, "one warpgroup is for a block mask");
static_assert(EARLY == 0 || (OWN_TILES && !CAUSAL), "other blocks have another order");
// Registers of a thread. One warpgroup: RESIDENT thread blocks of 256 threads share 65,536, which are handed out by eights. (Macros, as constants
// would stand in the binaries of calls without a block mask.)
#define PRODUCER_REGISTERS (WARPGROUPS < 3 ? 24 : 32)
#define CONSUMER_REGISTERS (WARPGROUPS == 1 ? 256 / RESIDENT / 8 * 16 - PRODUCER_REGISTERS : WARPGROUPS == 2 ? 240 : 160)
constexpr int HALVES = HEAD_DIM / 64;  // column blocks of 128 bytes
constexpr int BLOCK_Q = 64 * WARPGROUPS;
constexpr int QUERY_BYTES = 64 * HEAD_DIM * 2;  // of one warpgroup
constexpr int TILE_BYTES = BLOCK_KV * HEAD_DIM * 2;

// barriers, 8 bytes each, behind the tiles
enum Barrier {
    FULL_K,  // of each stage
    FULL_V = FULL_K + STAGES,
    EMPTY_K = FULL_V + STAGES,
    EMPTY_V = EMPTY_K + STAGES,
    FULL_Q = EMPTY_V + STAGES,  // of each warpgroup
    EMPTY_Q = FULL_Q + WARPGROUPS,
    TAIL = EMPTY_Q + WARPGROUPS,
    BARRIERS
};
enum NamedBarrier { TURN = 2 };  // of the first warpgroup, then one of each other; 0 is __syncthreads

// one block of queries of one head, and the key tiles that it and each warpgroup of it need
struct QueryBlock {
    int problem, first_query, tiles;
    int part = -1, first_tile = 0;  // SPLIT: which part of all, -1 for a whole block; its tiles are first_tile .. tiles - 1

    __device__ __forceinline__ QueryBlock(int index, const Sizes& sizes) {
        int block, turn = 0;
        if (SPLIT && index >= sizes.whole) {
            part = index - sizes.whole;
            turn = part % sizes.parts;
            index = sizes.whole + part / sizes.parts;
        }
        if constexpr (CAUSAL) {
            // long blocks first
            int blocks = (sizes.q_len + BLOCK_Q - 1) / BLOCK_Q;
            problem = index / blocks;
            block = blocks - 1 - index % blocks;
        } else if constexpr (EARLY) {
            order_blocks(index, sizes.problems, (sizes.q_len + BLOCK_Q - 1) / BLOCK_Q, EARLY, problem, block);
        } else {
            int whole = sizes.q_len / BLOCK_Q, others = sizes.q_len % BLOCK_Q ? sizes.problems : 0;
            // blocks that are not full come last, where they fill up the last wave
            if (!PERSISTENT) index = index < whole * sizes.problems ? index + others : index - whole * sizes.problems;
            bool full = index >= others;
            problem = full ? (index - others) / whole : index;
            block = full ? (index - others) % whole : whole;
        }
        first_query = block * BLOCK_Q;
        int end = KEYS ? sizes.key_spans[2 * sizes.key_row(problem)] : keys_of(first_query, BLOCK_Q, sizes);
        tiles = (end + BLOCK_KV - 1) / BLOCK_KV;
        if (SPLIT && part >= 0) {
            first_tile = tiles * turn / sizes.parts;
            tiles = tiles * (turn + 1) / sizes.parts;
        }
    }

    // how many keys are seen by at least one of `count` queries, the first of which is `query`
    static __device__ __forceinline__ int keys_of(int query, int count, const Sizes& sizes) {
        if (query >= sizes.q_len) return 0;
        return CAUSAL ? min(sizes.kv_len, query + count) : sizes.kv_len;
    }
};

// The pieces of work that a thread block does: one piece, or with PERSISTENT every gridDim-th. They follow only from blockIdx and gridDim: with a
// counter in memory ptxas no longer took the places in the rings for uniform, and made 38 R2UR instructions a tile.
//
// Blocks of queries that are not full come first. If only one warpgroup has queries in such a block, two such blocks count as one step: a block
// of this kind that ran alone at the end would cost half the time of a full one, 2 % of the kernel at 4,096 queries.
struct Schedule {
    int total, others, pairs;  // pieces; those that are not full; of these, steps of two

    __device__ __forceinline__ explicit Schedule(const Sizes& sizes) {
        int rest = sizes.q_len % BLOCK_Q;
        total = PERSISTENT ? (sizes.q_len + BLOCK_Q - 1) / BLOCK_Q * sizes.problems : int(blockIdx.x) + 1;
        if (SPLIT && PERSISTENT) total = sizes.whole + (total - sizes.whole) * sizes.parts;
        others = !CAUSAL && rest ? sizes.problems : 0;
        pairs = rest <= 64 && total > gridDim.x ? others / 2 : 0;
    }
    __device__ __forceinline__ int begin() const { return PERSISTENT ? piece(blockIdx.x) : int(blockIdx.x); }
    __device__ __forceinline__ int after(int index) const {
        if (!PERSISTENT) return total;
        if (index < 2 * pairs && index % 2 == 0) return index + 1;
        int step = index < 2 * pairs ? index / 2 : index - pairs;
        return piece(step + gridDim.x);
    }
    __device__ __forceinline__ int piece(int step) const { return step < pairs ? 2 * step : step + pairs; }
};

// Addresses in shared memory: the base is the only one in a register, the others are that plus constants.
struct FusedShared {
    u32 base;

    __device__ __forceinline__ FusedShared(const unsigned char* memory) : base(align_operands(shared_address(memory))) {}
    constexpr __device__ __forceinline__ explicit FusedShared(u32 base) : base(base) {}
    constexpr __device__ __forceinline__ u32 query(int warpgroup) const { return base + warpgroup * QUERY_BYTES; }
    constexpr __device__ __forceinline__ u32 keys(int stage) const { return base + WARPGROUPS * QUERY_BYTES + stage * TILE_BYTES; }
    constexpr __device__ __forceinline__ u32 values(int stage) const { return keys(STAGES + stage); }
    constexpr __device__ __forceinline__ u32 barrier(int index) const { return keys(2 * STAGES) + 8 * index; }
    // BLOCKS: a byte for each key tile, bit w: warpgroup w sees it
    constexpr __device__ __forceinline__ u32 seen(int tile) const { return barrier(BARRIERS) + tile; }
    // OWN_TILES: bits of 32 key tiles
    constexpr __device__ __forceinline__ u32 seen_word(int word) const { return barrier(BARRIERS) + 4 * word; }
};
// BLOCKS: the launch adds the bytes of the key tiles
static_assert(FusedShared(0u).seen(0) + EIGHT_ROWS <= SHARED_BYTES, "the launch asks for too little shared memory");

__device__ __forceinline__ int load_seen(const FusedShared& shared, int tile) {
    int value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(shared.seen(tile)) : "memory");
    return value;
}

// which warpgroups of a block of queries see each key tile, which is a column of the block mask
__device__ __forceinline__ void find_seen(const QueryBlock& work, const FusedShared& shared, const unsigned char* mask, const Sizes& sizes) {
    const unsigned char* rows = mask + work.problem / sizes.heads * sizes.mask_batch + work.problem % sizes.heads * sizes.mask_head;
    if constexpr (OWN_TILES) {
        int own = work.first_query / 64, tile = threadIdx.x;
        for (int word = threadIdx.x / 32; 32 * word < work.tiles; word += blockDim.x / 32, tile += blockDim.x) {
            bool shown = tile < work.tiles && !(CAUSAL && tile > own) && rows[own * sizes.mask_row + tile];
            u32 bits = __ballot_sync(~0u, shown);
            if (threadIdx.x % 32 == 0) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared.seen_word(word)), "r"(bits) : "memory");
        }
    } else {
        for (int tile = threadIdx.x; tile < work.tiles; tile += blockDim.x) {
            int seen = 0;
            for (int w = 0; w < WARPGROUPS; w++) {
                int query = work.first_query + 64 * w;
                bool hidden = query >= sizes.q_len || (CAUSAL && tile > query / 64);
                if (!hidden && rows[query / 64 * sizes.mask_row + tile]) seen |= 1 << w;
            }
            asm volatile("st.shared.u8 [%0], %1;" ::"r"(shared.seen(tile)), "r"(seen) : "memory");
        }
    }
}

// OWN_TILES: the tiles that are seen, the last one first. Bytes would be read one by one. BigBird's mask hides 249 of 256 tiles, whose bytes at 70
// clocks each would take longer than the products of the other 7 (an estimate).
struct SeenTiles {
    FusedShared shared;
    int word;
    u32 left = 0;

    __device__ __forceinline__ SeenTiles(const FusedShared& shared, int tiles) : shared(shared), word((tiles + 31) / 32) {}

    // -1 after the last one; `of_warp(x)`: x, or where the compiler must know that a warp agrees on it, a shuffle of x
    template <class OfWarp>
    __device__ __forceinline__ int next(const OfWarp& of_warp) {
        while (left == 0) {
            if (--word < 0) return -1;
            u32 bits;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(shared.seen_word(word)) : "memory");
            left = of_warp(bits);
        }
        int bit = 31 - __clz(left);
        left ^= 1u << bit;
        return 32 * word + bit;
    }
};

struct Producer {
    const TensorMap &query_map, &key_map, &tail_map, &value_map;
    const Sizes& sizes;
    FusedShared shared;
    int place = 0, query_parity = 1, tail_parity = 0;

    __device__ __forceinline__ void load(const QueryBlock& work) {
        int batch = work.problem / sizes.heads, head = work.problem % sizes.heads;
        if constexpr (OWN_TILES)
            load_own_tiles(work, batch, head);
        else
            load_tiles(work, batch, head);
    }

    __device__ __forceinline__ void load_own_tiles(const QueryBlock& work, int batch, int head) {
        SeenTiles seen(shared, work.tiles);
        auto itself = [](u32 bits) { return bits; };
        int tile = seen.next(itself);
        if (tile >= 0) load_keys(tile, batch, head / sizes.group);
        // K a tile ahead of V, as the products are
        for (int following; tile >= 0; tile = following, place++) {
            following = seen.next(itself);
            if (following >= 0) {
                place++;
                load_keys(following, batch, head / sizes.group);
                place--;
            }
            load_values(tile, batch, head / sizes.group);
        }
    }

    __device__ __forceinline__ void load_tiles(const QueryBlock& work, int batch, int head) {
        load_query(work, batch, head);
        for (int tile = work.tiles - 1; tile >= work.first_tile; tile--) {
            if (BLOCKS && load_seen(shared, tile) == 0) continue;
            load_keys(tile, batch, head / sizes.group);
            load_values(tile, batch, head / sizes.group);
            place++;
        }
    }

    __device__ __forceinline__ void load_query(const QueryBlock& work, int batch, int head) {
        int b = sizes.present & 1 ? batch : 0, h = sizes.present & 2 ? head : 0;
        for (int w = 0; w < WARPGROUPS; w++) {
            barrier_wait(shared.barrier(EMPTY_Q + w), query_parity);
            u32 barrier = shared.barrier(FULL_Q + w);
            barrier_expect(barrier, QUERY_BYTES);
            for (int half = 0; half < HALVES; half++)
                copy_4d(shared.query(w) + half * ROWS_64, query_map, barrier, 64 * half, work.first_query + 64 * w, h, b);
        }
        query_parity ^= 1;
    }

    // Whole groups of four keys are one dimension of the map, [.., T / 4, 4, D]. The keys after the last whole group come by a map of
    // single rows, after the rest: what lies beyond the whole groups is filled with zeros in the same place.
    __device__ __forceinline__ void load_keys(int tile, int batch, int head) {
        int b = sizes.present & 4 ? batch : 0, h = sizes.present & 8 ? head : 0;
        int first = tile * BLOCK_KV, whole = sizes.kv_len & ~3;
        bool tail = (sizes.kv_len & 3) && whole >= first && whole < first + BLOCK_KV;
        u32 to = shared.keys(stage_of(place)), barrier = shared.barrier(FULL_K + stage_of(place));
        barrier_wait(shared.barrier(EMPTY_K + stage_of(place)), parity_of(place) ^ 1);
        u32 filled = tail ? shared.barrier(TAIL) : barrier;
        if (whole > 0) {
            barrier_expect(filled, TILE_BYTES);
            for (int half = 0; half < HALVES; half++)
                for (int j = 0; j < 2; j++)
                    copy_5d(to + (2 * half + j) * BLOCK_KV * 64, key_map, filled, 64 * half, 2 * j, first / 4, h, b);
        }
        if (tail) {
            if (whole > 0) {
                barrier_wait(filled, tail_parity);
                tail_parity ^= 1;
            }
            barrier_expect(barrier, HALVES * 512);
            for (int half = 0; half < HALVES; half++)
                for (int j = 0; j < 2; j++)
                    copy_4d(to + (2 * half + j) * BLOCK_KV * 64 + (whole - first) * 64, tail_map, barrier, 64 * half, whole + 2 * j, h, b);
        }
    }

    __device__ __forceinline__ void load_values(int tile, int batch, int head) {
        int b = sizes.present & 16 ? batch : 0, h = sizes.present & 32 ? head : 0;
        u32 to = shared.values(stage_of(place)), barrier = shared.barrier(FULL_V + stage_of(place));
        barrier_wait(shared.barrier(EMPTY_V + stage_of(place)), parity_of(place) ^ 1);
        barrier_expect(barrier, TILE_BYTES);
        for (int half = 0; half < HALVES; half++)
            copy_4d(to + half * BLOCK_KV * 128, value_map, barrier, 64 * half, tile * BLOCK_KV, h, b);
    }
};

// A warpgroup: 64 queries of a block, 16 a warp.
//
// Registers are the limit: 160 a thread with three warpgroups, of which the arrays here and in `Rows` take 133 at D = 128 and BLOCK_KV = 96.
struct Consumer : Rows {
    FusedShared shared;
    int warpgroup, place = 0, query_parity = 0;
    u32 query[QUERY_STEPS ? 4 * QUERY_STEPS : 1];  // of the first steps of S. The others read Q from shared memory

    __device__ __forceinline__ Consumer(const Sizes& sizes, const FusedShared& shared) : Rows(sizes), shared(shared) {
        // The compiler assumes that the result of a shuffle is the same in all lanes. It runs products one by one in a loop that it considers
        // divergent.
        warpgroup = __shfl_sync(~0u, int(threadIdx.x) / 128 - 1, 0);
    }

    // Warpgroups issue their products in turn; warpgroup w, the threads from 128 (w + 1) on, waits at barrier TURN + w.
    __device__ __forceinline__ void take_turn() {
        if constexpr (WARPGROUPS > 1) sync_threads(TURN - 1 + thread_of() / 128, 256);
    }
    __device__ __forceinline__ void pass_turn() {
        if constexpr (WARPGROUPS == 1) return;
        int mine = TURN - 1 + thread_of() / 128;
        pass_barrier(mine == TURN - 1 + WARPGROUPS ? TURN : mine + 1, 256);
    }

    __device__ __forceinline__ void release(int barrier) {
        if (thread_of() % 128 == 0) barrier_arrive(shared.barrier(barrier));
    }

    __device__ __forceinline__ void wait_query() {
        barrier_wait(shared.barrier(FULL_Q + warpgroup), query_parity);
        query_parity ^= 1;
        load_query();
    }

    // fragments of 16 x 16: (row g, columns 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)
    __device__ __forceinline__ void load_query() {
        int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
        for (int step = 0; step < QUERY_STEPS; step++) {
            load_matrices(query + 4 * step, swizzled(shared.query(warpgroup) + step / 4 * ROWS_64, row, step % 4 * 2 + lane / 16));
        }
    }

    // scores = Q K^T of the tile in hand
    __device__ __forceinline__ void issue_scores() {
        u64 b = operand(shared.keys(stage_of(place)));
        u64 a = operand(shared.query(warpgroup));
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++) {
            u64 columns = advance(b, columns_at(step, BLOCK_KV * 128));
            u64 rows = advance(a, columns_at(step, ROWS_64));
            if (QUERY_STEPS && step == 0)
                Products<BLOCK_KV>::set(scores, query, columns);
            else if (step == 0)
                Products<BLOCK_KV>::set(scores, rows, columns);
            else if (step < QUERY_STEPS)
                Products<BLOCK_KV>::add(scores, query + 4 * step, columns);
            else
                Products<BLOCK_KV>::add(scores, rows, columns);
        }
        products_commit();
    }

    // out += P V of the tile whose weights are packed
    __device__ __forceinline__ void issue_values() {
        u64 b = operand(shared.values(stage_of(pending())), BLOCK_KV * 128);
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            SparseProducts<HEAD_DIM>::add(out, packed + 4 * step, advance(b, step * 32 * 128), metadata[step]);
        products_commit();
    }

    // after `select`: weights that are too large are computed again; once no product runs, they become the operand
    template <bool MASKED>
    __device__ __forceinline__ void finish(int tile, bool again, unsigned* kept) {
        if (again) {
            if constexpr (OVERLAP) products_wait<0>();
            retry<MASKED>(tile);
        }
        // after the branch: ptxas moves a wait as far up as it can, here above `select`
        if constexpr (OVERLAP) products_wait<0>();
        accept();
        if (STORES) store_selection(tile, kept);
    }

    // place of the tile whose weights wait for their values
    __device__ __forceinline__ int pending() const { return place - 1; }

    // A tile that this warpgroup does not need. The warpgroup waits for the tile's copies all the same: if it released a place before the place
    // was filled, it could be a whole pass through the ring ahead, where the parities are the same as in this pass.
    __device__ __forceinline__ void skip() {
        barrier_wait(shared.barrier(FULL_K + stage_of(place)), parity_of(place));
        take_turn();
        pass_turn();
        barrier_wait(shared.barrier(FULL_V + stage_of(place)), parity_of(place));
        release(EMPTY_K + stage_of(place));
        release(EMPTY_V + stage_of(place));
        place++;
    }

    // first tile: nothing to multiply with V yet
    __device__ __forceinline__ void first_tile(int tile, unsigned* kept) {
        ask_bits(tile);
        ask_bias(tile);
        barrier_wait(shared.barrier(FULL_K + stage_of(place)), parity_of(place));
        take_turn();
        products_begin();
        issue_scores();  // S = Q K^T
        pass_turn();
        products_wait<0>();
        release(EMPTY_K + stage_of(place));
        add_bias();
        // P = exp(s - r) of the kept scores s, r no less than any of them
        if (!CAUSAL && !BLOCKS && !DROPOUT && !KEYS && (tile + 1) * BLOCK_KV <= sizes.kv_len)
            retry<false>(tile);
        else
            retry<true>(tile);
        accept();
        if (STORES) store_selection(tile, kept);
        place++;
    }

    template <bool MASKED>
    __device__ __forceinline__ void next_tile(int tile, unsigned* kept) {
        ask_bits(tile);
        ask_bias(tile);
        barrier_wait(shared.barrier(FULL_K + stage_of(place)), parity_of(place));
        take_turn();
        products_begin();
        issue_scores();  // S = Q K^T
        barrier_wait(shared.barrier(FULL_V + stage_of(pending())), parity_of(pending()));
        products_begin();
        issue_values();  // O += P V of the tile before
        pass_turn();
        products_wait<OVERLAP>();
        release(EMPTY_K + stage_of(place));
        if (!OVERLAP) release(EMPTY_V + stage_of(pending()));
        add_bias();
        select<MASKED>(tile);  // P = exp(s - r) of the kept scores s
        finish<MASKED>(tile, overflows(), kept);
        if (OVERLAP) release(EMPTY_V + stage_of(pending()));
        place++;
    }

    __device__ __forceinline__ void last_values() {
        barrier_wait(shared.barrier(FULL_V + stage_of(pending())), parity_of(pending()));
        products_begin();
        issue_values();  // O += P V
        products_wait<0>();
        release(EMPTY_V + stage_of(pending()));
    }

    __device__ __forceinline__ void attend(const QueryBlock& work, unsigned* kept) {
        begin(work.problem, work.first_query + 64 * warpgroup);
        wait_query();
        // from a shuffle, see the constructor: with a mask of keys it comes from memory
        int tiles = KEYS ? __shfl_sync(~0u, work.tiles, 0) : work.tiles;
        if constexpr (OWN_TILES)
            attend_own_tiles(tiles, kept);
        else if constexpr (BLOCKS)
            attend_shown_tiles(tiles, kept);
        else
            attend_tiles(work.first_tile, tiles, kept);
        release(EMPTY_Q + warpgroup);
    }

    __device__ __forceinline__ void attend_own_tiles(int tiles, unsigned* kept) {
        SeenTiles seen(shared, tiles);
        auto shuffled = [](u32 bits) { return __shfl_sync(~0u, bits, 0); };
        int tile = seen.next(shuffled);
        if (tile >= 0) {
            first_tile(tile, kept);
            // the causal edge and the last key, if any, lie in the first tile
            for (tile = seen.next(shuffled); tile >= 0; tile = seen.next(shuffled)) next_tile<KEYS || QUERY_BITS>(tile, kept);
            last_values();
        }
    }

    // tiles that some warpgroup of the block sees
    __device__ __forceinline__ void attend_shown_tiles(int tiles, unsigned* kept) {
        bool open = false;  // whether weights wait for their values
        for (int tile = tiles - 1; tile >= 0; tile--) {
            int seen = __shfl_sync(~0u, load_seen(shared, tile), 0);
            if (seen == 0) continue;
            if (seen >> warpgroup & 1) {
                if (open)
                    next_tile<true>(tile, kept);
                else
                    first_tile(tile, kept);
                open = true;
            } else {
                // These values must be multiplied now: their place in the ring is needed for a later tile.
                if (open) last_values();
                open = false;
                skip();
            }
        }
        if (open) last_values();
    }

    __device__ __forceinline__ void attend_tiles(int begin, int end, unsigned* kept) {
        int tile = end - 1;
        int seen = KEYS ? (first_query < sizes.q_len ? end : 0) : (QueryBlock::keys_of(first_query, 64, sizes) + BLOCK_KV - 1) / BLOCK_KV;
        int whole = (KEYS ? __shfl_sync(~0u, sizes.key_spans[2 * key_row + 1], 0) : QueryBlock::keys_of(first_query, 1, sizes)) / BLOCK_KV;
        for (; tile >= seen; tile--) skip();
        if (tile >= 0) {
            first_tile(tile--, kept);
            // every row sees the tiles below `whole` whole. CAUSAL: one tile at most, but a product under an `if` is serialised, in a
            // loop it is not
            if constexpr (CAUSAL || KEYS)
                for (; tile >= whole; tile--) next_tile<true>(tile, kept);
            for (; tile >= begin; tile--) next_tile<false>(tile, kept);
            last_values();
        }
    }

    // O of a part, not divided by its sum, and for each row what its weights are relative to and their sum: `combine.cu` reads them
    __device__ __forceinline__ void store_part(int part, float* outs, float2* sums) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            long long at = (long long)part * BLOCK_Q + 64 * warpgroup + row(h) - first_query;
            float total = quad_sum(sum[h]);
            if (t == 0) sums[at] = make_float2(offset[h], total);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i++)
                *reinterpret_cast<float2*>(outs + at * HEAD_DIM + 8 * i + 2 * t) = make_float2(out[4 * i + 2 * h], out[4 * i + 2 * h + 1]);
        }
    }
};

static_assert(!(SPLIT && (CAUSAL || BLOCKS || KEYS || DROPOUT || BIAS)));
static_assert(!(OVERLAP && BIAS), "a second operand leaves no registers for a bias");

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), RESIDENT) fused_sm90(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap tail_map,
    const __grid_constant__ TensorMap value_map, unsigned short* out, float* lse, unsigned* kept, const unsigned char* block_mask,
    const u64* seed, const u32* key_bits, const int* key_spans, float* part_outs, float2* part_sums, int heads, int group, int q_len,
    int kv_len, int words, int counters, int head_dim, int problems, int present, int opaque_one, int key_words, int keys_batch,
#if QUERY_BITS
    int keys_head, int keys_query,
#endif
#if BIAS
    const unsigned char* bias, long long bias_batch, long long bias_head, long long bias_row, int bias_columns, float score_scale,
#endif
    int whole, int parts, long long out_batch, long long out_head, long long out_row, long long mask_batch, long long mask_head, long long mask_row,
    float scale, float spared, u32 threshold) {
    extern __shared__ unsigned char memory[];
    const Sizes sizes{.heads = heads, .group = group,
                      .q_len = q_len, .kv_len = kv_len,
                      .words = words, .counters = counters,
                      .head_dim = head_dim, .problems = problems,
                      .present = present, .opaque_one = opaque_one,
                      .out_batch = out_batch, .out_head = out_head, .out_row = out_row,
                      .mask_batch = mask_batch, .mask_head = mask_head, .mask_row = mask_row,
                      .scale = scale, .spared = spared, .threshold = threshold,
                      .key_bits = key_bits, .key_spans = key_spans,
                      .key_words = key_words, .keys_batch = keys_batch,
#if QUERY_BITS
                      .keys_head = keys_head, .keys_query = keys_query,
#endif
#if BIAS
                      .bias = bias, .bias_batch = bias_batch, .bias_head = bias_head, .bias_row = bias_row,
                      .bias_columns = bias_columns, .score_scale = score_scale,
#endif
                      .whole = whole, .parts = parts};
    FusedShared shared(memory);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(shared.barrier(FULL_K + s), 1);
            barrier_init(shared.barrier(FULL_V + s), 1);
            barrier_init(shared.barrier(EMPTY_K + s), WARPGROUPS);
            barrier_init(shared.barrier(EMPTY_V + s), WARPGROUPS);
        }
        for (int w = 0; w < WARPGROUPS; w++) {
            barrier_init(shared.barrier(FULL_Q + w), 1);
            barrier_init(shared.barrier(EMPTY_Q + w), 1);
        }
        barrier_init(shared.barrier(TAIL), 1);
        barrier_fence();
    }
    if constexpr (OWN_TILES) {
        const QueryBlock own(blockIdx.x, sizes);
        if (threadIdx.x == 0) {
            // Q need not wait for the mask
            Producer producer{.query_map = query_map, .key_map = key_map, .tail_map = tail_map, .value_map = value_map, .sizes = sizes,
                              .shared = shared};
            producer.load_query(own, own.problem / heads, own.problem % heads);
        }
        __syncwarp();
        find_seen(own, shared, block_mask, sizes);
    } else if constexpr (BLOCKS) {
        find_seen(QueryBlock(blockIdx.x, sizes), shared, block_mask, sizes);
    }
    __syncthreads();
    const Schedule schedule(sizes);
    if (threadIdx.x < 128) {
        leave_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            prefetch_map(query_map);
            prefetch_map(key_map);
            prefetch_map(value_map);
            Producer producer{.query_map = query_map, .key_map = key_map, .tail_map = tail_map, .value_map = value_map, .sizes = sizes,
                              .shared = shared};
            for (int index = schedule.begin(); index < schedule.total; index = schedule.after(index)) producer.load(QueryBlock(index, sizes));
        }
    } else {
        take_registers<CONSUMER_REGISTERS>();
        Consumer consumer(sizes, shared);
        if constexpr (DROPOUT) consumer.seed = *seed;
        if (consumer.warpgroup == WARPGROUPS - 1) consumer.pass_turn();
        for (int index = schedule.begin(); index < schedule.total; index = schedule.after(index)) {
            const QueryBlock work(index, sizes);
            consumer.attend(work, kept);
            if (SPLIT && work.part >= 0)
                consumer.store_part(work.part, part_outs, part_sums);
            else
                consumer.store(out, lse);
        }
    }
}
