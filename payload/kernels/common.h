// Shared code of the kernels: bf16 conversion, vectorised powers, scratch memory.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include <sys/mman.h>

// Rows of a partial sum. library.py allocates the sums and has the same number, SUM_ROWS.
constexpr int64_t kSumRows = 64;

// The bits of a bfloat16, the upper half of a float.
using bf16 = uint16_t;

inline float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}
inline float to_float(float value) { return value; }

// Rounds to nearest, ties to even, as in torch; NaN stays NaN.
inline bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<bf16>(value != value ? 0x7fc0 : rounded);
}

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// 2 to the power x, within a unit in the last place, for x below 128; below -126 it is 1e-38, which
// is negligible beside 1. NaN stays NaN. Not libm's, which the compiler would call element by
// element, and not exp: the factor log2(e) merges into an existing multiplication. Coefficients of
// Cephes' exp2f (Moshier, netlib.org/cephes).
inline float exp2_fast(float x) {
  x = x < -126.0f ? -126.0f : x;
  const float shifted = x + 12582912.0f;  // 1.5 x 2^23: the integer part in the low bits
  const float r = x - (shifted - 12582912.0f);
  float p = 1.535336188e-4f;
  p = p * r + 1.339887440e-3f;
  p = p * r + 9.618437357e-3f;
  p = p * r + 5.550332471e-2f;
  p = p * r + 2.402264791e-1f;
  p = p * r + 6.931472028e-1f;
  p = p * r + 1.0f;
  uint32_t bits, power;
  std::memcpy(&bits, &p, sizeof(bits));
  std::memcpy(&power, &shifted, sizeof(power));
  bits += power << 23;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Like std::max, which the compiler does not vectorise in a reduction.
inline float larger(float a, float b) { return b > a ? b : a; }

inline void round_all(const float* from, int64_t count, bf16* to) {
  int64_t i = 0;
#ifdef __AVX512BF16__
  for (; i + 16 <= count; i += 16) {
    const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + i));
    std::memcpy(to + i, &rounded, sizeof(rounded));
  }
#endif
  for (; i < count; ++i) to[i] = to_bf16(from[i]);
}

inline void round_all(const float* from, int64_t count, float* to) {
  std::memcpy(to, from, count * sizeof(float));
}

// to[i] = value(i), rounded, in pieces: the compiler cannot vectorise with the instruction that
// rounds sixteen elements, and its substitutes cost a quarter of a loop's time.
template <typename Value>
inline void fill(int64_t count, bf16* to, Value value) {
  constexpr int64_t kAtOnce = 256;
  float piece[kAtOnce];
  for (int64_t first = 0; first < count; first += kAtOnce) {
    const int64_t size = std::min(kAtOnce, count - first);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) piece[i] = value(first + i);
    round_all(piece, size, to + first);
  }
}
template <typename Value>
inline void fill(int64_t count, float* to, Value value) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = value(i);
}

// Return values of kernels that allocate memory: no exception may leave the library.
constexpr int kDone = 0, kOutOfMemory = 1;

// Tasks of all threads. After a task fails to allocate memory, later tasks are skipped: exceptions
// may not leave an OpenMP region either.
class Tasks {
 public:
  template <typename Work>
  void run(Work work) {
    if (failed_) return;
    try {
      work();
    } catch (const std::bad_alloc&) {
      failed_ = true;
    }
  }
  int outcome() const { return failed_ ? kOutOfMemory : kDone; }

 private:
  std::atomic<bool> failed_{false};
};

// Scratch memory of one thread's task, aligned to cache lines and reused between tasks.
class Scratch {
 public:
  ~Scratch() {
    for (auto& piece : pieces_) std::free(piece.memory);
  }
  void reset() { next_ = 0; }
  template <typename T>
  T* take(int64_t count) {
    const size_t least = count * sizeof(T), unit = least < kHugePage / 2 ? 64 : kHugePage;
    const size_t bytes = (least + unit - 1) / unit * unit;
    if (next_ == pieces_.size()) pieces_.push_back({});
    auto& piece = pieces_[next_++];
    if (piece.bytes < bytes) {
      std::free(piece.memory);
      piece = {};
      piece.memory = allocate(bytes);
      if (!piece.memory) throw std::bad_alloc();
      piece.bytes = bytes;
    }
    return static_cast<T*>(piece.memory);
  }

 private:
  struct Piece {
    void* memory = nullptr;
    size_t bytes = 0;
  };
  static constexpr size_t kHugePage = 1 << 21;

  // Large pieces are advised to use huge pages: with pages of 4 KB, products of packed operands ran
  // at 0.8 of their speed.
  static void* allocate(size_t bytes) {
    if (bytes < kHugePage) return std::aligned_alloc(64, bytes);
    void* memory = std::aligned_alloc(kHugePage, bytes);
#ifdef MADV_HUGEPAGE
    if (memory) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memory;
  }

  std::vector<Piece> pieces_;
  size_t next_ = 0;
};
