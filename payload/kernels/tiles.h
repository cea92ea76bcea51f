// AMX: the tile instructions, whether this process may use them, and products of bf16 matrices.
//
// Inline assembly, so that neither compiler options nor `-march` decide whether the code exists;
// tiles::available() decides at run time whether it runs.
#pragma once
#include "common.h"

// Every CPU with AMX has AVX-512 with bf16. Compilers with the header of the intrinsics come with
// an assembler that knows the instructions; clang's accepts them only when compiling for AMX.
#if defined(__AVX512BW__) && defined(__AVX512BF16__) && defined(__linux__) && \
    __has_include(<amxbf16intrin.h>) && (defined(__AMX_BF16__) || !defined(__clang__))
#define TILEFORGE_TILES 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>
#endif

namespace tiles {

// A tile has 16 rows of 64 bytes. Blocks of 2 x 2 tiles use each loaded tile twice.
constexpr int64_t kRows = 16, kBlock = 32, kDepth = 32, kBytes = 1024;

#ifdef TILEFORGE_TILES

#define TILE_LOAD(tile, at, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(at), "r"(int64_t{stride}) : "memory")
#define TILE_STORE(tile, at, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(at), "r"(int64_t{stride}) : "memory")
#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define TILE_PRODUCT(sum, left, right) \
  asm volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::)

// Returns whether the CPU and the kernel have tiles. Linux gives a process the registers only on
// request. ONEDNN_MAX_CPU_ISA turns tiles off here as it does in oneDNN.
inline bool available() {
  static const bool found = [] {
    constexpr unsigned kTileBits = 1u << 22 | 1u << 24;        // amx_bf16, amx_tile
    constexpr uint64_t kStateBits = 1u << 17 | 1u << 18;       // of the tiles and their shapes
    constexpr int kRequestPermission = 0x1023, kTileData = 18; // arch_prctl(2)
    if (const char* limit = std::getenv("ONEDNN_MAX_CPU_ISA")) {
      const std::string isa(limit);
      if (isa.find("AMX") == std::string::npos && isa != "DEFAULT" && isa != "ALL") return false;
    }
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTileBits) != kTileBits) return false;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & kStateBits) != kStateBits) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return found;
}

struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
};

// Loads the shape of full tiles, which all functions below expect unless they say otherwise.
inline void configure() {
  static const Shapes full = [] {
    Shapes shapes;
    std::fill_n(shapes.row_bytes, 8, 64);
    std::fill_n(shapes.rows, 8, 16);
    return shapes;
  }();
  full.load();
}

inline void release() { asm volatile("tilerelease" ::); }

// Adds 32 x 32 products of depth 32 to tiles 0 to 3: the left operand's rows are `left_stride`
// bytes apart, the right operand's pairs of rows `right_stride`.
inline __attribute__((always_inline)) void multiply(const char* left, int64_t left_stride,
                                                    const char* left_below, const char* right,
                                                    int64_t right_stride,
                                                    const char* right_beside) {
  TILE_LOAD(4, left, left_stride);
  TILE_LOAD(6, right, right_stride);
  TILE_PRODUCT(0, 4, 6);
  TILE_LOAD(7, right_beside, right_stride);
  TILE_PRODUCT(1, 4, 7);
  TILE_LOAD(5, left_below, left_stride);
  TILE_PRODUCT(2, 5, 6);
  TILE_PRODUCT(3, 5, 7);
}

// A block's sums in memory: fp32, rows `stride` bytes apart.
struct Sums {
  char* at = nullptr;
  int64_t stride = 0;

  char* tile(int row, int column) const { return at + row * kRows * stride + column * 64; }
};

// Starts a block: as `multiply`, but first stores the previous block's sums tile by tile, each
// while the others are still being computed, and begins with zeros or, with `add`, with the
// block's own sums. Storing all four tiles between two blocks took up to a third of their time.
inline __attribute__((always_inline)) void begin_block(const Sums& done, const Sums& next, bool add,
                                                       const char* left, int64_t left_stride,
                                                       const char* left_below, const char* right,
                                                       int64_t right_stride,
                                                       const char* right_beside) {
#define TILEFORGE_NEXT(number, row, column)                             \
  if (done.at) TILE_STORE(number, done.tile(row, column), done.stride); \
  if (add) TILE_LOAD(number, next.tile(row, column), next.stride);      \
  else TILE_ZERO(number)
  TILE_LOAD(4, left, left_stride);
  TILE_LOAD(6, right, right_stride);
  TILEFORGE_NEXT(0, 0, 0);
  TILE_PRODUCT(0, 4, 6);
  TILE_LOAD(7, right_beside, right_stride);
  TILEFORGE_NEXT(1, 0, 1);
  TILE_PRODUCT(1, 4, 7);
  TILE_LOAD(5, left_below, left_stride);
  TILEFORGE_NEXT(2, 1, 0);
  TILE_PRODUCT(2, 5, 6);
  TILEFORGE_NEXT(3, 1, 1);
  TILE_PRODUCT(3, 5, 7);
#undef TILEFORGE_NEXT
}

inline void store_block(const Sums& done) {
  TILE_STORE(0, done.tile(0, 0), done.stride);
  TILE_STORE(1, done.tile(0, 1), done.stride);
  TILE_STORE(2, done.tile(1, 0), done.stride);
  TILE_STORE(3, done.tile(1, 1), done.stride);
}

// A block's sums in a row of four tiles, and its packed operands: for each 32 of the depth, two
// tiles of 1024 bytes each.
constexpr int64_t kBlockSums = kBlock * kBlock, kStep = 2 * kBytes;

