// Pruned weights times values on sparse matrix units, O = W V: [32 * WARPS queries, KEYS keys] a stage, through a ring of STAGES in shared
// memory.
//
// Shared memory:   | STAGES x (W: ROWS rows of WEIGHT_CHUNKS | V: KEYS rows of VALUE_STRIDE | metadata: STEPS x ROWS words) |
//
// Rows of W and V are chunks of 16 bytes. The kept weights of a row are half as many as its keys.
//
// The metadata of 32 rows and 2 * OWNED keys are 32 words in memory. Lane l must hold word l for both of the warp's products of 16 rows, one with
// selector 0 and one with 1 (CUTLASS made its layout for this), so they are copied unchanged.
//
// Macros: DTYPE, WIDTH (columns of a block, a multiple of 16), CAUSAL, WARPS, STAGES, BLOCKS, STEPS (sparse products along the keys of a
// stage, 2 or 4: 64 or 128 bytes of a row of weights at a time).
#include "number.cuh"
#include "tile.cuh"

#include "mma.cuh"

#define LOGICAL (4 * PER_CHUNK)  // keys of one sparse product: 32, or 16 of float32; 32 bytes of kept numbers a row
#define KEYS (STEPS * LOGICAL)
#define WEIGHT_CHUNKS (2 * STEPS)
#define ROWS (32 * WARPS)
#define THREADS (32 * WARPS)
#define VALUE_CHUNKS (WIDTH / PER_CHUNK)
// of TF32 words are read one by one, thread t those of row t: 8 more a row put the four rows into different banks
#define VALUE_STRIDE (TF32 ? VALUE_CHUNKS + 2 : ROUND_UP(VALUE_CHUNKS, 8))
#define WEIGHT_BYTES (ROWS * WEIGHT_CHUNKS * 16)
#define VALUE_BYTES (KEYS * VALUE_STRIDE * 16)
#define METADATA_BYTES (STEPS * ROWS * 4)
#define STAGE_BYTES (WEIGHT_BYTES + VALUE_BYTES + METADATA_BYTES)
static_assert(STAGES * STAGE_BYTES <= SHARED_BYTES, "the launch asks for too little shared memory");

__device__ __forceinline__ u32 value_offset(int row, int chunk) {
    return TF32 ? (u32)(row * VALUE_STRIDE + chunk) * 16 : chunk_offset<VALUE_STRIDE>(row, row, chunk);
}

struct Operands {
    const Number* weights;  // of the first row of the block
    const u32* metadata;
    const Number* value;
    int64 value_row;
    int rows_left, kept, rows, kv_len, width;
};

__device__ __forceinline__ void fill_stage(u32 stage, const Operands& from, int first_key) {
    typedef Share<WEIGHT_CHUNKS, THREADS> Weights;
#pragma unroll
    for (int i = 0; i < Weights::count(ROWS); i++) {
        const int row = Weights::row(i), chunk = Weights::chunk(i);
        const bool valid = row < from.rows_left && first_key / 2 + chunk * PER_CHUNK < from.kept;
        const Number* source = Weights::of(from.weights + first_key / 2, (int64)from.kept, i);
        copy_16(stage + chunk_offset<WEIGHT_CHUNKS>(row, row, chunk), source, valid);
    }
    stage += WEIGHT_BYTES;
    typedef Share<VALUE_CHUNKS, THREADS> Values;
    const Number* value = from.value + first_key * from.value_row;
#pragma unroll
    for (int i = 0; i < Values::count(KEYS); i++) {
        const int row = Values::row(i), chunk = Values::chunk(i);
        if (KEYS * VALUE_CHUNKS % THREADS && row >= KEYS) break;
        const bool valid = first_key + row < from.kv_len && chunk * PER_CHUNK < from.width;
        copy_16(stage + value_offset(row, chunk), Values::of(value, from.value_row, i), valid);
    }
    stage += VALUE_BYTES;
    if (threadIdx.x < STEPS * ROWS / 4) {  // at most THREADS of them
        const int step = (int)threadIdx.x / (ROWS / 4), word = (int)threadIdx.x % (ROWS / 4) * 4;
        const bool valid = word < from.rows_left && first_key + step * LOGICAL < 2 * from.kept;
        const u32* source = from.metadata + (int64)(first_key / LOGICAL + step) * from.rows + word;
        copy_16(stage + (u32)(step * ROWS + word) * 4, source, valid);
    }
}

