// One block at a time of a CUDA kernel on a CPU: each thread is a fiber, instructions of a warp happen when its 32 fibers have met.
// Warps run one after the other, each as far as the next barrier of the block, in an order that changes: where a barrier is missing,
// one warp has gone ahead and another lags behind.
//
// Code that no kernel changes is in device.cpp, which is compiled once: a kernel then takes half the time to compile.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct Index { int x, y, z; };
extern Index threadIdx, blockIdx, gridDim;
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class To, class From>
To bit_copy(From x) { To y; static_assert(sizeof x == sizeof y); std::memcpy(&y, &x, sizeof y); return y; }
inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x > y ? x : y; }
inline float atomicAdd(float* at, float x) { const float before = *at; *at += x; return before; }
inline int __float_as_int(float x) { return bit_copy<int>(x); }
inline unsigned __float_as_uint(float x) { return bit_copy<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return bit_copy<float>(x); }
inline float __int_as_float(unsigned x) { return bit_copy<float>(x); }

constexpr size_t SHARED = 232448;
alignas(1024) extern unsigned char shared_memory[SHARED];
inline size_t __cvta_generic_to_shared(const void* p) { return (const unsigned char*)p - shared_memory; }

struct Warp { int arrived = 0, generation = 0; const char* what[32]; unsigned in[32][16], out[32][8]; };
extern Warp warps[32];
extern int current, rounds;
[[noreturn]] void fail(const char* why);
void wait_for(bool (*over)(void*), void* of);
template <class F>
void wait_until(F over) {  // `over` lies on the stack of the fiber that waits
    wait_for([](void* of) { return (bool)(*(F*)of)(); }, &over);
}
inline int lane_id() { return current & 31; }
inline Warp& my_warp() { return warps[current / 32]; }

bool is_last_of_warp(const char* what);
void end_meeting();
// all 32 lanes arrive with the same instruction, the last one computes
template <class F>
void meet(const char* what, F compute) {
    if (is_last_of_warp(what)) compute(my_warp()), end_meeting();
}

int __syncthreads_or(int x);
inline void __syncthreads() { __syncthreads_or(0); }

unsigned shuffle_xor_word(unsigned x, int lanes);
template <class T>
T __shfl_xor_sync(unsigned, T x, int lanes) { return bit_copy<T>(shuffle_xor_word(bit_copy<unsigned>(x), lanes)); }
unsigned __ballot_sync(unsigned, bool x);
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == ~0u; }
void __syncwarp();
void shuffle(unsigned* x, int from);  // two words
template <class T>
T __shfl_sync(unsigned, T x, int from) {
    static_assert(sizeof x <= 8);
    unsigned words[2] = {};
    std::memcpy(words, &x, sizeof x);
    shuffle(words, from);
    std::memcpy(&x, words, sizeof x);
    return x;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned((((unsigned long long)y << 32 | x) >> 8 * (selector >> 4 * i & 7)) & 255) << 8 * i;
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, int by) { return unsigned(((unsigned long long)high << 32 | low) << by >> 32); }
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned((unsigned long long)x * y >> 32); }
template <class T>
T __ldg(const T* at) { return *at; }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clzll(unsigned long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffsll(unsigned long long x) { return __builtin_ffsll(x); }
template <class T, class F>
T reduce_lanes(T x, F f) {
    for (int lanes = 1; lanes < 32; lanes *= 2) x = f(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}
inline unsigned __reduce_or_sync(unsigned, unsigned x) { return reduce_lanes(x, [](unsigned a, unsigned b) { return a | b; }); }
inline int __reduce_max_sync(unsigned, int x) { return reduce_lanes(x, [](int a, int b) { return a > b ? a : b; }); }
inline int __reduce_min_sync(unsigned, int x) { return reduce_lanes(x, [](int a, int b) { return a < b ? a : b; }); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

// Copies of 16 bytes of a thread, in groups: they happen when all but `groups` of these are waited for.
void copy_later(unsigned target, const void* source, bool valid);
void commit_copies();
void wait_for_copies(int groups);

// A barrier of some of a block's threads, by its number: any(x) of them. `arrive_named` counts a thread and lets it go on.
bool meet_named(int number, int threads, bool x);
void arrive_named(int number, int threads);

template <class T>
T& at_shared(unsigned address) {
    if (address % sizeof(T) || address + sizeof(T) > SHARED) fail("an address in shared memory is not aligned, or out of bounds");
    return *(T*)(shared_memory + address);
}

struct Body { void (*call)(void* kernel, void** arguments); void *kernel, **arguments; };
void run_grid(const Body& body, int grid_x, int grid_y, int threads);

template <class... A, size_t... I>
void call_kernel(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) { kernel(*(A*)arguments[I]...); }
template <class... A>
void run_kernel(void (*kernel)(A...), int grid_x, int grid_y, int threads, void** arguments) {
    auto call = [](void* of, void** given) { call_kernel((void (*)(A...))of, given, std::index_sequence_for<A...>{}); };
    run_grid({call, (void*)kernel, arguments}, grid_x, grid_y, threads);
}
template <class... A>
void sizes_of(void (*)(A...), int* sizes) { ((*sizes++ = sizeof(A)), ...); }
