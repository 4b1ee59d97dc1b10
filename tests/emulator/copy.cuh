// Asynchronous copies happen as late as they may, when they are waited for; with EARLY_COPIES at once.
#pragma once
#include "device.hpp"

typedef unsigned int uint32;
typedef long long int64;

inline uint32 shared_address(const void* pointer) { return (uint32)__cvta_generic_to_shared(pointer); }

inline void copy_async(uint32 target, const void* source, bool valid) {
    if (target % 16 || (uintptr_t)source % 16 || target + 16 > SHARED) fail("a copy of 16 bytes is not aligned, or out of bounds");
#ifdef EARLY_COPIES
    valid ? std::memcpy(shared_memory + target, source, 16) : std::memset(shared_memory + target, 0, 16);
    return;
#endif
    fibers[current].open.push_back({target, source, valid});
}

inline void commit_copies() {
    fibers[current].groups.push_back(std::move(fibers[current].open));
    fibers[current].open.clear();
}

template <int PENDING>
inline void wait_copies() {
    auto& groups = fibers[current].groups;
    for (; groups.size() > PENDING; groups.pop_front())
        for (auto& copy : groups.front())
            if (copy.valid) std::memcpy(shared_memory + copy.target, copy.source, 16);
            else std::memset(shared_memory + copy.target, 0, 16);
}
