// Number formats in memory: bfloat16 (DTYPE 0), float16 (1), float32 rounded to TF32 where it is multiplied (2).
#pragma once
#define BF16 (DTYPE == 0)
#define TF32 (DTYPE == 2)
#include "numbers.cuh"

typedef long long int64;

#define NUMBER_BYTES (TF32 ? 4 : 2)
#define PER_CHUNK (16 / NUMBER_BYTES)  // numbers in 16 bytes

__device__ __forceinline__ void round_operand(u32 (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (TF32) words[i] = to_tf32(__uint_as_float(words[i]));
}
