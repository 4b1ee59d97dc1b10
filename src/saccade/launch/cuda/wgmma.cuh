// Matrix products of a warpgroup (sm_90a): dense, and sparse with the sparse operand in registers.
//
// m64nNk16: rows 16w .. 16w + 15 belong to warp w; lane 4g + t holds d[4i + 2h + b] = D[g + 8h][8i + 2t + b].
// Operands in shared memory are rows of 128 bytes, swizzled (swizzle.cuh), 8 rows every 1024 bytes.
//
// Three things make ptxas silently wait after each product (look for WARPGROUP.DEPBAR after every HGMMA): a product under a
// condition inside a loop; a first product that takes its accumulators as inputs, so it has only outputs and scale-d 0; accumulators
// that other instructions write while products run.
#pragma once
#include "numbers.cuh"
#include "swizzle.cuh"

// descriptor of an operand that begins at `address`; `leading`: bytes between column blocks where it has more than one. PITCH: bytes of a
// row; rows of 64 bytes (32 columns) are swizzled by 64 bytes, 8 rows every 512
template <int PITCH = 128>
__device__ __forceinline__ u64 operand(u32 address, u32 leading = 16) {
    static_assert(PITCH == 128 || PITCH == 64, "rows of an operand are 128 or 64 bytes");
    return u64((address & 0x3FFFF) >> 4) | u64(leading >> 4) << 16 | u64(8 * PITCH >> 4) << 32 | (PITCH == 128 ? 1ull : 2ull) << 62;
}

// the descriptor of an operand that begins `bytes` further
__device__ __forceinline__ u64 advance(u64 descriptor, u32 bytes) {
    return descriptor + (bytes >> 4);
}

__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most GROUPS committed groups of products are still running.
template <int GROUPS>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// clang-format off
#define LIST_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LIST_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST_32 \
    LIST_16 \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_36 LIST_32 ", %32, %33, %34, %35"
#define LIST_48 \
    LIST_36 \
    ", %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define LIST_64 \
    LIST_48 \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_96 \
    LIST_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LIST_128 \
    LIST_96 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SET_4(d, i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define SET_NEXT_16(d, i) SET_4(d, i), SET_4(d, i + 4), SET_4(d, i + 8), SET_4(d, i + 12)
#define SET_8(d) SET_4(d, 0), SET_4(d, 4)
#define SET_16(d) SET_NEXT_16(d, 0)
#define SET_32(d) SET_NEXT_16(d, 0), SET_NEXT_16(d, 16)
#define SET_36(d) SET_32(d), SET_4(d, 32)
#define SET_48(d) SET_NEXT_16(d, 0), SET_NEXT_16(d, 16), SET_NEXT_16(d, 32)
#define SET_64(d) SET_NEXT_16(d, 0), SET_NEXT_16(d, 16), SET_NEXT_16(d, 32), SET_NEXT_16(d, 48)
#define ADD_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ADD_NEXT_16(d, i) ADD_4(d, i), ADD_4(d, i + 4), ADD_4(d, i + 8), ADD_4(d, i + 12)
#define ADD_8(d) ADD_4(d, 0), ADD_4(d, 4)
#define ADD_16(d) ADD_NEXT_16(d, 0)
#define ADD_32(d) ADD_NEXT_16(d, 0), ADD_NEXT_16(d, 16)
#define ADD_36(d) ADD_32(d), ADD_4(d, 32)
#define ADD_48(d) ADD_NEXT_16(d, 0), ADD_NEXT_16(d, 16), ADD_NEXT_16(d, 32)
#define ADD_64(d) ADD_NEXT_16(d, 0), ADD_NEXT_16(d, 16), ADD_NEXT_16(d, 32), ADD_NEXT_16(d, 48)
#define ADD_96(d) ADD_NEXT_16(d, 0), ADD_NEXT_16(d, 16), ADD_NEXT_16(d, 32), ADD_NEXT_16(d, 48), ADD_NEXT_16(d, 64), ADD_NEXT_16(d, 80)
#define ADD_128(d) ADD_NEXT_16(d, 0), ADD_NEXT_16(d, 16), ADD_NEXT_16(d, 32), ADD_NEXT_16(d, 48), ADD_NEXT_16(d, 64), ADD_NEXT_16(d, 80), ADD_NEXT_16(d, 96), ADD_NEXT_16(d, 112)
// clang-format on
// The instruction: D = A B (`set`) or D += A B over 16. A and B both lie in shared memory, or A in registers. ROWS_A, ROWS_B: 1 for an operand
// whose rows are along the sum, 0 for one whose columns are.
template <int N>
struct Instruction;

