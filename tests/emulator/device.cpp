// The scheduler of device.hpp and the instructions of a warp that are the same in every kernel.
#include "device.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

Index threadIdx, blockIdx, gridDim;
alignas(1024) unsigned char shared_memory[SHARED];
Warp warps[32];
int current, rounds;

#ifdef __x86_64__
// Other stacks and the registers that a call keeps. swapcontext does the same, but asks the kernel for the mask of signals each time.
typedef void* Context;
extern "C" void switch_stacks(void** from, void* to);
asm(R"(
.text
.hidden switch_stacks
.globl switch_stacks
switch_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
static void change(Context& from, Context& to) { switch_stacks(&from, to); }
static void begin(Context& of, char* stack, size_t size, void (*enter)()) {
    void** top = (void**)((uintptr_t)(stack + size) & ~(uintptr_t)15);
    *--top = nullptr, *--top = (void*)enter;  // where a call would have left it: `enter` never returns
    for (int i = 0; i < 6; i++) *--top = nullptr;
    of = top;
}
#else
#include <ucontext.h>
typedef ucontext_t Context;
static void change(Context& from, Context& to) { swapcontext(&from, &to); }
static void begin(Context& of, char* stack, size_t size, void (*enter)()) {
    getcontext(&of);
    of.uc_stack.ss_sp = stack, of.uc_stack.ss_size = size, of.uc_link = nullptr;
    makecontext(&of, enter, 0);
}
#endif

constexpr size_t STACK = 1 << 17;
struct Copy { unsigned target; const void* source; bool valid; };
struct Fiber {
    Context context;
    bool done = false;
    int waits = -1;  // generation of the barrier that it stands at
    bool (*over)(void*) = nullptr;  // what it waits for besides
    void* of;
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
};
static std::vector<Fiber> fibers;
static std::vector<std::unique_ptr<char[]>> stacks;  // of every block in turn
static Context scheduler;
static int block_arrived, block_generation, steps;
static bool block_any[2];  // of this generation and the next
static const Body* body;

[[noreturn]] void fail(const char* why) {
    std::fprintf(stderr, "emulator: %s, thread %d of block %d %d\n", why, current, blockIdx.x, blockIdx.y);
    std::abort();
}
static void yield() { change(fibers[current].context, scheduler); }
void wait_for(bool (*over)(void*), void* of) {
    if (over(of)) return;
    fibers[current].over = over, fibers[current].of = of;
    yield();
}

bool is_last_of_warp(const char* what) {
    Warp& warp = my_warp();
    const int generation = warp.generation;
    warp.what[lane_id()] = what;
    if (++warp.arrived == 32) {
        for (auto other : warp.what) if (other != what && std::strcmp(other, what)) fail("lanes of a warp meet in different instructions");
        return true;
    }
    // not by asking again and again: a lane may wait for other warps in the meantime
    wait_until([&warp, generation] { return warp.generation != generation; });
    return false;
}
void end_meeting() { my_warp().arrived = 0, my_warp().generation++; }

int __syncthreads_or(int x) {
    const int generation = block_generation;
    block_any[generation & 1] |= x != 0;
    if (++block_arrived == (int)fibers.size()) block_any[~generation & 1] = false, block_arrived = 0, block_generation++;
    else {
        fibers[current].waits = generation;
        while (block_generation == generation) yield();
    }
    return block_any[generation & 1];
}

unsigned shuffle_xor_word(unsigned x, int lanes) {
    Warp& warp = my_warp();
    warp.in[lane_id()][0] = x;
    meet("shfl", [&](Warp& w) { for (int l = 0; l < 32; l++) w.out[l][0] = w.in[l ^ lanes][0]; });
    return warp.out[lane_id()][0];
}
unsigned __ballot_sync(unsigned, bool x) {
    Warp& warp = my_warp();
    warp.in[lane_id()][0] = x;
    meet("ballot", [&](Warp& w) {
        unsigned all = 0;
        for (int l = 0; l < 32; l++) all |= w.in[l][0] << l;
        for (int l = 0; l < 32; l++) w.out[l][0] = all;
    });
    return warp.out[lane_id()][0];
}
void __syncwarp() { meet("syncwarp", [](Warp&) {}); }
void shuffle(unsigned* x, int from) {
    Warp& warp = my_warp();
    unsigned* in = warp.in[lane_id()];
    std::memcpy(in, x, 8), in[2] = from & 31;  // lanes may each name another
    meet("shfl", [](Warp& w) { for (int l = 0; l < 32; l++) std::memcpy(w.out[l], w.in[w.in[l][2]], 8); });
    std::memcpy(x, warp.out[lane_id()], 8);
}

void copy_later(unsigned target, const void* source, bool valid) { fibers[current].open.push_back({target, source, valid}); }
void commit_copies() {
    fibers[current].groups.push_back(std::move(fibers[current].open));
    fibers[current].open.clear();
}
void wait_for_copies(int left) {
    auto& groups = fibers[current].groups;
    for (; (int)groups.size() > left; groups.pop_front())
        for (auto& copy : groups.front())
            if (copy.valid) std::memcpy(shared_memory + copy.target, copy.source, 16);
            else std::memset(shared_memory + copy.target, 0, 16);
}

struct NamedState { int arrived = 0, generation = 0; bool any[2] = {}; };
static NamedState named_barriers[16];
void arrive_named(int number, int threads) {
    NamedState& barrier = named_barriers[number];
    if (++barrier.arrived == threads) barrier.any[~barrier.generation & 1] = false, barrier.arrived = 0, barrier.generation++;
}
bool meet_named(int number, int threads, bool x) {
    NamedState& barrier = named_barriers[number];
    const int generation = barrier.generation;
    barrier.any[generation & 1] |= x;
    arrive_named(number, threads);
    if (barrier.generation == generation) wait_until([&barrier, generation] { return barrier.generation != generation; });
    return barrier.any[generation & 1];
}

static void enter() {
    body->call(body->kernel, body->arguments);
    fibers[current].done = true;
    yield();
    std::abort();
}

// runs a warp until all its threads are done or stand at a barrier of the block; returns how many got done
static int run_warp(int warp) {
    int finished = 0;
    for (bool moved = true; moved;) {
        moved = false;
        for (current = 32 * warp; current < 32 * warp + 32; current++) {
            Fiber& fiber = fibers[current];
            if (fiber.done || fiber.waits == block_generation || (fiber.over && !fiber.over(fiber.of))) continue;
            fiber.over = nullptr;
            threadIdx = {current, 0, 0};
            change(scheduler, fiber.context);
            moved = true, steps++, finished += fiber.done;
        }
    }
    return finished;
}

static void run_block(int threads) {
    std::memset(shared_memory, 0xff, SHARED);
    fibers.assign(threads, Fiber());
    std::fill_n(warps, threads / 32, Warp());
    block_arrived = 0;
    std::fill_n(named_barriers, 16, NamedState());  // the last turn that is passed may find nobody who takes it
    block_any[0] = block_any[1] = false;
    while ((int)stacks.size() < threads) stacks.emplace_back(new char[STACK]);
    for (int i = 0; i < threads; i++) begin(fibers[i].context, stacks[i].get(), STACK, enter);
    std::vector<int> order(threads / 32);
    std::iota(order.begin(), order.end(), 0);
    std::minstd_rand random(blockIdx.x + 1);
    for (int left = threads; left > 0; std::shuffle(order.begin(), order.end(), random)) {
        steps = 0, rounds++;
        for (int warp : order) left -= run_warp(warp);
        if (!steps) fail("a barrier that other threads never reach");
    }
}

void run_grid(const Body& of, int grid_x, int grid_y, int threads) {
    body = &of;
    for (int y = 0; y < grid_y; y++)
        for (int x = 0; x < grid_x; x++) {
            blockIdx = {x, y, 0}, gridDim = {grid_x, grid_y, 1};
            run_block(threads);
        }
    fibers.clear(), stacks.clear();
}
