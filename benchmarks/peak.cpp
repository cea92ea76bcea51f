// The highest rates of this CPU: multiply-add instructions with their operands in registers or
// streamed from memory, and memory bandwidth. Each thread has a separate buffer.
#include "../payload/kernels/tiles.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <chrono>

namespace {

constexpr int64_t kLine = 64;

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Random bf16 numbers, also valid as fp32. Zeros would need less power, and the clock would be
// higher than in training.
char* make_buffer(int64_t bytes) {
  constexpr int64_t kHugePage = 1 << 21;
  auto* memory = static_cast<uint16_t*>(
      std::aligned_alloc(kHugePage, (bytes + kHugePage - 1) / kHugePage * kHugePage));
  if (!memory) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  const int64_t random = std::min<int64_t>(bytes, 1 << 20) / 2;
  uint32_t state = 1;
  for (int64_t i = 0; i < random; ++i) {
    state = state * 1664525u + 1013904223u;
    memory[i] = to_bf16((static_cast<float>(state >> 8) - 8388608.0f) * 1e-7f);
  }
  for (int64_t i = random; i < bytes / 2; i += random) {
    std::memcpy(memory + i, memory, std::min(random, bytes / 2 - i) * 2);
  }
  return reinterpret_cast<char*>(memory);
}

// Repeats work(), which returns an amount, for `budget_s` on `threads` threads at the same time.
// Returns the sum of the threads' amounts a second.
template <typename Work>
double rate(int64_t bytes, double budget_s, int threads, Work work) {
  double total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    char* buffer = make_buffer(bytes);
    work(buffer);
#pragma omp barrier
    double done = 0;
    const double began_s = seconds();
    double taken_s = 0;
    while (taken_s < budget_s) {
      done += work(buffer);
      taken_s = seconds() - began_s;
    }
    total += done / taken_s;
    std::free(buffer);
  }
  return total;
}

volatile float sink;

// Multiply-adds of `Vector`s into twelve sums, which hide the latency of one.
template <typename Vector, bool Loads, typename Load, typename MultiplyAdd>
double vector_loop(const char* buffer, int64_t bytes, Load load, MultiplyAdd multiply_add,
                   double flops) {
  constexpr int kSums = 12;
  constexpr int64_t kSize = sizeof(Vector), kSpan = kSums * kSize;
  const int64_t pieces = std::max<int64_t>(1, bytes / kSpan);
  const int64_t repeats = std::max<int64_t>(1, 4096 / pieces);
  Vector sums[kSums], factor = load(buffer + kSize);
  for (int i = 0; i < kSums; ++i) sums[i] = load(buffer);
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    const char* at = buffer;
    for (int64_t piece = 0; piece < pieces; ++piece, at += kSpan) {
#pragma GCC unroll 12
      for (int i = 0; i < kSums; ++i) {
        sums[i] = multiply_add(sums[i], factor, Loads ? load(at + i * kSize) : factor);
      }
      // Otherwise the compiler could merge or drop multiply-adds of constant factors.
      if (!Loads) asm volatile("" : "+v"(factor));
    }
  }
  for (int i = 0; i < kSums; ++i) sink = reinterpret_cast<const float*>(&sums[i])[0];
  return flops * kSums * static_cast<double>(pieces * repeats);
}

template <typename Vector, typename Load, typename MultiplyAdd>
double vector_work(const char* buffer, int64_t bytes, bool loads, Load load,
                   MultiplyAdd multiply_add, double flops) {
  return loads ? vector_loop<Vector, true>(buffer, bytes, load, multiply_add, flops)
               : vector_loop<Vector, false>(buffer, bytes, load, multiply_add, flops);
}

