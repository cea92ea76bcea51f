// GELU, sums of rows and the layer norm in fp32.
#define TILEFORGE_FP32
#include "pointwise.cpp"
