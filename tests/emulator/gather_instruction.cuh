// Single instructions of dynamic_mask/gather/sm90/cuda/gather_instruction.cuh. No rows by the copy engine (RUNS).
#pragma once
#include "tma.cuh"

inline bool barrier_passed(u32 barrier, int parity) { return phase_is_over(barrier, parity); }
inline void store_note(u32 address, int value) { at_shared<int>(address) = value; }
