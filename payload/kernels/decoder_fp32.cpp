// The Llama family's pointwise ops and norms in fp32.
#define TILEFORGE_FP32
#include "decoder.cpp"
