// Weight gradients on AMX tiles.
#pragma once
#include "common.h"

// Computes `tileforge_weight_gradient` (products.cpp) if tiles::available().
int tile_weight_gradient(const bf16* const* grad, int64_t slice, const bf16* x,
                         void* const* totals, const int64_t* rows_of, const int64_t* adds,
                         int64_t number, int64_t tokens, int64_t width, bool rounds, int threads);
