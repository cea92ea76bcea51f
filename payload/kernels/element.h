// The element type of matmuls and of the activations between them. A source that uses this header
// is compiled for bf16; `NAME_fp32.cpp` defines TILEFORGE_FP32 and includes it again.
#pragma once
#include "common.h"

#ifdef TILEFORGE_FP32
using element = float;
#define TILEFORGE_KERNEL(name) tileforge_##name##_fp32
#else
using element = bf16;
#define TILEFORGE_KERNEL(name) tileforge_##name##_bf16
#endif
