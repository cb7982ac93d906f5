// What is compiled on the user's machine, by `tiewise kernels build`: one file, one library, one table of operators.
//
// The library starts on any processor: code for wider registers is in functions that are compiled for them (the pragma
// below), and the Python side asks `instruction_sets` before it calls one.

#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
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
// The vocabulary loss: three products of which no logits remain, for features [n, d] and a weight [V, d].
//
//     E_ij  = exp(z_ij - ref_i)         ref_i = the target's logit, so that s_i = sum_j E_ij >= 1 and no maximum is needed;
//                                       where s_i leaves the safe range, the row's maximum, in a second run
//     nll_i = log s_i,  lse_i = ref_i + log s_i,  g_i = (c_i + k_i lse_i) / s_i
//     dfeatures_i = scale (g_i sum_j E_ij W_j - q_i W_t),   dweight_j = scale sum_i (g_i E_ij - q_i [j = t_i]) h_i
//
// with c, q, k [n] the row coefficients of ops/chunked.py. What depends on s stands on rows of n or on E's own rows, so
// that E is made, summed and multiplied while it is in the cache, before s is known.
//
// A register tile is 12 x 32: 12 numbers that are broadcast, 32 lanes. z has words x tokens, dfeatures tokens x columns
// (8 x 32), dweight words x columns. Panels, 32 lanes wide and padded with zeros:
//
//     hp [panel][d][32 tokens]   wp [d/32][block of words][32 columns]   ev, E [panel][words][32 tokens]
//
// wp is packed once for z and dfeatures; E is written twice, for dfeatures into the cache (ev) and for dweight past it.
// Inputs in bf16 are widened as they are packed: products are exact, sums are fp32. A processor with a dot product of
// bf16 would have its own `multiply`, over pairs along the reduction.
// ---------------------------------------------------------------------------------------------------------------------

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")

namespace avx512 {

constexpr int64_t LANES = 32, WORDS = 12;  // of a tile
constexpr double SAFE = 1e20;              // of s: E times anything stays finite in fp32
constexpr float NOWHERE = 1e30f;           // ref of a token that pads a panel: its E is 0

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

inline __mmask16 first(int64_t count) { return count >= 16 ? 0xffff : (1 << std::max<int64_t>(count, 0)) - 1; }

struct Matrix {  // fp32 or bf16, read as fp32
  const void* data;
  bool bf16;
  float at(int64_t i) const {
    if (!bf16) return static_cast<const float*>(data)[i];
    return std::bit_cast<float>(uint32_t(static_cast<const uint16_t*>(data)[i]) << 16);
  }
  __m512 load(int64_t i, int64_t count) const {  // 16 from i on, zeros after `count`
    const __mmask16 m = first(count);
    if (!bf16) return _mm512_maskz_loadu_ps(m, static_cast<const float*>(data) + i);
    const __m256i x = _mm256_maskz_loadu_epi16(m, static_cast<const uint16_t*>(data) + i);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
};

struct Loss {
  Matrix features, weight;
  const float* bias;            // [V] or null
  const int64_t* targets;       // [n], all in [0, V)
  const float *c, *q, *k;       // [n]; k may be null
  int64_t n, V, d;
  float scale;
  float *nll, *lse;                          // [n]
  float *by_features, *by_weight, *by_bias;  // [n, d], [V, d], [V], or null where not wanted
  int64_t threads, rows;                     // rows: tokens of a chunk, a multiple of 32