#ifdef TILEFORGE_TILES
double tile_work(const char* buffer, int64_t bytes, bool loads) {
  tiles::configure();
  const int64_t pieces = std::max<int64_t>(1, bytes / (4 * tiles::kBytes));
  const int64_t repeats = std::max<int64_t>(1, 512 / pieces);
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const char* at = buffer + piece * 4 * tiles::kBytes;
      if (loads || piece + repeat == 0) {
        TILE_LOAD(4, at, 64);
        TILE_LOAD(5, at + tiles::kBytes, 64);
        TILE_LOAD(6, at + 2 * tiles::kBytes, 64);
        TILE_LOAD(7, at + 3 * tiles::kBytes, 64);
      }
      TILE_PRODUCT(0, 4, 6);
      TILE_PRODUCT(1, 4, 7);
      TILE_PRODUCT(2, 5, 6);
      TILE_PRODUCT(3, 5, 7);
    }
  }
  tiles::release();
  return 4.0 * 2 * 16 * 16 * 32 * static_cast<double>(pieces * repeats);
}
#endif

}  // namespace

extern "C" {

// Returns FLOP/s of all threads together, or 0 if this CPU lacks the instructions: AMX in bf16
// (kind 0), AVX-512 in bf16 (1), AVX-512 in fp32 (2), AVX2 in fp32 (3). With `loads`, operands are
// streamed from a buffer of `bytes` a thread: both of a tile product, one of a vector instruction.
double tileforge_peak_flops(int kind, int64_t bytes, int loads, double budget_s, int threads) try {
#ifdef TILEFORGE_TILES
  if (kind == 0 && tiles::available()) {
    return rate(bytes, budget_s, threads,
                [=](const char* buffer) { return tile_work(buffer, bytes, loads != 0); });
  }
#endif
#ifdef __AVX512BF16__
  if (kind == 1 && __builtin_cpu_supports("avx512bf16")) {
    return rate(bytes, budget_s, threads, [=](const char* buffer) {
      return vector_work<__m512>(
          buffer, bytes, loads != 0, [](const char* at) { return _mm512_load_ps(at); },
          [](__m512 sum, __m512 a, __m512 b) {
            return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
          },
          64);
    });
  }
#endif
#ifdef __AVX512F__
  if (kind == 2 && __builtin_cpu_supports("avx512f")) {
    return rate(bytes, budget_s, threads, [=](const char* buffer) {
      return vector_work<__m512>(
          buffer, bytes, loads != 0, [](const char* at) { return _mm512_load_ps(at); },
          [](__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }, 32);
    });
  }
#endif
#if defined(__AVX2__) && defined(__FMA__)
  if (kind == 3 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return rate(bytes, budget_s, threads, [=](const char* buffer) {
      return vector_work<__m256>(
          buffer, bytes, loads != 0,
          [](const char* at) { return _mm256_load_ps(reinterpret_cast<const float*>(at)); },
          [](__m256 sum, __m256 a, __m256 b) { return _mm256_fmadd_ps(a, b, sum); }, 16);
    });
  }
#endif
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

// Returns the bytes a second of all threads together that are read (operation 0), written (1),
// written past the caches (2), or copied (3), which counts the bytes read and written; 0 where the
// CPU cannot write past the caches. The buffer has `bytes` a thread. -1: out of memory.
double tileforge_peak_bandwidth(int operation, int64_t bytes, double budget_s, int threads) try {
  return rate(bytes, budget_s, threads, [=](char* buffer) {
    auto* words = reinterpret_cast<uint64_t*>(buffer);
    const int64_t count = bytes / 8;
    if (operation == 0) {
      uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < count; ++i) sum += words[i];
      sink = static_cast<float>(sum);
    } else if (operation == 1) {
      for (int64_t i = 0; i < count; i += 8) {
        for (int k = 0; k < 8; ++k) words[i + k] = i;
        asm volatile("" ::: "memory");  // or the compiler would call memset
      }
    } else if (operation == 2) {
#ifdef __AVX512F__
      const __m512i value = _mm512_set1_epi64(bytes);
      for (int64_t i = 0; i < bytes; i += kLine) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(buffer + i), value);
      }
#else
      return 0.0;
#endif
    } else {
      for (int64_t i = 0; i < count / 2; i += 8) {
        for (int k = 0; k < 8; ++k) words[count / 2 + i + k] = words[i + k];
        asm volatile("" ::: "memory");
      }
    }
    return static_cast<double>(bytes);
  });
} catch (const std::bad_alloc&) {
  return -1;
}
}
