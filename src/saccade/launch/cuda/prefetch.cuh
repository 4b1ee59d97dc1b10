// Device memory that is brought to the L2 cache ahead of its use. sm_90.
#pragma once

// Asks for bytes of which both the address and the number are multiples of 16; nobody waits for them.
__device__ __forceinline__ void prefetch_to_l2(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
