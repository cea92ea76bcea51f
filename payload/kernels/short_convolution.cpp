// Pointwise ops of linear attention, each in one pass over its data: a causal convolution over the
// last few tokens of each channel, with SiLU, and the RMS norm of each head, multiplied by SiLU of
// a gate. Sums are fp32. Results do not depend on the number of threads.
#include "activations.h"
#include "element.h"

namespace {

// Channels that a task computes, and tokens that one partial sum of a weight's gradient has.
constexpr int64_t kPiece = 256;

// `x` has `stride` elements for each token, and its first `channels` are convolved.
struct Convolution {
  const element* x;
  const float* weight;  // (taps, channels)
  const int64_t* starts;
  int64_t length, stride, channels, taps;

  // The number of earlier tokens that `token` of a sequence reads.
  int64_t before(int64_t sequence, int64_t token) const {
    const int64_t start = starts ? starts[sequence * length + token] : 0;
    return std::min(taps - 1, token - start);
  }

  // Writes the convolution of `count` channels from `first` on.
  void convolve(int64_t sequence, int64_t token, int64_t first, int64_t count, float* sums) const {
    const int64_t most = before(sequence, token);
    const element* in = x + (sequence * length + token) * stride + first;
    const float* tap = weight + (taps - 1) * channels + first;
    for (int64_t back = 0; back <= most; ++back, in -= stride, tap -= channels) {
      if (back == 0) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) sums[i] = tap[i] * to_float(in[i]);
      } else {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) sums[i] += tap[i] * to_float(in[i]);
      }
    }
  }
};

// Computes the gradients of some channels of one sequence. Each token's gradient is complete when
// the last token that reads it has been seen: until then, it is in a ring of `taps` rows.
void convolution_backward(const Convolution& in, int64_t sequence, int64_t first, int64_t count,
                          const element* grad, element* grad_x, float* grad_weight,
                          float* ring) {
  float sums[kPiece];
  std::fill_n(ring, in.taps * kPiece, 0.0f);
  for (int64_t tap = 0; tap < in.taps; ++tap) {
    std::fill_n(grad_weight + tap * in.channels + first, count, 0.0f);
  }
  const auto finish = [&](int64_t token) {
    float* done = ring + token % in.taps * kPiece;
    round_all(done, count, grad_x + (sequence * in.length + token) * in.stride + first);
    std::fill_n(done, count, 0.0f);
  };
  for (int64_t token = 0; token < in.length; ++token) {
    in.convolve(sequence, token, first, count, sums);
    const element* of_out = grad + (sequence * in.length + token) * in.channels + first;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) sums[i] = to_float(of_out[i]) * Silu(sums[i]).slope;
    const int64_t most = in.before(sequence, token);
    for (int64_t back = 0; back <= most; ++back) {
      const int64_t at = (in.taps - 1 - back) * in.channels + first;
      const element* x = in.x + (sequence * in.length + token - back) * in.stride + first;
      const float* weight = in.weight + at;
      float *of_weight = grad_weight + at, *of_x = ring + (token - back) % in.taps * kPiece;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        of_weight[i] += sums[i] * to_float(x[i]);
        of_x[i] += sums[i] * weight[i];
      }
    }
    if (token >= in.taps - 1) finish(token - in.taps + 1);
  }
  for (int64_t token = std::max<int64_t>(in.length - in.taps + 1, 0); token < in.length; ++token) {
    finish(token);
  }
}

inline float inverse_root(const element* x, int64_t width, float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; ++i) squares += to_float(x[i]) * to_float(x[i]);
  return 1.0f / std::sqrt(squares / width + eps);
}

}  // namespace

extern "C" {

// y (batch, length, channels) = SiLU of the convolution of the first `channels` of x (batch,
// length, stride) with weight (taps, channels); the last tap is the token itself. `starts` (batch,
// length) is the first token that each token may read, or null.
void TILEFORGE_KERNEL(short_convolution_forward)(const element* x, const float* weight,
                                                 const int64_t* starts, element* y, int64_t batch,
                                                 int64_t length, int64_t stride, int64_t channels,
                                                 int64_t taps, int threads) {
  const Convolution in{x, weight, starts, length, stride, channels, taps};
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < batch * length; ++row) {
    float sums[kPiece];
    for (int64_t first = 0; first < channels; first += kPiece) {
      const int64_t count = std::min(kPiece, channels - first);
      in.convolve(row / length, row % length, first, count, sums);
      fill(count, y + row * channels + first, [&](int64_t i) { return Silu(sums[i]).value; });
    }
  }
}