#define DENSE(N, R) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" LIST_##R "}, "
#define SCALE_0 "{ .reg .pred add; setp.ne.b32 add, 0, 0;\n"
#define DEFINE_INSTRUCTION(N, R, P0, P1, P2, P3, P4, P5)                                                                          \
    template <>                                                                                                                   \
    struct Instruction<N> {                                                                                                       \
        template <int ROWS_A, int ROWS_B>                                                                                         \
        static __device__ __forceinline__ void set(float (&d)[R], u64 a, u64 b) {                                                 \
            asm volatile(SCALE_0 DENSE(N, R) P0 ", " P1 ", add, 1, 1, " P2 ", " P3 "; }"                                          \
                         : SET_##R(d)                                                                                             \
                         : "l"(a), "l"(b), "n"(ROWS_A), "n"(ROWS_B));                                                             \
        }                                                                                                                         \
        template <int ROWS_A, int ROWS_B>                                                                                         \
        static __device__ __forceinline__ void add(float (&d)[R], u64 a, u64 b) {                                                 \
            asm volatile(DENSE(N, R) P0 ", " P1 ", 1, 1, 1, " P2 ", " P3 ";"                                                      \
                         : ADD_##R(d)                                                                                             \
                         : "l"(a), "l"(b), "n"(ROWS_A), "n"(ROWS_B));                                                             \
        }                                                                                                                         \
        template <int ROWS_B>                                                                                                     \
        static __device__ __forceinline__ void set(float (&d)[R], const u32* a, u64 b) {                                          \
            asm volatile(SCALE_0 DENSE(N, R) "{" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", add, 1, 1, " P5 "; }"                     \
                         : SET_##R(d)                                                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ROWS_B));                                      \
        }                                                                                                                         \
        template <int ROWS_B>                                                                                                     \
        static __device__ __forceinline__ void add(float (&d)[R], const u32* a, u64 b) {                                          \
            asm volatile(DENSE(N, R) "{" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", 1, 1, 1, " P5 ";"                                 \
                         : ADD_##R(d)                                                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ROWS_B));                                      \
        }                                                                                                                         \
    }

DEFINE_INSTRUCTION(16, 8, "%8", "%9", "%10", "%11", "%12", "%13");
DEFINE_INSTRUCTION(32, 16, "%16", "%17", "%18", "%19", "%20", "%21");
DEFINE_INSTRUCTION(64, 32, "%32", "%33", "%34", "%35", "%36", "%37");
DEFINE_INSTRUCTION(72, 36, "%36", "%37", "%38", "%39", "%40", "%41");
DEFINE_INSTRUCTION(96, 48, "%48", "%49", "%50", "%51", "%52", "%53");
DEFINE_INSTRUCTION(128, 64, "%64", "%65", "%66", "%67", "%68", "%69");

// D is 64 x N
template <int N>
struct Products {
    typedef float Sums[N / 2];

    // Q K^T: both operands have their columns along the sum; A lies in shared memory or in registers
    static __device__ __forceinline__ void set(Sums& d, u64 a, u64 b) { Instruction<N>::template set<0, 0>(d, a, b); }
    static __device__ __forceinline__ void add(Sums& d, u64 a, u64 b) { Instruction<N>::template add<0, 0>(d, a, b); }
    static __device__ __forceinline__ void set(Sums& d, const u32* a, u64 b) { Instruction<N>::template set<0>(d, a, b); }
    static __device__ __forceinline__ void add(Sums& d, const u32* a, u64 b) { Instruction<N>::template add<0>(d, a, b); }

    // P V: B has its rows along the sum; A lies in shared memory or in registers
    static __device__ __forceinline__ void set_rows(Sums& d, u64 a, u64 b) { Instruction<N>::template set<0, 1>(d, a, b); }
    static __device__ __forceinline__ void add_rows(Sums& d, u64 a, u64 b) { Instruction<N>::template add<0, 1>(d, a, b); }
    static __device__ __forceinline__ void set_rows(Sums& d, const u32* a, u64 b) { Instruction<N>::template set<1>(d, a, b); }
    static __device__ __forceinline__ void add_rows(Sums& d, const u32* a, u64 b) { Instruction<N>::template add<1>(d, a, b); }

    // P^T dO: both have their rows along the sum
    static __device__ __forceinline__ void set_transposed(Sums& d, u64 a, u64 b) { Instruction<N>::template set<1, 1>(d, a, b); }
    static __device__ __forceinline__ void add_transposed(Sums& d, u64 a, u64 b) { Instruction<N>::template add<1, 1>(d, a, b); }
};

// column sums: D = A^T 1 and D += A^T 1 over 16, eight equal columns; b: 8 rows of ones
__device__ __forceinline__ void set_sums(float (&d)[4], u64 a, u64 b) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE " {%0, %1, %2, %3}, %4, %5, add, 1, 1, 1, 0; }"
                 : SET_4(d, 0)
                 : "l"(a), "l"(b));
}
__device__ __forceinline__ void add_sums(float (&d)[4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE " {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 1, 0;"
                 : ADD_4(d, 0)
                 : "l"(a), "l"(b));
}

template <int N>
struct SparseProducts;

#define DEFINE_SPARSE(N, R, P0, P1, P2, P3, P4, P5)                                                                              \
    template <>                                                                                                                  \
    struct SparseProducts<N> {                                                                                                   \
        static __device__ __forceinline__ void add(float (&d)[R], const u32* a, u64 b, u32 metadata) {                           \
            asm volatile("wgmma.mma_async.sp.sync.aligned.m64n" #N "k32.f32." TYPE "." TYPE " {" LIST_##R "}, {" P0 ", " P1      \
                         ", " P2 ", " P3 "}, " P4 ", " P5 ", 0, 1, 1, 1, 1;"                                                     \
                         : ADD_##R(d)                                                                                            \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(metadata));                                   \
        }                                                                                                                        \
    }

DEFINE_SPARSE(64, 32, "%32", "%33", "%34", "%35", "%36", "%37");
DEFINE_SPARSE(128, 64, "%64", "%65", "%66", "%67", "%68", "%69");
DEFINE_SPARSE(192, 96, "%96", "%97", "%98", "%99", "%100", "%101");
DEFINE_SPARSE(256, 128, "%128", "%129", "%130", "%131", "%132", "%133");
