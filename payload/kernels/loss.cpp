// The loss with its gradient, and the sums of the gradients of the head and the embedding. Sums
// are fp32. Results do not depend on the number of threads.
#include "common.h"

namespace {

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
}
