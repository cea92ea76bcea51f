// Pointwise ops and norms between the matmuls, each in one pass over its data: the loss and its
// gradient, GELU, and the residual sum with layer norm. Sums are fp32. Results do not depend on
// the number of threads.
#include "common.h"

namespace {

// Rows that one task adds to a partial sum.
constexpr int64_t kSumRows = 64;

// One row of logits: slices of `width` elements, the last one shorter, in separate memory.
template <typename T>
struct Logits {
  T* const* slices;
  int64_t row, vocabulary, width;

  T* at(int64_t i) const { return slices[i / width] + row * width + i % width; }
  template <typename Use>
  void each_slice(Use use) const {
    for (int64_t i = 0; i < vocabulary; i += width) use(at(i), std::min(width, vocabulary - i));
  }
};

template <typename T>
void cross_entropy_row(Logits<T> logits, int64_t target, int64_t ignored, float grad_scale,
                       bool with_grad, float* loss) {
  if (target == ignored) {
    *loss = 0.0f;
    if (with_grad) {
      logits.each_slice([](T* slice, int64_t size) { std::fill_n(slice, size, T{0}); });
    }
    return;
  }
  float top = -std::numeric_limits<float>::infinity();
  logits.each_slice([&](const T* slice, int64_t size) {
    float largest = top;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < size; ++i) largest = larger(largest, to_float(slice[i]));
    top = largest;
  });
  // One sum for each slice: rounding errors of fifty thousand terms would add up.
  double sum = 0;
  logits.each_slice([&](const T* slice, int64_t size) {
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t i = 0; i < size; ++i) part += exp2_fast((to_float(slice[i]) - top) * kLog2E);
    sum += part;
  });
  const float log_sum = static_cast<float>(std::log(sum));
  const float target_logit = to_float(*logits.at(target));
  *loss = log_sum + (top - target_logit);
  if (!with_grad) return;
  const float factor = static_cast<float>(grad_scale / sum);
  logits.each_slice([=](T* slice, int64_t size) {
    fill(size, slice, [=](int64_t i) {
      return exp2_fast((to_float(slice[i]) - top) * kLog2E) * factor;
    });
  });
  const float share = exp2_fast((target_logit - top) * kLog2E) / static_cast<float>(sum);
  fill(1, logits.at(target), [=](int64_t) { return (share - 1.0f) * grad_scale; });
}

template <typename T>
void cross_entropy(T* const* slices, int64_t rows, int64_t vocabulary, int64_t width,
                   const int64_t* targets, int64_t ignored, float grad_scale, int with_grad,
                   float* losses, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    cross_entropy_row(Logits<T>{slices, row, vocabulary, width}, targets[row], ignored, grad_scale,
                      with_grad != 0, losses + row);
  }
}

// GPT-2's tanh form is x times the logistic function of 2u.
struct Gelu {
  float logistic, slope;
  explicit Gelu(float x) {
    constexpr float kTwice = 1.5957691216057308f;  // 2 sqrt(2 / pi)
    // Below -10 the logistic function is 1e-38 or less, which is negligible.
    const float bounded = x < -10.0f ? -10.0f : x;
    const float square = bounded * bounded;
    const float power = -kTwice * kLog2E * bounded * (1.0f + 0.044715f * square);
    logistic = 1.0f / (1.0f + exp2_fast(power));
    slope = kTwice * (1.0f + 3 * 0.044715f * square);
  }
};

constexpr int64_t kPiece = 256;

}  // namespace

extern "C" {

// Loss of each row, log(sum(exp(logits))) - logits[target]; 0 if the target is `ignored`. With
// `with_grad` the logits are overwritten by their gradient times `grad_scale`. They are in slices
// of the vocabulary, (rows, width) each.
void tileforge_cross_entropy_bf16(bf16* const* slices, int64_t rows, int64_t vocabulary,
                                  int64_t width, const int64_t* targets, int64_t ignored,
                                  float grad_scale, int with_grad, float* losses, int threads) {
  cross_entropy(slices, rows, vocabulary, width, targets, ignored, grad_scale, with_grad, losses,
                threads);
}
void tileforge_cross_entropy_fp32(float* const* slices, int64_t rows, int64_t vocabulary,
                                  int64_t width, const int64_t* targets, int64_t ignored,
                                  float grad_scale, int with_grad, float* losses, int threads) {
  cross_entropy(slices, rows, vocabulary, width, targets, ignored, grad_scale, with_grad, losses,
                threads);
}

void tileforge_gelu_forward(const bf16* x, bf16* y, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < count; first += kPiece) {
    const int64_t end = std::min(count, first + kPiece);
    fill(end - first, y + first, [=](int64_t i) {
      const float in = to_float(x[first + i]);
      return in * Gelu(in).logistic;
    });
  }
}

