// Causal self-attention in fp32, forward and backward.
//
// A task is one key head of one sequence with the query heads that share it. A block of scores, a
// strip of queries by a block of keys, stays in the core's L1 cache. The forward pass keeps only
// the logarithms of the softmax sums.
#include "attention_shape.h"
#include "products_fp32.h"

namespace {

using fp32::padded;
using fp32::product;

// Queries of a strip, a multiple of the products' rows on each CPU; keys of a block.
constexpr int64_t kQueries = 48, kKeys = 64;

// Copies (rows, width) to (rows, padded width), zeros to the right.
void pack_rows(const float* from, int64_t stride, int64_t rows, int64_t width, float* to) {
  const int64_t wide = padded(width);
  for (int64_t row = 0; row < rows; ++row, from += stride, to += wide) {
    std::memcpy(to, from, width * sizeof(float));
    std::fill(to + width, to + wide, 0.0f);
  }
}

// Copies (rows, width) to its transpose (width, kKeys), zeros to the right.
void pack_columns(const float* from, int64_t stride, int64_t rows, int64_t width, float* to) {
  for (int64_t column = 0; column < width; ++column, to += kKeys) {
    for (int64_t row = 0; row < rows; ++row) to[row] = from[row * stride + column];
    std::fill(to + rows, to + kKeys, 0.0f);
  }
}

// The keys of a block that a query attends to.
struct Visible {
  int64_t begin, end;
  bool none() const { return begin >= end; }
  bool all() const { return begin == 0 && end == kKeys; }
};
Visible visible(const int64_t* starts, int64_t query, int64_t first_key) {
  const int64_t begin = starts ? starts[query] - first_key : 0;
  return {std::max<int64_t>(begin, 0), std::min(query + 1 - first_key, kKeys)};
}

void hide(float* row, const Visible& seen, float value) {
  std::fill(row, row + seen.begin, value);
  std::fill(row + seen.end, row + kKeys, value);
}

// Replaces a row's scores by 2^(scores - its maximum so far), adds their sum to `total`, and
// returns the factor for earlier sums. `scale` and `highest` are in powers of two.
float weigh(float* score, const Visible& seen, float scale, float& highest, float& total) {
  if (seen.none()) {
    std::fill_n(score, kKeys, 0.0f);
    return 1.0f;
  }
  if (!seen.all()) hide(score, seen, -1e30f);
  float most = score[0];
#pragma omp simd reduction(max : most)
  for (int64_t k = 0; k < kKeys; ++k) most = larger(most, score[k]);
  const float now = larger(highest, most * scale);
  const float keep = exp2_fast(highest - now);
  float sum = 0;
#pragma omp simd
  for (int64_t k = 0; k < kKeys; ++k) score[k] = exp2_fast(score[k] * scale - now);
  if (!seen.all()) hide(score, seen, 0.0f);
#pragma omp simd reduction(+ : sum)
  for (int64_t k = 0; k < kKeys; ++k) sum += score[k];
  highest = now;
  total = total * keep + sum;
  return keep;
}

// `query` is the first of the heads that share `key` and `value`; `out` and `lse` are its outputs.
void forward_heads(const Shape& s, const int64_t* starts, const float* query, const float* key,
                   const float* value, float* out, float* lse, Scratch& scratch) {
  const int64_t width = s.width, wide = padded(width), blocks = (s.length + kKeys - 1) / kKeys;
  auto* keys = scratch.take<float>(blocks * kKeys * width);
  auto* values = scratch.take<float>(blocks * kKeys * wide);
  auto* scores = scratch.take<float>(kQueries * kKeys);
  auto* sums = scratch.take<float>(kQueries * wide);
  for (int64_t j = 0; j < blocks; ++j) {
    const int64_t first = j * kKeys, rows = std::min(kKeys, s.length - first);
    pack_columns(key + first * s.in_stride, s.in_stride, rows, width, keys + first * width);
    pack_rows(value + first * s.value_stride, s.value_stride, rows, width, values + first * wide);
  }
  for (int64_t task = 0; task < s.group() * s.blocks(); ++task) {
    const int64_t head = task / s.blocks(), i = task % s.blocks();
    const int64_t rows = s.rows(i), first = i * kQueries;
    const float* in = query + head * width + first * s.in_stride;
    float highest[kQueries], total[kQueries];
    std::fill_n(highest, kQueries, -std::numeric_limits<float>::infinity());
    std::fill_n(total, kQueries, 0.0f);
    const int64_t begin = starts ? starts[first] / kKeys : 0, end = (first + rows - 1) / kKeys;
    for (int64_t j = begin; j <= end; ++j) {
      const int64_t before = j * kKeys;
      product(rows, kKeys, width, {in, s.in_stride, 1}, keys + before * width, kKeys, scores,
              kKeys, false);
      for (int64_t row = 0; row < rows; ++row) {
        const float keep = weigh(scores + row * kKeys, visible(starts, first + row, before),
                                 s.scale * kLog2E, highest[row], total[row]);
        float* sum = sums + row * wide;
        if (j == begin || keep == 1.0f) continue;
#pragma omp simd
        for (int64_t k = 0; k < wide; ++k) sum[k] *= keep;
      }
      product(rows, wide, std::min(kKeys, s.length - before), {scores, kKeys, 1},
              values + before * wide, wide, sums, wide, j > begin);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const float factor = 1.0f / total[row];
      const float* sum = sums + row * wide;
      fill(width, out + head * width + (first + row) * s.stride(),
           [=](int64_t k) { return sum[k] * factor; });
      lse[head * s.length + first + row] = highest[row] * kLn2 + std::log(total[row]);
    }
  }
}

// Replaces a row's scores by the probabilities, and their gradients by the scores' gradients. `lse`
// is in powers of two.
void differentiate(float* score, float* grad, const Visible& seen, float lse, float delta,
                   float scale) {
  if (seen.none()) {
    std::fill_n(score, kKeys, 0.0f);
    std::fill_n(grad, kKeys, 0.0f);
    return;
  }
  const float power_scale = scale * kLog2E;
#pragma omp simd
  for (int64_t k = 0; k < kKeys; ++k) {
    const float p = exp2_fast(score[k] * power_scale - lse);
    score[k] = p;
    grad[k] = p * (grad[k] - delta) * scale;
  }
  if (!seen.all()) {
    hide(score, seen, 0.0f);
    hide(grad, seen, 0.0f);
  }
}

// Inputs and outputs of the heads of one task.
struct Inputs {
  const float *query, *key, *value, *out, *grad_out;
  const float* lse;
};
struct Outputs {
  float *query, *key, *value;
};

// The keys and values of one task, packed, and the sums of their gradients.
struct Packed {
  float *keys, *key_columns, *value_columns, *key_sums, *value_sums;

