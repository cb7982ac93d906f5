// What is compiled on the user's machine, by `tiewise kernels build`: one file, one library, one table of operators.
//
// The library starts on any processor: code for wider registers is in functions that are compiled for them (the pragma
// below), and the Python side asks `instruction_sets` before it calls one.

#include <cstdint>

namespace {

// Bits in the order of INSTRUCTION_SETS in kernels.py, as the processor and the operating system have them.
int64_t instruction_sets() {
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 | (avx512 && __builtin_cpu_supports("avx512vnni")) << 1 |
         (avx512 && __builtin_cpu_supports("avx512bf16")) << 2;
}

}  // namespace

#ifndef WITHOUT_TORCH  // tests compile the mathematics alone, under a sanitizer

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(tiewise_kernels, m) {
  m.def("instruction_sets() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(tiewise_kernels, CompositeExplicitAutograd, m) {
  m.impl("instruction_sets", TORCH_BOX(&instruction_sets));
}

#endif
