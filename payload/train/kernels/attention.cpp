// Causal self-attention, forward and backward, in bf16 with fp32 sums.
//
// A task is one head of one sequence, whose blocks stay in the core's L2 cache. Scores are kept
// transposed (keys x queries) in the backward pass: so the probabilities and their gradients are
// left operands as they are, and what belongs to a query lies along a row.
#include "brgemm.h"
#include "layout.h"

namespace {

constexpr int64_t kBlock = 128;

// (rows, width) to the right operand (kBlock x width), zeros below.
void pack_rows(const bf16* from, int64_t stride, int64_t rows, int64_t width, bf16* to) {
  auto* pairs = reinterpret_cast<uint32_t*>(to);
  for (int64_t row = 0; row < kBlock; row += 2, pairs += width) {
    const bf16* first = from + row * stride;
    if (row < rows) {
      interleave(first, row + 1 < rows ? first + stride : nullptr, width, pairs);
    } else {
      std::fill_n(pairs, width, 0);
    }
  }
}

// (rows, width) to the right operand (width x kBlock), zeros to the right.
void pack_columns(const bf16* from, int64_t stride, int64_t rows, int64_t width, bf16* to) {
  transpose_pairs(from, stride, rows, width, reinterpret_cast<uint32_t*>(to), kBlock);
}

struct Shape {
  int64_t batch, length, heads, width;
  int64_t blocks() const { return (length + kBlock - 1) / kBlock; }
  int64_t rows(int64_t block) const { return std::min(kBlock, length - block * kBlock); }
  int64_t stride() const { return heads * width; }
};

// Of a row of a block on the diagonal, in whole vectors: numbers up to its own place, and those
// from there on. The others count for nothing.
constexpr int64_t kVector = 16;
int64_t vectors_end(int64_t row) { return row / kVector * kVector + kVector; }
int64_t vectors_begin(int64_t row) { return row / kVector * kVector; }

// One block of queries against one of keys: scores to 2^(scores - the row's highest so far), its
// sum into `total`, and into `keep` the factor for what was summed before. `scale` and `highest`
// are of powers of two. Row by row in steps of their own: a row's would wait for each other.
void weigh(int64_t rows, bool diagonal, float scale, float* scores, bf16* shares, float* highest,
           float* total, float* keep) {
  float top[kBlock], sum[kBlock];
  std::fill_n(top, kBlock, 0.0f);
  std::fill_n(sum, kBlock, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    float* score = scores + row * kBlock;
    const int64_t width = diagonal ? vectors_end(row) : kBlock;
    if (diagonal) std::fill(score + row + 1, score + width, -1e30f);
    float most = score[0];
#pragma omp simd reduction(max : most)
    for (int64_t k = 0; k < width; ++k) most = larger(most, score[k]);
    top[row] = most;
  }
#pragma omp simd
  for (int64_t row = 0; row < kBlock; ++row) {
    const float now = larger(highest[row], top[row] * scale);
    keep[row] = exp2_fast(highest[row] - now);
    highest[row] = now;
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* score = scores + row * kBlock;
    const float least = highest[row];
    const int64_t width = diagonal ? vectors_end(row) : kBlock;
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t k = 0; k < width; ++k) {
      score[k] = exp2_fast(score[k] * scale - least);
      part += score[k];
    }
    sum[row] = part;
    bf16* share = shares + row * kBlock;
    round_all(score, width, share);
    std::fill(share + width, share + kBlock, bf16{0});
  }
#pragma omp simd
  for (int64_t row = 0; row < kBlock; ++row) total[row] = total[row] * keep[row] + sum[row];
}

void forward_head(const Shape& s, const bf16* query, const bf16* key, const bf16* value, bf16* out,
                  float* lse, float scale, Scratch& scratch) {
  const int64_t blocks = s.blocks(), width = s.width, in_stride = 3 * s.stride();
  const int64_t block_size = kBlock * width;
  auto* keys = scratch.take<bf16>(blocks * block_size);
  auto* values = scratch.take<bf16>(blocks * block_size);
  auto* scores = scratch.take<float>(kBlock * kBlock);
  auto* shares = scratch.take<bf16>(kBlock * kBlock);
  auto* sums = scratch.take<float>(block_size);
  float highest[kBlock], total[kBlock], keep[kBlock];
  for (int64_t j = 0; j < blocks; ++j) {
    const int64_t at = j * kBlock * in_stride;
    pack_columns(key + at, in_stride, s.rows(j), width, keys + j * block_size);
    pack_rows(value + at, in_stride, s.rows(j), width, values + j * block_size);
  }
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t rows = s.rows(i);
    std::fill_n(highest, kBlock, -std::numeric_limits<float>::infinity());
    std::fill_n(total, kBlock, 0.0f);
    for (int64_t j = 0; j <= i; ++j) {
      product(rows, kBlock, width, query + i * kBlock * in_stride, in_stride,
              keys + j * block_size, kBlock, scores, kBlock, false);
      weigh(rows, i == j, scale * kLog2E, scores, shares, highest, total, keep);
      for (int64_t row = 0; j && row < rows; ++row) {
        float* row_sums = sums + row * width;
#pragma omp simd
        for (int64_t k = 0; k < width; ++k) row_sums[k] *= keep[row];
      }
      product(rows, width, kBlock, shares, kBlock, values + j * block_size, width, sums, width,
              j > 0);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const float factor = 1.0f / total[row];
      bf16* to = out + (i * kBlock + row) * s.stride();
      const float* from = sums + row * width;
      fill(width, to, [=](int64_t k) { return from[k] * factor; });
      lse[i * kBlock + row] = highest[row] * kLn2 + std::log(total[row]);
    }
  }
}

