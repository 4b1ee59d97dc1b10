// Device memory that is brought to the L2 cache ahead of its use.
#pragma once

// Asks for the piece of 64 bytes at an address; nobody waits for it. Not by cp.async.bulk.prefetch, whose address is the same for all lanes: ptxas
// makes a loop over the lanes of it.
__device__ __forceinline__ void prefetch_to_l2(const void* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
