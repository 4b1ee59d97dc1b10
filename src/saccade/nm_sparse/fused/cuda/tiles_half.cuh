// Tiles of 16-bit K and V in shared memory and a warp's products with them, for fused_sm80.cu.
//
// Keys are permuted when they are copied (tile_copies.cuh), V stays in order. Rows are 16 bytes longer than D, an odd number of 16-byte
// units, so that eight of them lie in different banks.
#pragma once
#define SCORE_GROUP(q, j) (2 * (q) + (j))
#include "rows.cuh"

#include "mma.cuh"

constexpr int ROW_BYTES = 2 * HEAD_DIM + 16;
constexpr int QUERY_ROW_BYTES = ROW_BYTES;  // of Q, which lies behind the tiles
constexpr int TILE_BYTES = BLOCK_KV * ROW_BYTES;
constexpr int STAGE_BYTES = 2 * TILE_BYTES;  // of K, then V
constexpr int CHUNKS = HEAD_DIM / 8;         // of 16 bytes, a row
#include "tile_copies.cuh"

struct Operands {
    Rows rows[TALL];
    u32 memory;  // stages of (K, V), then Q
    u32 own_key, own_value;  // see `find_rows`
    u32 query[QUERY_STEPS ? 4 * TALL * QUERY_STEPS : 1];

#if TALL == 1
    __device__ __forceinline__ Operands(const Sizes& sizes, u32 memory) : rows{sizes}, memory(memory) {}
#else
    __device__ __forceinline__ Operands(const Sizes& sizes, u32 memory) : rows{sizes, sizes}, memory(memory) {}
#endif
    // this lane's row of a fragment of K, and of V, in the first stage
    __device__ __forceinline__ u32 key_row() const {
        int lane = threadIdx.x % 32;
        return keys(0) + (lane / 16 * 8 + lane % 8) * ROW_BYTES + lane / 8 % 2 * 16;
    }
    __device__ __forceinline__ u32 value_row() const { return values(0) + threadIdx.x % 32 * ROW_BYTES; }

    // With PARTS the two addresses are kept in registers. Otherwise they are computed for each tile, by 10 instructions that wait for one
    // another; only D = 64 has registers to keep them.
    __device__ __forceinline__ void find_rows() {
        own_key = key_row();
        own_value = value_row();
        asm volatile("" : "+r"(own_key), "+r"(own_value));
    }

    __device__ __forceinline__ u32 keys(int stage) const { return memory + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 values(int stage) const { return keys(stage) + TILE_BYTES; }
    __device__ __forceinline__ u32 queries() const { return keys(STAGES); }

    // 16 x 16 of Q: of the warp's m-th 16 rows, columns 16 step ..
    __device__ __forceinline__ void load_query(u32* a, int m, int step) const {
        int thread = threadIdx.x, row = thread / 32 * (16 * TALL) + 16 * m + thread % 16;
        load_matrices(a, queries() + row * ROW_BYTES + (2 * step + thread % 32 / 16) * 16);
    }

    // before the first product: Q of the block into shared memory, with the first tile's copies
    __device__ __forceinline__ void copy_query(const Number* from, long long stride, int first) {
        for (int i = threadIdx.x; i < 16 * TALL * WARPS * CHUNKS; i += 32 * WARPS) {
            int row = first + i / CHUNKS, column = i % CHUNKS * 8;
            bool inside = row < rows[0].sizes.q_len;
            copy_16(queries() + i / CHUNKS * ROW_BYTES + column * 2, from + (inside ? row : 0) * stride + column, inside);
        }
    }

    // the fragments of Q that stay in registers, once Q lies in shared memory
    __device__ __forceinline__ void keep_query() {
#pragma unroll
        for (int step = 0; step < QUERY_STEPS; step++)
#pragma unroll
            for (int m = 0; m < TALL; m++) load_query(query + 4 * (TALL * step + m), m, step);
    }

    // Products are done in units, one load of a fragment with all that multiplies it, so that other work can be written between them.
    // S of a part of the keys: its i-th unit; `a` holds Q of one step of 16 dims from unit to unit.
    static constexpr int KEY_UNITS = HEAD_DIM / 16 * (SPANS / PARTS), VALUE_UNITS = HEAD_DIM / 8 * (STEPS / PARTS);

    __device__ __forceinline__ void multiply_keys(int part, int i, int stage, u32 (&a)[TALL][4]) {
        int step = i / (SPANS / PARTS), q = part * (SPANS / PARTS) + i % (SPANS / PARTS);
        u32 b[4];
        load_matrices(b, (PARTS > 1 ? own_key : key_row()) + stage * STAGE_BYTES + q * 16 * ROW_BYTES + step * 32);
#pragma unroll
        for (int m = 0; m < TALL; m++) {
            if (i % (SPANS / PARTS) == 0) {
                if (step >= QUERY_STEPS) load_query(a[m], m, step);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (step < QUERY_STEPS) a[m][j] = query[4 * (TALL * step + m) + j];
            }
            float* to = rows[m].scores + 8 * q;
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (step == 0) to[j] = 0.0f;
            multiply(to, a[m], b[0], b[1]);
            multiply(to + 4, a[m], b[2], b[3]);
        }
    }

    // out += P V of a part of the keys: its i-th unit
    __device__ __forceinline__ void multiply_values(int part, int i, int stage) {
        int step = part * (STEPS / PARTS) + i / (HEAD_DIM / 8), n = i % (HEAD_DIM / 8);
        u32 b[4];
        load_transposed(b, (PARTS > 1 ? own_value : value_row()) + stage * STAGE_BYTES + step * 32 * ROW_BYTES + n * 16);
#pragma unroll
        for (int m = 0; m < TALL; m++) {
            if (PARTS > 1 && m == 1)  // see `share_metadata_of_two`
                multiply_sparse<1>(rows[m].out + 4 * n, rows[m].packed + 4 * step, b, rows[0].metadata[step]);
            else
                multiply_sparse(rows[m].out + 4 * n, rows[m].packed + 4 * step, b, rows[m].metadata[step]);
        }
    }
};

typedef Tiles<ROW_BYTES, true> KeyTiles;
typedef Tiles<ROW_BYTES, false> ValueTiles;

// Nothing to do: 16-bit numbers are operands as copied.
template <class Tiles>
__device__ __forceinline__ void settle_tile(u32) {}
