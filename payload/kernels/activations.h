// The activation of gates.
#pragma once
#include "common.h"

// SiLU and its derivative.
struct Silu {
  float value, slope;
  explicit Silu(float x) {
    // Below -80 the logistic function is 1e-35 or less, which is negligible.
    const float bounded = x < -80.0f ? -80.0f : x;
    const float logistic = 1.0f / (1.0f + exp2_fast(-bounded * kLog2E));
    value = x * logistic;
    slope = logistic * (1.0f + x * (1.0f - logistic));
  }
};
