// mma.m8n8k4, Volta's matrix instruction: four products [8, 4] x [4, 8] at once, one for each quad-pair, which is lanes
// 4 p .. 4 p + 3 and 4 p + 16 .. 4 p + 19. With l = lane & 3 and h = lane >> 4, a lane holds
//
//   A by rows     row l + 4 h, k = 0..3        A by columns  rows 4 h .. 4 h + 3, k = l
//   B by columns  column l + 4 h, k = 0..3     B by rows     columns 4 h .. 4 h + 3, k = l
//   C element i   row (l & 1) + (i & 2) + 4 h, column (i & 4) + (l & 2) + (i & 1) in float32; row l + 4 h, column i in float16
//
// Layouts: PTX ISA, "Matrix fragments for mma.m8n8k4 with .f16".
#pragma once
#include "instruction.cuh"

enum Order { ROWS_FIRST, COLUMNS_FIRST };

// c += a b in float32
template <Order A, Order B>
__device__ __forceinline__ void multiply(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
#define M8N8K4(a, b)                                                                                             \
    asm volatile("mma.sync.aligned.m8n8k4." a "." b ".f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, " \
                 "{%0,%1,%2,%3,%4,%5,%6,%7};"                                                                    \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]) \
                 : "r"(a0), "r"(a1), "r"(b0), "r"(b1))
    if (A == ROWS_FIRST && B == COLUMNS_FIRST) M8N8K4("row", "col");
    if (A == ROWS_FIRST && B == ROWS_FIRST) M8N8K4("row", "row");
    if (A == COLUMNS_FIRST && B == ROWS_FIRST) M8N8K4("col", "row");
#undef M8N8K4
}

// the same in float16: c holds 8 halves, rounded after every four products
template <Order A, Order B>
__device__ __forceinline__ void multiply(u32 (&c)[4], u32 a0, u32 a1, u32 b0, u32 b1) {
#define M8N8K4(a, b)                                                                                                 \
    asm volatile("mma.sync.aligned.m8n8k4." a "." b ".f16.f16.f16.f16 {%0,%1,%2,%3}, {%4,%5}, {%6,%7}, {%0,%1,%2,%3};" \
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                                    \
                 : "r"(a0), "r"(a1), "r"(b0), "r"(b1))
    if (A == ROWS_FIRST && B == COLUMNS_FIRST) M8N8K4("row", "col");
    if (A == ROWS_FIRST && B == ROWS_FIRST) M8N8K4("row", "row");
    if (A == COLUMNS_FIRST && B == ROWS_FIRST) M8N8K4("col", "row");
#undef M8N8K4
}
