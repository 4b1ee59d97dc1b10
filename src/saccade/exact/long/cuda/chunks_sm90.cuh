// The parts that forward and backward of long sequences share on sm_90a: tiles in shared memory, the rows of a sequence, the batch.
//
// A warpgroup computes on 64 rows of an accumulator, 16 a warp. Lane 4g + t of a warp holds rows g and g + 8, written [h] for h = 0, 1, and
// columns 8i + 2t + {0, 1} of each column group i of 8: d[4i + 2h + b]. Rounded to 16 bits, columns 16j .. 16j + 15 are four registers, which are the
// left operand of the next product.
//
// Compiled with HEAD_DIM (32, 64 or 128: D rounded up, the rest is zeros), BF16, PACKED (1: sequences lie one behind another in [T, H, D]; 0: dense
// rows [B, H, T, D]), CAUSAL (0: none; 1: key j <= query i; 2: key j <= query i + Tk - Tq of its sequence), GROUPED (1: query heads, one behind
// another, share a key head; how many is a parameter), MASK (1: a mask of pairs is given as bits), DROPOUT (1: weights are dropped) and WINDOW (1: a
// query sees no key further than `left` before its own and `right` behind it; CAUSAL is 1 or 2 then, and says which key is its own). BIAS defined as 1: a
// bias [W, H or 1, Tq, Tk] in the numbers of the query is added to the scores of dense rows, of which row b reads b % W. KEY_MASK (1: beside a bias a mask
// of keys is given, which is why MASK is 0 there) is defined with it.
#pragma once
#include "accumulator.cuh"
#include "dropout.cuh"
#include "long_instruction.cuh"
#include "mma.cuh"
#include "numbers.cuh"
#include "tma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef KEY_MASK
#define KEY_MASK 0
#endif
#include "key_mask.cuh"

// ROWS x COLUMNS numbers of 16 bits: blocks of 64 columns, or one of 32, each with its rows of 128 (64) bytes one below the other, swizzled.
template <int COLUMNS, int ROWS>
struct Tile {
    static constexpr int PITCH = COLUMNS == 32 ? 64 : 128;  // bytes of a row in a block
    static constexpr int BLOCKS = COLUMNS == 32 ? 1 : COLUMNS / 64;
    static constexpr int BLOCK_BYTES = ROWS * PITCH;
    static constexpr int BYTES = BLOCKS * BLOCK_BYTES;
    static constexpr int GROUP_BYTES = BLOCKS * 64 * PITCH;  // of 64 rows in all blocks, which one copy for each block moves
    static constexpr int CHUNKS = PITCH / 16;                // of 16 bytes, in a row of a block

    // The operand of a product along the columns: rows from `row`, a multiple of 8; columns from 16 step on. `low` is the low word of the descriptor
    // of the tile (Memory), to which offsets are added: descriptors built for each product were a third of the instructions of a loop.
    static __device__ __forceinline__ u64 columns(u32 low, int row, int step) {
        constexpr int STEPS = PITCH / 32;
        return descriptor(low + ((row * PITCH + step / STEPS * BLOCK_BYTES + step % STEPS * 32) >> 4));
    }
    // the operand of a product along the rows: from `row`, a multiple of 16, and from the column block `block` on
    static __device__ __forceinline__ u64 rows(u32 low, int row, int block = 0) {
        constexpr u32 NEXT_BLOCK = ((BLOCK_BYTES - 16) >> 4) << 16;  // in place of the 16 bytes of a tile along the columns
        return descriptor(low + NEXT_BLOCK + ((row * PITCH + block * BLOCK_BYTES) >> 4));
    }
    static __device__ __forceinline__ u64 descriptor(u32 low) {
        return (operand<PITCH>(0) & 0xffffffff00000000ull) | low;
    }
    // where a 16-byte chunk of a row lies
    static __device__ __forceinline__ u32 chunk(u32 tile, int block, int row, int chunk) {
        return tile + block * BLOCK_BYTES + row * PITCH + (chunk ^ (PITCH == 128 ? row & 7 : row >> 1 & 3)) * 16;
    }
    // this lane's address for the fragment of 16 columns `step` of the 16 rows of its warp, from row `first` on
    static __device__ __forceinline__ u32 fragment(u32 tile, int first, int step) {
        constexpr int STEPS = PITCH / 32;
        int row = first + int(threadIdx.x) / 32 % 4 * 16 + int(threadIdx.x) % 16;
        return chunk(tile, step / STEPS, row, step % STEPS * 2 + int(threadIdx.x) % 32 / 16);
    }
    // starts the copy of 64 rows; the barrier counts GROUP_BYTES
    static __device__ __forceinline__ void load(u32 tile, const TensorMap& map, u32 barrier, int group, int row, int head, int batch) {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
            copy_4d(tile + block * BLOCK_BYTES + group * 64 * PITCH, map, barrier, block * (PITCH / 2), row, head, batch);
    }
    // zeros in rows first .. end - 1, by `threads` threads of which this is number `thread`
    static __device__ __forceinline__ void clear(u32 tile, int first, int end, int thread, int threads) {
        for (int i = thread; i < (end - first) * BLOCKS * CHUNKS; i += threads) {
            u32 to = chunk(tile, i / CHUNKS % BLOCKS, first + i / CHUNKS / BLOCKS, i % CHUNKS);
            store_16(to, 0, 0, 0, 0);
        }
    }
};