  Packed(const Shape& s, const Inputs& in, Scratch& scratch) {
    const int64_t width = s.width, wide = padded(width);
    const int64_t all = (s.length + kKeys - 1) / kKeys * kKeys;
    keys = scratch.take<float>(all * wide);
    key_columns = scratch.take<float>(all * width);
    value_columns = scratch.take<float>(all * width);
    key_sums = scratch.take<float>(all * wide);
    value_sums = scratch.take<float>(all * wide);
    std::fill_n(key_sums, all * wide, 0.0f);
    std::fill_n(value_sums, all * wide, 0.0f);
    for (int64_t first = 0; first < s.length; first += kKeys) {
      const int64_t rows = std::min(kKeys, s.length - first);
      const float* key = in.key + first * s.in_stride;
      const float* value = in.value + first * s.value_stride;
      pack_rows(key, s.in_stride, rows, width, keys + first * wide);
      pack_columns(key, s.in_stride, rows, width, key_columns + first * width);
      pack_columns(value, s.value_stride, rows, width, value_columns + first * width);
    }
  }
};

void store(const float* from, int64_t rows, int64_t width, float* to, int64_t stride) {
  const int64_t wide = padded(width);
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(to + row * stride, from + row * wide, width * sizeof(float));
  }
}

void backward_heads(const Shape& s, const int64_t* starts, const Inputs& in, const Outputs& to,
                    Scratch& scratch) {
  const int64_t width = s.width, wide = padded(width);
  const Packed packed(s, in, scratch);
  auto* scores = scratch.take<float>(kQueries * kKeys);
  auto* grads = scratch.take<float>(kQueries * kKeys);
  auto* queries = scratch.take<float>(kQueries * wide);
  auto* grad_outs = scratch.take<float>(kQueries * wide);
  auto* query_sums = scratch.take<float>(kQueries * wide);
  for (int64_t task = 0; task < s.group() * s.blocks(); ++task) {
    const int64_t head = task / s.blocks(), i = task % s.blocks();
    const int64_t rows = s.rows(i), first = i * kQueries;
    const int64_t at = head * width + first * s.stride();
    pack_rows(in.query + head * width + first * s.in_stride, s.in_stride, rows, width, queries);
    pack_rows(in.grad_out + at, s.stride(), rows, width, grad_outs);
    float lse[kQueries], delta[kQueries];
    for (int64_t row = 0; row < rows; ++row) {
      const float* left = in.out + at + row * s.stride();
      const float* right = grad_outs + row * wide;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t k = 0; k < width; ++k) sum += left[k] * right[k];
      delta[row] = sum;
      lse[row] = in.lse[head * s.length + first + row] * kLog2E;
    }
    const int64_t begin = starts ? starts[first] / kKeys : 0, end = (first + rows - 1) / kKeys;
    for (int64_t j = begin; j <= end; ++j) {
      const int64_t before = j * kKeys, keys = std::min(kKeys, s.length - before);
      product(rows, kKeys, width, {queries, wide, 1}, packed.key_columns + before * width, kKeys,
              scores, kKeys, false);
      product(rows, kKeys, width, {grad_outs, wide, 1}, packed.value_columns + before * width,
              kKeys, grads, kKeys, false);
      for (int64_t row = 0; row < rows; ++row) {
        differentiate(scores + row * kKeys, grads + row * kKeys,
                      visible(starts, first + row, before), lse[row], delta[row], s.scale);
      }
      product(keys, wide, rows, {scores, 1, kKeys}, grad_outs, wide,
              packed.value_sums + before * wide, wide, true);
      product(keys, wide, rows, {grads, 1, kKeys}, queries, wide, packed.key_sums + before * wide,
              wide, true);
      product(rows, wide, keys, {grads, kKeys, 1}, packed.keys + before * wide, wide, query_sums,
              wide, j > begin);
    }
    store(query_sums, rows, width, to.query + head * width + first * s.grad_stride, s.grad_stride);
  }
  store(packed.key_sums, s.length, width, to.key, s.grad_stride);
  store(packed.value_sums, s.length, width, to.value, s.grad_stride);
}

}  // namespace

