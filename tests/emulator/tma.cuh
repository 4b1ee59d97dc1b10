// Barriers and copies of launch/cuda/tma.cuh: phases that end when the last of a number of arrivals, and the last byte, is there. A copy happens
// when it is asked for; its bytes are counted a while later, so that who does not wait for them goes ahead.
#pragma once
#include "async_copy.cuh"
#include "numbers.cuh"

// as the tests lay it out (__init__.py): the contiguous dimension first; `strides` are bytes, of the dimensions behind it
struct TensorMap {
    char* address;
    long long sizes[4], strides[3];
    int columns, rows;  // of a copy
    char filled_up[56];
};
static_assert(sizeof(TensorMap) == 128);
#define __grid_constant__

struct Phases { int arrivals, left, parity, bytes; };
inline Phases phases[SHARED / 8];  // by address
inline Phases& phases_of(u32 barrier) {
    if (barrier % 8 || barrier >= SHARED) fail("a barrier is not aligned, or out of bounds");
    return phases[barrier / 8];
}

inline void barrier_init(u32 barrier, int arrivals) { phases_of(barrier) = {arrivals, arrivals, 0, 0}; }
inline void barrier_fence() {}
inline void barrier_count(u32 barrier, int arrivals, int bytes) {
    Phases& of = phases_of(barrier);
    if (!of.arrivals) fail("a barrier without a count");
    of.left -= arrivals, of.bytes += bytes;
    if (of.left < 0) fail("more arrivals at a barrier than it counts");
    if (of.left == 0 && of.bytes == 0) of.left = of.arrivals, of.parity ^= 1;
}
inline void barrier_arrive(u32 barrier) { barrier_count(barrier, 1, 0); }
inline void barrier_arrive_after_copies(u32 barrier) {
    copies_commit();
    copies_wait<0>();
    barrier_arrive(barrier);
}
inline void barrier_expect(u32 barrier, int bytes) { barrier_count(barrier, 1, bytes); }
inline bool phase_is_over(u32 barrier, int parity) { return phases_of(barrier).parity != parity; }
inline void barrier_wait(u32 barrier, int parity) {
    wait_until([=] { return phase_is_over(barrier, parity); });
}
inline void fence_async() {}

// each number of a box: f(place in shared memory, its address, or null outside of the tensor)
template <class F>
void for_box(const TensorMap& map, u32 tile, const int (&x)[4], F f) {
    const int pitch = map.columns * 2, chunks = pitch == 128 ? 7 : 3;
    if (tile % 512) fail("a tile of the copy engine does not begin at a multiple of its pattern");
    for (int row = 0; row < map.rows; row++)
        for (int column = 0; column < map.columns; column++) {
            const long long at[4] = {x[0] + column, x[1] + row, x[2], x[3]};
            bool inside = true;
            for (int i = 0; i < 4; i++) inside &= at[i] >= 0 && at[i] < map.sizes[i];
            char* from = map.address + 2 * at[0];
            for (int i = 1; i < 4; i++) from += at[i] * map.strides[i - 1];
            u32 to = tile + row * pitch + column * 2;
            to ^= (to >> 7 & chunks) << 4;
            f(at_shared<unsigned short>(to), inside ? (unsigned short*)from : nullptr);
        }
}
inline void copy_4d(u32 to, const TensorMap& map, u32 barrier, int x0, int x1, int x2, int x3) {
    for_box(map, to, {x0, x1, x2, x3}, [](unsigned short& place, unsigned short* from) { place = from ? *from : 0; });
    barrier_count(barrier, 0, -map.columns * map.rows * 2);
}
inline void store_4d(const TensorMap& map, u32 from, int x0, int x1, int x2, int x3) {
    for_box(map, from, {x0, x1, x2, x3}, [](unsigned short& place, unsigned short* to) { if (to) *to = place; });
}
inline void stores_commit() {}
inline void stores_wait_read() {}
