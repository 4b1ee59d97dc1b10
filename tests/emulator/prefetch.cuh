// What launch/cuda/prefetch.cuh asks for is only checked.
#pragma once
#include "device.hpp"

inline void prefetch_to_l2(const void* from, int bytes) {
    if ((size_t)from % 16 || bytes % 16) fail("a prefetch is not of whole pieces of 16 bytes");
}
