// Copies of 16 bytes from device memory into shared memory that go on while the thread does (cp.async, sm_80 and later), in groups.
#pragma once

typedef unsigned int u32;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// A copy of 16 bytes; where not `inside`, zeros are written and nothing is read. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

// A copy of 16 bytes of a row that is read completely: the L2 cache fetches 128 bytes of the row in one request.
__device__ __forceinline__ void copy_16_of_row(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The copies that this thread has started since its last commit become a group.
__device__ __forceinline__ void copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most GROUPS committed groups of this thread are still under way.
template <int GROUPS>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
