// What is compiled on the user's machine, by `tiewise kernels build`: one file, one library, one table of operators.
//
// The library starts on any processor: code for wider registers is in functions that are compiled for them (the pragma
// below), and the Python side asks `instruction_sets` before it calls one.

#include <immintrin.h>

#include <cstdint>
#include <numeric>
#include <vector>

namespace {

// Bits in the order of INSTRUCTION_SETS in kernels.py, as the processor and the operating system have them.
int64_t instruction_sets() {
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 | (avx512 && __builtin_cpu_supports("avx512vnni")) << 1 |
         (avx512 && __builtin_cpu_supports("avx512bf16")) << 2;
}

// ---------------------------------------------------------------------------------------------------------------------
// What exact_top.py sees of a table in int8: seen_nv = step_v sigma_n (q_v.a_n + q_v.b_n / 256), rounded to fp32 once.
//
// `vpdpbusd` multiplies bytes of 0 to 255 by int8 and adds exactly. So the table is flipped to q + 128 as it comes, and
// 128 times the sum of the digits is taken off again. The table is read once for all queries, as fast as memory delivers
// it: the prefetch crosses ends of pages, where the processor's own stops.
// ---------------------------------------------------------------------------------------------------------------------

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vnni")

void seen_in_int8(const int8_t* q, const float* step, int64_t V, int64_t e, const int8_t* digits, const double* sigma,
                  int64_t n, float* seen) {
  const auto sum = [](const int8_t* x, int64_t count) { return std::accumulate(x, x + count, int64_t{0}); };
  std::vector<double> flipped(n);
  for (int64_t j = 0; j < n; j++)
    flipped[j] = 128.0 * (sum(digits + 2 * j * e, e) + sum(digits + (2 * j + 1) * e, e) / 256.0);
  const __m512i flip = _mm512_set1_epi8(-128);
  const int64_t whole = e / 64 * 64, ahead = 4096;
  const __mmask64 rest = (uint64_t{1} << (e - whole)) - 1;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < V; i++)
    for (int64_t j = 0; j < n; j++) {
      const int8_t *row = q + i * e, *a = digits + 2 * j * e, *b = a + e;
      __m512i by_a = _mm512_setzero_si512(), by_b = by_a;
      for (int64_t c = 0; c < whole; c += 64) {
        if (j == 0) _mm_prefetch(reinterpret_cast<const char*>(row + c + ahead), _MM_HINT_T0);
        const __m512i x = _mm512_xor_si512(_mm512_loadu_si512(row + c), flip);
        by_a = _mm512_dpbusd_epi32(by_a, x, _mm512_loadu_si512(a + c));
        by_b = _mm512_dpbusd_epi32(by_b, x, _mm512_loadu_si512(b + c));
      }
      if (rest) {
        const __m512i x = _mm512_xor_si512(_mm512_maskz_loadu_epi8(rest, row + whole), flip);
        by_a = _mm512_dpbusd_epi32(by_a, x, _mm512_maskz_loadu_epi8(rest, a + whole));
        by_b = _mm512_dpbusd_epi32(by_b, x, _mm512_maskz_loadu_epi8(rest, b + whole));
      }
      const double dot = _mm512_reduce_add_epi32(by_a) + _mm512_reduce_add_epi32(by_b) / 256.0 - flipped[j];
      seen[j * V + i] = float(step[i] * (sigma[j] * dot));
    }
}

#pragma GCC pop_options

}  // namespace

#ifndef WITHOUT_TORCH  // tests compile the mathematics alone, under a sanitizer

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

Tensor seen_in_int8_op(Tensor q, Tensor step, Tensor digits, Tensor sigma) {
  const int64_t V = q.size(0), e = q.size(1), n = digits.size(0);
  for (const Tensor& x : {q, step, digits, sigma}) STD_TORCH_CHECK(x.is_contiguous(), "seen_in_int8: contiguous tensors");
  STD_TORCH_CHECK(step.size(0) == V && digits.size(1) == 2 && digits.size(2) == e && sigma.size(0) == n && e <= 65536,
                  "seen_in_int8: q [V, E], step [V], digits [n, 2, E], sigma [n], E at most 65,536");
  Tensor seen = torch::stable::new_empty(step, {n, V});
  seen_in_int8(q.const_data_ptr<int8_t>(), step.const_data_ptr<float>(), V, e, digits.const_data_ptr<int8_t>(),
               sigma.const_data_ptr<double>(), n, seen.mutable_data_ptr<float>());
  return seen;
}

STABLE_TORCH_LIBRARY(tiewise_kernels, m) {
  m.def("instruction_sets() -> int");
  m.def("seen_in_int8(Tensor q, Tensor step, Tensor digits, Tensor sigma) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(tiewise_kernels, CompositeExplicitAutograd, m) {
  m.impl("instruction_sets", TORCH_BOX(&instruction_sets));
}
STABLE_TORCH_LIBRARY_IMPL(tiewise_kernels, CPU, m) { m.impl("seen_in_int8", TORCH_BOX(&seen_in_int8_op)); }

#endif