// Computes the gradient of x, in its first `channels`, and that of the weight by each sequence
// (batch, taps, channels). `ring` is memory for (tasks, taps, 256), with a task for each sequence
// and each 256 channels.
void TILEFORGE_KERNEL(short_convolution_backward)(const element* x, const float* weight,
                                                  const int64_t* starts, const element* grad,
                                                  element* grad_x, float* weight_parts,
                                                  float* ring, int64_t batch, int64_t length,
                                                  int64_t stride, int64_t channels, int64_t taps,
                                                  int threads) {
  const Convolution in{x, weight, starts, length, stride, channels, taps};
  const int64_t pieces = (channels + kPiece - 1) / kPiece;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t task = 0; task < batch * pieces; ++task) {
    const int64_t sequence = task / pieces, first = task % pieces * kPiece;
    convolution_backward(in, sequence, first, std::min(kPiece, channels - first), grad, grad_x,
                         weight_parts + sequence * taps * channels, ring + task * taps * kPiece);
  }
}

// y (rows, heads, width) = the RMS norm of each head of x times SiLU of the gates, which are
// `heads` x `width` columns of wide (rows, stride) from `column` on. The weight is (width,).
void TILEFORGE_KERNEL(gated_norm_forward)(const element* x, const float* weight, float eps,
                                          const element* wide, element* y, int64_t rows,
                                          int64_t heads, int64_t width, int64_t stride,
                                          int64_t column, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      const element* in = x + (row * heads + head) * width;
      const element* gate = wide + row * stride + column + head * width;
      const float factor = inverse_root(in, width, eps);
      fill(width, y + (row * heads + head) * width, [=](int64_t i) {
        return to_float(in[i]) * factor * weight[i] * Silu(to_float(gate[i])).value;
      });
    }
  }
}

// Computes the gradients of x, of the gates, at their place in grad_wide (rows, stride), and of the
// weight, with one partial sum for each 64 rows, (parts, width).
void TILEFORGE_KERNEL(gated_norm_backward)(const element* x, const float* weight, float eps,
                                           const element* wide, const element* grad,
                                           element* grad_x, element* grad_wide,
                                           float* weight_parts, int64_t rows, int64_t heads,
                                           int64_t width, int64_t stride, int64_t column,
                                           int threads) {
  const int64_t parts = (rows + kSumRows - 1) / kSumRows;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t part = 0; part < parts; ++part) {
    float* weight_grad = weight_parts + part * width;
    std::fill_n(weight_grad, width, 0.0f);
    const int64_t first = part * kSumRows * heads;
    const int64_t end = std::min(rows, (part + 1) * kSumRows) * heads;
    for (int64_t each = first; each < end; ++each) {
      const int64_t place = each / heads * stride + column + each % heads * width;
      const element *in = x + each * width, *gate = wide + place, *of_y = grad + each * width;
      const float factor = inverse_root(in, width, eps);
      float along = 0;
#pragma omp simd reduction(+ : along)
      for (int64_t i = 0; i < width; ++i) {
        const float open = Silu(to_float(gate[i])).value;
        const float product = to_float(of_y[i]) * open * to_float(in[i]) * factor;
        weight_grad[i] += product;
        along += product * weight[i];
      }
      const float pull = along / width * factor;
      fill(width, grad_wide + place, [=](int64_t i) {
        return to_float(of_y[i]) * to_float(in[i]) * factor * weight[i] *
               Silu(to_float(gate[i])).slope;
      });
      fill(width, grad_x + each * width, [=](int64_t i) {
        const float open = Silu(to_float(gate[i])).value;
        return factor * (to_float(of_y[i]) * open * weight[i] - to_float(in[i]) * pull);
      });
    }
  }
}
}
