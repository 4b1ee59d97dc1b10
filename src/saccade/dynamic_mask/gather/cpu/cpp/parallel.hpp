// The threads of one call.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

// The entry of OpenMP's run-time library that `#pragma omp parallel` calls in GCC: `run(data)` on a team of threads. Weak, so that it resolves to the
// library that torch has loaded for its own operations, and to null if there is none. A second pool of threads would wait for milliseconds
// behind torch's, which spin after each operation.
extern "C" __attribute__((weak)) void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned flags);

namespace saccade {

// Runs `run` on new threads for this call, which costs about 20 us for each.
template <class Run>
void on_own_threads(int threads, const Run& run) {
  std::vector<std::thread> others;
  others.reserve(threads);
  try {
    for (int i = 1; i < threads; i++) others.emplace_back([&] { run(); });
  } catch (const std::system_error&) {
    // the system refuses more threads: the existing ones do all the work
  }
  run();
  for (auto& other : others) other.join();
}

// The process that loaded the library. A forked child lacks the threads that OpenMP still counts, and would wait for them.
inline const pid_t loaded_by = getpid();

// Runs `work(next)` on up to `threads` threads; `next()` hands out 0 to count - 1, once each, then -1. False if memory ran out. A negative number of
// threads keeps OpenMP out: the library was loaded in a child of a fork.
template <class Work>
bool share(int64_t count, int threads, const Work& work) {
  std::atomic<int64_t> given{0};
  std::atomic<bool> failed{false};
  auto run = [&] {
    auto next = [&]() -> int64_t {
      const int64_t own = given++;
      return own < count && !failed ? own : -1;
    };
    try {
      work(next);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  };
  const int team = static_cast<int>(std::min<int64_t>(threads < 0 ? -threads : threads, count));
  if (team <= 1)
    run();
  else if (GOMP_parallel && threads > 0 && getpid() == loaded_by)
    GOMP_parallel([](void* data) { (*static_cast<decltype(run)*>(data))(); }, &run, team, 0);
  else
    on_own_threads(team, run);
  return !failed;
}

}  // namespace saccade