// B of one sparse product: LOGICAL keys of 8 columns
__device__ __forceinline__ void load_value(u32 (&b)[4], u32 value, const unsigned char* generic, int key, int j, int lane) {
    if constexpr (TF32) {
#pragma unroll
        for (int r = 0; r < 4; r++)
            b[r] = *(const u32*)(generic + value_offset(key + 4 * r + (lane & 3), 0) + (8 * j + (lane >> 2)) * 4);
        round_operand(b);
    } else {
        load_transposed(b, value + value_offset(key + lane, j));
    }
}

extern __shared__ __align__(128) unsigned char shared_memory[];

// weights [B, H, rows, cols / 2], metadata words [B, H, cols / LOGICAL, rows], value [B, Hkv, Tk, width] and out [B, H, Tq, width] by
// strides (batch, head, row; the last is 1). Grid: batch * heads * q_tiles, blocks of WIDTH columns.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) nm_matmul(
    const Number* weights, const u32* metadata, const Number* value, Number* out, int64 value_batch, int64 value_head,
    int64 value_row, int64 out_batch, int64 out_head, int64 out_row, int heads, int group, int q_len, int kv_len, int rows,
    int cols, int width, int q_tiles) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int problem = blockIdx.x / q_tiles, batch = problem / heads, head = problem % heads;
    const int block_query = (blockIdx.x % q_tiles) * ROWS, first_query = block_query + 32 * warp;
    const int first_column = blockIdx.y * WIDTH;
    Operands from;
    from.kept = cols / 2, from.rows = rows, from.kv_len = kv_len;
    from.rows_left = rows - block_query, from.width = width - first_column;
    from.weights = weights + ((int64)problem * rows + block_query) * from.kept;
    from.metadata = metadata + (int64)problem * (cols / LOGICAL) * rows + block_query;
    from.value = value + batch * value_batch + (head / group) * value_head + first_column;
    from.value_row = value_row;
    out += batch * out_batch + head * out_head + first_column;

    int stages = (cols + KEYS - 1) / KEYS;
    if constexpr (CAUSAL) {
        const int seen = (block_query + ROWS + KEYS - 1) / KEYS;
        if (seen < stages) stages = seen;
    }
    const u32 base = shared_address(shared_memory);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < stages) fill_stage(base + i * STAGE_BYTES, from, i * KEYS);
        copies_commit();
    }
    float acc[2][WIDTH / 8][4];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) acc[i / (WIDTH / 2)][i / 4 % (WIDTH / 8)][i % 4] = 0.0f;
#pragma unroll 1
    for (int i = 0; i < stages; i++) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        const int ahead = i + STAGES - 1;
        if (ahead < stages) fill_stage(base + ahead % STAGES * STAGE_BYTES, from, ahead * KEYS);
        copies_commit();
        if (first_query >= rows) continue;  // a whole warp leaves, which would read metadata that was never written
        const u32 offset = i % STAGES * STAGE_BYTES, tile = base + offset;
        const unsigned char* values = shared_memory + offset + WEIGHT_BYTES;
        const u32* words = (const u32*)(values + VALUE_BYTES) + 32 * warp + lane;
        // O += W V, LOGICAL keys a step
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            // columns are a multiple of 2 * LOGICAL; beyond them there is no metadata
            if (STEPS > 2 && step == 2 && (2 * i + 1) * 2 * LOGICAL >= cols) break;
            u32 a[2][4];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const int row = 32 * warp + 16 * m + (lane & 15);
                load_matrices(a[m], tile + chunk_offset<WEIGHT_CHUNKS>(row, row, 2 * step + (lane >> 4)));
                round_operand(a[m]);
            }
            const u32 word = words[step * ROWS];
#pragma unroll
            for (int j = 0; j < WIDTH / 8; j++) {
                u32 b[4];
                load_value(b, tile + WEIGHT_BYTES, values, step * LOGICAL, j, lane);
                multiply_sparse<0>(acc[0][j], a[0], b, word);
                multiply_sparse<1>(acc[1][j], a[1], b, word);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 4; half++) {
        const int query = first_query + 8 * half + g;
        if (query >= q_len) continue;
        Number* row = out + query * out_row;
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
            const int column = 8 * j + 2 * t;
            const float low = acc[half >> 1][j][2 * (half & 1)], high = acc[half >> 1][j][2 * (half & 1) + 1];
            if (column >= from.width) continue;
            store_pair(row + column, low, high);
        }
    }
}
