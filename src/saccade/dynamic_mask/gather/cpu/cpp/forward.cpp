// Forward: out = softmax(scale * Q K^T + bias, over the keys that each query sees) V, and lse.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "parallel.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "weights.hpp"

using namespace saccade;

// 0, or 1 if memory ran out.
extern "C" int saccade_forward(const Problem* problem, float* out, float* lse, int threads) {
  const Problem& p = *problem;
  const int64_t blocks = p.blocks();
  std::vector<Lists> lists(p.rows);
  const bool listed = share(p.rows, threads, [&](auto next) {
    for (int64_t row; (row = next()) >= 0;) lists[row] = lists_of(p, row);
  });
  if (!listed) return 1;
  const bool done = share(p.rows * blocks, threads, [&](auto next) {
    std::vector<float> columns, weights;
    for (int64_t task; (task = next()) >= 0;)
      for (int64_t head = 0; head < p.group; head++) {
        const Block b = Block::of(p, lists[task / blocks], task / blocks, task % blocks, head);
        const Sums sums = weights_of(p, b, columns, weights);
        weights_times_rows(
            weights.data(), b.values, p.value_dim, b.list, b.count, sums.inverse, b.queries, out + b.first * p.value_dim);
        std::copy_n(sums.lse, b.queries, lse + b.first);
      }
  });
  return done ? 0 : 1;
}
