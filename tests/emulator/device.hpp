// One block at a time of a CUDA kernel on a CPU: each thread is a fiber, instructions of a warp happen when its 32 fibers have met.
// Warps run one after the other, each as far as the next barrier of the block, in an order that changes: where a barrier is missing,
// one warp has gone ahead and another lags behind.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct Index { int x, y, z; };
inline Index threadIdx, blockIdx, gridDim;
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

constexpr size_t SHARED = 232448, STACK = 1 << 17;
alignas(1024) inline unsigned char shared_memory[SHARED];
inline size_t __cvta_generic_to_shared(const void* p) { return (const unsigned char*)p - shared_memory; }

struct Copy { unsigned target; const void* source; bool valid; };
struct Warp { int arrived = 0, generation = 0; const char* what[32]; unsigned in[32][16], out[32][8]; };
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
    int waits = -1;  // generation of the barrier that it stands at
    std::function<bool()> until;  // what it waits for besides
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
};
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline ucontext_t scheduler;
inline int current, block_arrived, block_generation, steps, rounds;
inline bool block_any[2];  // of this generation and the next
inline std::function<void()> body;

[[noreturn]] inline void fail(const char* why) { std::fprintf(stderr, "emulator: %s, thread %d of block %d %d\n", why, current, blockIdx.x, blockIdx.y); std::abort(); }
inline void yield() { swapcontext(&fibers[current].context, &scheduler); }
inline void wait_until(std::function<bool()> over) {
    if (over()) return;
    fibers[current].until = over;
    yield();
}
inline int lane_id() { return current & 31; }
inline Warp& my_warp() { return warps[current / 32]; }

// all 32 lanes arrive with the same instruction, the last one computes
template <class F>
void meet(const char* what, F compute) {
    Warp& warp = my_warp();
    const int generation = warp.generation;
    warp.what[lane_id()] = what;
    if (++warp.arrived == 32) {
        for (auto other : warp.what) if (other != what && std::strcmp(other, what)) fail("lanes of a warp meet in different instructions");
        compute(warp);
        warp.arrived = 0, warp.generation++;
    } else {  // not by asking again and again: a lane may wait for other warps in the meantime
        wait_until([&warp, generation] { return warp.generation != generation; });
    }
}

inline int __syncthreads_or(int x) {
    const int generation = block_generation;
    block_any[generation & 1] |= x != 0;
    if (++block_arrived == (int)fibers.size()) block_any[~generation & 1] = false, block_arrived = 0, block_generation++;
    else {
        fibers[current].waits = generation;
        while (block_generation == generation) yield();
    }
    return block_any[generation & 1];
}
inline void __syncthreads() { __syncthreads_or(0); }

template <class T>
T __shfl_xor_sync(unsigned, T x, int lanes) {
    Warp& warp = my_warp();
    warp.in[lane_id()][0] = bit_copy<unsigned>(x);
    meet("shfl", [&](Warp& w) { for (int l = 0; l < 32; l++) w.out[l][0] = w.in[l ^ lanes][0]; });
    return bit_copy<T>(warp.out[lane_id()][0]);
}

inline unsigned __ballot_sync(unsigned, bool x) {
    Warp& warp = my_warp();
    warp.in[lane_id()][0] = x;
    meet("ballot", [&](Warp& w) {
        unsigned all = 0;
        for (int l = 0; l < 32; l++) all |= w.in[l][0] << l;
        for (int l = 0; l < 32; l++) w.out[l][0] = all;
    });
    return warp.out[lane_id()][0];
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == ~0u; }
inline void __syncwarp() { meet("syncwarp", [](Warp&) {}); }
template <class T>
T __shfl_sync(unsigned, T x, int from) {
    static_assert(sizeof x <= 8);
    Warp& warp = my_warp();
    unsigned* in = warp.in[lane_id()];
    std::memcpy(in, &x, sizeof x), in[2] = from & 31;  // lanes may each name another
    meet("shfl", [](Warp& w) { for (int l = 0; l < 32; l++) std::memcpy(w.out[l], w.in[w.in[l][2]], 8); });
    std::memcpy(&x, warp.out[lane_id()], sizeof x);
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
inline int __popc(unsigned x) { return __builtin_popcount(x); }

// A barrier of some of a block's threads, by its number: any(x) of them.
struct NamedState { int arrived = 0, generation = 0; bool any[2] = {}; };
inline NamedState named_barriers[16];
inline bool meet_named(int number, int threads, bool x) {
    NamedState& barrier = named_barriers[number];
    const int generation = barrier.generation;
    barrier.any[generation & 1] |= x;
    if (++barrier.arrived == threads) barrier.any[~generation & 1] = false, barrier.arrived = 0, barrier.generation++;
    else wait_until([&barrier, generation] { return barrier.generation != generation; });
    return barrier.any[generation & 1];
}

template <class T>
T& at_shared(unsigned address) {
    if (address % sizeof(T) || address + sizeof(T) > SHARED) fail("an address in shared memory is not aligned, or out of bounds");
    return *(T*)(shared_memory + address);
}

inline void enter() {
    body();
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}

// runs a warp until all its threads are done or stand at a barrier of the block; returns how many got done
inline int run_warp(int warp) {
    int finished = 0;
    for (bool moved = true; moved;) {
        moved = false;
        for (current = 32 * warp; current < 32 * warp + 32; current++) {
            Fiber& fiber = fibers[current];
            if (fiber.done || fiber.waits == block_generation || (fiber.until && !fiber.until())) continue;
            fiber.until = nullptr;
            threadIdx = {current, 0, 0};
            swapcontext(&scheduler, &fiber.context);
            moved = true, steps++, finished += fiber.done;
        }
    }
    return finished;
}

inline void run_block(int threads) {
    std::memset(shared_memory, 0xff, SHARED);
    fibers = std::vector<Fiber>(threads);
    warps = std::vector<Warp>(threads / 32);
    block_arrived = 0;
    block_any[0] = block_any[1] = false;
    for (auto& fiber : fibers) {
        fiber.stack.reset(new char[STACK]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = STACK, fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, enter, 0);
    }
    std::vector<int> order(threads / 32);
    std::iota(order.begin(), order.end(), 0);
    std::minstd_rand random(blockIdx.x + 1);
    for (int left = threads; left > 0; std::shuffle(order.begin(), order.end(), random)) {
        steps = 0, rounds++;
        for (int warp : order) left -= run_warp(warp);
        if (!steps) fail("a barrier that other threads never reach");
    }
}

template <class... A, size_t... I>
void run_grid(void (*kernel)(A...), int grid_x, int grid_y, int threads, void** arguments, std::index_sequence<I...>) {
    body = [=] { kernel(*(A*)arguments[I]...); };
    for (int y = 0; y < grid_y; y++)
        for (int x = 0; x < grid_x; x++) {
            blockIdx = {x, y, 0}, gridDim = {grid_x, grid_y, 1};
            run_block(threads);
        }
}
template <class... A>
void run_kernel(void (*kernel)(A...), int grid_x, int grid_y, int threads, void** arguments) {
    run_grid(kernel, grid_x, grid_y, threads, arguments, std::index_sequence_for<A...>{});
}
template <class... A>
void sizes_of(void (*)(A...), int* sizes) { ((*sizes++ = sizeof(A)), ...); }
