// Single instructions of dynamic_mask/gather/sm90/cuda/backward_instruction.cuh.
#pragma once
#include "numbers.cuh"

inline void load_shared(u32 address, float& x, float& y) { x = at_shared<float>(address), y = at_shared<float>(address + 4); }
inline void load_shared(u32 address, int& x, int& y) { x = at_shared<int>(address), y = at_shared<int>(address + 4); }
inline int load_shared(u32 address) { return at_shared<int>(address); }
inline uint4 load_chunk(u32 address) { return at_shared<uint4>(address); }
inline u64 load_address(u32 address) { return at_shared<u64>(address); }
inline void store_shared(u32 address, float x, float y) { at_shared<float2>(address) = {x, y}; }
inline void store_shared(u32 address, u64 x) { at_shared<u64>(address) = x; }
inline void store_shared(u32 address, const uint4& x) { at_shared<uint4>(address) = x; }
inline uint4 load_global(const Number* from, bool real) { return real ? *(const uint4*)from : make_uint4(0, 0, 0, 0); }
inline float exp2_here(float x) { return exp2_fast(x); }

template <int THREADS>
int sync_threads_or(int barrier, bool x) { return meet_named(barrier, THREADS, x); }

// the elected lane adds a row
inline void add_row(u64 to, u32 from) {
    meet("elect", [](Warp&) {});
    if (lane_id() == 0 && to)
        for (int i = 0; i < HEAD_DIM; i++) ((float*)to)[i] += at_shared<float>(from + 4 * i);
}
inline void additions_commit() {}
template <int GROUPS>
void additions_wait() {}
inline void additions_end() {}
