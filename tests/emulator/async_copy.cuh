// Copies of launch/cuda/async_copy.cuh: they happen as late as they may, when they are waited for; with EARLY_COPIES at once.
#pragma once
#include "device.hpp"

typedef unsigned int u32;

inline u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

inline void copy_16(u32 target, const void* source, bool valid) {
    if (target % 16 || (uintptr_t)source % 16 || target + 16 > SHARED) fail("a copy of 16 bytes is not aligned, or out of bounds");
#ifdef EARLY_COPIES
    valid ? std::memcpy(shared_memory + target, source, 16) : std::memset(shared_memory + target, 0, 16);
    return;
#endif
    copy_later(target, source, valid);
}

inline void copy_16_of_row(u32 target, const void* source) { copy_16(target, source, true); }

inline void copies_commit() { commit_copies(); }

template <int GROUPS>
inline void copies_wait() { wait_for_copies(GROUPS); }
