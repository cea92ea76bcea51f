// The instruction sets that the compiler used, compared with those of the CPU.
#include "common.h"

extern "C" {

// Returns the name of an instruction set that the library was compiled for and that this CPU lacks,
// or null. It runs before all other functions, so it must run on any CPU.
#if defined(__x86_64__) && !defined(__clang__)
__attribute__((target("arch=x86-64")))
#endif
const char* tileforge_missing_instructions() {
#ifdef __x86_64__
  __builtin_cpu_init();
#define TILEFORGE_REQUIRE(name) \
  if (!__builtin_cpu_supports(name)) return name
#ifdef __AVX__
  TILEFORGE_REQUIRE("avx");
#endif
#ifdef __AVX2__
  TILEFORGE_REQUIRE("avx2");
#endif
#ifdef __FMA__
  TILEFORGE_REQUIRE("fma");
#endif
#ifdef __FMA4__
  TILEFORGE_REQUIRE("fma4");
#endif
#ifdef __AVX512F__
  TILEFORGE_REQUIRE("avx512f");
#endif
#ifdef __AVX512BW__
  TILEFORGE_REQUIRE("avx512bw");
#endif
#ifdef __AVX512DQ__
  TILEFORGE_REQUIRE("avx512dq");
#endif
#ifdef __AVX512VL__
  TILEFORGE_REQUIRE("avx512vl");
#endif
#ifdef __AVX512BF16__
  TILEFORGE_REQUIRE("avx512bf16");
#endif
#undef TILEFORGE_REQUIRE
#endif
  return nullptr;
}
}
