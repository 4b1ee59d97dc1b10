// A barrier of the warps of a block that they need not reach together: a warp arrives in one tile, early, and waits in the next one, so that
// they may be a tile apart, and one selects while another multiplies. With __syncthreads in each tile all did the same at the same time.
//
// mbarrier as sm_80 has it. A warp arrives for a turn when it has waited for the turn before: one barrier serves all turns.
#pragma once
#include "numbers.cuh"

__device__ __forceinline__ void turns_begin(u32 turns, int warps) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(turns), "r"(warps) : "memory");
}

// what all lanes of the warp have done is done
__device__ __forceinline__ void turns_arrive(u32 turns) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) asm volatile("{ .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(turns) : "memory");
}

// until all warps have arrived for a turn, counted from 0
__device__ __forceinline__ void turns_wait(u32 turns, int turn) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(turns),
        "r"(turn & 1)
        : "memory");
}
