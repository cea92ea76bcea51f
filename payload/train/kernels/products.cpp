// The gradient of a weight, from the bf16 gradient of what a product gave and from what came in,
// added up in fp32 where it is wanted.
//
// Both lie with their tokens below each other, the direction that is summed over, so that both have
// to be rearranged; oneDNN's own products do so again for every block of the result. Here what came
// in is packed once, and the other once for each block that stays in a core's L2 cache.
#include "brgemm.h"
#include "common.h"

namespace {

// Columns of a panel of the right operand: what brgemm keeps in registers at a time.
constexpr int64_t kPanel = 64;
// Tokens and rows of a left operand's block: half a megabyte.
constexpr int64_t kTokens = 1024;
constexpr int64_t kRows = 256;
// Tokens of a tile: numbers of the summed direction come in whole tiles, the last ones zero.
constexpr int64_t kTile = 32;

int64_t padded(int64_t tokens) { return (tokens + kTile - 1) / kTile * kTile; }

// Two rows of numbers to pairs; `second` may be null for zeros.
inline void interleave(const bf16* first, const bf16* second, int64_t count, uint32_t* pairs) {
  if (second) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) pairs[i] = first[i] | static_cast<uint32_t>(second[i]) << 16;
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) pairs[i] = first[i];
  }
}

// A pair of rows of x (tokens, width) to its place in (panels, padded tokens / 2, kPanel) pairs.
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

#ifdef __AVX512F__
// 16 x 16 words.
inline void transpose_words(__m512i w[16]) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(w[i], w[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(w[i], w[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  }
  for (int j = 0; j < 4; ++j) {
    a[j] = _mm512_shuffle_i32x4(b[j], b[j + 4], 0x88);
    a[j + 4] = _mm512_shuffle_i32x4(b[j], b[j + 4], 0xdd);
    a[j + 8] = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0x88);
    a[j + 12] = _mm512_shuffle_i32x4(b[j + 8], b[j + 12], 0xdd);
  }
  for (int j = 0; j < 8; ++j) {
    w[j] = _mm512_shuffle_i32x4(a[j], a[j + 8], 0x88);
    w[j + 8] = _mm512_shuffle_i32x4(a[j], a[j + 8], 0xdd);
  }
}
#endif

// (tokens, rows) to (rows, padded tokens), `to_stride` apart.
void transpose_block(const bf16* from, int64_t stride, int64_t tokens, int64_t rows, bf16* to,
                     int64_t to_stride) {
  for (int64_t token = 0; token < tokens; token += kTile) {
    int64_t row = 0;
#ifdef __AVX512F__
    for (; row + 16 <= rows && token + kTile <= tokens; row += 16) {
      __m512i words[16];
      for (int pair = 0; pair < 16; ++pair) {
        const bf16* at = from + (token + 2 * pair) * stride + row;
        const auto first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        const auto second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + stride));
        words[pair] = _mm512_or_si512(_mm512_cvtepu16_epi32(first),
                                      _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
      }
      transpose_words(words);
      for (int i = 0; i < 16; ++i) {
        _mm512_storeu_si512(to + (row + i) * to_stride + token, words[i]);
      }
    }
#endif
    for (; row < rows; ++row) {
      for (int64_t i = token; i < token + kTile; ++i) {
        to[row * to_stride + i] = i < tokens ? from[i * stride + row] : bf16{0};
      }
    }
  }
}

// The left factor, transposed: (tokens, rows) in slices of `width` rows that begin `apart` numbers
// from each other.
struct Gradient {
  const bf16* first;
  int64_t width, apart;
};

// Rows `row`... of the result, `count` of them, in panels `panel` to `end` of the right operand.
void sum_block(Gradient grad, int64_t row, int64_t count, const uint32_t* packed, int64_t panel,
               int64_t end, float* total, int64_t tokens, int64_t width, bool add, bf16* left) {
  const bf16* from = grad.first + row / grad.width * grad.apart + row % grad.width;
  for (int64_t token = 0; token < tokens; token += kTokens) {
    const int64_t here = std::min(kTokens, tokens - token), length = padded(here);
    transpose_block(from + token * grad.width, grad.width, here, count, left, length);
    for (int64_t each = panel; each < end; ++each) {
      const uint32_t* right = packed + (each * padded(tokens) + token) / 2 * kPanel;
      product(count, std::min(kPanel, width - each * kPanel), length, left, length,
              reinterpret_cast<const bf16*>(right), kPanel, total + row * width + each * kPanel,
              width, add || token > 0);
    }
  }
}

}  // namespace

extern "C" {

// Whether brgemm works here in bf16: 1, 0 when this CPU has none, as torch says by throwing.
int tileforge_has_products() {
  alignas(64) bf16 left[32 * 32], right[32 * 32];
  alignas(64) float sums[32 * 32];
  for (int i = 0; i < 32 * 32; ++i) left[i] = right[i] = to_bf16(1.0f);
  try {
    product(32, 32, 32, left, 32, right, 32, sums, 32, false);
    release_products();
  } catch (...) {
    return 0;
  }
  for (float sum : sums) {
    if (sum != 32.0f) return 0;
  }
  return 1;
}

// total (rows, width) is, or with `add` gains, the transpose of grad (tokens, rows) times x (tokens,
// width). `grad` is in slices of `slice` rows, (slices, tokens, slice), that begin `apart` numbers
// from each other.
void tileforge_weight_gradient(const bf16* grad, int64_t slice, int64_t apart, const bf16* x,
                               float* total, int64_t tokens, int64_t rows, int64_t width, int add,
                               int threads) {
  const int64_t pairs = padded(tokens) / 2, panels = (width + kPanel - 1) / kPanel;
  // Enough tasks for the threads, each with as much of the width as that leaves.
  const int64_t step = rows / kRows < 2 * threads ? kRows / 2 : kRows;
  const int64_t in_slice = (slice + step - 1) / step;
  const int64_t blocks = (rows + slice - 1) / slice * in_slice;
  const int64_t splits = std::clamp<int64_t>(2 * threads / blocks, 1, panels);
  const int64_t share = (panels + splits - 1) / splits;
  Scratch shared;
  auto* packed = shared.take<uint32_t>(panels * pairs * kPanel);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t pair = 0; pair < pairs; ++pair) pack_tokens(x, tokens, width, pair, packed);
    Scratch own;
    auto* left = own.take<bf16>(step * padded(std::min(kTokens, tokens)));
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t block = 0; block < blocks; ++block) {
      for (int64_t split = 0; split < splits; ++split) {
        const int64_t before = block % in_slice * step, row = block / in_slice * slice + before;
        const int64_t count = std::min({step, slice - before, rows - row});
        if (count <= 0) continue;
        sum_block({grad, slice, apart}, row, count, packed, split * share,
                  std::min(panels, (split + 1) * share), total, tokens, width, add != 0, left);
      }
    }
    release_products();
  }
}
}
