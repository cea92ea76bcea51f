// The update: the gradients' norm, and AdamW in one pass over its memory.
//
// Every operation is rounded as in IEEE 754, without contraction and in a fixed order: ranks on
// different machines, compilers or thread counts must get the same weights.
#include "common.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace {

// Elements of one task: its inputs and outputs fit a core's L2 cache.
constexpr int64_t kPiece = 16384;

struct Piece {
  int64_t tensor, first, end;
};

std::vector<Piece> pieces_of(const int64_t* counts, int64_t tensors) {
  std::vector<Piece> pieces;
  for (int64_t tensor = 0; tensor < tensors; ++tensor) {
    for (int64_t first = 0; first < counts[tensor]; first += kPiece) {
      pieces.push_back({tensor, first, std::min(counts[tensor], first + kPiece)});
    }
  }
  return pieces;
}

// Squares of floats are exact in double.
template <typename Number>
double sum_of_squares(const Number* x, int64_t count) {
  constexpr int64_t kLanes = 32;
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = to_float(x[i + lane]);
      lanes[lane] += value * value;
    }
  }
  double sum = 0;
  for (double lane : lanes) sum += lane;
  for (; i < count; ++i) sum += static_cast<double>(to_float(x[i])) * to_float(x[i]);
  return sum;
}

}  // namespace

extern "C" {

// One tensor of an update. Its gradient is in fp32 (`grad`) or in bf16 (`rounded`); the other
// pointer is null. `copy` is the weight's bf16 copy, or null.
struct TileforgeUpdate {
  float *weight, *mean, *square;
  const float* grad;
  const bf16* rounded;
  bf16* copy;
  int64_t count;
  // 1 - lr x weight decay; lr / (1 - beta1^step); sqrt(1 - beta2^step).
  float keep, step_size, correction;
};

// Sum of the squares of all elements of all tensors, each fp32 or, where `is_bf16`, bf16.
int tileforge_sum_squares(const void* const* tensors, const int64_t* is_bf16,
                          const int64_t* counts, int64_t number, double* sum, int threads) try {
  const auto pieces = pieces_of(counts, number);
  std::vector<double> sums(pieces.size());
#pragma omp parallel for num_threads(threads) schedule(static)
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto& piece = pieces[i];
    const void* tensor = tensors[piece.tensor];
    const int64_t count = piece.end - piece.first;
    sums[i] = is_bf16[piece.tensor]
                  ? sum_of_squares(static_cast<const bf16*>(tensor) + piece.first, count)
                  : sum_of_squares(static_cast<const float*>(tensor) + piece.first, count);
  }
  *sum = 0;
  for (double part : sums) *sum += part;
  return kDone;
} catch (const std::bad_alloc&) {
  return kOutOfMemory;
}

// torch's AdamW with gradients times `scale`: updates weight, mean and square, and writes the new
// weight's bf16 copy.
int tileforge_adamw(const TileforgeUpdate* updates, int64_t number, float scale, double beta1,
                    double beta2, float eps, int threads) try {
  std::vector<int64_t> counts;
  for (int64_t i = 0; i < number; ++i) counts.push_back(updates[i].count);
  const auto pieces = pieces_of(counts.data(), number);
  const auto old2 = static_cast<float>(beta2);
  const auto new1 = static_cast<float>(1 - beta1), new2 = static_cast<float>(1 - beta2);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (size_t i = 0; i < pieces.size(); ++i) {
    const TileforgeUpdate& u = updates[pieces[i].tensor];
    constexpr int64_t kAtOnce = 1024;
    for (int64_t first = pieces[i].first; first < pieces[i].end; first += kAtOnce) {
      const int64_t size = std::min(kAtOnce, pieces[i].end - first);
      float* weight = u.weight + first;
      float* mean = u.mean + first;
      float* square = u.square + first;
      float widened[kAtOnce];
      if (u.rounded) {
#pragma omp simd
        for (int64_t k = 0; k < size; ++k) widened[k] = to_float(u.rounded[first + k]);
      }
      const float* grad = u.rounded ? widened : u.grad + first;
#pragma omp simd
      for (int64_t k = 0; k < size; ++k) {
        const float g = grad[k] * scale;
        const float m = mean[k] + new1 * (g - mean[k]);
        const float v = square[k] * old2 + new2 * g * g;
        mean[k] = m;
        square[k] = v;
        weight[k] = weight[k] * u.keep - u.step_size * m / (std::sqrt(v) / u.correction + eps);
      }
      if (u.copy) round_all(weight, size, u.copy + first);
    }
  }
  return kDone;
} catch (const std::bad_alloc&) {
  return kOutOfMemory;
}
}
