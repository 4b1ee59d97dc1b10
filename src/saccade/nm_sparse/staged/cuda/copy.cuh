// Shared memory: filling it from global memory, and finding a 16-byte chunk of a tile in it.
#pragma once

typedef unsigned int uint32;
typedef long long int64;

__device__ __forceinline__ uint32 shared_address(const void* pointer) { return (uint32)__cvta_generic_to_shared(pointer); }

// 16 bytes, zeros where not `valid`: then nothing is read, so the source may lie anywhere; it must be aligned to 16 bytes
__device__ __forceinline__ void copy_async(uint32 target, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// waits until at most `PENDING` groups of this thread's copies are under way
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
