// Barriers of launch/cuda/warpgroup.cuh, by number. Registers have no number here.
#pragma once

inline void sync_threads(int barrier, int threads) { meet_named(barrier, threads, false); }
inline void pass_barrier(int barrier, int threads) { arrive_named(barrier, threads); }
template <int COUNT>
void take_registers() {}
template <int COUNT>
void leave_registers() {}