// The shared memory of a block, which begins at `base`.
struct Memory {
    u32 base, first;

    __device__ __forceinline__ Memory(u32 base) : base(base), first(u32(operand(base))) {}
    // the low word of the descriptor of a tile
    __device__ __forceinline__ u32 low(u32 tile) const { return first + ((tile - base) >> 4); }
};

// Whether this is the lane that arrives for its warp. Read once, and volatile: a new read at each use would wait behind the exponentials for 130 cycles.
__device__ __forceinline__ bool arriving_lane() {
    return thread_of() % 32 == 0;
}

// one arrival for each warp, after what its lanes wrote
__device__ __forceinline__ void warp_arrives(u32 barrier, bool arriving) {
    __syncwarp();
    if (arriving) barrier_arrive(barrier);
}

__device__ __forceinline__ int warpgroup_of() {
    return __shfl_sync(~0u, int(threadIdx.x) / 128, 0);  // the same register in all lanes: branches on it do not diverge
}

__device__ __forceinline__ int between(int low, int x, int high) {
    return min(max(x, low), high);
}

// A sliding window. As with Group, a kernel without one has no such parameters.
#if WINDOW
struct Window {
    int left, right;
};
#define WINDOW_OF_CALL Window{window_left, window_right}
static_assert(CAUSAL == 1 || CAUSAL == 2, "a window is aligned with the first keys or with the last ones");
#else
struct Window {
    static constexpr int left = 0, right = 0;
};
#define WINDOW_OF_CALL Window{}
#endif

// The rows of one sequence and head. k_len: keys that exist; k_rows: rows that the gradients of keys have, more where a dense row is padded.
struct Item {
    int head, batch, q_first, q_len, k_first, k_len, k_rows, sequence;
    Window window;

    // The number that others get in place of the batch row: the draw of dropout counts sequences, and packed ones are all of batch row 0.
    __device__ __forceinline__ int told_row() const { return DROPOUT ? sequence : batch; }
    static __device__ __forceinline__ int batch_of(int told_row) { return DROPOUT && PACKED ? 0 : told_row; }

    // the last key that query 0 sees, and the first one in its window
    __device__ __forceinline__ int reach() const { return (CAUSAL == 2 ? k_len - q_len : 0) + window.right; }
    __device__ __forceinline__ int back() const { return (CAUSAL == 2 ? k_len - q_len : 0) - window.left; }
    __device__ __forceinline__ bool sees(int query, int key) const {
        return query < q_len && key < k_len && (!CAUSAL || key <= query + reach()) && (!WINDOW || key >= query + back());
    }
};

// Packed sequences with a WINDOW come in parts, so that blocks share the work evenly whatever the lengths are: the number of a sequence, and that of
// its part from bit PART_AT on. A part is a block of queries in forward, and a segment of keys in backward.
constexpr bool IN_PARTS = PACKED && WINDOW;
constexpr int PART_AT = 22;

// cu_q, cu_k: cu_seqlens; of dense rows cu_k is the lengths of their keys, or null. members, count: the sequences of this launch, if PACKED, or parts.
struct Batch {
    const int *cu_q, *cu_k, *members, *count;
    int sequences, total_q, total_k, max_q, max_k, heads;

    __device__ __forceinline__ int items() const { return (PACKED ? *count : sequences) * heads; }  // the launch fits 31 bits

    // which part of its sequence an item is
    __device__ __forceinline__ int part(int index) const { return unsigned(members[unsigned(index) / unsigned(heads)]) >> PART_AT; }

    // clamped: lengths come from the device unchecked
    __device__ __forceinline__ static void rows_of(const int* offsets, int sequence, int total, int longest, int& first, int& rows) {
        first = between(0, offsets[sequence], total);
        rows = between(0, min(offsets[sequence + 1], total) - first, longest);
    }

    __device__ __forceinline__ Item item(int index, const Window& window) const {
        Item it;
        int sequence = unsigned(index) / unsigned(heads);
        it.head = index - sequence * heads;
        if (PACKED) sequence = members[sequence];
        if (IN_PARTS) sequence &= (1 << PART_AT) - 1;
        it.sequence = sequence, it.window = window;
        if (PACKED) {
            it.batch = 0;
            rows_of(cu_q, sequence, total_q, max_q, it.q_first, it.q_len);
            rows_of(cu_k, sequence, total_k, max_k, it.k_first, it.k_len);
            it.k_rows = it.k_len;
        } else {
            it.batch = sequence;
            it.q_first = it.k_first = 0;
            it.q_len = max_q;
            it.k_len = cu_k ? between(0, cu_k[sequence], max_k) : max_k;
            it.k_rows = max_k;
        }
        return it;
    }
};

