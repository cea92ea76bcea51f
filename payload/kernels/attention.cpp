// Causal self-attention, forward and backward, in bf16 with fp32 sums.
//
// A task is one key head of one sequence with the query heads that share it: keys are packed once
// for all of them, and never copied per query head. Its blocks stay in the core's L2 cache. The
// backward pass keeps scores transposed (keys x queries): so probabilities and their gradients are
// left operands without repacking, and per-query values lie along a row.
#include "attention_shape.h"
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

// The first token that each token of a sequence attends to, by blocks.
struct Visible {
  const int64_t* starts;
  // For each token the end of the tokens that attend to it. Empty if all later ones do.
  std::vector<int64_t> ends;

  Visible(const int64_t* starts_of, int64_t length, bool with_ends) : starts(starts_of) {
    if (!starts || !with_ends) return;
    ends.resize(length);
    int64_t query = 0;
    for (int64_t key = 0; key < length; ++key) {
      while (query < length && starts[query] <= key) ++query;
      ends[key] = query;
    }
  }
  int64_t first_block(int64_t query_block) const {
    return starts ? starts[query_block * kBlock] / kBlock : 0;
  }
  // The starts of a block of `rows` queries, or null if all of them see the whole key block.
  const int64_t* limits(int64_t query_block, int64_t rows, int64_t key_block) const {
    if (!starts) return nullptr;
    const int64_t* of = starts + query_block * kBlock;
    return of[rows - 1] > key_block * kBlock ? of : nullptr;
  }
  int64_t last_block(int64_t key_block, int64_t rows, int64_t blocks) const {
    return ends.empty() ? blocks - 1 : (ends[key_block * kBlock + rows - 1] - 1) / kBlock;
  }
  const int64_t* key_limits(int64_t key_block, int64_t query_block) const {
    if (ends.empty()) return nullptr;
    const int64_t* of = ends.data() + key_block * kBlock;
    return of[0] < (query_block + 1) * kBlock ? of : nullptr;
  }
};

// For a row of a block on the diagonal, in whole vectors: elements up to the diagonal, and elements
// from it on. The others are ignored.
constexpr int64_t kVector = 16;
int64_t vectors_end(int64_t row) { return row / kVector * kVector + kVector; }
int64_t vectors_begin(int64_t row) { return row / kVector * kVector; }

