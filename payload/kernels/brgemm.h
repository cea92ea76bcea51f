// Products of bf16 blocks with fp32 sums: AMX tiles, or oneDNN's brgemm as exported by torch.
#pragma once
#include "common.h"
#include "tiles.h"

namespace c10 {
struct BFloat16;
}
namespace at::native::cpublas {
// ATen/native/CPUBlas.h of torch 2.13; the right operand has pairs of rows interleaved ("VNNI").
void brgemm(int64_t m, int64_t n, int64_t k, int64_t ld_a, int64_t ld_b, int64_t ld_c,
            bool add_c, const c10::BFloat16* a, const c10::BFloat16* b, float* c, bool is_vnni);
void brgemm_release(bool is_vnni);
}  // namespace at::native::cpublas

// Call at the start of a thread's products.
inline void begin_products() {
  if (tiles::available()) tiles::configure();
}

inline void product(int64_t m, int64_t n, int64_t k, const bf16* a, int64_t ld_a, const bf16* b,
                    int64_t ld_b, float* c, int64_t ld_c, bool add) {
  if (tiles::available()) {
    tiles::product(m, n, k, a, ld_a, b, ld_b, c, ld_c, add);
    return;
  }
  at::native::cpublas::brgemm(m, n, k, ld_a, ld_b, ld_c, add,
                              reinterpret_cast<const c10::BFloat16*>(a),
                              reinterpret_cast<const c10::BFloat16*>(b), c, true);
}

// Call at the end of a thread's products: with AMX, it releases the tiles.
inline void release_products() {
  if (tiles::available()) {
    tiles::release();
  } else {
    at::native::cpublas::brgemm_release(true);
  }
}
