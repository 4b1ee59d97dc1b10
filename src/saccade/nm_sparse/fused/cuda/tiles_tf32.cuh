// Tiles of float32 K and V in shared memory and a warp's products with them as TF32, for fused_sm80.cu.
//
// A lane's two neighbours in an accumulator are the pair that "1:2" chooses from, so keys stay in order. Operands are single numbers,
// and rows are padded so that 32 lanes have no bank conflict: lane 4g + t reads word t of row g of K (rows 4 words past a multiple of 32),
// word g of row t of V (8 words past).
#pragma once
#define SCORE_GROUP(q, j) (q)
#include "rows.cuh"

#include "mma.cuh"

constexpr int WIDE = (HEAD_DIM + 31) / 32 * 32;
constexpr int KEY_WORDS = WIDE + 4, VALUE_WORDS = WIDE + 8;  // of a row
constexpr int STAGE_BYTES = 4 * BLOCK_KV * (KEY_WORDS + VALUE_WORDS);
constexpr int CHUNKS = HEAD_DIM / 4;  // of 16 bytes, a row
constexpr int QUERY_ROW_BYTES = 0;    // Q is only in registers
#include "tile_copies.cuh"

__device__ __forceinline__ u32 load_word(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

static_assert(TALL == 1, "accumulators of 16 queries a warp");

struct Operands {
    Rows rows[1];
    u32 memory;  // stages of (K, V)
    u32 query[HEAD_DIM / 2];

    __device__ __forceinline__ Operands(const Sizes& sizes, u32 memory) : rows{sizes}, memory(memory) {}
    __device__ __forceinline__ u32 keys(int stage) const { return memory + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 values(int stage) const { return keys(stage) + 4 * BLOCK_KV * KEY_WORDS; }

    // Q of this warp's rows, from device memory to registers: [step][8 columns], (row g, column t), (g + 8, t), (g, t + 4), (g + 8, t + 4)
    __device__ __forceinline__ void copy_query(const Number* from, long long stride, int first) {
        int lane = threadIdx.x % 32, top = first + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            bool inside = top + 8 * h < rows[0].sizes.q_len;
            const Number* at = from + (inside ? top + 8 * h : 0) * stride + lane % 4;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 4; i++) query[2 * i + h] = inside ? to_tf32(at[4 * i]) : 0;
        }
    }

    __device__ __forceinline__ void keep_query() {}

    // in units, as in tiles_half.cuh; Q is in registers
    static constexpr int KEY_UNITS = HEAD_DIM / 8 * (SPANS / PARTS), VALUE_UNITS = HEAD_DIM / 8 * (STEPS / PARTS);

    __device__ __forceinline__ void multiply_keys(int part, int i, int stage, u32 (&)[TALL][4]) {
        int lane = threadIdx.x % 32, step = i / (SPANS / PARTS), q = part * (SPANS / PARTS) + i % (SPANS / PARTS);
        u32 at = keys(stage) + 4 * (lane / 4 * KEY_WORDS + lane % 4) + 4 * (8 * q * KEY_WORDS + 8 * step);
        float* to = rows[0].scores + 4 * q;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (step == 0) to[j] = 0.0f;
        multiply(to, query + 4 * step, load_word(at), load_word(at + 16));
    }

    __device__ __forceinline__ void multiply_values(int part, int i, int stage) {
        int lane = threadIdx.x % 32, step = part * (STEPS / PARTS) + i / (HEAD_DIM / 8), n = i % (HEAD_DIM / 8);
        u32 at = values(stage) + 4 * (lane % 4 * VALUE_WORDS + lane / 4) + 4 * (16 * step * VALUE_WORDS + 8 * n), b[4];
#pragma unroll
        for (int j = 0; j < 4; j++) b[j] = load_word(at + 16 * j * VALUE_WORDS);
        multiply_sparse(rows[0].out + 4 * n, rows[0].packed + 4 * step, b, rows[0].metadata[step]);
    }
};

typedef Tiles<4 * KEY_WORDS, true> KeyTiles;
typedef Tiles<4 * VALUE_WORDS, false> ValueTiles;

__device__ __forceinline__ void load_16(float (&x)[4], u32 address) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void store_rounded(u32 address, const float (&x)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(to_tf32(x[0])), "r"(to_tf32(x[1])), "r"(to_tf32(x[2])),
                 "r"(to_tf32(x[3]))
                 : "memory");
}

// Rounded once in place, by the thread whose copies have arrived. If readers rounded, every warp would do it again: 512 instructions for 192 products
// of a tile at D = 128. Four loads at a time, because one load waits some 30 clocks.
template <class Tiles>
__device__ __forceinline__ void settle_tile(u32 tile) {
    int thread = threadIdx.x;
    if constexpr (COLUMNS && BLOCK_KV % (4 * DISTANCE) == 0) {
        u32 at = tile + thread / CHUNKS * Tiles::ROW + thread % CHUNKS * 16;
#pragma unroll
        for (int place = 0; place < BLOCK_KV; place += 4 * DISTANCE) {
            float x[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) load_16(x[i], at + (place + i * DISTANCE) * Tiles::ROW);
#pragma unroll
            for (int i = 0; i < 4; i++) store_rounded(at + (place + i * DISTANCE) * Tiles::ROW, x[i]);
        }
    } else {
#pragma unroll 2
        for (int i = thread; i < BLOCK_KV * CHUNKS; i += THREADS) {
            float x[4];
            load_16(x, tile + i / CHUNKS * Tiles::ROW + i % CHUNKS * 16);
            store_rounded(tile + i / CHUNKS * Tiles::ROW + i % CHUNKS * 16, x);
        }
    }
}
