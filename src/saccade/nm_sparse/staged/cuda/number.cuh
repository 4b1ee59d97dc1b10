// Numbers as they lie in memory: bfloat16 (DTYPE 0), float16 (1), float32 rounded to TF32 where it is multiplied (2).
#pragma once
#include "convert.cuh"

#if DTYPE == 2
typedef float Number;
#define NUMBER_BYTES 4
#else
typedef unsigned short Number;
#define NUMBER_BYTES 2
#endif
#define PER_CHUNK (16 / NUMBER_BYTES)  // numbers in 16 bytes

__device__ __forceinline__ void round_operand(uint32 (&words)[4]) {
#if DTYPE == 2
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = to_tf32(words[i]);
#endif
}
