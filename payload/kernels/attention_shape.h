// Sizes and strides of attention's tensors, in bf16 and in fp32.
#pragma once
#include "common.h"

// Sizes and strides: queries and keys are in one tensor, values can be in another.
struct Shape {
  // Tokens of a block; the last block of a sequence can have fewer.
  int64_t block;
  int64_t batch, length, heads, key_heads, width;
  // Elements from one token to the next: of queries and keys, of values, of all three's gradients.
  int64_t in_stride, value_stride, grad_stride;
  float scale;
  // For each token of a batch the first one that it attends to, never decreasing; null for 0.
  const int64_t* starts;

  int64_t blocks() const { return (length + block - 1) / block; }
  int64_t rows(int64_t number) const { return std::min(block, length - number * block); }
  int64_t stride() const { return heads * width; }
  int64_t group() const { return heads / key_heads; }
};

inline Shape make_shape(int64_t block, int64_t batch, int64_t length, int64_t heads,
                        int64_t key_heads, int64_t width, bool is_apart, float scale,
                        const int64_t* starts) {
  const int64_t all = (heads + 2 * key_heads) * width;
  const int64_t in = is_apart ? (heads + key_heads) * width : all;
  if (scale == 0.0f) scale = 1.0f / std::sqrt(static_cast<float>(width));
  return {block, batch, length, heads, key_heads, width, in, all, all, scale, starts};
}

inline const int64_t* starts_of(const Shape& s, int64_t sequence) {
  return s.starts ? s.starts + sequence * s.length : nullptr;
}
