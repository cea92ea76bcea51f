// The gated delta rule in fp32.
#define TILEFORGE_FP32
#include "delta_rule.cpp"