struct Packed {
  bf16 *rows, *columns;
};

// One block of keys against one of queries: from the transposed scores and their gradient before
// softmax to probabilities and to the scores' gradient, the latter also as a right operand. `lse`
// is of powers of two, `delta` comes times `scale`.
void differentiate(int64_t rows, bool diagonal, const float* scores, const float* grad_shares,
                   const float* lse, const float* delta, float scale, bf16* shares,
                   bf16* grad_scores, bf16* grad_pairs) {
  const float power_scale = scale * kLog2E;
  float exact[2 * kBlock];
  for (int64_t row = 0; row < kBlock; ++row) {
    bf16* share = shares + row * kBlock;
    bf16* grad = grad_scores + row * kBlock;
    if (row < rows) {
      const int64_t first = diagonal ? vectors_begin(row) : 0;
      const float* score = scores + row * kBlock;
      const float* grad_share = grad_shares + row * kBlock;
#pragma omp simd
      for (int64_t k = first; k < kBlock; ++k) {
        const float p = exp2_fast(score[k] * power_scale - lse[k]);
        exact[k] = p;
        exact[kBlock + k] = p * (grad_share[k] * scale - delta[k]);
      }
      if (diagonal) {
        std::fill(exact, exact + row, 0.0f);
        std::fill(exact + kBlock, exact + kBlock + row, 0.0f);
      }
      round_all(exact, kBlock, share);
      round_all(exact + kBlock, kBlock, grad);
    } else {
      std::fill_n(share, kBlock, bf16{0});
      std::fill_n(grad, kBlock, bf16{0});
    }
    if (row % 2) {
      const bf16* above = grad - kBlock;
      bf16* pairs = grad_pairs + (row - 1) * kBlock;
#pragma omp simd
      for (int64_t k = 0; k < kBlock; ++k) {
        pairs[2 * k] = above[k];
        pairs[2 * k + 1] = grad[k];
      }
    }
  }
}

void store(const float* from, int64_t rows, int64_t width, bf16* to, int64_t stride) {
  for (int64_t row = 0; row < rows; ++row) round_all(from + row * width, width, to + row * stride);
}

