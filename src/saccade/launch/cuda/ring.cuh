// The place of the n-th tile of a thread block in a ring of STAGES places, and the parity of that pass through it. Compiled with STAGES.
#pragma once

static_assert((STAGES & (STAGES - 1)) == 0, "a place is a tile's number modulo STAGES, kept in one register");
__device__ __forceinline__ int stage_of(int n) {
    return n & (STAGES - 1);
}
__device__ __forceinline__ int parity_of(int n) {
    return n / STAGES & 1;
}
