// Uses AMX like a program on a CPU with it, and checks the results; the argument is the name of a
// case. Exits with 0 if all checks pass.
#include <immintrin.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kRows = 16, kLeftStride = 80, kRightStride = 96, kSumStride = 112 };

// gcc's header declares only that tile instructions take an address: memory must be written
// before and read again after them (gcc bug 114098).
#define SEEN() __asm__ volatile("" ::: "memory")

// `right_rows` equals `pairs` if the tiles fit each other.
static void configure(int m, int n, int pairs, int right_rows) {
  uint8_t config[64] = {1};
  const uint16_t row_bytes[8] = {4 * n, 4 * pairs, 0, 0, 0, 0, 0, 4 * n};  // sums, left, right
  memcpy(config + 16, row_bytes, sizeof(row_bytes));
  config[48 + 0] = config[48 + 1] = m;
  config[48 + 7] = right_rows;
  SEEN();
  _tile_loadconfig(config);
  uint8_t seen[64];
  memset(seen, 0xff, sizeof(seen));
  _tile_storeconfig(seen);
  SEEN();
  if (memcmp(config, seen, sizeof(seen))) exit(10);
}

static float number(uint16_t bf16) {
  const uint32_t bits = (uint32_t)bf16 << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Small integers, whose products and sums are exact.
static void fill(uint16_t* numbers, int count) {
  for (int i = 0; i < count; ++i) {
    const float value = (float)(rand() % 17 - 8);
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    numbers[i] = bits >> 16;
  }
}

static int products(int m, int n, int pairs) {
  static uint8_t left[kRows * kLeftStride], right[kRows * kRightStride];
  static uint8_t sums[kRows * kSumStride], before[sizeof(sums)];
  fill((uint16_t*)left, sizeof(left) / 2);
  fill((uint16_t*)right, sizeof(right) / 2);
  for (size_t i = 0; i < sizeof(sums) / 4; ++i) ((float*)sums)[i] = (float)(rand() % 9);
  memcpy(before, sums, sizeof(sums));
  configure(m, n, pairs, pairs);
  SEEN();
  _tile_loadd(0, sums, kSumStride);
  _tile_loadd(1, left, kLeftStride);
  _tile_stream_loadd(7, right, kRightStride);
  _tile_dpbf16ps(0, 1, 7);
  _tile_dpbf16ps(0, 1, 7);
  _tile_stored(0, sums, kSumStride);
  SEEN();
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kSumStride / 4; ++column) {
      const float* was = (float*)(before + row * kSumStride) + column;
      float expected = *was;
      for (int i = 0; row < m && column < n && i < 2 * pairs; ++i) {
        const float a = number(((uint16_t*)(left + row * kLeftStride))[i]);
        const float b =
            number(((uint16_t*)(right + i / 2 * kRightStride))[2 * column + i % 2]);
        expected += 2 * a * b;
      }
      const float found = ((float*)(sums + row * kSumStride))[column];
      if (found != expected) {
        fprintf(stderr, "%d x %d x %d pairs: %g instead of %g\n", m, n, pairs, found, expected);
        return 11;
      }
    }
  }
  return 0;
}

static int all_products(void) {
  for (int m = 1; m <= kRows; ++m) {
    for (int n = 1; n <= kRows; n += 3) {
      for (int pairs = 1; pairs <= kRows; pairs += 5) {
        const int result = products(m, n, pairs);
        if (result) return result;
      }
    }
  }
  return 0;
}

// Elements outside a tile's configuration are zero when a larger configuration shows them.
static int zeros(void) {
  uint16_t numbers[kRows * 32], seen[kRows * 32];
  memset(seen, 0xff, sizeof(seen));
  fill(numbers, kRows * 32);
  configure(16, 16, 16, 16);
  SEEN();
  _tile_loadd(1, numbers, 64);
  _tile_zero(1);
  _tile_stored(1, seen, 64);
  SEEN();
  for (int i = 0; i < kRows * 32; ++i) {
    if (seen[i]) return 12;
  }
  SEEN();
  _tile_loadd(1, numbers, 0);  // every row is equal to the first
  _tile_stored(1, seen, 64);
  SEEN();
  for (int i = 0; i < kRows * 32; ++i) {
    if (seen[i] != numbers[i % 32]) return 13;
  }
  configure(16, 16, 16, 16);  // zeroes all tiles
  _tile_stored(1, seen, 64);
  SEEN();
  for (int i = 0; i < kRows * 32; ++i) {
    if (seen[i]) return 14;
  }
  return 0;
}

static void* look(void* seen) {
  _tile_storeconfig(seen);
  SEEN();
  return NULL;
}

static int threads(void) {
  uint8_t seen[64];
  memset(seen, 0xff, sizeof(seen));
  pthread_t thread;
  configure(16, 16, 16, 16);
  if (pthread_create(&thread, NULL, look, seen) || pthread_join(thread, NULL)) return 15;
  for (int i = 0; i < 64; ++i) {
    if (seen[i]) return 16;
  }
  _tile_release();
  _tile_storeconfig(seen);
  SEEN();
  return seen[0] ? 17 : 0;
}

static int without_configuration(void) {
  _tile_zero(3);
  return 18;
}

static int misfit(void) {
  configure(16, 8, 4, 5);
  _tile_dpbf16ps(0, 1, 7);
  return 19;
}

// tdpbf16ps tmm0, tmm1, tmm1, which assemblers reject.
static int twice(void) {
  configure(16, 16, 16, 16);
  __asm__ volatile(".byte 0xc4, 0xe2, 0x72, 0x5c, 0xc1");
  return 20;
}

int main(int argc, char** argv) {
  const char* name = argc == 2 ? argv[1] : "";
  if (!strcmp(name, "products")) return all_products();
  if (!strcmp(name, "zeros")) return zeros();
  if (!strcmp(name, "threads")) return threads();
  if (!strcmp(name, "without_configuration")) return without_configuration();
  if (!strcmp(name, "misfit")) return misfit();
  if (!strcmp(name, "twice")) return twice();
  return 2;
}
