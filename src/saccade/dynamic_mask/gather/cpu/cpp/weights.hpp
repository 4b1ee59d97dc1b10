// The unnormalised weights of a block of queries and its list of keys, with which both forward and backward begin.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "problem.hpp"
#include "products.hpp"
#include "vectors.hpp"

namespace saccade {

constexpr int WIDE = BLOCK / LANES;

// A block of queries of one head: `row` of key and value, rows `first` and following of query.
struct Block {
  int64_t row, index, first, queries, count, whole;
  const int32_t* list;
  const float *query, *keys, *values;

  // vectors of lanes that hold a query
  int wide() const { return static_cast<int>((queries + LANES - 1) / LANES); }

  static Block of(const Problem& p, const Lists& lists, int64_t row, int64_t index, int64_t head) {
    const int64_t first = (row * p.group + head) * p.q_len + index * BLOCK;
    return {row, index, first, std::min<int64_t>(BLOCK, p.q_len - index * BLOCK), lists.first[index + 1] - lists.first[index],
            lists.whole[index], lists.keys.data() + lists.first[index], p.query + first * p.dim, p.key + row * p.kv_len * p.dim,
            p.value + row * p.kv_len * p.value_dim};
  }
};

// The sums of a softmax over the keys, for each query of a block; inverse is 0 for a query that sees no key.
struct Sums {
  float inverse[BLOCK], lse[BLOCK];
};

// scores [count][BLOCK]: those that a query does not see become -infinity, and `top` the largest of each query.
inline void hide(const Problem& p, const Block& b, float* scores, Vector* top) {
  const int32_t *start = p.start + b.row * p.kv_len, *stop = p.stop + b.row * p.kv_len;
  Integers at[WIDE];
  for (int t = 0; t < b.wide(); t++) {
    top[t] = all(MINUS_INFINITY);
    at[t] = Integers{} + static_cast<int32_t>(p.position_of(b.index * BLOCK + t * LANES));
    for (int lane = 0; lane < LANES; lane++) at[t][lane] += lane;
  }
  for (int64_t x = 0; x < b.count; x++)
    for (int t = 0; t < b.wide(); t++) {
      float* s = scores + x * BLOCK + t * LANES;
      Vector score = load(s);
      if (x >= b.whole) {
        score = (at[t] >= start[b.list[x]]) & (at[t] < stop[b.list[x]]) ? score : all(MINUS_INFINITY);
        store(s, score);
      }
      top[t] = score > top[t] ? score : top[t];
    }
}

// scores become weights that are not divided by their sums yet.
inline Sums exponentials(const Block& b, float* scores, const Vector* top) {
  Vector shift[WIDE], total[WIDE] = {};
  // -inf - -inf would be NaN
  for (int t = 0; t < b.wide(); t++) shift[t] = top[t] == MINUS_INFINITY ? Vector{} : top[t];
  for (int64_t x = 0; x < b.count; x++)
    for (int t = 0; t < b.wide(); t++) {
      float* s = scores + x * BLOCK + t * LANES;
      const Vector weight = exp2((load(s) - shift[t]) * LOG2_E);
      total[t] += weight;
      store(s, weight);
    }
  Sums found;
  for (int q = 0; q < b.wide() * LANES; q++) {
    const float sum = total[q / LANES][q % LANES];
    found.inverse[q] = sum == 0.0f ? 0.0f : 1.0f / sum;
    found.lse[q] = sum == 0.0f ? MINUS_INFINITY : shift[q / LANES][q % LANES] + std::log(sum);
  }
  return found;
}

// to[d][q] = scale * block[q][d], 0 for the queries behind the last one.
inline void transpose(const float* block, int64_t queries, int64_t dim, float scale, std::vector<float>& to) {
  to.assign(dim * BLOCK, 0.0f);
  for (int64_t q = 0; q < queries; q++)
    for (int64_t d = 0; d < dim; d++) to[d * BLOCK + q] = block[q * dim + d] * scale;
}

// weights[x][q] = exp(score - largest score of q). columns: memory for Q^T.
inline Sums weights_of(const Problem& p, const Block& b, std::vector<float>& columns, std::vector<float>& weights) {
  transpose(b.query, b.queries, p.dim, p.scale, columns);
  weights.resize(b.count * BLOCK);
  const float* bias = p.bias ? p.bias + b.row * p.kv_len : nullptr;
  rows_times_block(b.keys, p.dim, b.list, b.count, columns.data(), bias, b.queries, weights.data());
  Vector top[WIDE];
  hide(p, b, weights.data(), top);
  return exponentials(b, weights.data(), top);
}

}  // namespace saccade