  int64_t columns() const { return up(d, LANES); }
  int64_t words() const { return up(V, WORDS); }
  int64_t block() const { return up(std::clamp<int64_t>(100'000 / columns(), 48, 384), 48); }  // wp stays in L2
  int64_t panels() const { return std::clamp<int64_t>(6'000 / columns(), 4, 16); }  // of a thread at a time
  bool later() const { return by_weight || by_bias; }

  // The workspace, in floats: what all threads share, and then each one's own.
  int64_t shared() const { return (later() ? rows * words() : 0) + rows * (columns() + 1); }
  int64_t own() const { return panels() * LANES * (d + block() + columns() + 6) + block() * (columns() + 1); }
  int64_t workspace() const { return shared() + threads * own(); }

  void run(float* space) const;
};

using Tile = __m512[WORDS][2];

// c += a b for M rows of a (apart by `row`, along the reduction by `step`) and a panel b [k][32].
template <int M>
inline __attribute__((always_inline)) void multiply(Tile& c, const float* a, int64_t row, int64_t step, const float* b,
                                                    int64_t k) {
  for (int64_t i = 0; i < k; i++) {
    const __m512 b0 = _mm512_load_ps(b + i * LANES), b1 = _mm512_load_ps(b + i * LANES + 16);
#pragma GCC unroll 16
    for (int r = 0; r < M; r++) {
      const __m512 x = _mm512_set1_ps(a[r * row + i * step]);
      c[r][0] = _mm512_fmadd_ps(x, b0, c[r][0]);
      c[r][1] = _mm512_fmadd_ps(x, b1, c[r][1]);
    }
  }
}

// e^x, relative error 1.2e-7: 2^n 2^f with the fraction from a fused product and log2(e) in two parts; nan stays nan.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-150.f), x);
  const __m512 high = _mm512_set1_ps(1.442695f), n = _mm512_roundscale_ps(_mm512_mul_ps(x, high), 0);
  const __m512 f = _mm512_fmadd_ps(x, _mm512_set1_ps(1.925963e-8f), _mm512_fmsub_ps(x, high, n));
  __m512 p = _mm512_set1_ps(1.5353362e-4f);
  for (float a : {1.3398874e-3f, 9.618437e-3f, 5.5503324e-2f, 2.4022648e-1f, 6.931472e-1f, 1.f})
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(a));
  return _mm512_scalef_ps(p, n);
}

// `count` tokens from `at` on, in whole panels, over all words: their sums, E and dfeatures.
struct Part {
  const Loss& l;
  const int64_t at, count, panels;
  float *E, *g;                                          // the chunk's, from this part's first panel on; E may be null
  float *hp, *wp, *ev, *acc, *ref, *target, *sum, *bias;  // the thread's own
  double* total;

  Part(const Loss& l, int64_t at, int64_t count, float* E, float* g, float* own)
      : l(l), at(at), count(count), panels(up(count, LANES) / LANES), E(E), g(g) {
    const int64_t n = l.panels() * LANES;
    auto take = [&own](int64_t floats) { return std::exchange(own, own + floats); };
    hp = take(n * l.d), wp = take(l.block() * l.columns()), ev = take(n * l.block()), acc = take(n * l.columns());
    ref = take(n), target = take(n), sum = take(n), total = reinterpret_cast<double*>(take(2 * n)), bias = take(l.block());
  }

  void pack_features() const {
    for (int64_t i = 0; i < panels * LANES; i++) {
      float* to = hp + i / LANES * LANES * l.d + i % LANES;
      for (int64_t k = 0; k < l.d; k++) to[k * LANES] = i < count ? l.features.at((at + i) * l.d + k) * l.scale : 0.f;
      ref[i] = NOWHERE;
      if (i >= count) continue;
      const int64_t t = l.targets[at + i];
      float z = l.bias ? l.bias[t] : 0.f;  // in the order of the tile, so that E at the target is 1 to the last bit
      for (int64_t k = 0; k < l.d; k++) z = __builtin_fmaf(to[k * LANES], l.weight.at(t * l.d + k), z);
      ref[i] = target[i] = z;
    }
  }

  void pack_weight(int64_t v0, int64_t words) const {
    for (int64_t v = 0; v < words; v++) {
      const bool there = v0 + v < l.V;
      bias[v] = !there ? -INFINITY : l.bias ? l.bias[v0 + v] : 0.f;  // a word that is none has E = 0
      for (int64_t j = 0; j < l.columns(); j += 16) {
        const __m512 x = there ? l.weight.load((v0 + v) * l.d + j, l.d - j) : _mm512_setzero_ps();
        _mm512_store_ps(wp + (j / LANES * words + v) * LANES + j % LANES, x);
      }
    }
  }

  // Logits of 12 words and 32 tokens, and what becomes of them while they are in registers.
  void tile(int64_t v0, int64_t v, int64_t words, int64_t p, bool maximum) const {
    Tile c;
#pragma GCC unroll 16
    for (int r = 0; r < WORDS; r++) c[r][0] = c[r][1] = _mm512_set1_ps(bias[v + r]);
    for (int64_t k = 0; k < l.d; k += LANES)
      multiply<WORDS>(c, wp + (k / LANES * words + v) * LANES, LANES, 1, hp + (p * l.d + k) * LANES,
                      std::min(LANES, l.d - k));
#pragma GCC unroll 16
    for (int half = 0; half < 2; half++) {
      const int64_t lane = p * LANES + half * 16;
      __m512 s = _mm512_load_ps(sum + lane);
      if (maximum) {
#pragma GCC unroll 16
        for (int r = 0; r < WORDS; r++) s = _mm512_max_ps(s, c[r][half]);
      } else {
        const __m512 from = _mm512_load_ps(ref + lane);
#pragma GCC unroll 16
        for (int r = 0; r < WORDS; r++) {
          const __m512 e = exponential(_mm512_sub_ps(c[r][half], from));
          s = _mm512_add_ps(s, e);
          if (l.by_features) _mm512_store_ps(ev + (p * words + v + r) * LANES + half * 16, e);
          if (E) _mm512_stream_ps(E + (p * l.words() + v0 + v + r) * LANES + half * 16, e);
        }
      }
      _mm512_store_ps(sum + lane, s);
    }
  }

  // All words once; with `maximum` only their largest logits, into ref. False where a sum left the safe range.
  bool sweep(bool maximum) const {
    std::fill(total, total + panels * LANES, 0.);
    std::fill(sum, sum + panels * LANES, -INFINITY);
    bool safe = true;
    for (int64_t v0 = 0; v0 < l.V; v0 += l.block()) {
      const int64_t words = up(std::min(l.block(), l.V - v0), WORDS);
      pack_weight(v0, words);
      if (!maximum) std::fill(sum, sum + panels * LANES, 0.f);
      for (int64_t p = 0; p < panels; p++)
        for (int64_t v = 0; v < words; v += WORDS) tile(v0, v, words, p, maximum);
      if (maximum) continue;
      for (int64_t i = 0; i < panels * LANES; i++) safe &= (total[i] += sum[i]) < SAFE;
      if (!l.by_features) continue;
      for (int64_t j = 0; j < l.columns(); j += LANES)
        for (int64_t i = 0; i < panels * LANES; i += 8) {
          Tile c{};
          float* to = acc + i * l.columns() + j;
          for (int r = 0; r < 8; r++) _mm_prefetch(to + r * l.columns(), _MM_HINT_T0);
          for (int r = 0; r < 8; r++) _mm_prefetch(to + r * l.columns() + 16, _MM_HINT_T0);
          multiply<8>(c, ev + i / LANES * LANES * words + i % LANES, 1, LANES, wp + j * words, words);
#pragma GCC unroll 16
          for (int r = 0; r < 8; r++)
#pragma GCC unroll 16
            for (int half = 0; half < 2; half++) {
              float* o = to + r * l.columns() + half * 16;
              _mm512_store_ps(o, v0 ? _mm512_add_ps(c[r][half], _mm512_load_ps(o)) : c[r][half]);
            }
        }
    }
    if (maximum) std::copy(sum, sum + count, ref);
    return safe;
  }

  void run() const {
    pack_features();
    if (!sweep(false)) sweep(true), sweep(false);
    for (int64_t i = 0; i < panels * LANES; i++) {
      g[i] = 0;
      if (i >= count) continue;
      const int64_t row = at + i, t = l.targets[row];
      const double log = std::log(total[i]);
      l.nll[row] = log + (double(ref[i]) - target[i]);
      l.lse[row] = log + ref[i];
      g[i] = (l.c[row] + (l.k ? l.k[row] * l.lse[row] : 0.f)) / total[i];
      if (!l.by_features) continue;
      for (int64_t j = 0; j < l.d; j += 16) {
        const __m512 at_target = _mm512_mul_ps(_mm512_set1_ps(l.q[row]), l.weight.load(t * l.d + j, l.d - j));
        const __m512 x = _mm512_fmsub_ps(_mm512_set1_ps(g[i]), _mm512_load_ps(acc + i * l.columns() + j), at_target);
        _mm512_mask_storeu_ps(l.by_features + row * l.d + j, first(l.d - j), _mm512_mul_ps(x, _mm512_set1_ps(l.scale)));
      }
    }
    _mm_sfence();  // E is read by other threads
  }
};

void Loss::run(float* space) const {
  float *E = later() ? space : nullptr, *hs = space + (later() ? rows * words() : 0), *g = hs + rows * columns();
#pragma omp parallel num_threads(threads)
  {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);  // what is below 1e-38 counts as 0: E is full of it, and it takes a hundred times as long
    float* own_space = space + shared() + omp_get_thread_num() * own();
    for (int64_t at = 0; at < n; at += rows) {
      const int64_t here = std::min(rows, n - at), all = up(here, LANES) / LANES;
      const int64_t even = up(all, panels() * threads) / panels(), parts = std::min(all, even);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < parts; i++) {
        const int64_t from = all * i / parts, to = all * (i + 1) / parts;
        Part(*this, at + from * LANES, std::min(to * LANES, here) - from * LANES, E ? E + from * LANES * words() : E,
             g + from * LANES, own_space)
            .run();
      }
      if (!later()) continue;
#pragma omp for
      for (int64_t i = 0; i < all * LANES; i++)  // scale g h, as panels [d/32][rows][32]
        for (int64_t j = 0; j < columns(); j += 16) {
          const __m512 x = i < here ? features.load((at + i) * d + j, d - j) : _mm512_setzero_ps();
          _mm512_store_ps(hs + (j / LANES * rows + i) * LANES + j % LANES, _mm512_mul_ps(x, _mm512_set1_ps(scale * g[i])));
        }
#pragma omp for schedule(dynamic, 1)
      for (int64_t v0 = 0; v0 < V; v0 += 16 * WORDS) {  // a panel of hs stays in L2 for 16 tiles
        const int64_t end = std::min(v0 + 16 * WORDS, V);
        for (int64_t j = 0; by_weight && j < columns(); j += LANES)
          for (int64_t v = v0; v < end; v += WORDS) {
            Tile c{};
            float* to = by_weight + v * d + j;
            const int64_t there = std::min(WORDS, V - v);
            for (int64_t r = 0; at && r < there; r++) _mm_prefetch(to + r * d, _MM_HINT_T0), _mm_prefetch(to + r * d + 16, _MM_HINT_T0);
            for (int64_t p = 0; p < all; p++)
              multiply<WORDS>(c, E + (p * words() + v) * LANES, LANES, 1, hs + (j * rows + p * LANES * LANES), LANES);
#pragma GCC unroll 16
            for (int r = 0; r < WORDS; r++)
#pragma GCC unroll 16
              for (int half = 0; half < 2; half++) {
                float* o = to + r * d + half * 16;
                const __mmask16 m = r < there ? first(d - j - half * 16) : 0;
                _mm512_mask_storeu_ps(o, m, at ? _mm512_add_ps(c[r][half], _mm512_maskz_loadu_ps(m, o)) : c[r][half]);
              }
          }
        for (int64_t v = v0; by_bias && v < end; v++) {
          __m512 s = _mm512_setzero_ps();
          for (int64_t i = 0; i < all * LANES; i += 16)
            s = _mm512_fmadd_ps(_mm512_load_ps(E + (i / LANES * words() + v) * LANES + i % LANES), _mm512_load_ps(g + i), s);
          by_bias[v] = (at ? by_bias[v] : 0.f) + _mm512_reduce_add_ps(s);
        }
      }
      // the targets' terms, of which two tokens may share a row: a share of the columns for each thread
      const int64_t id = omp_get_thread_num(), team = omp_get_num_threads();
      for (int64_t i = at; i < at + here; i++) {
        for (int64_t j = d * id / team; by_weight && j < d * (id + 1) / team; j++)
          by_weight[targets[i] * d + j] -= scale * q[i] * features.at(i * d + j);
        if (by_bias && !id) by_bias[targets[i]] -= q[i];
      }
    }
    _mm_setcsr(mode);
  }
}

}  // namespace avx512

#pragma GCC pop_options

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
  const int64_t ahead = 4096;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < V; i++)
    for (int64_t j = 0; j < n; j++) {
      const int8_t *row = q + i * e, *a = digits + 2 * j * e, *b = a + e;
      __m512i by_a[2] = {}, by_b[2] = {};  // two of each, or every addition would wait for the one before
      const auto add = [&](int64_t c, __mmask64 there, int to) {
        _mm_prefetch(reinterpret_cast<const char*>(row + c + ahead), _MM_HINT_T0);
        const __m512i x = _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, row + c), flip);
        by_a[to] = _mm512_dpbusd_epi32(by_a[to], x, _mm512_maskz_loadu_epi8(there, a + c));
        by_b[to] = _mm512_dpbusd_epi32(by_b[to], x, _mm512_maskz_loadu_epi8(there, b + c));
      };
      int64_t c = 0;
      for (; c + 128 <= e; c += 128) add(c, ~uint64_t{0}, 0), add(c + 64, ~uint64_t{0}, 1);
      for (; c < e; c += 64) add(c, ~uint64_t{0} >> std::max<int64_t>(64 - (e - c), 0), 0);
      const int32_t dot_a = _mm512_reduce_add_epi32(_mm512_add_epi32(by_a[0], by_a[1]));
      const int32_t dot_b = _mm512_reduce_add_epi32(_mm512_add_epi32(by_b[0], by_b[1]));
      const double dot = dot_a + dot_b / 256.0 - flipped[j];
      seen[j * V + i] = float(step[i] * (sigma[j] * dot));
    }
}

