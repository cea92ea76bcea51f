// Pointwise ops and norms of the Llama family, each in one pass over its data: residual sum and RMS
// norm, rotary embeddings with norms of queries and keys, and the gated activation. Sums are fp32.
// Results do not depend on the number of threads.
#include "activations.h"
#include "element.h"

namespace {

template <typename T>
inline float inverse_root(const T* x, int64_t width, float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; ++i) squares += to_float(x[i]) * to_float(x[i]);
  return 1.0f / std::sqrt(squares / width + eps);
}

// The scale is weight + offset: Gemma's weights are relative to 1.
template <typename T>
void norm_forward(const T* x, const element* added, float added_scale, const float* weight,
                  float offset, float eps, float* sum, element* normed, float* rstd, int64_t rows,
                  int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const T* in = x + row * width;
    element* to = normed + row * width;
    if (added) {
      const element* plus = added + row * width;
      float* total = sum + row * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        total[i] = to_float(in[i]) + added_scale * to_float(plus[i]);
      }
      const float factor = rstd[row] = inverse_root(total, width, eps);
      fill(width, to, [=](int64_t i) { return total[i] * factor * (weight[i] + offset); });
    } else {
      const float factor = rstd[row] = inverse_root(in, width, eps);
      fill(width, to, [=](int64_t i) { return to_float(in[i]) * factor * (weight[i] + offset); });
    }
  }
}

template <typename T>
void norm_backward(const T* x, const float* rstd, const float* weight, float offset,
                   const float* grad_sum, const element* grad_normed, T* grad_x,
                   element* grad_added, float added_scale, float* weight_parts, int64_t rows,
                   int64_t width, int threads) {
  constexpr int64_t kAtOnce = 256;
  const int64_t parts = (rows + kSumRows - 1) / kSumRows;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t part = 0; part < parts; ++part) {
    float* weight_grad = weight_parts ? weight_parts + part * width : nullptr;
    if (weight_grad) std::fill_n(weight_grad, width, 0.0f);
    const int64_t end = std::min(rows, (part + 1) * kSumRows);
    for (int64_t row = part * kSumRows; row < end; ++row) {
      const T* in = x + row * width;
      const element* grad = grad_normed + row * width;
      const float factor = rstd[row];
      float along = 0;
      if (weight_grad) {
#pragma omp simd reduction(+ : along)
        for (int64_t i = 0; i < width; ++i) {
          const float product = to_float(grad[i]) * to_float(in[i]) * factor;
          weight_grad[i] += product;
          along += product * (weight[i] + offset);
        }
      } else {
#pragma omp simd reduction(+ : along)
        for (int64_t i = 0; i < width; ++i) {
          along += to_float(grad[i]) * to_float(in[i]) * factor * (weight[i] + offset);
        }
      }
      const float pull = along / width * factor;
      const float* through = grad_sum ? grad_sum + row * width : nullptr;
      float piece[kAtOnce];
      for (int64_t first = 0; first < width; first += kAtOnce) {
        const int64_t size = std::min(kAtOnce, width - first);
#pragma omp simd
        for (int64_t k = 0; k < size; ++k) {
          const int64_t i = first + k;
          piece[k] = factor * (to_float(grad[i]) * (weight[i] + offset) - to_float(in[i]) * pull);
        }
        if (through) {
#pragma omp simd
          for (int64_t k = 0; k < size; ++k) piece[k] += through[first + k];
        }
        round_all(piece, size, grad_x + row * width + first);
        if (grad_added) {
#pragma omp simd
          for (int64_t k = 0; k < size; ++k) piece[k] *= added_scale;
          round_all(piece, size, grad_added + row * width + first);
        }
      }
    }
  }
}

// The largest head width, since a thread keeps a head on its stack.
constexpr int64_t kLongestHead = 512;

// Rotates the pairs (i, i + half) of x by the angles' cosines and sines; a `sign` of -1 inverts it.
inline void turn(float* x, const float* cos, const float* sin, float sign, int64_t half) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half], s = sin[i] * sign;
    x[i] = first * cos[i] - second * s;
    x[i + half] = second * cos[i] + first * s;
  }
}

// Sizes of queries and keys: `heads` of the first kind, `key_heads` of the second.
struct Heads {
  int64_t rows, length, heads, key_heads, width;
  int64_t rotated() const { return heads + key_heads; }
  int64_t stride() const { return (heads + 2 * key_heads) * width; }
};

// How queries and keys are normed: each head by itself, or (`is_joint`) all heads of a kind at
// once. Weights are (2, width), or with `is_joint` (heads + key_heads, width).
struct Norms {
  const Heads& sizes;
  bool is_joint;
  int64_t weights() const { return (is_joint ? sizes.rotated() : 2) * sizes.width; }
  // Number of heads in the norm that begins at `head`.
  int64_t together(int64_t head) const {
    return is_joint ? (head < sizes.heads ? sizes.heads : sizes.key_heads) : 1;
  }
  int64_t weight_at(int64_t head) const {
    return (is_joint ? head : head < sizes.heads ? 0 : 1) * sizes.width;
  }
};

