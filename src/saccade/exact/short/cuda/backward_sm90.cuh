// The parts that the three forms of backward share besides rounded weights (weights_sm90.cuh): their tensors, and the loads of a tile's rows.
//
//   backward_sm90.cu             four tiles of a problem lie in shared memory, and the results take their places
//   backward_turns_sm90.cu       three tiles, and K takes V's place (64 x 256)
//   backward_streamed_sm90.cu    Q and K lie there, and V and dO pass by in pieces (128 x 256)
#pragma once
#include "weights_sm90.cuh"

// the tensors that a block reads
struct Maps {
    const TensorMap &query, &key, &value, &dout;
};

// the tensor maps that every form is launched with, in the order of its launch (sm90.py)
#define BACKWARD_MAPS                                                                                                                    \
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map, \
        const __grid_constant__ TensorMap dout_map, const __grid_constant__ TensorMap dquery_map,                                        \
        const __grid_constant__ TensorMap dkey_map, const __grid_constant__ TensorMap dvalue_map
// and the rest of its arguments; lse and dlse [B, H, Tq], problems: B * H
#define BACKWARD_NUMBERS const float *lse, const float *dlse, int problems, int heads, int q_len, int kv_len, float scale

// Starts reading one row group of a tile, which alone completes a phase of its barrier. column: the first of the head dim.
template <int COLUMNS>
__device__ __forceinline__ void load_alone(u32 tile, const TensorMap& map, u32 barrier, const Problem& problem, int group, int column = 0) {
    barrier_expect(barrier, Tile<COLUMNS>::ROW_GROUP_BYTES);
    load_rows<COLUMNS>(tile, map, barrier, problem, group, column);
}
