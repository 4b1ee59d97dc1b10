// The memory of a block, its inputs and its rows, which all warps of backward_sm90.cu share.
#pragma once
#include "backward_instruction.cuh"
#include "gather.cuh"
#include "mma.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

static_assert(BLOCK_N == 64 && INDICES, "a warpgroup makes dV or dK of 64 keys, and adds them by their indices");
constexpr int WARPGROUPS = 2;
constexpr int PARTS = HEAD_DIM == 64 ? 2 : 1;
constexpr int PART_ROWS = 64 * WARPGROUPS;
constexpr int ROWS = PARTS * PART_ROWS;
constexpr int OWN_BYTES = 64 * HEAD_DIM * 2;      // Q or dO of one warpgroup
constexpr int PAIR_BYTES = PART_ROWS * 128;       // P or dS of a part and a tile
constexpr int LINE_BYTES = 4 * HEAD_DIM + 32;     // a row, its address, its sum; four rows of a store then lie in different banks
constexpr int AREA_BYTES = 16 * LINE_BYTES;       // of a warp
constexpr bool IN_VALUES = PARTS == 1;            // dS takes the place of V, which is not read after dP
// At D = 64 the product for dK also gives the sums of dS: the ones are its second column block, behind Q. At D = 128 Q itself has two column blocks, and
// the ones do not lie at their stride.
constexpr bool SUMS_INSIDE = HAS_SCORES && HEAD_DIM == 64;
constexpr int ONES_BYTES = HEAD_DIM == 64 ? 2048 : 1024;
// together what 384 threads are launched with, 168 each
constexpr int PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = (3 * 168 - PRODUCER_REGISTERS) / 2;
enum NamedBarrier { ALL = 1, OF_WARPGROUP };      // + HALF; 0 is __syncthreads
constexpr int ACROSS = HEAD_DIM / 8;              // threads along a row of Q
constexpr int LOADS = PARTS * ACROSS / 2;         // rows of a thread
constexpr float FAR = 1024.0f;                    // an lse beyond this has lost more than 3e-5 of the logarithm of the sum
// without key scores a product beyond this may exceed its rounded maximum by more powers of two than a weight in half has
constexpr float TOO_FAR = 268435456.0f;

// Addresses in shared memory: the base is the only one in a register, the others are that plus constants.
struct GatherShared {
    u32 base;

    __device__ __forceinline__ explicit GatherShared(const unsigned char* memory) : base(align_operands(shared_address(memory))) {}
    constexpr __device__ __forceinline__ explicit GatherShared(u32 base) : base(base) {}
    // rows 64 i and on of a block
    constexpr __device__ __forceinline__ u32 query(int i) const { return base + i * OWN_BYTES; }
    constexpr __device__ __forceinline__ u32 dout(int i) const { return query(ROWS / 64 + i); }
    constexpr __device__ __forceinline__ u32 probs(int part) const { return dout(ROWS / 64) + part * (IN_VALUES ? 1 : 2) * PAIR_BYTES; }
    constexpr __device__ __forceinline__ u32 dscores(int part, int stage) const { return IN_VALUES ? ring().values(stage) : probs(part) + PAIR_BYTES; }
    constexpr __device__ __forceinline__ u32 ones() const { return probs(PARTS); }
    constexpr __device__ __forceinline__ Ring ring() const { return Ring{ones() + ONES_BYTES}; }
    constexpr __device__ __forceinline__ u32 area(int warp) const { return ring().base + Ring::BYTES + warp * AREA_BYTES; }
    constexpr __device__ __forceinline__ u32 delta(int row) const { return area(4 * WARPGROUPS) + 4 * row; }
    // all products up to those that read the last P and dS of a part, at D = 128 those of the tile in hand too, are done, in every warp
    constexpr __device__ __forceinline__ u32 multiplied() const { return delta(ROWS); }
    // an area holds rows to be added; its rows have been read
    constexpr __device__ __forceinline__ u32 staged(int warp) const { return multiplied() + 8 + 16 * warp; }
    constexpr __device__ __forceinline__ u32 drained(int warp) const { return staged(warp) + 8; }
};
static_assert(GatherShared(0u).staged(4 * WARPGROUPS) + EIGHT_ROWS <= SHARED_BYTES, "the launch asks for too little shared memory");

struct Given {
    const Number *query, *dout, *out;
    const float *lse, *dlse;  // dlse: null if there is none
    const int *counts, *wholes;
    Number* dquery;
    float *dkey, *dvalue, *dscores;
    long long query_batch, query_head, query_row, dout_batch, dout_head, dout_row, out_batch, out_head, out_row;
    long long dquery_batch, dquery_head, dquery_row;
    int kv_heads, group, group_shift, q_len, kv_len, blocks, owners, total;  // total: blocks of all owners
    float exponent, scale;  // exponent: scale * log2(e)
};

__device__ __forceinline__ float dot(const uint4& x, const uint4& y) {
    float sum = 0.0f;
    const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 a = floats_of(xs[i]), b = floats_of(ys[i]);
        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
    }
    return sum;
}

// two numbers of a register times a factor
__device__ __forceinline__ u32 times(u32 pair, float factor) {
    float2 x = floats_of(pair);
    return pack(x.x * factor, x.y * factor);
}

// how far an lse is from 0; a row that sees no key has lost nothing
__device__ __forceinline__ float distance(float lse) { return lse == MINUS_INFINITY ? 0.0f : fabsf(lse); }

// a row of a block: false for one that is none
__device__ __forceinline__ bool locate_row(const Given& given, const QueryBlock& work, int row, int& query, int& head) {
    int member = row & ((1 << given.group_shift) - 1);
    query = work.block * (ROWS >> given.group_shift) + (row >> given.group_shift);
    head = work.owner % given.kv_heads * given.group + member;
    return member < given.group && query < given.q_len;
}

// where its lse stands
__device__ __forceinline__ long long place_of(const Given& given, const QueryBlock& work, int query, int head) {
    return ((long long)(work.owner / given.kv_heads) * given.kv_heads * given.group + head) * given.q_len + query;
}
