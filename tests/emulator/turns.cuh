// The mbarrier of nm_sparse/fused/cuda/turns.cuh: a count of arrivals, and a phase of which who waits is told the parity. A warp that has arrived lets
// others go on first: one that waits for it may be a tile ahead before it does anything more.
#pragma once
#include "numbers.cuh"

inline int turns_count, turns_arrived, turns_phase;

inline void turns_begin(u32, int warps) { turns_count = warps, turns_arrived = turns_phase = 0; }
inline void turns_arrive(u32) {
    __syncwarp();
    if (lane_id() == 0 && ++turns_arrived == turns_count) turns_arrived = 0, turns_phase++;
    wait_until([round = rounds] { return rounds != round; });
}
inline void turns_wait(u32, int turn) {
    wait_until([turn] { return (turns_phase & 1) != (turn & 1); });
}
