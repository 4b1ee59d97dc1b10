// The tensors of a call, and which keys each block of queries attends to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace saccade {

// Queries that share a list of keys: the lanes of a row of scores. Longer blocks have longer lists (keep + BLOCK - 1 keys at most), shorter ones
// leave registers empty.
constexpr int BLOCK = 64;

// All tensors are contiguous float32: query [rows, group, q_len, dim], key [rows, kv_len, dim], value [rows, kv_len, value_dim], bias [rows, kv_len]
// or null, out and lse as query has it. start, stop: int32 [rows, kv_len], the positions that keep each key; query i is at kv_len - q_len + i.
struct Problem {
  const float *query, *key, *value, *bias;
  const int32_t *start, *stop;
  int64_t rows, group, q_len, kv_len, dim, value_dim;
  float scale;

  int64_t blocks() const { return (q_len + BLOCK - 1) / BLOCK; }
  int64_t position_of(int64_t query) const { return kv_len - q_len + query; }
};

// The keys of all blocks of a row. Those of block b are keys[first[b]] to keys[first[b + 1]]; the first whole[b] of them are seen by all of its
// queries, the rest only by some. Both parts go forward through memory.
struct Lists {
  std::vector<int32_t> keys;
  std::vector<int64_t> first, whole;
};

inline Lists lists_of(const Problem& p, int64_t row) {
  const int64_t blocks = p.blocks(), base = p.position_of(0);
  const int32_t *start = p.start + row * p.kv_len, *stop = p.stop + row * p.kv_len;
  auto for_each = [&](auto&& use) {
    for (int64_t key = 0; key < p.kv_len; key++) {
      const int64_t first = std::max<int64_t>(start[key] - base, 0), end = std::min<int64_t>(stop[key] - base, p.q_len);
      if (end <= first) continue;
      for (int64_t b = first / BLOCK; b <= (end - 1) / BLOCK; b++)
        use(key, b, first <= b * BLOCK && end >= std::min<int64_t>((b + 1) * BLOCK, p.q_len));
    }
  };
  Lists found;
  found.whole.assign(blocks, 0);
  found.first.assign(blocks + 1, 0);
  std::vector<int64_t> some(blocks, 0);
  for_each([&](int64_t, int64_t b, bool whole) { (whole ? found.whole : some)[b]++; });
  for (int64_t b = 0; b < blocks; b++) found.first[b + 1] = found.first[b] + found.whole[b] + some[b];
  found.keys.resize(found.first[blocks]);
  std::vector<int64_t> next(found.first.begin(), found.first.end() - 1), next_of_some(blocks);
  for (int64_t b = 0; b < blocks; b++) next_of_some[b] = next[b] + found.whole[b];
  for_each([&](int64_t key, int64_t b, bool whole) { found.keys[(whole ? next : next_of_some)[b]++] = static_cast<int32_t>(key); });
  return found;
}

}  // namespace saccade