// Computes a block of packed operands, `steps` times 32 deep, into or with `add` onto `next`. The
// sums stay in the tiles until the next block begins: each tile of `done` is stored while the
// others are still being computed, as in `begin_block`. Calls each() after every step but the
// first, while the tiles are busy.
template <typename Each>
inline __attribute__((always_inline)) void packed_block(const char* left, const char* right,
                                                        int64_t steps, float* done, float* next,
                                                        bool add, Each each) {
  const auto sums = [](float* at) {
    return [at](int tile) { return reinterpret_cast<char*>(at) + tile * kBytes; };
  };
  const auto of_done = sums(done), of_next = sums(next);
#define TILEFORGE_NEXT(number)                           \
  if (done) TILE_STORE(number, of_done(number), 64);     \
  if (add) TILE_LOAD(number, of_next(number), 64);       \
  else TILE_ZERO(number)
  TILE_LOAD(4, left, 64);
  TILE_LOAD(6, right, 64);
  TILEFORGE_NEXT(0);
  TILE_PRODUCT(0, 4, 6);
  TILE_LOAD(7, right + kBytes, 64);
  TILEFORGE_NEXT(1);
  TILE_PRODUCT(1, 4, 7);
  TILE_LOAD(5, left + kBytes, 64);
  TILEFORGE_NEXT(2);
  TILE_PRODUCT(2, 5, 6);
  TILEFORGE_NEXT(3);
  TILE_PRODUCT(3, 5, 7);
#undef TILEFORGE_NEXT
  for (int64_t step = 1; step < steps; ++step) {
    left += kStep;
    right += kStep;
    multiply(left, 64, left + kBytes, right, 64, right + kBytes);
    each();
  }
}

inline void store_packed(float* done) {
  char* at = reinterpret_cast<char*>(done);
  TILE_STORE(0, at, 64);
  TILE_STORE(1, at + kBytes, 64);
  TILE_STORE(2, at + 2 * kBytes, 64);
  TILE_STORE(3, at + 3 * kBytes, 64);
}

// One tile of at most 16 x 16 sums, of any even depth: in separate shapes. Restores the full
// shape.
inline void edge_tile(int64_t rows, int64_t columns, int64_t depth, const bf16* left,
                      int64_t left_stride, const bf16* right, int64_t right_stride, float* sums,
                      int64_t stride, bool add) {
  Shapes shapes;
  const auto shape = [&](int tile, int64_t of_rows, int64_t bytes) {
    shapes.rows[tile] = static_cast<uint8_t>(of_rows);
    shapes.row_bytes[tile] = static_cast<uint16_t>(bytes);
  };
  const int64_t rest = depth % kDepth, whole = depth - rest;
  shape(0, rows, 4 * columns);
  shape(1, rows, 64);
  shape(2, 16, 4 * columns);
  if (rest) {
    shape(3, rows, 2 * rest);
    shape(4, rest / 2, 4 * columns);
  }
  shapes.load();
  if (add) TILE_LOAD(0, sums, 4 * stride);
  else TILE_ZERO(0);
  for (int64_t k = 0; k < whole; k += kDepth) {
    TILE_LOAD(1, left + k, 2 * left_stride);
    TILE_LOAD(2, right + k * right_stride, 4 * right_stride);
    TILE_PRODUCT(0, 1, 2);
  }
  if (rest) {
    TILE_LOAD(3, left + whole, 2 * left_stride);
    TILE_LOAD(4, right + whole * right_stride, 4 * right_stride);
    TILE_PRODUCT(0, 3, 4);
  }
  TILE_STORE(0, sums, 4 * stride);
  configure();
}

// sums (m x n) = or += left (m x k) times right (k x n), whose pairs of rows are interleaved.
// Strides are in elements of a row; those of `right` are pairs. k is even.
inline void product(int64_t m, int64_t n, int64_t k, const bf16* left, int64_t left_stride,
                    const bf16* right, int64_t right_stride, float* sums, int64_t stride,
                    bool add) {
  const bool whole = k % kDepth == 0;
  const int64_t full_rows = whole ? m / kBlock * kBlock : 0;
  const int64_t full_columns = whole ? n / kBlock * kBlock : 0;
  const int64_t left_bytes = 2 * left_stride, right_bytes = 4 * right_stride;
  Sums done;
  for (int64_t row = 0; row < full_rows; row += kBlock) {
    for (int64_t column = 0; column < full_columns; column += kBlock) {
      const Sums next{reinterpret_cast<char*>(sums + row * stride + column), 4 * stride};
      const char* at = reinterpret_cast<const char*>(left + row * left_stride);
      const char* from = reinterpret_cast<const char*>(right + 2 * column);
      const int64_t below = kRows * left_bytes;
      begin_block(done, next, add, at, left_bytes, at + below, from, right_bytes, from + 64);
      for (int64_t i = kDepth; i < k; i += kDepth) {
        at += 2 * kDepth;
        from += 2 * kDepth * right_stride;
        multiply(at, left_bytes, at + below, from, right_bytes, from + 64);
      }
      done = next;
    }
  }
  if (done.at) store_block(done);
  for (int64_t row = 0; row < m; row += kRows) {
    const int64_t rows = std::min(kRows, m - row);
    for (int64_t column = row < full_rows ? full_columns : 0; column < n; column += kRows) {
      edge_tile(rows, std::min(kRows, n - column), k, left + row * left_stride, left_stride,
                right + 2 * column, right_stride, sums + row * stride + column, stride, add);
    }
  }
}

#else

inline bool available() { return false; }
inline void configure() {}
inline void release() {}
inline void product(int64_t, int64_t, int64_t, const bf16*, int64_t, const bf16*, int64_t, float*,
                    int64_t, bool) {}

#endif

}  // namespace tiles