// Query heads that share a key head. A kernel that is not GROUPED has no such parameter, and its structs no such number.
#if GROUPED
struct Group {
    int size;

    __device__ __forceinline__ int members() const { return size; }
    __device__ __forceinline__ int key_head(int query_head) const { return unsigned(query_head) / unsigned(size); }
    __device__ __forceinline__ int query_head(int key_head, int member) const { return key_head * size + member; }
};
#define GROUP Group{group_size}
#else
struct Group {
    __device__ __forceinline__ static constexpr int members() { return 1; }
    __device__ __forceinline__ static constexpr int key_head(int query_head) { return query_head; }
    __device__ __forceinline__ static constexpr int query_head(int key_head, int member) { return key_head; }
};
#define GROUP Group{}
#endif

// eight numbers that one thread passes to the others, which have waited for a barrier
__device__ __forceinline__ void tell(u32 to, const int (&x)[8]) {
    store_16(to, x[0], x[1], x[2], x[3]);
    store_16(to + 16, x[4], x[5], x[6], x[7]);
}
__device__ __forceinline__ int told(u32 from, int i) {
    return __shfl_sync(~0u, load_4(from + 4 * i), 0);  // the same register in all lanes: what depends on it does not diverge
}

// A number that changes from call to call is passed as a pointer (sm90.py).
__device__ __forceinline__ long long number_of(const void* x) {
    return reinterpret_cast<long long>(x);
}

// strides in numbers
struct Strides {
    long long batch, head, row;

    __device__ __forceinline__ long long at(int batch_index, int head_index, int row_index) const {
        return batch_index * batch + head_index * head + row_index * row;
    }
};

// The pairs that a mask shows, as bits (mask_bits.cu): a word for each 64 columns of a row. Rows are queries in forward, and keys in backward, which
// forms everything transposed. As with Group a kernel without a mask has none of it.
#if MASK
struct MaskBits {
    const u64* words;
    Strides strides;

    // The bits of this lane in 64 columns, for the two rows that it holds, of which `row` is the first; those from `rows` on are not there. One
    // register for the 32 numbers of an accumulator, in the order of `shows`.
    __device__ __forceinline__ u32 of(const Item& item, int head, int row, int rows, int chunk) const {
        const u64* from = words + strides.at(item.batch, head, 0) + chunk;
        return pairs(__ldg(from + strides.row * min(row, rows - 1))) | pairs(__ldg(from + strides.row * min(row + 8, rows - 1))) << 4;
    }
    // columns 8i + 2t + {0, 1} of a row: bits 8 (i % 4) + 2 (i / 4) + {0, 1}
    static __device__ __forceinline__ u32 pairs(u64 word) {
        const int shift = own_column();
        return (u32(word) >> shift & 0x03030303u) | (u32(word >> 32) >> shift & 0x03030303u) << 2;
    }
    // whether number e = 4i + 2h + b of an accumulator is shown
    static __device__ __forceinline__ bool shows(u32 bits, int e) { return bits >> (e / 4 % 4 * 8 + e / 16 * 2 + e / 2 % 2 * 4 + e % 2) & 1; }
};
#define MASK_BITS MaskBits{mask_bits, {mask_batch, mask_head, mask_row}}
#else
struct MaskBits {
    __device__ __forceinline__ static constexpr u32 of(const Item&, int, int, int, int) { return 0; }
    __device__ __forceinline__ static constexpr bool shows(u32, int) { return true; }
};
#define MASK_BITS MaskBits{}
#endif

// A bias that rows, or rows and heads, share. windows: W. owners: the heads that it has.
#if BIAS
static_assert(!PACKED && !CAUSAL && !WINDOW && !MASK, "a bias is one of dense rows, and holds what hides keys, but for a mask of keys");
struct BiasOf {
    const TensorMap& map;
    int windows, owners;

    __device__ __forceinline__ int head_of(int head) const { return owners > 1 ? head : 0; }
    // starts the copy of 64 queries and 64 keys: 8 KB, and zeros where it has no numbers
    __device__ __forceinline__ void load(u32 tile, u32 barrier, int key, int query, int head, int batch) const {
        copy_4d(tile, map, barrier, key, query, head_of(head), unsigned(batch) % unsigned(windows));
    }
};
#define BIAS_OF_CALL BiasOf{bias_map, bias_windows, bias_owners}
#else
struct BiasOf {};
#define BIAS_OF_CALL BiasOf{}
#endif
constexpr u32 BIAS_BLOCK_BYTES = 64 * 128;  // 64 queries and 64 keys

// scale S + bias is in base e: a bias of finfo.min would overflow in base 2. Beyond this, neighbouring numbers are more than 1e30 apart, so weights are
// 0 or 1 for any factor before the exponential; 1/4 keeps the products finite.
constexpr float EXTREME = 1e37f;
__device__ __forceinline__ float factor_of(float top) {
    return fabsf(top) > EXTREME ? 0.25f : LOG2E;
}
