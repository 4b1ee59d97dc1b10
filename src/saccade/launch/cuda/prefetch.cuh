// Prefetches of device memory into the L2 cache.
#pragma once

// Requests the 64 bytes at an address; no thread waits for them. Not by cp.async.bulk.prefetch, whose address is the same for all lanes: ptxas
// makes a loop over the lanes of it.
__device__ __forceinline__ void prefetch_to_l2(const void* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}
