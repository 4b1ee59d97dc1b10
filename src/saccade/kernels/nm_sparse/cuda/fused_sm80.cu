// Forward of N:M attention on sm_80 and later: Q K^T by mma, selection and softmax in registers, P V by mma.sp. See README.md here.
//
//   thread block     BLOCK_Q = 16 * WARPS queries of one head; tiles of BLOCK_KV keys from the last one that they see to the first
//   each warp        16 queries; K and V come by cp.async, STAGES tiles at a time
//
// Keys are permuted when they are copied: row 8 j + 2 t + b of each 16 rows in shared memory is key 4 t + 2 j + b, so that a lane finds
// keys 4 t .. 4 t + 3 in its accumulators, as a sparse product wants them. V stays in order. Rows are 16 bytes longer than D, an odd
// number of 16-byte units, so that eight of them lie in different banks.
//
// Compiled with HEAD_DIM (D, a multiple of 16), BLOCK_KV, WARPS (4 or 8), STAGES (1 or 2), BF16, PAIRS (1: "1:2", 0: "2:4"), CAUSAL, STORES
// (the selection), DROPOUT, BLOCKS (a block mask; BLOCK_KV is 64), SELECTION, RESIDENT (thread blocks of a multiprocessor).
#define SCORE_GROUP(q, j) (2 * (q) + (j))
#define OVERLAP 0
#include "mma.cuh"
#include "rows.cuh"

constexpr int BLOCK_Q = 16 * WARPS;
constexpr int ROW_BYTES = 2 * HEAD_DIM + 16;
constexpr int TILE_BYTES = BLOCK_KV * ROW_BYTES;
constexpr int CHUNKS = HEAD_DIM / 8;           // of 16 bytes, a row
constexpr bool QUERY_REGISTERS = HEAD_DIM <= 128;  // else Q is read from shared memory again for every tile

struct Strides {
    long long batch, head, row;
};

struct Warp : Rows {
    u32 memory;  // stages of (K, V), then Q
    u32 query[QUERY_REGISTERS ? HEAD_DIM / 4 : 4];

    __device__ __forceinline__ Warp(const Sizes& sizes, u32 memory) : Rows(sizes), memory(memory) {}
    __device__ __forceinline__ u32 keys(int stage) const { return memory + 2 * stage * TILE_BYTES; }
    __device__ __forceinline__ u32 values(int stage) const { return keys(stage) + TILE_BYTES; }
    __device__ __forceinline__ u32 queries() const { return keys(STAGES) + threadIdx.x / 32 * 16 * ROW_BYTES; }

    // 16 x 16 of Q, columns 16 step ..
    __device__ __forceinline__ void load_query(u32* a, int step) const {
        int lane = threadIdx.x % 32;
        load_matrices(a, queries() + lane % 16 * ROW_BYTES + (2 * step + lane / 16) * 16);
    }

    __device__ __forceinline__ void keep_query() {
        if (QUERY_REGISTERS)
#pragma unroll
            for (int step = 0; step < HEAD_DIM / 16; step++) load_query(query + 4 * step, step);
    }

    // scores = Q K^T of the tile at `stage`
    __device__ __forceinline__ void multiply_keys(int stage) {
        int lane = threadIdx.x % 32;
        u32 from = keys(stage) + (lane / 16 * 8 + lane % 8) * ROW_BYTES + lane / 8 % 2 * 16;
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; i++) scores[i] = 0.0f;
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++) {
            u32* a = query + (QUERY_REGISTERS ? 4 * step : 0);
            if (!QUERY_REGISTERS) load_query(a, step);
#pragma unroll
            for (int q = 0; q < SIXTEENS; q++) {
                u32 b[4];
                load_matrices(b, from + q * 16 * ROW_BYTES + step * 32);
                multiply(scores + 8 * q, a, b[0], b[1]);
                multiply(scores + 8 * q + 4, a, b[2], b[3]);
            }
        }
    }

    // out += P V of the tile at `stage`
    __device__ __forceinline__ void multiply_values(int stage) {
        u32 from = values(stage) + threadIdx.x % 32 * ROW_BYTES;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++) {
                u32 b[4];
                load_transposed(b, from + step * 32 * ROW_BYTES + n * 16);
                multiply_sparse(out + 4 * n, packed + 4 * step, b, metadata[step]);
            }
        }
    }

    template <bool MASKED>
    __device__ __forceinline__ void attend(int tile, int stage, u32* kept) {
        multiply_keys(stage);
        __syncwarp();  // else ptxas moves loads and comparisons across, and spills
        select<MASKED>(tile);
        if (overflows()) retry<MASKED>(tile);  // always at the first tile, whose reference is not known
        accept();
        if (STORES) store_selection(tile, kept);
        __syncwarp();
        multiply_values(stage);
    }
};

