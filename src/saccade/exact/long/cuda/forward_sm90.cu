// Exact attention of long sequences on sm_90a, forward. A team of two warpgroups takes 128 queries of a (sequence, head) at a time, 64
// each; a warp for each team requests tiles from the copy engine, as far ahead as memory allows, also for the next queries.
//
//   S = Q K^T    m = running rowmax(scale S)    P = exp(scale S - m)    O = P V / rowsum(P)    lse = m + log(rowsum(P))
//
// With dropout O = (P kept) V / rowsum(P) / (1 - p), and lse is that of all weights.
//
// shared memory of a team:   | Q, then O: QUERY_SLOTS times 128 rows | K, V: STAGES chunks of 64 keys | what is told | selectors of a KEY_MASK: STAGES |
//                             | barriers |
// with a BIAS, behind all teams:   | BIAS_STAGES tiles of 128 queries and 64 keys | their barriers |
//
// The values of a chunk are multiplied while the scores of the next one become weights. The last chunk is as wide as its keys (16, 32 or 64). O is
// rescaled only where a row's maximum has grown by 2^8 since the last time. Source: FlashAttention-2 (Dao 2023), algorithm 1; the order of the
// products after FlashAttention-3, the rare rescaling after FlashAttention-4.
//
// With a BIAS, S = scale Q K^T + bias in base e, and m too. The teams of a block take the same queries of problems that share a matrix of the bias, so that
// a tile of it is read once for both. They synchronise only at its tiles, each with the chunks of its own row, and the team with fewer passes the
// rest. With a KEY_MASK all lanes of the warp that requests keys read the mask of a chunk, while it waits for memory, and write selectors beside the keys.
//
// Compiled with the macros of chunks_sm90.cuh, TEAMS (1 or 2), QUERY_SLOTS, STAGES, COMPUTE_REGISTERS, LOAD_REGISTERS and SHARED_BYTES, with a BIAS
// BIAS_STAGES and LATE_MAXIMA. The registers
// of all threads are those of the launch, rounded down to 8 a thread: a warpgroup that requests more waits for ever.
#include "forward_rows.cuh"
#include "forward_output.cuh"
#include "forward_loads.cuh"

// A warpgroup's way through the works that it is told.
struct Computing {
    Rows rows;
    const Output& output;
    const Batch& batch;
    const Window window;
    const bool arriving;
    bool unread = false;  // the copy engine may read the queries' memory of the work before
    int chunk = 0, works = 0;
    int tile = 0;  // of the bias, the first of a work

    // the queries' memory of the work before is free
    __device__ __forceinline__ void finish() {
        if (!unread) return;
        if (threadIdx.x % 128 == 0) {
            stores_wait_read();
            barrier_arrive(rows.shared.barrier(FREE + slot_of(works - 1)));
        }
        unread = false;
    }
    // a chunk of keys that this warpgroup no longer reads
    __device__ __forceinline__ void release(int at) { warp_arrives(rows.shared.barrier(READ + stage_of(at)), arriving); }

    // Chunk c of an item, of which this warpgroup sees keys before `mine`, and each of its queries those before `whole`, if not those before its
    // window: its scores become weights. Returns how many keys it has.
    template <bool FIRST>
    __device__ __forceinline__ int next(const Item& item, int first, int mine, int whole, int c) {
        const int begin = c * CHUNK_KEYS;
        int keys = CHUNK_KEYS;
        if (c < whole / CHUNK_KEYS && (!WINDOW || begin >= first + 63 + item.back())) {
            rows.chunk<CHUNK_KEYS, false, FIRST>(chunk, item, first, begin, tile + c, arriving);
        } else {
            rows.clear_behind(chunk, item.k_len - begin, batch);
            keys = width_of(mine - begin);
            if (keys == CHUNK_KEYS) rows.chunk<CHUNK_KEYS, true, FIRST>(chunk, item, first, begin, tile + c, arriving);
            else if (keys == 32) rows.chunk<32, true, FIRST>(chunk, item, first, begin, tile + c, arriving);
            else rows.chunk<16, true, FIRST>(chunk, item, first, begin, tile + c, arriving);
        }
        if (!FIRST) release(chunk - 1);  // of which the products have ended
        chunk++;
        return keys;
    }

    __device__ __forceinline__ void pass_tile(int c) {
#if BIAS
        barrier_wait(rows.bias.filled(tile + c), BiasTiles::parity(tile + c));
        warp_arrives(rows.bias.read(tile + c), arriving);
#endif
    }

    // the chunks before `end` that only the other warpgroup needs
    __device__ __forceinline__ void pass(const QueryBlock& work, int& c, int end) {
#pragma unroll 1
        for (; c < end; c++, chunk++) {
            barrier_wait(rows.shared.barrier(KEY + stage_of(chunk)), parity_of(chunk));
            barrier_wait(rows.shared.barrier(VALUE + stage_of(chunk)), parity_of(chunk));
            rows.clear_behind(chunk, work.item.k_len - c * CHUNK_KEYS, batch);
            release(chunk);
            pass_tile(c);  // beside its keys: the other warpgroup waits for the tiles behind it
        }
    }

    // the tiles of the bias from the c-th on, which only other teams need
    __device__ __forceinline__ void pass_tiles(const QueryBlock& work, int c) {
        if (!BIAS) return;
#pragma unroll 1
        for (; c < work.tiles; c++) pass_tile(c);
        tile += work.tiles;
    }