extern "C" {

// The same as `tileforge_attention_forward_bf16` on fp32 tensors.
int tileforge_attention_forward_fp32(const float* qkv, const float* qk, const int64_t* starts,
                                     float* out, float* lse, int64_t batch, int64_t length,
                                     int64_t heads, int64_t key_heads, int64_t width, float scale,
                                     int threads) {
  const Shape s = make_shape(kQueries, batch, length, heads, key_heads, width, qk, scale, starts);
  Tasks tasks;
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < batch * key_heads; ++task) {
      const int64_t b = task / key_heads, h = task % key_heads, head = h * s.group();
      const float* in = (qk ? qk : qkv) + b * length * s.in_stride;
      const float* values = qkv + b * length * s.value_stride + (heads + key_heads) * width;
      tasks.run([&] {
        scratch.reset();
        forward_heads(s, starts_of(s, b), in + head * width, in + (heads + h) * width,
                      values + h * width, out + b * length * s.stride() + head * width,
                      lse + (b * heads + head) * length, scratch);
      });
    }
  }
  return tasks.outcome();
}

// The same as `tileforge_attention_backward_bf16` on fp32 tensors.
int tileforge_attention_backward_fp32(const float* qkv, const float* qk, const int64_t* starts,
                                      const float* out, const float* lse, const float* grad_out,
                                      float* grad_qkv, int64_t batch, int64_t length,
                                      int64_t heads, int64_t key_heads, int64_t width, float scale,
                                      int threads) {
  const Shape s = make_shape(kQueries, batch, length, heads, key_heads, width, qk, scale, starts);
  Tasks tasks;
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < batch * key_heads; ++task) {
      const int64_t b = task / key_heads, h = task % key_heads, head = h * s.group();
      const int64_t at = b * length * s.stride() + head * width;
      const int64_t key_at = (heads + h) * width, value_at = (heads + key_heads + h) * width;
      const float* in = (qk ? qk : qkv) + b * length * s.in_stride;
      const float* values = qkv + b * length * s.value_stride;
      float* grad = grad_qkv + b * length * s.grad_stride;
      tasks.run([&] {
        scratch.reset();
        backward_heads(s, starts_of(s, b),
                       {in + head * width, in + key_at, values + value_at, out + at, grad_out + at,
                        lse + (b * heads + head) * length},
                       {grad + head * width, grad + key_at, grad + value_at}, scratch);
      });
    }
  }
  return tasks.outcome();
}
}
