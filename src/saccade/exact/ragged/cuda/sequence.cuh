// Packed sequences whose rows lie in a tile of shared memory: where they come from, how they are copied, where a chunk of a row lies.
// Macros: HEAD_DIM (32, 64 or 128), ROWS (of a tile: 64 or 128), WARPS, BF16, CAUSAL (0: none; 1: key j <= query i; 2: key j <= query i + Tk - Tq).
#pragma once
#include "async_copy.cuh"
#include "mma.cuh"
#include "numbers.cuh"

constexpr int CHUNKS = HEAD_DIM / 8;            // of 16 bytes, in a row
constexpr int PITCH = HEAD_DIM * 2;             // bytes of a row
constexpr int TILE_BYTES = ROWS * PITCH;
constexpr int THREADS = 32 * WARPS;

// The place of chunk c of a row: eight rows of one column then meet eight different groups of banks. Rows of 64 bytes lie two in a line of
// banks, so that every second row changes the place.
__device__ __forceinline__ u32 chunk_at(u32 tile, int row, int chunk) {
    int key = HEAD_DIM == 32 ? row / 2 % 4 : row % 8;
    return tile + row * PITCH + (chunk ^ key) * 16;
}

// The rows of one sequence and head.
struct Item {
    int head, q_first, q_len, k_first, k_len;
};

struct Batch {
    const int *cu_q, *cu_k, *members;
    int total_q, total_k, max_q, max_k, heads;

    // clamped: lengths come from the device unchecked
    __device__ __forceinline__ static void rows_of(int begin, int end, int total, int longest, int& first, int& rows) {
        first = min(max(begin, 0), total);
        rows = min(max(min(end, total) - first, 0), min(longest, ROWS));
    }
};

// The (sequence, head) pairs of a block, in order. A pair's sequence, and the place where its rows begin, are two loads, one after the other,
// of 0.6 us each. The first is requested three pairs ahead and the second two ahead, so that no thread waits for them.
struct Walk {
    const Batch& batch;
    int index, step, total;
    int member;                                  // of the pair after `ends`
    int begin_q, end_q, begin_k, end_k;          // of the pair after the last `take`

    __device__ __forceinline__ Walk(const Batch& batch, int index, int step, int total) : batch(batch), index(index), step(step), total(total) {
        member = batch.members[min(index, total - 1) / batch.heads];
        ask();
    }

    // requests the rows of the next pair and the sequence of the one after it; beyond the last pair, those of the last
    __device__ __forceinline__ void ask() {
        begin_q = batch.cu_q[member], end_q = batch.cu_q[member + 1];
        begin_k = batch.cu_k[member], end_k = batch.cu_k[member + 1];
        member = batch.members[min(index + step, total - 1) / batch.heads];
    }

    // the next pair; requests those behind it
    __device__ __forceinline__ Item take() {
        Item item;
        item.head = index % batch.heads;
        Batch::rows_of(begin_q, end_q, batch.total_q, batch.max_q, item.q_first, item.q_len);
        Batch::rows_of(begin_k, end_k, batch.total_k, batch.max_k, item.k_first, item.k_len);
        index += step;
        ask();
        return item;
    }
};

// strides in numbers
struct Strides {
    long long row, head;

    __device__ __forceinline__ long long at(int first, int head_index) const { return first * row + head_index * head; }
};

// Starts the copies of a tile's first rows; those up to the next multiple of 16 are zeros: what lies behind the last row belongs to another
// sequence and may be NaN.
__device__ __forceinline__ void copy_tile(u32 tile, const Number* from, Strides strides, int first, int head, int rows) {
    from += strides.at(first, head);
    int number = (rows + 15) / 16 * 16 * CHUNKS;
    for (int i = threadIdx.x; i < number; i += THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        bool inside = row < rows;
        copy_16(chunk_at(tile, row, chunk), inside ? from + row * strides.row + chunk * 8 : from, inside);
    }
}

// Fragments of 16 x 16 numbers from rows row .. row + 15 and columns 16 step .. of a tile; lane 8m + i addresses row i of matrix m.
//   left:  A of a product, rows down; of its transpose with load_transposed
//   right: B of a product, rows are its columns
__device__ __forceinline__ u32 left_at(u32 tile, int row, int step, int lane) {
    return chunk_at(tile, row + lane / 8 % 2 * 8 + lane % 8, 2 * step + lane / 16);
}
__device__ __forceinline__ u32 right_at(u32 tile, int row, int step, int lane) {
    return chunk_at(tile, row + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2);
}
