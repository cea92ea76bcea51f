// The gradient of a weight, from the bf16 gradient of a matmul's output and its input. Sums are
// fp32, in their final memory, or rounded to bf16 at the end.
//
// In both factors the summed dimension, tokens, is the rows, so both must be repacked;
// oneDNN's own products repack them for every block of the result. This code packs the input once,
// and the gradient once for each block that stays in a core's L2 cache.
#include "brgemm.h"
#include "layout.h"
#include "tile_gradients.h"

namespace {

// Columns of a panel of the right operand, which brgemm keeps in registers.
constexpr int64_t kPanel = 64;
// Tokens and rows of a left operand's block: half a megabyte.
constexpr int64_t kTokens = 1024;
constexpr int64_t kRows = 256;

// Packs a pair of rows of x (tokens, width) into (panels, padded tokens / 2, kPanel) pairs.
void pack_tokens(const bf16* x, int64_t tokens, int64_t width, int64_t pair, uint32_t* panels) {
  const int64_t row = 2 * pair, size = padded(tokens) / 2 * kPanel;
  for (int64_t column = 0; column < width; column += kPanel) {
    uint32_t* to = panels + column / kPanel * size + pair * kPanel;
    const int64_t count = std::min(kPanel, width - column);
    if (row < tokens) {
      const bf16* from = x + row * width + column;
      interleave(from, row + 1 < tokens ? from + width : nullptr, count, to);
    }
    std::fill(to + (row < tokens ? count : 0), to + kPanel, 0);
  }
}

// The left factor, transposed: (tokens, rows) in slices of `width` rows.
struct Gradient {
  const bf16* const* slices;
  int64_t width;
};

// A part of the result: its `rows` from `row` on, in separate memory, fp32 or bf16.
struct Part {
  int64_t row, rows;
  float* total;
  bf16* rounded;
  bool add;
};

// Computes panels `panel` to `end` of a part of the result into `sums`, with a row stride of
// `apart` elements.
void sum_block(Gradient grad, const Part& part, const uint32_t* packed, int64_t panel, int64_t end,
               int64_t tokens, int64_t width, bf16* left, float* sums, int64_t apart) {
  const bf16* from = grad.slices[part.row / grad.width] + part.row % grad.width;
  for (int64_t token = 0; token < tokens; token += kTokens) {
    const int64_t here = std::min(kTokens, tokens - token), length = padded(here);
    transpose(from + token * grad.width, grad.width, here, part.rows, left, length);
    for (int64_t each = panel; each < end; ++each) {
      const uint32_t* right = packed + (each * padded(tokens) + token) / 2 * kPanel;
      product(part.rows, std::min(kPanel, width - each * kPanel), length, left, length,
              reinterpret_cast<const bf16*>(right), kPanel, sums + (each - panel) * kPanel, apart,
              part.add || token > 0);
    }
  }
}

}  // namespace

extern "C" {

// Returns 1 if brgemm supports bf16 on this CPU, and 0 if torch throws or the library was compiled
// for a CPU without bf16.
int tileforge_has_products() {
#ifdef TILEFORGE_WITHOUT_BF16
  return 0;
#else
  alignas(64) bf16 left[32 * 32], right[32 * 32];
  alignas(64) float sums[32 * 32];
  for (int i = 0; i < 32 * 32; ++i) left[i] = right[i] = to_bf16(1.0f);
  try {
    begin_products();
    product(32, 32, 32, left, 32, right, 32, sums, 32, false);
    release_products();
  } catch (...) {
    return 0;
  }
  for (float sum : sums) {
    if (sum != 32.0f) return 0;
  }
  return 1;
#endif
}

// Each part's total (rows, width) is, or with `add` is increased by, the transpose of its columns
// of grad (tokens, rows of all parts) times x (tokens, width). `grad` is in slices of `slice` rows,
// (tokens, slice) each; several parts have one slice.
// The totals are fp32, or with `rounds` all are bf16, without `add`.
int tileforge_weight_gradient(const bf16* const* grad, int64_t slice, const bf16* x,
                              void* const* totals, const int64_t* rows_of, const int64_t* adds,
                              int64_t number, int64_t tokens, int64_t width, int rounds,
                              int threads) try {
  if (tiles::available()) {
    return tile_weight_gradient(grad, slice, x, totals, rows_of, adds, number, tokens, width,
                                rounds != 0, threads);
  }
  const int64_t pairs = padded(tokens) / 2, panels = (width + kPanel - 1) / kPanel;
  int64_t rows = 0;
  for (int64_t i = 0; i < number; ++i) rows += rows_of[i];
  // Enough tasks for the threads, each with as much of the width as possible.
  const int64_t step = rows / kRows < 2 * threads ? kRows / 2 : kRows;
  std::vector<Part> blocks;
  for (int64_t i = 0, first = 0; i < number; first += rows_of[i++]) {
    const int64_t piece = number == 1 ? slice : rows_of[i];
    for (int64_t begin = 0; begin < rows_of[i]; begin += piece) {
      const int64_t end = std::min(begin + piece, rows_of[i]);
      for (int64_t row = begin; row < end; row += step) {
        auto* total = rounds ? nullptr : static_cast<float*>(totals[i]) + row * width;
        auto* rounded = rounds ? static_cast<bf16*>(totals[i]) + row * width : nullptr;
        blocks.push_back({first + row, std::min(step, end - row), total, rounded, adds[i] != 0});
      }
    }
  }
  const int64_t count = static_cast<int64_t>(blocks.size());
  const int64_t wanted = std::clamp<int64_t>(2 * threads / count, 1, panels);
  const int64_t share = (panels + wanted - 1) / wanted, splits = (panels + share - 1) / share;
  Tasks tasks;
  Scratch shared;
  auto* packed = shared.take<uint32_t>(panels * pairs * kPanel);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t pair = 0; pair < pairs; ++pair) pack_tokens(x, tokens, width, pair, packed);
    Scratch own;
    begin_products();
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t block = 0; block < count; ++block) {
      for (int64_t split = 0; split < splits; ++split) {
        tasks.run([&] {
          own.reset();
          auto* left = own.take<bf16>(step * padded(std::min(kTokens, tokens)));
          const Part& part = blocks[block];
          const int64_t panel = split * share, end = std::min(panels, panel + share);
          if (!part.rounded) {
            sum_block({grad, slice}, part, packed, panel, end, tokens, width, left,
                      part.total + panel * kPanel, width);
            return;
          }
          const int64_t columns = std::min(width, end * kPanel) - panel * kPanel;
          auto* sums = own.take<float>(step * columns);
          sum_block({grad, slice}, part, packed, panel, end, tokens, width, left, sums,
                    columns);
          for (int64_t row = 0; row < part.rows; ++row) {
            round_all(sums + row * columns, columns, part.rounded + row * width + panel * kPanel);
          }
        });
      }
    }
    release_products();
  }
  return tasks.outcome();
} catch (const std::bad_alloc&) {
  return kOutOfMemory;
}
}