// a tile of K (its keys permuted) and V, zeros beyond the last key
__device__ __forceinline__ void copy_tile(
    u32 keys, u32 values, const unsigned short* key, const unsigned short* value, long long key_row, long long value_row, int first, int kv_len) {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // so that addresses are made here, not kept over the tiles and spilled
#pragma unroll 2
    for (int i = thread; i < BLOCK_KV * CHUNKS; i += 32 * WARPS) {
        int row = i / CHUNKS, chunk = i % CHUNKS, place = (row & ~15) | (row & 2) << 2 | (row & 12) >> 1 | (row & 1);
        bool inside = first + row < kv_len;
        long long at = inside ? first + row : 0;
        copy_16(keys + place * ROW_BYTES + chunk * 16, key + at * key_row + chunk * 8, inside);
        copy_16(values + row * ROW_BYTES + chunk * 16, value + at * value_row + chunk * 8, inside);
    }
}

// whether these 64 queries see a tile
__device__ __forceinline__ bool sees(const unsigned char* mask, int query, int tile, const Sizes& sizes) {
    if (query >= sizes.q_len || (CAUSAL && tile * BLOCK_KV > query + 63)) return false;
    return !BLOCKS || mask[query / 64 * sizes.mask_row + tile];
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) fused_sm80(
    const unsigned short* query, const unsigned short* key, const unsigned short* value, unsigned short* out, float* lse, unsigned* kept,
    const unsigned char* block_mask, const u64* seed, int heads, int group, int q_len, int kv_len, int words, int counters, int problems,
    int one, long long query_batch, long long query_head, long long query_row, long long key_batch, long long key_head,
    long long key_row, long long value_batch, long long value_head, long long value_row, long long out_batch, long long out_head,
    long long out_row, long long mask_batch, long long mask_head, long long mask_row, float scale, float spared, u32 threshold) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Sizes sizes{heads,     group,    q_len,   kv_len,     words,     counters, HEAD_DIM, problems, 0,        one,
                      out_batch, out_head, out_row, mask_batch, mask_head, mask_row, scale,    spared,   threshold};
    int blocks = (q_len + BLOCK_Q - 1) / BLOCK_Q, problem = blockIdx.x / blocks;
    int first = (blocks - 1 - int(blockIdx.x) % blocks) * BLOCK_Q;  // long blocks of a causal problem first
    int batch = problem / heads, head = problem % heads;
    query += batch * query_batch + head * query_head;
    key += batch * key_batch + head / group * key_head;
    value += batch * value_batch + head / group * value_head;
    block_mask += batch * mask_batch + head * mask_head;

    Warp warp(sizes, static_cast<u32>(__cvta_generic_to_shared(memory)));
#if DROPOUT
    warp.seed = *seed;
#endif
    int own = first + threadIdx.x / 128 * 64;
    warp.begin(problem, own);
    for (int i = threadIdx.x; i < BLOCK_Q * CHUNKS; i += 32 * WARPS) {
        int row = i / CHUNKS;
        bool inside = first + row < q_len;
        copy_16(warp.keys(STAGES) + row * ROW_BYTES + i % CHUNKS * 16, query + (inside ? first + row : 0) * query_row + i % CHUNKS * 8, inside);
    }
    int tiles = ((CAUSAL ? min(kv_len, first + BLOCK_Q) : kv_len) + BLOCK_KV - 1) / BLOCK_KV;
    // the next tile that some warp sees, going down
    auto following = [&](int tile) {
        for (; tile >= 0; tile--) {
            bool seen = false;
            for (int w = 0; w < BLOCK_Q; w += 64) seen |= sees(block_mask, first + w, tile, sizes);
            if (seen) break;
        }
        return tile;
    };
    auto copy = [&](int tile, int stage) {
        if (tile >= 0)
            copy_tile(warp.keys(stage), warp.values(stage), key, value, key_row, value_row, tile * BLOCK_KV, kv_len);
        copies_commit();
    };
    int tile = following(tiles - 1), stage = 0;
    copy(tile, 0);
    for (int turn = 0; tile >= 0; turn++) {
        int next = following(tile - 1);
        if (STAGES == 2) copy(next, stage ^ 1);
        copies_wait<STAGES - 1>();
        __syncthreads();
        if (turn == 0) warp.keep_query();
        if (sees(block_mask, own, tile, sizes)) {
            if ((tile + 1) * BLOCK_KV > (CAUSAL ? min(kv_len, own + 1) : kv_len))
                warp.attend<true>(tile, stage, kept);
            else
                warp.attend<false>(tile, stage, kept);
        }
        __syncthreads();
        if (STAGES == 1) copy(next, 0);
        if (STAGES == 2) stage ^= 1;
        tile = next;
    }
    copies_wait<0>();
    warp.store(out, lse);
}
