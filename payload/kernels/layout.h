// Layouts of products' operands: pairs of rows interleaved, or transposed.
#pragma once
#include "common.h"

// The summed dimension is padded with zeros to whole tiles.
constexpr int64_t kTile = 32;
inline int64_t padded(int64_t count) { return (count + kTile - 1) / kTile * kTile; }

// Interleaves two rows to pairs, one pair in a 32-bit word; a null `second` means zeros.
inline void interleave(const bf16* first, const bf16* second, int64_t count, uint32_t* pairs) {
  if (second) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      pairs[i] = first[i] | static_cast<uint32_t>(second[i]) << 16;
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) pairs[i] = first[i];
  }
}

#ifdef __AVX512F__
// Transposes 16 rows of 16 32-bit words.
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

// (rows, columns) to (columns, height), a left operand: zeros after the rows. `height` is a
// multiple of the tile.
inline void transpose(const bf16* from, int64_t stride, int64_t rows, int64_t columns, bf16* to,
                      int64_t height) {
  for (int64_t row = 0; row < height; row += kTile) {
    int64_t column = 0;
#ifdef __AVX512F__
    for (; column + 16 <= columns && row + kTile <= rows; column += 16) {
      __m512i words[16];
      for (int pair = 0; pair < 16; ++pair) {
        const bf16* at = from + (row + 2 * pair) * stride + column;
        const auto first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        const auto second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + stride));
        words[pair] = _mm512_or_si512(_mm512_cvtepu16_epi32(first),
                                      _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
      }
      transpose_words(words);
      for (int i = 0; i < 16; ++i) {
        _mm512_storeu_si512(to + (column + i) * height + row, words[i]);
      }
    }
#endif
    for (; column < columns; ++column) {
      for (int64_t i = row; i < row + kTile; ++i) {
        to[column * height + i] = i < rows ? from[i * stride + column] : bf16{0};
      }
    }
  }
}

// (rows, columns) to pairs of columns, (columns / 2, height): the same as a right operand. Each of
// its pairs is a 32-bit word of the source.
inline void transpose_pairs(const bf16* from, int64_t stride, int64_t rows, int64_t columns,
                            uint32_t* to, int64_t height) {
  const int64_t pairs = columns / 2;
  for (int64_t row = 0; row < height; row += 16) {
    int64_t pair = 0;
#ifdef __AVX512F__
    for (; pair + 16 <= pairs && row + 16 <= rows; pair += 16) {
      __m512i words[16];
      for (int i = 0; i < 16; ++i) {
        words[i] = _mm512_loadu_si512(from + (row + i) * stride + 2 * pair);
      }
      transpose_words(words);
      for (int i = 0; i < 16; ++i) {
        _mm512_storeu_si512(to + (pair + i) * height + row, words[i]);
      }
    }
#endif
    for (; pair < pairs; ++pair) {
      for (int64_t i = row; i < row + 16; ++i) {
        uint32_t word = 0;
        if (i < rows) std::memcpy(&word, from + i * stride + 2 * pair, sizeof(word));
        to[pair * height + i] = word;
      }
    }
  }
}
