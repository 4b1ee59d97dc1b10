// Programmatic dependent launch (`CudaLaunch.dependent`): a kernel starts while the one ahead of it in the stream still runs, so that launches
// that follow each other lose neither their gap nor the time in which blocks arrive. Nothing below sm_90, where no launch is dependent.
//
// Every thread of a dependent kernel waits, also in blocks without work. A finished kernel must mean that the one ahead of it has
// finished: the next kernel waits only for this one.
#pragma once

// Waits until the kernel ahead is done and all that it wrote can be read.
__device__ __forceinline__ void wait_for_kernel_ahead() {
    if constexpr (__CUDA_ARCH__ >= 900) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel, if it is a dependent one, may start as soon as every block of this kernel has called this function. All blocks of this
// kernel have their places on multiprocessors by then, so the next kernel takes none away from them.
__device__ __forceinline__ void let_next_kernel_start() {
    if constexpr (__CUDA_ARCH__ >= 900) asm volatile("griddepcontrol.launch_dependents;");
}
