// Single instructions of the backward for sm_90a, in inline PTX, which `tests/emulator` replaces.
#pragma once
#include "numbers.cuh"

__device__ __forceinline__ void load_shared(u32 address, float& x, float& y) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(u32 address, int& x, int& y) {
    asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(address) : "memory");
}
__device__ __forceinline__ uint4 load_chunk(u32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ int load_shared(u32 address) {
    int x;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void store_shared(u32 address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, u64 x) {
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
}
__device__ __forceinline__ u64 load_address(u32 address) {
    u64 x;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void store_shared(u32 address, const uint4& x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
// zeros unless `real`
__device__ __forceinline__ uint4 load_global(const Number* from, bool real) {
    uint4 x;
    asm volatile(
        "{ .reg .pred real; setp.ne.b32 real, %5, 0;\n"
        "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
        "@real ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
        : "l"(from), "r"(int(real)));
    return x;
}

// exp2_fast that stays between the instructions around it
__device__ __forceinline__ float exp2_here(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// `sync_threads` of warpgroup.cuh; returns whether the condition holds in any of the threads
template <int THREADS>
__device__ __forceinline__ int sync_threads_or(int barrier, bool x) {
    int any;
    asm volatile(
        "{ .reg .pred mine, any; setp.ne.s32 mine, %3, 0;\n"
        "bar.red.or.pred any, %1, %2, mine; selp.s32 %0, 1, 0, any; }"
        : "=r"(any)
        : "r"(barrier), "n"(THREADS), "r"(int(x))
        : "memory");
    return any;
}

// Adds a row of floats in shared memory to one in device memory, unless that is null. Both addresses are the same in all lanes. The elected lane,
// always the same, hands it over. Rows of one lane each would be handed over one by one in a loop of 40 clocks a turn.
__device__ __forceinline__ void add_row(u64 to, u32 from) {
    asm volatile(
        "{ .reg .pred elected, real; elect.sync _|elected, 0xffffffff;\n"
        "setp.ne.and.u64 real, %0, 0, elected;\n"
        "@real cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2; }" ::"l"(to),
        "r"(from), "n"(4 * HEAD_DIM)
        : "memory");
}
__device__ __forceinline__ void additions_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// waits until the rows of all but the last GROUPS groups of this thread have been read
template <int GROUPS>
__device__ __forceinline__ void additions_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS) : "memory");
}
// waits until all of them are in device memory
__device__ __forceinline__ void additions_end() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
