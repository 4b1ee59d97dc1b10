// The first position that no longer keeps a key: the keep-th smallest position among the keys that rank above it.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "parallel.hpp"

namespace {

// Larger for better keys: by score, then by position. -0 and 0 are equal.
uint64_t rank_of(float score, int64_t position) {
  score += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  bits ^= static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | static_cast<uint32_t>(position);
}

// Replaces heap[0], the smallest, by `rank`, which is not smaller.
void replace_least(std::vector<uint64_t>& heap, uint64_t rank) {
  size_t hole = 0;
  for (size_t child; (child = 2 * hole + 1) < heap.size(); hole = child) {
    if (child + 1 < heap.size() && heap[child + 1] < heap[child]) child++;
    if (heap[child] >= rank) break;
    heap[hole] = heap[child];
  }
  heap[hole] = rank;
}

// Walks along the positions with the kept keys in a heap: a key that drops out of it has expired.
void expire(const float* scores, int64_t length, int64_t valid, int64_t keep, int32_t* stop, std::vector<uint64_t>& heap) {
  heap.clear();
  for (int64_t i = 0; i < valid; i++) {
    const uint64_t rank = rank_of(scores[i], i);
    stop[i] = static_cast<int32_t>(length);
    if (static_cast<int64_t>(heap.size()) < keep) {
      heap.push_back(rank);
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    } else if (rank < heap[0]) {
      stop[i] = static_cast<int32_t>(i);
    } else {
      stop[static_cast<uint32_t>(heap[0])] = static_cast<int32_t>(i);
      replace_least(heap, rank);
    }
  }
  for (int64_t i = valid; i < length; i++) stop[i] = static_cast<int32_t>(i);
}

}  // namespace

// scores float32 and stop int32 [rows, length]; lengths: int64 [rows / heads] or null. 0, or 1 if memory ran out.
extern "C" int saccade_expiry(
    const float* scores, const int64_t* lengths, int32_t* stop, int64_t rows, int64_t heads, int64_t length, int64_t keep, int threads) {
  const bool done = saccade::share(rows, threads, [&](auto next) {
    std::vector<uint64_t> heap;
    for (int64_t row; (row = next()) >= 0;) {
      const int64_t valid = lengths ? std::clamp<int64_t>(lengths[row / heads], 0, length) : length;
      expire(scores + row * length, length, valid, keep, stop + row * length, heap);
    }
  });
  return done ? 0 : 1;
}
