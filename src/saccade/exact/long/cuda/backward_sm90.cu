// Gradients of long sequences on sm_90a: a thread block takes one (sequence, key head) at a time, without atomics.
//
//   P = exp(scale Q K^T - lse)    dV = P^T dO    dP = dO V^T    dS = P (dP - delta)    dK = scale dS^T Q    dQ = scale dS K
//   delta = rowsum(dO O) - dlse
//
// With dropout dV = (P kept)^T dO / (1 - p) and dS = P (dP kept / (1 - p) - delta): -delta is added after dP, onto which it is summed without.
//
// Keys come in rounds of 128, queries in chunks of 64. The four warpgroups of a block:
//
//   keys 0, 1   own 64 keys of a round each and form everything transposed: S^T = K Q^T, dP^T = V dO^T; P^T and dS^T stay in registers as left
//               factors of dV and dK; dS^T goes to shared memory too
//   queries     adds up dQ = dS K, and stores unfinished sums in device memory between the rounds: each thread its own numbers, in the same order in
//               every run
//   loads       requests tiles, and computes delta in the first round
//
// shared memory:   | K, V: two rounds | Q, dO: STAGES chunks | dS^T: two chunks | O: two chunks | tiles of the bias: STAGES | -lse, -delta of each chunk |
//                  | rounds | barriers |
//
// With GROUPED heads a round meets the chunks of all query heads that share its keys, one head after another: their dK and dV add up in the registers
// where those of one head do, and unfinished dQ has a place for each head.
//
// Barriers, each with one that says that its memory was read: KEYS (a round's K and V are there, and what it is), CHUNK (a chunk's Q and dO),
// ROWS (the numbers of its rows), SCORES (dS^T is written). Source: FlashAttention-2 (Dao 2023), algorithm 2, with roles as in FlashAttention-3
// (Shah et al. 2024); traffic: Q and dO once from memory, then from L2 once a round.
//
// With a BIAS a chunk comes with its tile of 64 queries and 128 keys, which is read transposed, and with numbers of its queries that another kernel found
// (rows_of_bias.cuh): lse has lost the logarithm of the sum where scores are near finfo.min. Another kernel computes the gradient of the bias. A
// KEY_MASK is two bytes for a thread and a round, those of its two keys.
//
// With a WINDOW a block takes the keys of a segment, so that a long sequence occupies many blocks. Queries whose window begins in a segment
// are its own: it writes their dQ, and goes on to the rounds behind its end that their windows reach, of which it writes no dK and dV. A round meets only
// the chunks that see its keys, and unfinished dQ has a place for as many chunks as a window reaches at a time. A segment has SEGMENT rounds. If SEGMENT
// is 1, each block has an equal share of all rounds, one after another, and its part of a sequence is a segment.
//
// Compiled with the macros of chunks_sm90.cuh, STAGES, SEGMENT, OWN_DELTA (0: delta is given, since O does not fit beside the others), KEY_REGISTERS,
// QUERY_REGISTERS, LOAD_REGISTERS and SHARED_BYTES.
#include "backward_keys.cuh"
#include "backward_queries.cuh"
#include "backward_loads.cuh"

extern "C" __global__ void __launch_bounds__(512, 1)
    long_backward_sm90(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                       const __grid_constant__ TensorMap value_map, const __grid_constant__ TensorMap dout_map,
                       const __grid_constant__ TensorMap out_map,
#if BIAS
                       const __grid_constant__ TensorMap bias_map,
#endif
                       const int* cu_q, const int* cu_k, const int* members, const int* count,
                       const float* lse, const float* dlse, float* delta, float* parked, Number* dquery, Number* dkey, Number* dvalue,
#if BIAS
                       const float* inverse_sums,
#endif
#if MASK
                       const u64* mask_bits,
#endif
#if KEY_MASK
                       const unsigned char* key_mask,
#endif
                       const void* sequences, const void* total_q, const void* total_k, const void* max_q, const void* max_k, const void* row_batch,
                       const void* row_head, const void* parked_block,
#if DROPOUT
                       const u64* seed, u32 threshold, float inverse,
#endif
                       long long dquery_batch, long long dquery_head, long long dquery_row,
                       long long dkey_batch, long long dkey_head, long long dkey_row, long long dvalue_batch, long long dvalue_head,
                       long long dvalue_row,
#if MASK
                       long long mask_batch, long long mask_head, long long mask_row,
#endif
#if KEY_MASK
                       long long key_mask_batch, int key_mask_column,
#endif
#if GROUPED
                       int group_size,
#endif
#if WINDOW
                       int window_left, int window_right,
#endif
#if BIAS
                       int bias_windows, int bias_owners,
#endif
                       int heads, int head_dim, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const LongBackwardShared shared(shared_address(memory));
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(shared.barrier(KEYS + i), 1);
            barrier_init(shared.barrier(KEYS_READ + i), 12);
            barrier_init(shared.barrier(SCORES + i), 8);
            barrier_init(shared.barrier(SCORES_READ + i), 4);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.barrier(CHUNK + i), 1);
            barrier_init(shared.barrier(ROWS + i), 4);
            barrier_init(shared.barrier(CHUNK_READ + i), 8);
        }
        barrier_fence();
    }
    __syncthreads();
    const Gradients gradients{.dquery = dquery, .dkey = dkey, .dvalue = dvalue,
                              .dquery_strides = {dquery_batch, dquery_head, dquery_row},
                              .dkey_strides = {dkey_batch, dkey_head, dkey_row},
                              .dvalue_strides = {dvalue_batch, dvalue_head, dvalue_row},
                              .head_dim = head_dim, .scale = scale};
    const Group group = GROUP;
#if BIAS
    const NumbersOfRows numbers{lse, inverse_sums, number_of(row_batch), number_of(row_head)};
#else
    const NumbersOfRows numbers{};
#endif
    const int warpgroup = warpgroup_of();
    if (warpgroup == 3) {
        leave_registers<LOAD_REGISTERS>();
        const Batch batch{.cu_q = cu_q, .cu_k = cu_k, .members = members, .count = count,
                          .sequences = int(number_of(sequences)), .total_q = int(number_of(total_q)), .total_k = int(number_of(total_k)),
                          .max_q = int(number_of(max_q)), .max_k = int(number_of(max_k)), .heads = heads};
        const Inputs in{.query = query_map, .key = key_map, .value = value_map, .dout = dout_map, .out = out_map,
                        .lse = lse, .dlse = dlse, .delta = delta, .row_batch = number_of(row_batch), .row_head = number_of(row_head),
                        .bias = BIAS_OF_CALL, .numbers = numbers};
        Loads loads(shared, in, group);
        loads.run(batch, WINDOW_OF_CALL);
    } else if (warpgroup == 2) {
        leave_registers<QUERY_REGISTERS>();
        Queries queries(shared, parked + blockIdx.x * number_of(parked_block), group, WINDOW_OF_CALL,
                        int(number_of(parked_block)) / (group.members() * CHUNK_ROWS * HEAD_DIM));
        queries.run(gradients);
    } else {
        take_registers<KEY_REGISTERS>();
        Dropout dropout{};
#if DROPOUT
        dropout = Dropout::of(*seed, threshold, inverse, heads * group.members(), int(number_of(max_k)));  // heads are those of keys
#endif
        Keys keys(shared, warpgroup, BIAS ? scale : scale * LOG2E, group, MASK_BITS, dropout, WINDOW_OF_CALL, numbers,
                  KEY_MASK_OF_CALL);
        keys.run(gradients);
    }
}
