// Products of small fp32 blocks that are in a core's caches, in vectors of the width that the
// compiler's target has: AVX-512, AVX2 or NEON.
#pragma once
#include "common.h"

namespace fp32 {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileRows = 4, kTileVectors = 4;
#elif defined(__AVX__)
constexpr int kLanes = 8, kTileRows = 6, kTileVectors = 2;
#else
constexpr int kLanes = 4, kTileRows = 4, kTileVectors = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

// Columns of right operands and results are padded to whole vectors of AVX-512 on any CPU.
constexpr int64_t kPadding = 16;
inline int64_t padded(int64_t count) { return (count + kPadding - 1) / kPadding * kPadding; }

// The left operand: element (i, k) is at[i * row + k * column], so it can also be a transpose.
struct Left {
  const float* at;
  int64_t row, column;
};

// Rows [0, kRows) and kVectors vectors of c = or += a x b; the sums stay in registers.
template <int kRows, int kVectors>
inline void tile(int64_t depth, Left a, const float* b, int64_t ld_b, float* c, int64_t ld_c,
                 bool add) {
  Vector sums[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) {
      sums[i][j] = add ? *reinterpret_cast<const Vector*>(c + i * ld_c + j * kLanes) : Vector{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector right[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      right[j] = *reinterpret_cast<const Vector*>(b + k * ld_b + j * kLanes);
    }
    for (int i = 0; i < kRows; ++i) {
      const float left = a.at[i * a.row + k * a.column];
      for (int j = 0; j < kVectors; ++j) sums[i][j] += left * right[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) {
      *reinterpret_cast<Vector*>(c + i * ld_c + j * kLanes) = sums[i][j];
    }
  }
}

template <int kRows>
void strip(int64_t columns, int64_t depth, Left a, const float* b, int64_t ld_b, float* c,
           int64_t ld_c, bool add) {
  constexpr int64_t kWide = kTileVectors * kLanes;
  int64_t column = 0;
  for (; column + kWide <= columns; column += kWide) {
    tile<kRows, kTileVectors>(depth, a, b + column, ld_b, c + column, ld_c, add);
  }
  for (; column < columns; column += kLanes) {
    tile<kRows, 1>(depth, a, b + column, ld_b, c + column, ld_c, add);
  }
}

// c (rows, columns) = or, with `add`, += a x b (depth, columns). `columns` are whole vectors.
inline void product(int64_t rows, int64_t columns, int64_t depth, Left a, const float* b,
                    int64_t ld_b, float* c, int64_t ld_c, bool add) {
  int64_t row = 0;
  for (; row + kTileRows <= rows; row += kTileRows) {
    strip<kTileRows>(columns, depth, {a.at + row * a.row, a.row, a.column}, b, ld_b,
                     c + row * ld_c, ld_c, add);
  }
  for (; row < rows; ++row) {
    strip<1>(columns, depth, {a.at + row * a.row, a.row, a.column}, b, ld_b, c + row * ld_c, ld_c,
             add);
  }
}

}  // namespace fp32
