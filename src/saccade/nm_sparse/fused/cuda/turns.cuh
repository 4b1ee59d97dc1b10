// A barrier that the warps of a block need not reach together. A warp arrives early in one tile and waits in the next tile, so that two warps
// may be a tile apart, and one of them selects while the other multiplies. With __syncthreads in each tile all warps would do the same thing at the same time.
//
// The barrier is an mbarrier as sm_80 has it. A warp arrives for a turn only after it has waited for the turn before, so one barrier serves all
// turns.
#pragma once
#include "numbers.cuh"

__device__ __forceinline__ void turns_begin(u32 turns, int warps) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(turns), "r"(warps) : "memory");
}

// Arrives for a turn, once per warp, after all lanes of the warp have done what comes before the call.
__device__ __forceinline__ void turns_arrive(u32 turns) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) asm volatile("{ .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(turns) : "memory");
}

// Waits until all warps have arrived for a turn; turns are counted from 0.
__device__ __forceinline__ void turns_wait(u32 turns, int turn) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(turns),
        "r"(turn & 1)
        : "memory");
}
