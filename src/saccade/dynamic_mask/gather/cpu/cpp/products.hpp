// The three products of a block of queries and its list of keys. Scores and weights are transposed, a key a row and a query a lane,
// so that a softmax needs no sum across lanes. Rows of K and V are read in place: nothing is gathered into a copy.
#pragma once

#include <cstdint>
#include <type_traits>

#include "problem.hpp"
#include "vectors.hpp"

namespace saccade {

// Calls `tile(first, std::integral_constant<int, ROWS, 2 or 1>)` for rows 0 to count - 1. Two rows are the fewest whose sums hide the latency of
// the multipliers, so 64 rows cost 64/60 of what ten tiles of six do.
template <class Tile>
inline void in_tiles(int64_t count, const Tile& tile) {
  int64_t row = 0;
  for (; row + ROWS <= count; row += ROWS) tile(row, std::integral_constant<int, ROWS>());
  for (; row + 2 <= count; row += 2) tile(row, std::integral_constant<int, 2>());
  for (; row < count; row++) tile(row, std::integral_constant<int, 1>());
}

// Calls `piece(first, std::integral_constant<int, 1 to TILE>)` for the columns of a matrix, in vectors of LANES.
template <class Piece>
inline void in_pieces(int64_t width, const Piece& piece) {
  int64_t column = 0;
  for (; column + TILE * LANES <= width; column += TILE * LANES) piece(column, std::integral_constant<int, TILE>());
  for (; column < width; column += LANES) piece(column, std::integral_constant<int, 1>());
}

// to[x][q] = sum_d rows[list[x]][d] * columns[d][q] + bias[list[x]], for x < count and the first `queries` of a block, rounded up
// to LANES.
// With rows = K and columns = scale * Q^T these are scores, with V and dO^T the gradients of weights.
inline void rows_times_block(
    const float* rows, int64_t dim, const int32_t* list, int64_t count, const float* columns, const float* bias, int64_t queries, float* to) {
  in_pieces(queries, [&](int64_t part, auto wide) {
    in_tiles(count, [&](int64_t first, auto tall) {
      constexpr int R = decltype(tall)::value, C = decltype(wide)::value;
      const float* row[R];
      for (int r = 0; r < R; r++) row[r] = rows + list[first + r] * dim;
      Vector sum[R][C] = {};
      for (int64_t d = 0; d < dim; d++) {
        Vector column[C];
        for (int t = 0; t < C; t++) column[t] = load(columns + d * BLOCK + part + t * LANES);
        for (int r = 0; r < R; r++)
          for (int t = 0; t < C; t++) sum[r][t] += column[t] * row[r][d];
      }
      for (int r = 0; r < R; r++) {
        // behind the products, which would be rounded to a large bias one by one
        const float added = bias ? bias[list[first + r]] : 0.0f;
        for (int t = 0; t < C; t++) store(to + (first + r) * BLOCK + part + t * LANES, sum[r][t] + added);
      }
    });
  });
}

// to[q][e] = scale[q] * sum_x weights[x][q] * rows[list[x]][e], for q < queries: the output, or with dS and K the gradient of Q.
inline void weights_times_rows(
    const float* weights, const float* rows, int64_t width, const int32_t* list, int64_t count, const float* scale, int64_t queries,
    float* to) {
  in_pieces(width, [&](int64_t column, auto wide) {
    in_tiles(queries, [&](int64_t first, auto tall) {
      constexpr int R = decltype(tall)::value, C = decltype(wide)::value;
      Vector sum[R][C] = {};
      for (int64_t x = 0; x < count; x++) {
        const float *row = rows + list[x] * width + column, *weight = weights + x * BLOCK + first;
        Vector v[C];
        for (int c = 0; c < C; c++) v[c] = load(row + c * LANES);
        for (int r = 0; r < R; r++)
          for (int c = 0; c < C; c++) sum[r][c] += v[c] * weight[r];
      }
      for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(to + (first + r) * width + column + c * LANES, sum[r][c] * scale[first + r]);
    });
  });
}

// to[list[x]][e] += scale * sum_q weights[x][q] * block[q][e], for x < count: the gradients of V, and with dS and Q of K.
inline void add_weights_times_block(
    const float* weights, const float* block, int64_t width, const int32_t* list, int64_t count, int64_t queries, float scale, float* to) {
  in_pieces(width, [&](int64_t column, auto wide) {
    in_tiles(count, [&](int64_t first, auto tall) {
      constexpr int R = decltype(tall)::value, C = decltype(wide)::value;
      Vector sum[R][C] = {};
      for (int64_t q = 0; q < queries; q++) {
        Vector v[C];
        for (int c = 0; c < C; c++) v[c] = load(block + q * width + column + c * LANES);
        for (int r = 0; r < R; r++)
          for (int c = 0; c < C; c++) sum[r][c] += v[c] * weights[(first + r) * BLOCK + q];
      }
      for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
          float* at = to + list[first + r] * width + column + c * LANES;
          store(at, load(at) + sum[r][c] * scale);
        }
    });
  });
}

}  // namespace saccade
