// The gradient of a weight on AMX tiles, from the bf16 gradient of a matmul's output and its input.
//
// The sum over tokens is blocked so that memory keeps up with the tiles: a task's block of the
// result, a megabyte in fp32, stays in the core's L2 cache while the task reads all tokens. Of the
// two factors, the narrower one is transposed once, for all tasks; each task packs its own part of
// the wider one. An element's order of summation does not depend on the blocks.
#include "layout.h"
#include "tile_gradients.h"
#include "tiles.h"

#ifdef TILEFORGE_TILES

namespace {

using tiles::kBlock;
using tiles::kBlockSums;
using tiles::kStep;

// Tokens of a packed chunk, and the same in steps of a product.
constexpr int64_t kTokens = 256, kSteps = kTokens / tiles::kDepth;
// Distance of the prefetched tokens.
constexpr int64_t kAhead = 16;
// Sums of a task's block, and the largest number of blocks of 32 of its narrower side.
constexpr int64_t kSums = 1 << 18, kNarrow = 32;

// At most 32 columns of a factor (tokens, ...) whose elements are contiguous in memory.
struct Strip {
  const bf16* from;
  int64_t stride, count;
  // For the factor whose columns are the result's rows: the first of these rows.
  float* total = nullptr;
  bf16* rounded = nullptr;
  bool add = false;
  // For the other factor: the first of the result's columns.
  int64_t column = 0;
};

// Loads 32 columns of a token's row, with zeros after the strip's columns and after the last token.
inline __m512i load_row(const Strip& strip, int64_t token, int64_t tokens) {
  const __mmask32 mask =
      token < tokens ? (strip.count < kBlock ? (1u << strip.count) - 1 : ~0u) : 0u;
  return _mm512_maskz_loadu_epi16(mask, strip.from + token * strip.stride);
}

const __m512i* pair_order() {
  alignas(64) static const auto order = [] {
    struct {
      uint16_t low[32], high[32];
    } made;
    for (uint16_t i = 0; i < 16; ++i) {
      made.low[2 * i] = i;
      made.low[2 * i + 1] = static_cast<uint16_t>(32 + i);
      made.high[2 * i] = static_cast<uint16_t>(16 + i);
      made.high[2 * i + 1] = static_cast<uint16_t>(48 + i);
    }
    return made;
  }();
  return reinterpret_cast<const __m512i*>(&order);
}

// Packs tokens `first` to `first` + 32 `steps` of `count` strips as right operands, `apart` bytes
// each: row by row, since a row's strips are adjacent in memory.
void pack_right(const Strip* strips, int64_t count, int64_t first, int64_t steps, int64_t tokens,
                char* to, int64_t apart) {
  const __m512i low = _mm512_loadu_si512(pair_order()), high = _mm512_loadu_si512(pair_order() + 1);
  for (int64_t pair = 0; pair < 16 * steps; ++pair) {
    const int64_t token = first + 2 * pair;
    char* at = to + pair / 16 * kStep + pair % 16 * 64;
    for (int64_t i = 0; i < count; ++i, at += apart) {
      const __m512i a = load_row(strips[i], token, tokens);
      const __m512i b = load_row(strips[i], token + 1, tokens);
      if (token + kAhead < tokens) {
        const bf16* ahead = strips[i].from + (token + kAhead) * strips[i].stride;
        _mm_prefetch(ahead, _MM_HINT_T0);
        _mm_prefetch(ahead + strips[i].stride, _MM_HINT_T0);
      }
      _mm512_store_si512(at, _mm512_permutex2var_epi16(a, low, b));
      _mm512_store_si512(at + tiles::kBytes, _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

// Packs 32 tokens of a strip transposed, as a step of a left operand.
void pack_left(const Strip& strip, int64_t first, int64_t tokens, char* to) {
  const __m512i low = _mm512_loadu_si512(pair_order()), high = _mm512_loadu_si512(pair_order() + 1);
  __m512i above[16], below[16];
  for (int64_t pair = 0; pair < 16; ++pair) {
    const int64_t token = first + 2 * pair;
    const __m512i a = load_row(strip, token, tokens), b = load_row(strip, token + 1, tokens);
    if (token + 1 < tokens) {
      // The strip after the next one is usually adjacent.
      _mm_prefetch(strip.from + token * strip.stride + 2 * kBlock, _MM_HINT_T0);
      _mm_prefetch(strip.from + (token + 1) * strip.stride + 2 * kBlock, _MM_HINT_T0);
    }
    above[pair] = _mm512_permutex2var_epi16(a, low, b);
    below[pair] = _mm512_permutex2var_epi16(a, high, b);
  }
  transpose_words(above);
  transpose_words(below);
  for (int row = 0; row < 16; ++row) {
    _mm512_store_si512(to + 64 * row, above[row]);
    _mm512_store_si512(to + tiles::kBytes + 64 * row, below[row]);
  }
}

// Adds a block's sums, or writes them, to the result: `rows` by `columns`, fp32 or rounded. Tile
// 2 i + j has rows 16 i on and columns 16 j on; `flipped` means that the sums are transposed.
void write_block(const float* sums, bool flipped, const Strip& of_rows, const Strip& of_columns,
                 int64_t width) {
  for (int64_t i = 0; i < 2; ++i) {
    const int64_t rows = std::min<int64_t>(16, of_rows.count - 16 * i);
    for (int64_t j = 0; j < 2; ++j) {
      const int64_t columns = std::min<int64_t>(16, of_columns.count - 16 * j);
      if (rows <= 0 || columns <= 0) continue;
      const float* tile = sums + 256 * (flipped ? 2 * j + i : 2 * i + j);
      __m512i words[16];
      for (int row = 0; row < 16; ++row) words[row] = _mm512_load_si512(tile + 16 * row);
      if (flipped) transpose_words(words);
      const auto mask = static_cast<__mmask16>((1u << columns) - 1);
      for (int64_t row = 0; row < rows; ++row) {
        __m512 values = _mm512_castsi512_ps(words[row]);
        const int64_t at = (16 * i + row) * width + of_columns.column + 16 * j;
        if (of_rows.total) {
          float* to = of_rows.total + at;
          if (of_rows.add) values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(mask, to));
          if (columns == 16 && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
            // The result is next read after all other gradients were written: past the caches,
            // its lines need not be read before they are written.
            _mm512_stream_ps(to, values);
          } else {
            _mm512_mask_storeu_ps(to, mask, values);
          }
        } else {
          alignas(64) float exact[16];
          _mm512_store_ps(exact, values);
          round_all(exact, columns, of_rows.rounded + at);
        }
      }
    }
  }
}

int64_t up(int64_t count, int64_t step) { return (count + step - 1) / step; }

}  // namespace

int tile_weight_gradient(const bf16* const* grad, int64_t slice, const bf16* x,
                         void* const* totals, const int64_t* rows_of, const int64_t* adds,
                         int64_t number, int64_t tokens, int64_t width, bool rounds,
                         int threads) try {
  std::vector<Strip> of_grad, of_x;
  for (int64_t part = 0, first = 0; part < number; first += rows_of[part++]) {
    for (int64_t row = 0; row < rows_of[part];) {
      const int64_t at = first + row, in_slice = at % slice;
      const int64_t count = std::min({kBlock, rows_of[part] - row, slice - in_slice});
      Strip strip{grad[at / slice] + in_slice, slice, count};
      if (rounds) strip.rounded = static_cast<bf16*>(totals[part]) + row * width;
      else strip.total = static_cast<float*>(totals[part]) + row * width;
      strip.add = adds[part] != 0;
      of_grad.push_back(strip);
      row += count;
    }
  }
  for (int64_t column = 0; column < width; column += kBlock) {
    Strip strip{x + column, width, std::min(kBlock, width - column)};
    strip.column = column;
    of_x.push_back(strip);
  }
  const bool flipped = of_x.size() <= of_grad.size();
  const auto& narrow = flipped ? of_x : of_grad;
  const auto& wide = flipped ? of_grad : of_x;
  const auto narrow_size = static_cast<int64_t>(narrow.size());
  const auto wide_size = static_cast<int64_t>(wide.size());
  const int64_t steps = up(tokens, tiles::kDepth);
  // Blocks of 32 of each side of a task: as large as the cache allows, with work for all threads.
  const int64_t narrow_tasks = up(narrow_size, kNarrow);
  const int64_t narrow_share = up(narrow_size, narrow_tasks);
  const int64_t largest = std::max<int64_t>(1, kSums / kBlockSums / narrow_share);
  const int64_t least = up(up(wide_size, largest), threads) * threads;
  const int64_t wide_share = up(wide_size, std::min(least, wide_size));
  const int64_t wide_tasks = up(wide_size, wide_share);
  Tasks tasks;
  static thread_local Scratch shared;
  shared.reset();
  auto* packed = shared.take<char>(narrow_size * steps * kStep);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t strip = 0; strip < narrow_size; ++strip) {
        pack_left(narrow[strip], step * tiles::kDepth, tokens,
                  packed + (strip * steps + step) * kStep);
      }
    }
    static thread_local Scratch own;
    tiles::configure();
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t i = 0; i < wide_tasks; ++i) {
      for (int64_t j = 0; j < narrow_tasks; ++j) {
        tasks.run([&] {
          own.reset();
          const int64_t wide_begin = i * wide_share, narrow_begin = j * narrow_share;
          const int64_t columns = std::min(wide_size, wide_begin + wide_share) - wide_begin;
          const int64_t rows = std::min(narrow_size, narrow_begin + narrow_share) - narrow_begin;
          // One piece, since only large pieces have huge pages.
          const int64_t elements = wide_share * (narrow_share * kBlockSums + kSteps * kStep / 4);
          auto* sums = own.take<float>(elements);
          auto* right = reinterpret_cast<char*>(sums + wide_share * narrow_share * kBlockSums);
          for (int64_t step = 0; step < steps; step += kSteps) {
            const int64_t here = std::min(kSteps, steps - step);
            pack_right(&wide[wide_begin], columns, step * tiles::kDepth, here, tokens, right,
                       kSteps * kStep);
            const int64_t lines = up(here * kStep / 64, columns * std::max<int64_t>(1, here - 1));
            float* done = nullptr;
            for (int64_t row = 0; row < rows; ++row) {
              const char* left = packed + ((narrow_begin + row) * steps + step) * kStep;
              // The next row's left operand comes from memory.
              const char* ahead =
                  row + 1 < rows ? left + steps * kStep
                                 : packed + (narrow_begin * steps + step + kSteps) * kStep;
              for (int64_t column = 0; column < columns; ++column) {
                float* next = sums + (row * columns + column) * kBlockSums;
                tiles::packed_block(left, right + column * kSteps * kStep, here, done, next,
                                    step > 0, [&] {
                                      for (int64_t i = 0; i < lines; ++i, ahead += 64) {
                                        _mm_prefetch(ahead, _MM_HINT_T1);
                                      }
                                    });
                done = next;
              }
            }
            tiles::store_packed(done);
          }
          for (int64_t column = 0; column < columns; ++column) {
            for (int64_t row = 0; row < rows; ++row) {
              const Strip& of_narrow = narrow[narrow_begin + row];
              const Strip& of_wide = wide[wide_begin + column];
              write_block(sums + (row * columns + column) * kBlockSums, flipped,
                          flipped ? of_wide : of_narrow, flipped ? of_narrow : of_wide, width);
            }
          }
        });
      }
    }
    tiles::release();
    _mm_sfence();  // another thread may read what this one wrote past the caches
  }
  return tasks.outcome();
} catch (const std::bad_alloc&) {
  return kOutOfMemory;
}

#else

int tile_weight_gradient(const bf16* const*, int64_t, const bf16*, void* const*, const int64_t*,
                         const int64_t*, int64_t, int64_t, int64_t, bool, int) {
  return kDone;
}

#endif
