// The short convolution and the gated norm in fp32.
#define TILEFORGE_FP32
#include "short_convolution.cpp"