    __device__ __forceinline__ void compute(const QueryBlock& work) {
        const Item& item = work.item;
        const int first = work.first + 64 * rows.warpgroup, chunks = work.chunks();
        // keys that some query, and that every query, of this warpgroup sees
        const int mine = first >= item.q_len ? 0 : CAUSAL ? between(0, first + 64 + item.reach(), item.k_len) : item.k_len;
        const int whole = CAUSAL ? between(0, first + 1 + item.reach(), mine) : mine;
        int c = 0;
        if (WINDOW) c = work.first_chunk();  // so that kernels without a window keep their machine code
        const int own = WINDOW ? max(c, between(0, first + item.back(), item.k_len) / CHUNK_KEYS) : 0;  // the first chunk of this warpgroup
        if (own * CHUNK_KEYS < mine) {
            if (WINDOW) pass(work, c, own);
            int last = next<true>(item, first, mine, whole, c++);  // keys of the last chunk
            finish();
#pragma unroll 1
            while (c * CHUNK_KEYS < mine) last = next<false>(item, first, mine, whole, c++);
            if (last == CHUNK_KEYS) rows.values<CHUNK_KEYS>(chunk - 1);
            else if (last == 32) rows.values<32>(chunk - 1);
            else rows.values<16>(chunk - 1);
            products_wait<0>();
            release(chunk - 1);
        }
        pass(work, c, chunks);
        pass_tiles(work, c);
        finish();
        output.write(rows, item, first);
    }

    // a work of which this team has no problem
    __device__ __forceinline__ void idle(const QueryBlock& work) {
        finish();
        pass_tiles(work, 0);
        sync_threads(OF_WARPGROUP + 2 * rows.shared.team + rows.warpgroup, 128);  // otherwise a slow warp would miss the work that replaces this one
        if (threadIdx.x % 128 == 0) barrier_arrive(rows.shared.barrier(FREE + slot_of(works)));
    }

    __device__ __forceinline__ void run() {
        const LongForwardShared& shared = rows.shared;
#pragma unroll 1
        while (true) {
            const int slot = slot_of(works);
            barrier_wait(shared.barrier(QUERY + slot), slot_parity(works));
            const QueryBlock work = QueryBlock::from(shared.work(slot), window);
            if (work.first < 0) break;
            if (BIAS && work.item.q_len == 0) {
                idle(work);
                works++;
                continue;
            }
            rows.begin(slot);
            compute(work);
            works++, unread = true;
            if (QUERY_SLOTS == 1) finish();
        }
        finish();  // the copy engine reads this memory until then
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    long_forward_sm90(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                      const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap out_map,
#if BIAS
                      const __grid_constant__ TensorMap bias_map,
#endif
                      const int* cu_q, const int* cu_k, const int* members, const int* count,
                      Number* out, float* lse,
#if MASK
                      const u64* mask_bits,
#endif
#if KEY_MASK
                      const unsigned char* key_mask,
#endif
                      const void* sequences, const void* total_q, const void* total_k, const void* max_q, const void* max_k,
                      const void* row_batch, const void* row_head,
#if DROPOUT
                      const u64* seed, u32 threshold, float inverse,
#endif
                      long long out_batch, long long out_head, long long out_row,
#if MASK
                      long long mask_batch, long long mask_head, long long mask_row,
#endif
#if KEY_MASK
                      long long key_mask_batch, int key_mask_column,
#endif
#if GROUPED
                      int group_size,
#endif
#if WINDOW
                      int window_left, int window_right,
#endif
#if BIAS
                      int bias_windows, int bias_owners,
#endif
                      int heads, int head_dim, float exponent) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const Batch batch{.cu_q = cu_q, .cu_k = cu_k, .members = members, .count = count,
                      .sequences = int(number_of(sequences)), .total_q = int(number_of(total_q)), .total_k = int(number_of(total_k)),
                      .max_q = int(number_of(max_q)), .max_k = int(number_of(max_k)), .heads = heads};
    const BiasTiles bias_tiles(shared_address(memory));
    if (threadIdx.x < TEAMS) LongForwardShared(shared_address(memory), threadIdx.x).init_barriers();
    if (BIAS && threadIdx.x == 0) bias_tiles.init_barriers();
    __syncthreads();
    const int warpgroup = warpgroup_of();
    if (warpgroup == 2 * TEAMS) {
        leave_registers<LOAD_REGISTERS>();
        const int warp = thread_of() % 128 / 32;
        Loads loads{.shared = LongForwardShared(shared_address(memory), warp), .batch = batch, .query = query_map, .key = key_map, .value = value_map,
                    .group = GROUP, .window = WINDOW_OF_CALL, .mask = KEY_MASK_OF_CALL, .asks = !KEY_MASK || thread_of() % 32 == 0};
#if BIAS
        const BiasOf bias = BIAS_OF_CALL;
        const Sharing sharing{batch, bias};
        if (warp < TEAMS && (KEY_MASK || thread_of() % 32 == 0)) loads.run_shared(sharing);
        if (warp == TEAMS && thread_of() % 32 == 0) BiasLoads{bias_tiles, sharing}.run();
#else
        if (warp < TEAMS && thread_of() % 32 == 0) loads.run();
#endif
        return;
    }
    take_registers<COMPUTE_REGISTERS>();
    const Output output{.map = out_map, .out = out, .lse = lse, .strides = {out_batch, out_head, out_row},
                        .row_batch = number_of(row_batch), .row_head = number_of(row_head), .head_dim = head_dim};
    Dropout dropout{};
#if DROPOUT
    dropout = Dropout::of(*seed, threshold, inverse, heads, batch.max_k);
#endif
    Computing computing{.rows = Rows{.shared = LongForwardShared(shared_address(memory), warpgroup / 2), .warpgroup = warpgroup % 2, .exponent = exponent,
                                     .mask = MASK_BITS, .dropout = dropout, .bias = bias_tiles},
                        .output = output, .batch = batch, .window = WINDOW_OF_CALL, .arriving = arriving_lane()};
    computing.run();
}