// GELU's tanh form: x times the logistic function of 2u.
struct GeluTanh {
  float value, slope;
  explicit GeluTanh(float x) {
    constexpr float kTwice = 1.5957691216057308f;  // 2 sqrt(2 / pi)
    // Below -10 the logistic function is 1e-38 or less, above 10 it is 1.
    const float bounded = std::min(std::max(x, -10.0f), 10.0f);
    const float square = bounded * bounded;
    const float power = -kTwice * kLog2E * bounded * (1.0f + 0.044715f * square);
    const float logistic = 1.0f / (1.0f + exp2_fast(power));
    value = x * logistic;
    slope = logistic + value * (1.0f - logistic) * kTwice * (1.0f + 3 * 0.044715f * square);
  }
};

constexpr int64_t kPiece = 512;

template <typename Activation>
void gated_forward(const element* wide, element* y, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const element* gate = wide + row * 2 * width;
    const element* up = gate + width;
    fill(width, y + row * width, [=](int64_t i) {
      return Activation(to_float(gate[i])).value * to_float(up[i]);
    });
  }
}

template <typename Activation>
void gated_backward(const element* wide, element* grad, element* grad_wide, int64_t rows,
                    int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const element* gate = wide + row * 2 * width;
    const element* up = gate + width;
    element* in = grad + row * width;
    element* to = grad_wide + row * 2 * width;
    float gate_grad[kPiece], up_grad[kPiece], out[kPiece];
    for (int64_t first = 0; first < width; first += kPiece) {
      const int64_t size = std::min(kPiece, width - first);
#pragma omp simd
      for (int64_t k = 0; k < size; ++k) {
        const Activation activation(to_float(gate[first + k]));
        const float g = to_float(in[first + k]), u = to_float(up[first + k]);
        out[k] = activation.value * u;
        up_grad[k] = g * activation.value;
        gate_grad[k] = g * u * activation.slope;
      }
      round_all(gate_grad, size, to + first);
      round_all(up_grad, size, to + width + first);
      round_all(out, size, in + first);
    }
  }
}

}  // namespace

extern "C" {

// sum = x + added_scale * added, normed = sum * rstd * (weight + offset), row by row, rstd = 1 /
// the root of the mean square. Without `added`, `sum` is not written; both may be null.
void TILEFORGE_KERNEL(rms_norm_forward)(const float* x, const element* added, float added_scale,
                                        const float* weight, float offset, float eps, float* sum,
                                        element* normed, float* rstd, int64_t rows, int64_t width,
                                        int threads) {
  norm_forward(x, added, added_scale, weight, offset, eps, sum, normed, rstd, rows, width,
               threads);
}
// The same of x with elements of the matmuls' type, without a sum.
void TILEFORGE_KERNEL(branch_rms_norm_forward)(const element* x, const float* weight, float offset,
                                               float eps, element* normed, float* rstd,
                                               int64_t rows, int64_t width, int threads) {
  norm_forward(x, nullptr, 1.0f, weight, offset, eps, nullptr, normed, rstd, rows, width, threads);
}

// grad_x = grad_sum + the norm's own gradient; grad_added is added_scale * grad_x, rounded.
// `grad_sum` may be grad_x itself; `grad_sum` and `grad_added` may be null. The weight's gradient
// has one partial sum for each 64 rows, (parts, width), and is skipped if `weight_parts` is null.
void TILEFORGE_KERNEL(rms_norm_backward)(const float* sum, const float* rstd, const float* weight,
                                         float offset, const float* grad_sum,
                                         const element* grad_normed, float* grad_x,
                                         element* grad_added, float added_scale,
                                         float* weight_parts, int64_t rows, int64_t width,
                                         int threads) {
  norm_backward(sum, rstd, weight, offset, grad_sum, grad_normed, grad_x, grad_added, added_scale,
                weight_parts, rows, width, threads);
}
void TILEFORGE_KERNEL(branch_rms_norm_backward)(const element* x, const float* rstd,
                                                const float* weight, float offset,
                                                const element* grad_normed, element* grad_x,
                                                float* weight_parts, int64_t rows, int64_t width,
                                                int threads) {
  norm_backward<element>(x, rstd, weight, offset, nullptr, grad_normed, grad_x, nullptr, 1.0f,
                      weight_parts, rows, width, threads);
}

// Rotates queries and keys of qkv (rows, heads + 2 key_heads, width) in place; cos and sin are
// (length, half), and row r is token r % length. Elements from 2 half on stay as they are.
void TILEFORGE_KERNEL(rotate)(element* qkv, const float* cos, const float* sin, float sign,
                              int64_t rows, int64_t length, int64_t heads, int64_t key_heads,
                              int64_t width, int64_t half, int threads) {
  const Heads s{rows, length, heads, key_heads, width};
  const int64_t turned = 2 * half;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t angle = row % length * half;
    float x[kLongestHead];
    for (int64_t head = 0; head < s.rotated(); ++head) {
      element* at = qkv + row * s.stride() + head * width;
      for (int64_t i = 0; i < turned; ++i) x[i] = to_float(at[i]);
      turn(x, cos + angle, sin + angle, sign, half);
      round_all(x, turned, at);
    }
  }
}

