// The instruction sets that the compiler used, compared with those of the CPU.
#include "common.h"
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

extern "C" {

// Returns the name of an instruction set that the library was compiled for and that this CPU lacks,
// or null. It runs before all other functions, so it must run on any CPU.
#if defined(__x86_64__) && !defined(__clang__)
__attribute__((target("arch=x86-64")))
#elif defined(__aarch64__) && !defined(__clang__)
__attribute__((target("arch=armv8-a")))
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
#elif defined(__aarch64__) && defined(__linux__)
  // The bits of arch/arm64/include/uapi/asm/hwcap.h in Linux; older headers lack their names.
#define TILEFORGE_REQUIRE(name, word, bit) \
  if (!(getauxval(word) >> (bit) & 1)) return name
#ifdef __ARM_FEATURE_ATOMICS
  TILEFORGE_REQUIRE("atomics", AT_HWCAP, 8);
#endif
#ifdef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC
  TILEFORGE_REQUIRE("asimdhp", AT_HWCAP, 10);
#endif
#ifdef __ARM_FEATURE_DOTPROD
  TILEFORGE_REQUIRE("asimddp", AT_HWCAP, 20);
#endif
#ifdef __ARM_FEATURE_SVE
  TILEFORGE_REQUIRE("sve", AT_HWCAP, 22);
#endif
#ifdef __ARM_FEATURE_SVE2
  TILEFORGE_REQUIRE("sve2", AT_HWCAP2, 1);
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
  TILEFORGE_REQUIRE("i8mm", AT_HWCAP2, 13);
#endif
#ifdef __ARM_FEATURE_BF16
  TILEFORGE_REQUIRE("bf16", AT_HWCAP2, 14);
#endif
#undef TILEFORGE_REQUIRE
#endif
  return nullptr;
}
}
