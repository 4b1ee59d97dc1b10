// Matrix products of a warp (sm_80 and later), dense and sparse; 8 x 8 matrices of 16-bit numbers between registers and shared memory.
//
// Lane 4g + t. Product of 16 x K by K x 8: d[2h + b] = D[g + 8h][2t + b]. With 16 bits:
//   A, 16 x 16:   a[0..3] = columns 2t, 2t + 1 of row g; of row g + 8; columns 2t + 8, 2t + 9 of row g; of row g + 8
//   B, K x 8:     b[r] = rows 8r + 2t, 8r + 2t + 1 of column g
//   sparse A, 16 x 32, two of each four columns: a[0..3] = the kept of columns 4t .. 4t + 3 of row g; of row g + 8; of columns
//   16 + 4t .. of row g; of row g + 8. Its metadata: nm_sparse/fused/cuda/metadata.cuh.
// With TF32:
//   A, 16 x 8:    a[0..3] = column t of row g; of row g + 8; column t + 4 of row g; of row g + 8
//   B, K x 8:     b[r] = row 4r + t of column g
//   sparse A, 16 x 16, one of each two columns: a[0..3] = the kept of columns 2t, 2t + 1 of row g; of row g + 8; of columns 8 + 2t ..
//   of row g; of row g + 8
//
// Layouts: PTX ISA, "Matrix fragments for mma" and "for sparse mma". Compiled with TF32, BF16; ANY_ORDER defined: the two kept of four, and their
// codes, may be in any order.
#pragma once
#include "numbers.cuh"

#if TF32
#define DENSE_PRODUCT "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
#define SPARSE_PRODUCT "mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.tf32.tf32.f32"
#else
#define DENSE_PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32"
#ifdef ANY_ORDER
#define SPARSE_PRODUCT "mma.sp.sync.aligned.m16n8k32.row.col.f32." TYPE "." TYPE ".f32"
#else
#define SPARSE_PRODUCT "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." TYPE "." TYPE ".f32"
#endif
#endif

__device__ __forceinline__ void multiply(float* d, const u32* a, u32 b0, u32 b1) {
    asm volatile(DENSE_PRODUCT " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// SELECTOR: which two lanes of four the metadata is taken from
template <int SELECTOR = 0>
__device__ __forceinline__ void multiply_sparse(float* d, const u32* a, const u32* b, u32 metadata) {
    asm volatile(SPARSE_PRODUCT " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata), "n"(SELECTOR));
}

// four 8 x 8 matrices, lane l gives the address of row l % 8 of matrix l / 8; b[m]: row g, columns 2t, 2t + 1 of matrix m
__device__ __forceinline__ void load_matrices(u32* b, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address)
                 : "memory");
}

// transposed: b[m]: rows 2t, 2t + 1, column g
__device__ __forceinline__ void load_transposed(u32* b, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address)
                 : "memory");
}

// the reverse, a store: lane l gives the address of row l % 8 of matrix l / 8 (sm_90)
__device__ __forceinline__ void store_matrices(u32 address, const u32* x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// transposed: lane l gives the address of column l % 8 of matrix l / 8
__device__ __forceinline__ void store_transposed(u32 address, const u32* x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}
