// Products of small dense matrices in a core's cache, with fp32 sums, in bf16 or fp32.
#pragma once
#include "element.h"
#include "layout.h"
#ifdef TILEFORGE_FP32
#include "products_fp32.h"
#else
#include "brgemm.h"
#endif

// A dense matrix, or with `turned` its transpose. Rows and columns are multiples of kTile.
struct Matrix {
  const element* at;
  int64_t rows, columns;
  bool turned = false;

  Matrix transposed() const { return {at, rows, columns, !turned}; }
  int64_t height() const { return turned ? columns : rows; }
  int64_t width() const { return turned ? rows : columns; }
};

// Memory for the operands that a product needs in another layout.
struct Operands {
  element *left, *right;

  Operands(Scratch& scratch, int64_t largest)
      : left(scratch.take<element>(largest)), right(scratch.take<element>(largest)) {}
};

// sums (a's height x b's width) = or, with `add`, += a x b. Inlined into each of its callers, this
// function would take most of the build's time.
inline __attribute__((noinline)) void multiply(Matrix a, Matrix b, float* sums, bool add,
                                               Operands& operands) {
  const int64_t m = a.height(), n = b.width(), depth = a.width();
#ifdef TILEFORGE_FP32
  const float* right = b.at;
  if (b.turned) {
    for (int64_t row = 0; row < b.rows; ++row) {
      for (int64_t column = 0; column < b.columns; ++column) {
        operands.right[column * b.rows + row] = b.at[row * b.columns + column];
      }
    }
    right = operands.right;
  }
  const int64_t along = a.turned ? a.columns : 1;
  fp32::product(m, n, depth, {a.at, a.turned ? 1 : a.columns, along}, right, n, sums, n, add);
#else
  const bf16* left = a.at;
  if (a.turned) {
    transpose(a.at, a.columns, a.rows, a.columns, operands.left, a.rows);
    left = operands.left;
  }
  auto* pairs = reinterpret_cast<uint32_t*>(operands.right);
  if (b.turned) {
    transpose_pairs(b.at, b.columns, b.rows, b.columns, pairs, b.rows);
  } else {
    for (int64_t row = 0; row < b.rows; row += 2) {
      const bf16* first = b.at + row * n;
      interleave(first, first + n, n, pairs + row / 2 * n);
    }
  }
  product(m, n, depth, left, depth, operands.right, n, sums, n, add);
#endif
}

inline void begin_matmuls() {
#ifndef TILEFORGE_FP32
  begin_products();
#endif
}

inline void end_matmuls() {
#ifndef TILEFORGE_FP32
  release_products();
#endif
}
