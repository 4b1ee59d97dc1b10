// Matrix instructions of one warp, and loads of their operands. g = lane / 4, t = lane % 4.
//
// A step takes 32 bytes of each row of A and B: 16 numbers of 16 bits, or 8 of TF32; the sparse products take 32 bytes of kept
// numbers of A, twice as many logical ones of B. Layouts: PTX ISA, "Matrix fragments for mma" and "for sparse mma".
#pragma once
#include "copy.cuh"

// four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8 and gets word t of row g of each
__device__ __forceinline__ void load_matrices(uint32 (&m)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

// the same, 16-bit elements transposed
__device__ __forceinline__ void load_transposed(uint32 (&m)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

#if DTYPE == 0
#define DENSE_PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#define SPARSE_PRODUCT "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32"
#elif DTYPE == 1
#define DENSE_PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#define SPARSE_PRODUCT "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32"
#else
#define DENSE_PRODUCT "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
#define SPARSE_PRODUCT "mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.tf32.tf32.f32"
#endif

// c [16, 8] += a [16, 32 bytes] b [32 bytes, 8]; c holds (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
__device__ __forceinline__ void multiply(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile(DENSE_PRODUCT " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c [16, 8] += a [16, 64 logical bytes] b [64 bytes, 8]; SELECTOR s: lanes with t / 2 = s hold the metadata
template <int SELECTOR>
__device__ __forceinline__ void multiply_sparse(float (&c)[4], const uint32 (&a)[4], const uint32 (&b)[4], uint32 metadata) {
    asm volatile(SPARSE_PRODUCT " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
                   "n"(SELECTOR));
}
