// Pointwise ops and norms between GPT-2's matmuls, each in one pass over its data: GELU, and the
// residual sum with layer norm; also a bias's gradient. Sums are fp32. Results do not depend on the
// number of threads.
#include "element.h"

namespace {

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

void TILEFORGE_KERNEL(gelu_forward)(const element* x, element* y, int64_t count, int threads) {
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
void TILEFORGE_KERNEL(gelu_backward)(const element* x, element* grad, element* y, int64_t count,
                                     int threads) {
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
void TILEFORGE_KERNEL(sum_rows)(const element* x, float* parts_of, int64_t rows, int64_t width,
                                int threads) {
  const int64_t parts = (rows + kSumRows - 1) / kSumRows;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t part = 0; part < parts; ++part) {
    float* sums = parts_of + part * width;
    std::fill_n(sums, width, 0.0f);
    const int64_t end = std::min(rows, (part + 1) * kSumRows);
    for (int64_t row = part * kSumRows; row < end; ++row) {
      const element* in = x + row * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) sums[i] += to_float(in[i]);
    }
  }
}

// sum = x + added, normed = (sum - mean) * rstd * weight + bias, row by row. `added` and `bias` may
// be null; without `added`, `sum` is not written and may be null.
void TILEFORGE_KERNEL(add_norm_forward)(const float* x, const element* added, const float* weight,
                                        const float* bias, float eps, float* sum, element* normed,
                                        float* mean, float* rstd, int64_t rows, int64_t width,
                                        int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * width;
    if (added) {
      const element* plus = added + row * width;
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
    element* to = normed + row * width;
    if (bias) {
      fill(width, to,
           [=](int64_t i) { return (in[i] - middle) * factor * weight[i] + bias[i]; });
    } else {
      fill(width, to, [=](int64_t i) { return (in[i] - middle) * factor * weight[i]; });
    }
  }
}

// grad_x = grad_sum + the norm's own gradient; grad_added is the same, rounded. `grad_sum` and
// `grad_added` may be null. Gradients of weight and bias have one partial sum for each 64 rows,
// (parts, width).
void TILEFORGE_KERNEL(add_norm_backward)(const float* sum, const float* mean, const float* rstd,
                                         const float* weight, const float* grad_sum,
                                         const element* grad_normed, float* grad_x,
                                         element* grad_added, float* weight_parts,
                                         float* bias_parts, int64_t rows, int64_t width,
                                         int threads) {
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
      const element* grad = grad_normed + row * width;
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