#pragma GCC pop_options

}  // namespace

#ifndef WITHOUT_TORCH  // tests compile the mathematics alone, under a sanitizer

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <tuple>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor floats(const Tensor& like, std::initializer_list<int64_t> shape) {  // in large pages, where the system has them
  const Tensor made = torch::stable::new_empty(like, shape, ScalarType::Float);
  constexpr uintptr_t page = 1 << 21;
  const auto from = reinterpret_cast<uintptr_t>(made.data_ptr()), start = (from + page - 1) / page * page;
  const uintptr_t end = (from + made.numel() * sizeof(float)) / page * page;
  if (end > start) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
  return made;
}

avx512::Matrix matrix(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "features and weight must be contiguous matrices");
  const bool bf16 = x.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(bf16 || x.scalar_type() == ScalarType::Float, "features and weight must be float32 or bfloat16");
  return {x.data_ptr(), bf16};
}

// nll [n], lse [n], and the gradients of sum_i (c_i lse_i - q_i z_it + k_i lse_i^2 / 2) that are wanted, else empty
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> vocabulary_loss(
    Tensor features, Tensor weight, std::optional<Tensor> bias, Tensor targets, Tensor c, Tensor q,
    std::optional<Tensor> k, double scale, int64_t rows, bool by_features, bool by_weight, bool by_bias) {
  const int64_t n = features.size(0), d = features.size(1), V = weight.size(0);
  auto vector = [](const std::optional<Tensor>& x, int64_t size) -> const float* {
    if (!x) return nullptr;
    STD_TORCH_CHECK(x->dim() == 1 && x->size(0) == size && x->is_contiguous(), "a vector of ", size, " numbers is needed");
    return x->const_data_ptr<float>();
  };
  STD_TORCH_CHECK(weight.size(1) == d && targets.numel() == n && targets.is_contiguous(), "shapes do not meet");
  STD_TORCH_CHECK(n && V && d, "nothing to compute");
  Tensor nll = floats(features, {n}), lse = floats(features, {n});
  Tensor dh = floats(features, {by_features ? n : 0, d}), dw = floats(features, {by_weight ? V : 0, d});
  Tensor db = floats(features, {by_bias ? V : 0});
  auto made = [](const Tensor& x, bool wanted) { return wanted ? x.mutable_data_ptr<float>() : nullptr; };
  const avx512::Loss loss{matrix(features), matrix(weight), vector(bias, V), targets.const_data_ptr<int64_t>(),
                          vector(c, n), vector(q, n), vector(k, n), n, V, d, float(scale), made(nll, true),
                          made(lse, true), made(dh, by_features), made(dw, by_weight), made(db, by_bias),
                          omp_get_max_threads(), avx512::up(std::min(rows, n), avx512::LANES)};
  loss.run(floats(features, {loss.workspace()}).mutable_data_ptr<float>());
  return {nll, lse, dh, dw, db};
}

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

}  // namespace

STABLE_TORCH_LIBRARY(tiewise_kernels, m) {
  m.def("instruction_sets() -> int");
  m.def(
      "vocabulary_loss(Tensor features, Tensor weight, Tensor? bias, Tensor targets, Tensor c, Tensor q, Tensor? k,"
      " float scale, int rows, bool by_features, bool by_weight, bool by_bias)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("seen_in_int8(Tensor q, Tensor step, Tensor digits, Tensor sigma) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(tiewise_kernels, CompositeExplicitAutograd, m) {
  m.impl("instruction_sets", TORCH_BOX(&instruction_sets));
}
STABLE_TORCH_LIBRARY_IMPL(tiewise_kernels, CPU, m) {
  m.impl("vocabulary_loss", TORCH_BOX(&vocabulary_loss));
  m.impl("seen_in_int8", TORCH_BOX(&seen_in_int8_op));
}

#endif
