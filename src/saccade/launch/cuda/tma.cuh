// Tensor copies (TMA) into shared memory and out of it, and the barriers that the former complete on. sm_90.
#pragma once
#include "async_copy.cuh"
#include "numbers.cuh"

struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// makes initialised barriers visible to copies
__device__ __forceinline__ void barrier_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("fence.proxy.async.shared::cta;");
}

// Arrives once all copies of 16 bytes that this thread has started (async_copy.cuh) are there; the barrier counts such an arrival as any.
__device__ __forceinline__ void barrier_arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(u32 barrier, int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "WAIT: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra WAIT; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void copy_4d(u32 to, const TensorMap& map, u32 barrier, int x0, int x1, int x2, int x3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
        : "memory");
}

__device__ __forceinline__ void copy_5d(u32 to, const TensorMap& map, u32 barrier, int x0, int x1, int x2, int x3, int x4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
        : "memory");
}

// makes this thread's writes to shared memory visible to the copy engine and to warpgroup products
__device__ __forceinline__ void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// from shared memory; elements outside the tensor are left out
__device__ __forceinline__ void store_4d(const TensorMap& map, u32 from, int x0, int x1, int x2, int x3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(from), "r"(x0),
                 "r"(x1), "r"(x2), "r"(x3)
                 : "memory");
}

// the stores of this thread since the last commit are a group
__device__ __forceinline__ void stores_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// waits until the shared memory of every group of this thread has been read
__device__ __forceinline__ void stores_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
