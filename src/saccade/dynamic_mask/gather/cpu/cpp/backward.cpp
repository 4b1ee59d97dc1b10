// Backward, five products a block of queries: S = Q K^T and dP = dO V^T, then dV += P^T dO, dK += dS^T Q and dQ = dS K,
// with dS = P * (dP - delta), delta = rowsum(dO * O) - dlse. The gradient of the bias is the sum of dS over the queries.

#include <cstdint>
#include <vector>

#include "parallel.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "weights.hpp"

using namespace saccade;

namespace {

// dout [rows, group, q_len, value_dim], delta [rows, group, q_len], dquery as query. Each segment of the blocks adds to its own part of dkey [segments, rows,
// kv_len, dim], dvalue and dbias (null without a bias). So threads never write to the same memory, and sums do not depend on the number of threads.
// All sums begin at 0.
struct Gradients {
  const float *dout, *delta;
  float *dquery, *dkey, *dvalue, *dbias;
  int64_t segments;
};

struct Memory {
  std::vector<float> columns, weights, dcolumns, dscores;
};

// weights become P, and dscores, which holds dP, becomes dS; their sums over the queries are added to dbias.
void differentiate(const Block& b, const Sums& sums, const float* delta, float* weights, float* dscores, float* dbias) {
  Vector inverse[WIDE], deltas[WIDE] = {};
  for (int t = 0; t < b.wide(); t++) {
    inverse[t] = load(sums.inverse + t * LANES);
    for (int lane = 0; lane < LANES && t * LANES + lane < b.queries; lane++) deltas[t][lane] = delta[t * LANES + lane];
  }
  for (int64_t x = 0; x < b.count; x++) {
    Vector sum = {};
    for (int t = 0; t < b.wide(); t++) {
      const int64_t at = x * BLOCK + t * LANES;
      const Vector weight = load(weights + at) * inverse[t], dscore = weight * (load(dscores + at) - deltas[t]);
      store(weights + at, weight);
      store(dscores + at, dscore);
      sum += dscore;
    }
    if (!dbias) continue;
    for (int lane = 0; lane < LANES; lane++) dbias[b.list[x]] += sum[lane];
  }
}

void add_block(const Problem& p, const Gradients& g, const Block& b, int64_t segment, Memory& memory) {
  const int64_t copy = (segment * p.rows + b.row) * p.kv_len;
  const float* dout = g.dout + b.first * p.value_dim;
  const Sums sums = weights_of(p, b, memory.columns, memory.weights);
  transpose(dout, b.queries, p.value_dim, 1.0f, memory.dcolumns);
  memory.dscores.resize(b.count * BLOCK);
  float *weights = memory.weights.data(), *dscores = memory.dscores.data();
  rows_times_block(b.values, p.value_dim, b.list, b.count, memory.dcolumns.data(), nullptr, b.queries, dscores);
  differentiate(b, sums, g.delta + b.first, weights, dscores, g.dbias ? g.dbias + copy : nullptr);
  add_weights_times_block(weights, dout, p.value_dim, b.list, b.count, b.queries, 1.0f, g.dvalue + copy * p.value_dim);
  add_weights_times_block(dscores, b.query, p.dim, b.list, b.count, b.queries, p.scale, g.dkey + copy * p.dim);
  float scale[BLOCK];
  for (float& each : scale) each = p.scale;
  weights_times_rows(dscores, b.keys, p.dim, b.list, b.count, scale, b.queries, g.dquery + b.first * p.dim);
}

}  // namespace

// 0, or 1 if memory ran out.
extern "C" int saccade_backward(const Problem* problem, const Gradients* gradients, int threads) {
  const Problem& p = *problem;
  const Gradients& g = *gradients;
  const int64_t blocks = p.blocks();
  std::vector<Lists> lists(p.rows);
  const bool listed = share(p.rows, threads, [&](auto next) {
    for (int64_t row; (row = next()) >= 0;) lists[row] = lists_of(p, row);
  });
  if (!listed) return 1;
  const bool done = share(p.rows * g.segments, threads, [&](auto next) {
    Memory memory;
    for (int64_t task; (task = next()) >= 0;) {
      const int64_t row = task / g.segments, segment = task % g.segments;
      for (int64_t block = segment * blocks / g.segments; block < (segment + 1) * blocks / g.segments; block++)
        for (int64_t head = 0; head < p.group; head++) add_block(p, g, Block::of(p, lists[row], row, block, head), segment, memory);
    }
  });
  return done ? 0 : 1;
}
