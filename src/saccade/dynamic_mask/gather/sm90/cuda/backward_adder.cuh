// Adds dV, or dK and dscores, to their tensors; see backward_sm90.cu.
#pragma once
#include "backward_shared.cuh"

// The warp that adds up dV (HALF 0), or dK and dscores (1).
template <int HALF>
struct Adder {
    const Given& given;
    GatherShared shared;

    __device__ __forceinline__ void run() {
        int parity = 0;
        for (int index = blockIdx.x; index < given.total; index += gridDim.x) {
            int count = given.counts[QueryBlock(index, given.owners, given.blocks).list];
            for (int first = 0; first < count; first += BLOCK_N, parity ^= 1) add_tile(parity);
        }
        additions_end();
    }

    __device__ __forceinline__ void add_tile(int parity) const {
#pragma unroll 1
        for (int warp = 4 * HALF; warp < 4 * HALF + 4; warp++) {
            barrier_wait(shared.staged(warp), parity);
            add_rows(shared.area(warp));
            additions_commit();
        }
        give_back<3>();
        give_back<2>();
        give_back<1>();
        give_back<0>();
    }

    __device__ __forceinline__ void add_rows(u32 area) const {
        int lane = threadIdx.x % 32;
        u32 behind = area + lane % 16 * LINE_BYTES + 4 * HEAD_DIM;
        u64 to = load_address(behind);
#pragma unroll
        for (int row = 0; row < 16; row++) add_row(__shfl_sync(~0u, to, row), area + row * LINE_BYTES);
        if (HALF && HAS_SCORES && lane < 16 && to != 0)
            atomicAdd(given.dscores + (reinterpret_cast<float*>(to) - given.dkey) / HEAD_DIM, __int_as_float(load_shared(behind + 8)));
    }

    // the area of the warp that LATER others have followed
    template <int LATER>
    __device__ __forceinline__ void give_back() const {
        additions_wait<LATER>();
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(shared.drained(4 * HALF + 3 - LATER));
    }
};