void backward_head(const Shape& s, const bf16* query, const bf16* key, const bf16* value,
                   const bf16* out, const bf16* grad_out, const float* lse_of, bf16* grad_query,
                   bf16* grad_key, bf16* grad_value, float scale, Scratch& scratch) {
  const int64_t blocks = s.blocks(), width = s.width, stride = s.stride(), in_stride = 3 * stride;
  const int64_t block_size = kBlock * width;
  Packed queries{scratch.take<bf16>(blocks * block_size), scratch.take<bf16>(blocks * block_size)};
  Packed grads{scratch.take<bf16>(blocks * block_size), scratch.take<bf16>(blocks * block_size)};
  auto* lse = scratch.take<float>(blocks * kBlock);
  auto* delta = scratch.take<float>(blocks * kBlock);
  auto* query_sums = scratch.take<float>(blocks * block_size);  // (width, kBlock) a block
  auto* key_sums = scratch.take<float>(block_size);
  auto* value_sums = scratch.take<float>(block_size);
  auto* key_columns = scratch.take<bf16>(block_size);
  auto* scores = scratch.take<float>(kBlock * kBlock);
  auto* grad_shares = scratch.take<float>(kBlock * kBlock);
  auto* shares = scratch.take<bf16>(kBlock * kBlock);
  auto* grad_scores = scratch.take<bf16>(kBlock * kBlock);
  auto* grad_pairs = scratch.take<bf16>(kBlock * kBlock);
  for (int64_t i = 0; i < blocks; ++i) {
    const bf16* grad = grad_out + i * kBlock * stride;
    const bf16* from = query + i * kBlock * in_stride;
    pack_rows(from, in_stride, s.rows(i), width, queries.rows + i * block_size);
    pack_columns(from, in_stride, s.rows(i), width, queries.columns + i * block_size);
    pack_rows(grad, stride, s.rows(i), width, grads.rows + i * block_size);
    pack_columns(grad, stride, s.rows(i), width, grads.columns + i * block_size);
    for (int64_t row = 0; row < kBlock; ++row) {
      const int64_t position = i * kBlock + row;
      float sum = 0;
      if (row < s.rows(i)) {
        const bf16* left = grad_out + position * stride;
        const bf16* right = out + position * stride;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < width; ++k) sum += to_float(left[k]) * to_float(right[k]);
      }
      delta[position] = sum * scale;
      // A query past the end gets no share: 2^-large.
      lse[position] = row < s.rows(i) ? lse_of[position] * kLog2E : 1e30f;
    }
  }
  for (int64_t j = 0; j < blocks; ++j) {
    const int64_t rows = s.rows(j), at = j * kBlock * in_stride;
    transpose(key + at, in_stride, rows, width, key_columns, kBlock);
    for (int64_t i = j; i < blocks; ++i) {
      product(rows, kBlock, width, key + at, in_stride, queries.columns + i * block_size, kBlock,
              scores, kBlock, false);
      product(rows, kBlock, width, value + at, in_stride, grads.columns + i * block_size, kBlock,
              grad_shares, kBlock, false);
      differentiate(rows, i == j, scores, grad_shares, lse + i * kBlock, delta + i * kBlock, scale,
                    shares, grad_scores, grad_pairs);
      product(rows, width, kBlock, shares, kBlock, grads.rows + i * block_size, width, value_sums,
              width, i > j);
      product(rows, width, kBlock, grad_scores, kBlock, queries.rows + i * block_size, width,
              key_sums, width, i > j);
      product(width, kBlock, kBlock, key_columns, kBlock, grad_pairs, kBlock,
              query_sums + i * block_size, kBlock, j > 0);
    }
    store(key_sums, rows, width, grad_key + at, in_stride);
    store(value_sums, rows, width, grad_value + at, in_stride);
  }
  for (int64_t i = 0; i < blocks; ++i) {
    bf16* rounded = shares;
    for (int64_t first = 0; first < width; first += kBlock) {
      const int64_t columns = std::min(kBlock, width - first);
      round_all(query_sums + i * block_size + first * kBlock, columns * kBlock, rounded);
      for (int64_t row = 0; row < s.rows(i); ++row) {
        bf16* to = grad_query + (i * kBlock + row) * in_stride + first;
        for (int64_t k = 0; k < columns; ++k) to[k] = rounded[k * kBlock + row];
      }
    }
  }
}

}  // namespace

extern "C" {

// qkv (batch, length, 3, heads, width) to out (batch, length, heads, width) and the logarithm of
// each query's softmax sum, lse (batch, heads, length).
int tileforge_attention_forward(const bf16* qkv, bf16* out, float* lse, int64_t batch,
                                int64_t length, int64_t heads, int64_t width, int threads) {
  const Shape s{batch, length, heads, width};
  const float scale = 1.0f / std::sqrt(static_cast<float>(width));
  Tasks tasks;
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < batch * heads; ++task) {
      const int64_t b = task / heads, h = task % heads;
      const bf16* in = qkv + b * length * 3 * s.stride() + h * width;
      tasks.run([&] {
        scratch.reset();
        forward_head(s, in, in + s.stride(), in + 2 * s.stride(),
                     out + b * length * s.stride() + h * width, lse + task * length, scale,
                     scratch);
      });
    }
    release_products();
  }
  return tasks.outcome();
}

// grad_qkv from the forward pass's in- and outputs and grad_out (batch, length, heads, width).
int tileforge_attention_backward(const bf16* qkv, const bf16* out, const float* lse,
                                 const bf16* grad_out, bf16* grad_qkv, int64_t batch,
                                 int64_t length, int64_t heads, int64_t width, int threads) {
  const Shape s{batch, length, heads, width};
  const float scale = 1.0f / std::sqrt(static_cast<float>(width));
  Tasks tasks;
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < batch * heads; ++task) {
      const int64_t b = task / heads, h = task % heads;
      const int64_t in_at = b * length * 3 * s.stride() + h * width;
      const int64_t at = b * length * s.stride() + h * width;
      const bf16* in = qkv + in_at;
      bf16* grad_in = grad_qkv + in_at;
      tasks.run([&] {
        scratch.reset();
        backward_head(s, in, in + s.stride(), in + 2 * s.stride(), out + at, grad_out + at,
                      lse + task * length, grad_in, grad_in + s.stride(), grad_in + 2 * s.stride(),
                      scale, scratch);
      });
    }
    release_products();
  }
  return tasks.outcome();
}
}