// Norms and rotates queries and keys of qkv, to qk (rows, heads + key_heads, width). `Norms`
// describes the weights; null cos and sin mean no rotation.
void TILEFORGE_KERNEL(norm_rotate_forward)(const element* qkv, const float* weights, int is_joint,
                                           float offset, float eps, const float* cos,
                                           const float* sin, element* qk, int64_t rows,
                                           int64_t length, int64_t heads, int64_t key_heads,
                                           int64_t width, int64_t half, int threads) {
  const Heads s{rows, length, heads, key_heads, width};
  const Norms norms{s, is_joint != 0};
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t angle = row % length * half;
    float x[kLongestHead];
    for (int64_t first = 0; first < s.rotated(); first += norms.together(first)) {
      const int64_t end = first + norms.together(first);
      const element* at = qkv + row * s.stride() + first * width;
      const float factor = inverse_root(at, (end - first) * width, eps);
      for (int64_t head = first; head < end; ++head, at += width) {
        const float* weight = weights + norms.weight_at(head);
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) x[i] = to_float(at[i]) * factor * (weight[i] + offset);
        if (cos) turn(x, cos + angle, sin + angle, 1.0f, half);
        round_all(x, width, qk + (row * s.rotated() + head) * width);
      }
    }
  }
}

// Converts the gradient of queries and keys in grad (rows, heads + 2 key_heads, width) from the
// outputs' of the function above to the inputs'. The weights' gradient has one partial sum for each
// 64 rows, each with the shape of the weights.
void TILEFORGE_KERNEL(norm_rotate_backward)(const element* qkv, const float* weights, int is_joint,
                                            float offset, float eps, const float* cos,
                                            const float* sin, element* grad, float* weight_parts,
                                            int64_t rows, int64_t length, int64_t heads,
                                            int64_t key_heads, int64_t width, int64_t half,
                                            int threads) {
  const Heads s{rows, length, heads, key_heads, width};
  const Norms norms{s, is_joint != 0};
  const int64_t parts = (rows + kSumRows - 1) / kSumRows;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t part = 0; part < parts; ++part) {
    float* sums = weight_parts + part * norms.weights();
    std::fill_n(sums, norms.weights(), 0.0f);
    const int64_t end = std::min(rows, (part + 1) * kSumRows);
    for (int64_t row = part * kSumRows; row < end; ++row) {
      const int64_t angle = row % length * half;
      float g[kLongestHead];
      const auto load = [&](const element* from) {
        for (int64_t i = 0; i < width; ++i) g[i] = to_float(from[i]);
        if (cos) turn(g, cos + angle, sin + angle, -1.0f, half);
      };
      for (int64_t first = 0; first < s.rotated(); first += norms.together(first)) {
        const int64_t count = norms.together(first), at = row * s.stride() + first * width;
        const float factor = inverse_root(qkv + at, count * width, eps);
        float along = 0;
        for (int64_t k = 0; k < count; ++k) {
          const element* in = qkv + at + k * width;
          const float* weight = weights + norms.weight_at(first + k);
          float* weight_grad = sums + norms.weight_at(first + k);
          load(grad + at + k * width);
#pragma omp simd reduction(+ : along)
          for (int64_t i = 0; i < width; ++i) {
            const float product = g[i] * to_float(in[i]) * factor;
            weight_grad[i] += product;
            along += product * (weight[i] + offset);
          }
        }
        const float pull = along / (count * width) * factor;
        for (int64_t k = 0; k < count; ++k) {
          const element* in = qkv + at + k * width;
          const float* weight = weights + norms.weight_at(first + k);
          // With one head, g still holds its gradient.
          if (count > 1) load(grad + at + k * width);
#pragma omp simd
          for (int64_t i = 0; i < width; ++i) {
            g[i] = factor * (g[i] * (weight[i] + offset) - to_float(in[i]) * pull);
          }
          round_all(g, width, grad + at + k * width);
        }
      }
    }
  }
}

// y (rows, width) = activation(gate) * up; gate and up are the halves of wide (rows, 2 width). The
// activation is SiLU, or with `is_gelu` GELU's tanh form.
void TILEFORGE_KERNEL(gated_forward)(const element* wide, element* y, int is_gelu, int64_t rows,
                                     int64_t width, int threads) {
  (is_gelu ? gated_forward<GeluTanh> : gated_forward<Silu>)(wide, y, rows, width, threads);
}

// grad_wide (rows, 2 width) from the gradient of y, which is overwritten by y.
void TILEFORGE_KERNEL(gated_backward)(const element* wide, element* grad, element* grad_wide,
                                      int is_gelu, int64_t rows, int64_t width, int threads) {
  (is_gelu ? gated_backward<GeluTanh> : gated_backward<Silu>)(wide, grad, grad_wide, rows, width,
                                                              threads);
}
}
