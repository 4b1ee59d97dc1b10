// Single instructions of the kernels for long sequences, each a function. An emulator replaces these to run the sources on a CPU.
#pragma once
#include "numbers.cuh"

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The same number, hidden from the compiler: values derived from it are computed again and not kept in registers.
__device__ __forceinline__ int apart(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Four bytes of (x, y), each named by four bits of the selector's low half. __byte_perm would clear the unused bit of each first.
__device__ __forceinline__ u32 bytes_of(u32 x, u32 y, u32 selector) {
    u32 picked;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(x), "r"(y), "r"(selector));
    return picked;
}

// shared memory, 4 or 16 bytes at an address that is a multiple of as many
__device__ __forceinline__ void store_16(u32 to, int x, int y, int z, int w) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ __forceinline__ void store_4(u32 to, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
__device__ __forceinline__ void store_4(u32 to, u32 x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ __forceinline__ int load_4(u32 from) {
    int x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}
__device__ __forceinline__ void load_16(u32 (&x)[4], u32 from) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ float4 load_floats(u32 from) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from) : "memory");
    return x;
}

// Device memory that is soon read again: the L2 cache keeps it in preference to data that is read once.
__device__ __forceinline__ u64 keep_in_cache() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ float4 load_kept(const float4* from, u64 policy) {
    float4 x;
    asm volatile("ld.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(from), "l"(policy)
                 : "memory");
    return x;
}
__device__ __forceinline__ void store_kept(float4* to, float4 x, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "l"(policy)
                 : "memory");
}
