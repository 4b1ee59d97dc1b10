// Barriers of launch/cuda/tma.cuh in shared memory: phases that end when the last of a number of arrivals is there. No copies by the engine.
#pragma once
#include <map>

#include "async_copy.cuh"
#include "numbers.cuh"

struct TensorMap { unsigned char opaque[128]; };

struct Phases { int arrivals, left, parity; };
inline std::map<u32, Phases> phases;  // by address

inline void barrier_init(u32 barrier, int arrivals) { phases[barrier] = {arrivals, arrivals, 0}; }
inline void barrier_fence() {}
inline void barrier_arrive(u32 barrier) {
    Phases& of = phases.at(barrier);
    if (--of.left == 0) of.left = of.arrivals, of.parity ^= 1;
}
inline bool phase_is_over(u32 barrier, int parity) { return phases.at(barrier).parity != parity; }
inline void barrier_wait(u32 barrier, int parity) {
    wait_until([=] { return phase_is_over(barrier, parity); });
}
inline void fence_async() {}
