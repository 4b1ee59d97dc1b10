// The ring of tiles of the dQ and of the dK, dV kernel: its barriers, which tiles come through it, and which of them a warpgroup takes.
//
// A step is the number of a tile among those that a thread block could visit, and n its number among those that the producer brings.
#pragma once
#include "backward.cuh"

// barriers, 8 bytes each, behind the tiles
enum Barrier { FULL, EMPTY = FULL + STAGES, FULL_OWN = EMPTY + STAGES, BARRIERS };

// The steps of a thread block in order; with a block mask those that it shows. All lanes of a warp call `next` together.
struct Steps {
    int total;
    int following = 0;
    // BLOCKS
    int base = -32;
    u32 window = 0;  // steps base .. base + 31 that are still to come
    u32 own;         // of these steps, those of this warpgroup

    __device__ __forceinline__ explicit Steps(int total) : total(total) {}

    // `shows(step)`: whether the block mask shows it
    template <class Shows>
    __device__ __forceinline__ int next(const Shows& shows) {
        if constexpr (!BLOCKS) return following++;
        while (window == 0) {
            base += 32;
            if (base >= total) return total;
            int step = base + lane_of();
            window = __ballot_sync(~0u, step < total && shows(step));
        }
        int step = base + __ffs(window) - 1;
        window &= window - 1;
        return step;
    }

    // The next step that the block mask shows to this warpgroup, `shows(step, warpgroup)`; `pass()` is called for each that it shows to the other
    // alone.
    template <class Shows, class Pass>
    __device__ __forceinline__ int next_own(const Shows& shows, int warpgroup, const Pass& pass) {
        while (true) {
            while (window == 0) {
                base += 32;
                if (base >= total) return total;
                int step = base + lane_of();
                bool mine = step < total && shows(step, warpgroup);
                window = __ballot_sync(~0u, mine || (step < total && shows(step)));
                own = __ballot_sync(~0u, mine);
            }
            int bit = __ffs(window) - 1;
            window &= window - 1;
            if (own >> bit & 1) return base + bit;
            pass();
        }
    }
};

// BLOCKS: each warp of a consumer arrives when it has finished a tile: where its warpgroup passes tiles without products, one warp could be a whole
// pass through the ring ahead of another, for which the parities are then those of another pass.
constexpr int RELEASES = BLOCKS ? 4 * WARPGROUPS : WARPGROUPS;

template <class Shared>
__device__ __forceinline__ void release(const Shared& shared, int stage) {
    if (threadIdx.x % (BLOCKS ? 32 : 128) == 0) barrier_arrive(shared.barrier(EMPTY + stage));
}

// The next step that a warpgroup of consumers sees. `n`: of the tile before, -1 ahead of the first; it is counted up by the tiles that the other
// warpgroup alone sees, which are waited for and released.
template <class Shared, class Shows>
__device__ __forceinline__ int next_tile(Steps& steps, const Shows& shows, const Shared& shared, int warpgroup, int& n) {
    int step;
    if constexpr (BLOCKS) {
        int following = n + 1;
        step = steps.next_own(shows, warpgroup, [&] {
            barrier_wait(shared.barrier(FULL + stage_of(following)), parity_of(following));
            release(shared, stage_of(following++));
        });
        n = following - 1;
    } else {
        step = steps.next(shows);
    }
    return __shfl_sync(~0u, step, 0);
}
