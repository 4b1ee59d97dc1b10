// Cooperation of warps in a thread block, on sm_90: numbered barriers for some of the warps, and registers that one warpgroup cedes
// to others.
#pragma once

// So many threads meet: those that wait here, and those that have passed. Barrier 0 is __syncthreads.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts this thread at a barrier, and goes on.
__device__ __forceinline__ void pass_barrier(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A warpgroup raises its registers to COUNT a thread, or cedes those above COUNT.
template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