// One block of queries against one of keys: replaces scores by 2^(scores - the row's maximum so
// far), adds their sum to `total`, and writes the factor for earlier sums to `keep`. `scale` and
// `highest` are in powers of two. The steps loop over rows separately, since steps of one row
// depend on each other. `limits` are the first visible keys; `before` keys precede the block.
void weigh(int64_t rows, bool diagonal, const int64_t* limits, int64_t before, float scale,
           float* scores, bf16* shares, float* highest, float* total, float* keep) {
  float top[kBlock], sum[kBlock];
  std::fill_n(top, kBlock, 0.0f);
  std::fill_n(sum, kBlock, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    float* score = scores + row * kBlock;
    const int64_t width = diagonal ? vectors_end(row) : kBlock;
    if (diagonal) std::fill(score + row + 1, score + width, -1e30f);
    if (limits) std::fill(score, score + std::clamp<int64_t>(limits[row] - before, 0, width), -1e30f);
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

// `query` is the first of the heads that share `key` and `value`; `out` and `lse` are its outputs.
void forward_heads(const Shape& s, const Visible& visible, const bf16* query, const bf16* key,
                   const bf16* value, bf16* out, float* lse, Scratch& scratch) {
  const int64_t blocks = s.blocks(), width = s.width;
  const int64_t block_size = kBlock * width;
  auto* keys = scratch.take<bf16>(blocks * block_size);
  auto* values = scratch.take<bf16>(blocks * block_size);
  auto* scores = scratch.take<float>(kBlock * kBlock);
  auto* shares = scratch.take<bf16>(kBlock * kBlock);
  auto* sums = scratch.take<float>(block_size);
  float highest[kBlock], total[kBlock], keep[kBlock];
  for (int64_t j = 0; j < blocks; ++j) {
    pack_columns(key + j * kBlock * s.in_stride, s.in_stride, s.rows(j), width,
                 keys + j * block_size);
    pack_rows(value + j * kBlock * s.value_stride, s.value_stride, s.rows(j), width,
              values + j * block_size);
  }
  for (int64_t task = 0; task < s.group() * blocks; ++task) {
    const int64_t head = task / blocks, i = task % blocks, rows = s.rows(i);
    const int64_t first = visible.first_block(i);
    std::fill_n(highest, kBlock, -std::numeric_limits<float>::infinity());
    std::fill_n(total, kBlock, 0.0f);
    for (int64_t j = first; j <= i; ++j) {
      product(rows, kBlock, width, query + head * width + i * kBlock * s.in_stride, s.in_stride,
              keys + j * block_size, kBlock, scores, kBlock, false);
      weigh(rows, i == j, visible.limits(i, rows, j), j * kBlock, s.scale * kLog2E, scores, shares,
            highest, total, keep);
      for (int64_t row = 0; j > first && row < rows; ++row) {
        float* row_sums = sums + row * width;
#pragma omp simd
        for (int64_t k = 0; k < width; ++k) row_sums[k] *= keep[row];
      }
      product(rows, width, kBlock, shares, kBlock, values + j * block_size, width, sums, width,
              j > first);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const float factor = 1.0f / total[row];
      const int64_t position = i * kBlock + row;
      bf16* to = out + head * width + position * s.stride();
      const float* from = sums + row * width;
      fill(width, to, [=](int64_t k) { return from[k] * factor; });
      lse[head * s.length + position] = highest[row] * kLn2 + std::log(total[row]);
    }
  }
}

struct Packed {
  bf16 *rows, *columns;
};

// One block of keys against one of queries: from transposed scores and the gradient before
// softmax to probabilities and the scores' gradient, the latter also as a right operand. `lse`
// is in powers of two, `delta` is multiplied by `scale`. `limits` are the ends of the visible
// queries; `before` queries precede the block.
void differentiate(int64_t rows, bool diagonal, const int64_t* limits, int64_t before,
                   const float* scores, const float* grad_shares, const float* lse,
                   const float* delta, float scale, bf16* shares, bf16* grad_scores,
                   bf16* grad_pairs) {
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
      if (limits) {
        const int64_t end = std::clamp<int64_t>(limits[row] - before, 0, kBlock);
        std::fill(exact + end, exact + kBlock, 0.0f);
        std::fill(exact + kBlock + end, exact + 2 * kBlock, 0.0f);
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

// Inputs and outputs of the heads of one task.
struct Inputs {
  const bf16 *query, *key, *value, *out, *grad_out;
  const float* lse;
};
struct Outputs {
  bf16 *query, *key, *value;
};

// The rows of queries, their gradients, and per-query values, packed for one head.
struct Queries {
  Packed rows, grads;
  float *lse, *delta;

  Queries(const Shape& s, Scratch& scratch) {
    const int64_t size = s.blocks() * kBlock * s.width;
    rows = {scratch.take<bf16>(size), scratch.take<bf16>(size)};
    grads = {scratch.take<bf16>(size), scratch.take<bf16>(size)};
    lse = scratch.take<float>(s.blocks() * kBlock);
    delta = scratch.take<float>(s.blocks() * kBlock);
  }

  void pack(const Shape& s, const Inputs& in, int64_t head) {
    const int64_t width = s.width, stride = s.stride(), block_size = kBlock * width;
    const bf16* query = in.query + head * width;
    const bf16* grad_out = in.grad_out + head * width;
    const bf16* out = in.out + head * width;
    const float* lse_of = in.lse + head * s.length;
    for (int64_t i = 0; i < s.blocks(); ++i) {
      const bf16* grad = grad_out + i * kBlock * stride;
      const bf16* from = query + i * kBlock * s.in_stride;
      pack_rows(from, s.in_stride, s.rows(i), width, rows.rows + i * block_size);
      pack_columns(from, s.in_stride, s.rows(i), width, rows.columns + i * block_size);
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
        delta[position] = sum * s.scale;
        // A query past the end has weight 2^-large.
        lse[position] = row < s.rows(i) ? lse_of[position] * kLog2E : 1e30f;
      }
    }
  }
};

// Converts the queries' gradient from sums (width, kBlock) a block to rows.
void store_queries(const Shape& s, const float* sums, bf16* rounded, bf16* grad) {
  const int64_t width = s.width, block_size = kBlock * width;
  for (int64_t i = 0; i < s.blocks(); ++i) {
    for (int64_t first = 0; first < width; first += kBlock) {
      const int64_t columns = std::min(kBlock, width - first);
      round_all(sums + i * block_size + first * kBlock, columns * kBlock, rounded);
      for (int64_t row = 0; row < s.rows(i); ++row) {
        bf16* to = grad + (i * kBlock + row) * s.grad_stride + first;
        for (int64_t k = 0; k < columns; ++k) to[k] = rounded[k * kBlock + row];
      }
    }
  }
}

void backward_heads(const Shape& s, const Visible& visible, const Inputs& in, const Outputs& to,
                    Scratch& scratch) {
  const int64_t blocks = s.blocks(), width = s.width, group = s.group();
  const int64_t block_size = kBlock * width;
  Queries queries(s, scratch);
  auto* query_sums = scratch.take<float>(blocks * block_size);  // (width, kBlock) a block
  // Heads that share keys add their gradients; a single head finishes a block immediately.
  const int64_t kept = group > 1 ? blocks : 1;
  auto* key_sums = scratch.take<float>(kept * block_size);
  auto* value_sums = scratch.take<float>(kept * block_size);
  auto* key_columns = scratch.take<bf16>(block_size);
  auto* scores = scratch.take<float>(kBlock * kBlock);
  auto* grad_shares = scratch.take<float>(kBlock * kBlock);
  auto* shares = scratch.take<bf16>(kBlock * kBlock);
  auto* grad_scores = scratch.take<bf16>(kBlock * kBlock);
  auto* grad_pairs = scratch.take<bf16>(kBlock * kBlock);
  for (int64_t head = 0; head < group; ++head) {
    queries.pack(s, in, head);
    for (int64_t j = 0; j < blocks; ++j) {
      const int64_t rows = s.rows(j), last = visible.last_block(j, rows, blocks);
      const bf16* key = in.key + j * kBlock * s.in_stride;
      const bf16* value = in.value + j * kBlock * s.value_stride;
      float* key_sum = key_sums + (group > 1 ? j : 0) * block_size;
      float* value_sum = value_sums + (group > 1 ? j : 0) * block_size;
      transpose(key, s.in_stride, rows, width, key_columns, kBlock);
      for (int64_t i = j; i <= last; ++i) {
        product(rows, kBlock, width, key, s.in_stride, queries.rows.columns + i * block_size,
                kBlock, scores, kBlock, false);
        product(rows, kBlock, width, value, s.value_stride, queries.grads.columns + i * block_size,
                kBlock, grad_shares, kBlock, false);
        differentiate(rows, i == j, visible.key_limits(j, i), i * kBlock, scores, grad_shares,
                      queries.lse + i * kBlock, queries.delta + i * kBlock, s.scale, shares,
                      grad_scores, grad_pairs);
        const bool adds = i > j || head > 0;
        product(rows, width, kBlock, shares, kBlock, queries.grads.rows + i * block_size, width,
                value_sum, width, adds);
        product(rows, width, kBlock, grad_scores, kBlock, queries.rows.rows + i * block_size,
                width, key_sum, width, adds);
        product(width, kBlock, kBlock, key_columns, kBlock, grad_pairs, kBlock,
                query_sums + i * block_size, kBlock, j > visible.first_block(i));
      }
      if (head == group - 1) {
        store(key_sum, rows, width, to.key + j * kBlock * s.grad_stride, s.grad_stride);
        store(value_sum, rows, width, to.value + j * kBlock * s.grad_stride, s.grad_stride);
      }
    }
    store_queries(s, query_sums, shares, to.query + head * width);
  }
}

}  // namespace

extern "C" {

// Computes out (batch, length, heads, width) and the logarithm of each query's softmax sum, lse
// (batch, heads, length), from qkv (batch, length, heads + 2 key_heads, width). If `qk` (batch,
// length, heads + key_heads, width) is given, it replaces queries and keys. A scale of 0 means one
// over the root of the width. `starts` (batch, length) is each token's first visible one, or null.
int tileforge_attention_forward_bf16(const bf16* qkv, const bf16* qk, const int64_t* starts,
                                     bf16* out, float* lse, int64_t batch, int64_t length,
                                     int64_t heads, int64_t key_heads, int64_t width, float scale,
                                     int threads) {
  const Shape s = make_shape(kBlock, batch, length, heads, key_heads, width, qk, scale, starts);
  Tasks tasks;
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
    begin_products();
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < batch * key_heads; ++task) {
      const int64_t b = task / key_heads, h = task % key_heads, head = h * s.group();
      const bf16* in = (qk ? qk : qkv) + b * length * s.in_stride;
      const bf16* values = qkv + b * length * s.value_stride + (heads + key_heads) * width;
      tasks.run([&] {
        scratch.reset();
        forward_heads(s, Visible(starts_of(s, b), length, false), in + head * width,
                      in + (heads + h) * width, values + h * width,
                      out + b * length * s.stride() + head * width,
                      lse + (b * heads + head) * length, scratch);
      });
    }
    release_products();
  }
  return tasks.outcome();
}

// Computes grad_qkv, of qkv's shape, from the forward pass's in- and outputs and grad_out, of out's
// shape. If `qk` is given, the gradients of queries and keys are the gradients of `qk`.
int tileforge_attention_backward_bf16(const bf16* qkv, const bf16* qk, const int64_t* starts,
                                      const bf16* out, const float* lse, const bf16* grad_out,
                                      bf16* grad_qkv, int64_t batch, int64_t length, int64_t heads,
                                      int64_t key_heads, int64_t width, float scale, int threads) {
  const Shape s = make_shape(kBlock, batch, length, heads, key_heads, width, qk, scale, starts);
  Tasks tasks;
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
    begin_products();
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < batch * key_heads; ++task) {
      const int64_t b = task / key_heads, h = task % key_heads, head = h * s.group();
      const int64_t at = b * length * s.stride() + head * width;
      const int64_t key_at = (heads + h) * width, value_at = (heads + key_heads + h) * width;
      const bf16* in = (qk ? qk : qkv) + b * length * s.in_stride;
      const bf16* values = qkv + b * length * s.value_stride;
      bf16* grad = grad_qkv + b * length * s.grad_stride;
      tasks.run([&] {
        scratch.reset();
        backward_heads(s, Visible(starts_of(s, b), length, true),
                       {in + head * width, in + key_at, values + value_at, out + at, grad_out + at,
                        lse + (b * heads + head) * length},
                       {grad + head * width, grad + key_at, grad + value_at}, scratch);
      });
    }
    release_products();
  }
  return tasks.outcome();
}
}
