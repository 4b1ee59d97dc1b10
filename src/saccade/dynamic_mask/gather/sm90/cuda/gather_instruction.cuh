// Single instructions of the gathering warps, in inline PTX, which `tests/emulator` replaces.
#pragma once
#include "tma.cuh"

__device__ __forceinline__ bool barrier_passed(u32 barrier, int parity) {
    u32 done;
    asm volatile(
        "{ .reg .pred done; mbarrier.test_wait.parity.shared.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}
// Two functions that one lane, elected by the hardware, runs for its warp; their arguments are the same in all lanes. (A lane that a comparison
// chose went through a loop for each copy.) The first makes a barrier wait for BYTES more. The second copies rows that begin at `from`, of column
// block `column`, by a map of all memory.
template <int BYTES>
__device__ __forceinline__ void expect_more(u32 barrier) {
    asm volatile(
        "{ .reg .pred elected; elect.sync _|elected, 0xffffffff;\n"
        "@elected mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1; }" ::"r"(barrier),
        "n"(BYTES)
        : "memory");
}
__device__ __forceinline__ void copy_rows(u32 to, const TensorMap& map, u32 barrier, u64 from, int column) {
    asm volatile(
        "{ .reg .pred elected; elect.sync _|elected, 0xffffffff;\n"
        "@elected cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2]; }" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(64 * column), "r"(0), "r"(u32(from) >> 4), "r"(u32(from >> 32))
        : "memory");
}
__device__ __forceinline__ void store_note(u32 address, int value) {
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
