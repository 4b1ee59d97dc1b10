// Threads of one call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace saccade {

// Runs `work(next)` on up to `threads` threads; `next()` hands out 0 to count - 1, once each, then -1. False if memory ran out.
//
// Threads of our own cost about 20 us each. Those of torch lie in its own copy of OpenMP, and a second copy would let both pools spin at once.
template <class Work>
bool share(int64_t count, int threads, const Work& work) {
  std::atomic<int64_t> given{0};
  std::atomic<bool> failed{false};
  auto next = [&]() -> int64_t {
    const int64_t own = given++;
    return own < count && !failed ? own : -1;
  };
  auto run = [&] {
    try {
      work(next);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  };
  std::vector<std::thread> others;
  others.reserve(threads);
  try {
    for (int64_t i = 1; i < std::min<int64_t>(threads, count); i++) others.emplace_back(run);
  } catch (const std::system_error&) {
    // the machine gives no more threads: those that there are do all
  }
  run();
  for (auto& other : others) other.join();
  return !failed;
}

}  // namespace saccade