// Overwrites grad, of the output, by the input's; y is the forward pass's output, recomputed.
void tileforge_gelu_backward(const bf16* x, bf16* grad, bf16* y, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < count; first += kPiece) {
    const int64_t size = std::min(count - first, kPiece);
    float out[kPiece], slope[kPiece];
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const float in = to_float(x[first + i]);
      const Gelu gelu(in);
      out[i] = in * gelu.logistic;
      slope[i] = to_float(grad[first + i]) *
                 (gelu.logistic + out[i] * (1.0f - gelu.logistic) * gelu.slope);
    }
    round_all(out, size, y + first);
    round_all(slope, size, grad + first);
  }
}

// Sums over rows, one partial sum for each 64 of them, (parts, width): a bias's gradient.
void tileforge_sum_rows(const bf16* x, float* parts_of, int64_t rows, int64_t width, int threads) {
  const int64_t parts = (rows + kSumRows - 1) / kSumRows;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t part = 0; part < parts; ++part) {
    float* sums = parts_of + part * width;
    std::fill_n(sums, width, 0.0f);
    const int64_t end = std::min(rows, (part + 1) * kSumRows);
    for (int64_t row = part * kSumRows; row < end; ++row) {
      const bf16* in = x + row * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) sums[i] += to_float(in[i]);
    }
  }
}

// to += from, elementwise.
void tileforge_widen_add(const bf16* from, float* to, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < count; first += kPiece) {
    const int64_t end = std::min(count, first + kPiece);
#pragma omp simd
    for (int64_t i = first; i < end; ++i) to[i] += to_float(from[i]);
  }
}

// Row indices[i] of `to` += row i of `from`, in order; a task has some columns of all rows.
void tileforge_add_rows(float* to, const int64_t* indices, const float* from, int64_t rows,
                        int64_t width, int threads) {
  constexpr int64_t kColumns = 64;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < width; first += kColumns) {
    const int64_t size = std::min(kColumns, width - first);
    for (int64_t row = 0; row < rows; ++row) {
      float* sum = to + indices[row] * width + first;
      const float* plus = from + row * width + first;
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) sum[i] += plus[i];
    }
  }
}

// sum = x + added, normed = (sum - mean) * rstd * weight + bias, row by row. `added` and `bias` may
// be null; without `added`, `sum` is not written and may be null.
void tileforge_add_norm_forward(const float* x, const bf16* added, const float* weight,
                                const float* bias, float eps, float* sum, bf16* normed,
                                float* mean, float* rstd, int64_t rows, int64_t width,
                                int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * width;
    if (added) {
      const bf16* plus = added + row * width;
      float* to = sum + row * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) to[i] = in[i] + to_float(plus[i]);
      in = to;
    }
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < width; ++i) total += in[i];
    const float middle = total / width;
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i) squares += (in[i] - middle) * (in[i] - middle);
    const float factor = 1.0f / std::sqrt(squares / width + eps);
    mean[row] = middle;
    rstd[row] = factor;
    bf16* to = normed + row * width;
    if (bias) {
      fill(width, to,
           [=](int64_t i) { return (in[i] - middle) * factor * weight[i] + bias[i]; });
    } else {
      fill(width, to, [=](int64_t i) { return (in[i] - middle) * factor * weight[i]; });
    }
  }
}

// grad_x = grad_sum + the norm's own gradient; grad_added is the same in bf16. `grad_sum` and
// `grad_added` may be null. Gradients of weight and bias have one partial sum for each 64 rows,
// (parts, width).
void tileforge_add_norm_backward(const float* sum, const float* mean, const float* rstd,
                                 const float* weight, const float* grad_sum,
                                 const bf16* grad_normed, float* grad_x, bf16* grad_added,
                                 float* weight_parts, float* bias_parts, int64_t rows,
                                 int64_t width, int threads) {
  const int64_t parts = (rows + kSumRows - 1) / kSumRows;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t part = 0; part < parts; ++part) {
    float* weight_grad = weight_parts + part * width;
    float* bias_grad = bias_parts + part * width;
    std::fill_n(weight_grad, width, 0.0f);
    std::fill_n(bias_grad, width, 0.0f);
    const int64_t end = std::min(rows, (part + 1) * kSumRows);
    for (int64_t row = part * kSumRows; row < end; ++row) {
      const float* in = sum + row * width;
      const bf16* grad = grad_normed + row * width;
      const float middle = mean[row], factor = rstd[row];
      float plain = 0, along = 0;
#pragma omp simd reduction(+ : plain, along)
      for (int64_t i = 0; i < width; ++i) {
        const float standard = (in[i] - middle) * factor;
        const float g = to_float(grad[i]);
        weight_grad[i] += g * standard;
        bias_grad[i] += g;
        plain += g * weight[i];
        along += g * weight[i] * standard;
      }
      plain /= width;
      along /= width;
      const float* through = grad_sum ? grad_sum + row * width : nullptr;
      float* to = grad_x + row * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const float standard = (in[i] - middle) * factor;
        to[i] = factor * (to_float(grad[i]) * weight[i] - plain - standard * along);
      }
      if (through) {
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) to[i] += through[i];
      }
      if (grad_added) round_all(to, width, grad_added + row * width);
    }
  }
}
}
