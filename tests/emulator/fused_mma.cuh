// Instructions of nm_sparse/cuda/mma.cuh, by those of the emulator.
#pragma once
#include "fused_numbers.cuh"
#include "selection.cuh"
#if SELECTION == SELECT_UNORDERED && !PAIRS
#define ANY_ORDER
#endif
// by other names: these take references to arrays, which is no better a match than a pointer
#define load_matrices emulated_load
#define load_transposed emulated_load_transposed
#define multiply emulated_multiply
#define multiply_sparse emulated_multiply_sparse
#include "mma.cuh"
#undef load_matrices
#undef load_transposed
#undef multiply
#undef multiply_sparse

typedef float Four[4];
typedef u32 FourWords[4];
inline void multiply(float* d, const u32* a, u32 b0, u32 b1) { emulated_multiply(*(Four*)d, *(const FourWords*)a, b0, b1); }
template <int SELECTOR = 0>
void multiply_sparse(float* d, const u32* a, const u32* b, u32 metadata) {
    emulated_multiply_sparse<SELECTOR>(*(Four*)d, *(const FourWords*)a, *(const FourWords*)b, metadata);
}
inline void load_matrices(u32* b, u32 address) { emulated_load(*(FourWords*)b, address); }
inline void load_transposed(u32* b, u32 address) { emulated_load_transposed(*(FourWords*)b, address); }
inline void copy_16(u32 to, const void* from, bool inside) { copy_async(to, from, inside); }
inline void copies_commit() { commit_copies(); }
template <int GROUPS>
void copies_wait() { wait_copies<GROUPS>(); }
