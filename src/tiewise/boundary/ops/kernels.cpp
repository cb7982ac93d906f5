// What is compiled on the user's machine, by `tiewise kernels build`: one file, one library, one table of operators.
//
// The library starts on any processor: code for wider registers is in functions that are compiled for them (the pragma
// below), and the Python side asks `instruction_sets` before it calls one.

#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
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
//     E_ij  = exp(z_ij - ref_i)         ref_i = the target's logit, so that s_i = sum_j E_ij >= 1 and no maximum is
//                                       needed; where s_i leaves the safe range, the row's maximum, in a second run
//     nll_i = log s_i,  lse_i = ref_i + log s_i,  g_i = (c_i + k_i lse_i) / s_i
//     dfeatures_i = scale (g_i sum_j E_ij W_j - q_i W_t),   dweight_j = scale sum_i (g_i E_ij - q_i [j = t_i]) h_i
//
// with c, q, k [n] the row coefficients of boundary/ops/chunked.py. What depends on s stands on rows of n, so that E is made,
// summed and multiplied while it is in the cache, before s is known. A thread has a share of the words and all tokens
// of a chunk: it packs each block of words once.
//
// A soft-cap bends z before the exponential, and E by its slope behind the sum; q comes with the slope at the target.
// Gradients of which lse is known beforehand, and a part of which goes with z (an entropy's), have E and g in their
// place:
//
//     E_ij = exp(z_ij - lse_i) (c_i + k_i (z_ij - lse_i)),  g_i = 1
//
// Numbers are counted in units of 32 bits along the reduction: one of fp32, or two of bf16, for which the processor has
// a dot product. Only `dot` and how two rows are paired tell the kinds apart; a sum is fp32 in both. A register tile is
// 12 x 32: 12 units that are broadcast, 32 lanes. z has words x tokens, dfeatures tokens x columns (8 x 32), dweight
// words x columns. Panels are 32 lanes wide and padded with zeros; a block is one of words:
//
//     hp, hs   features    [tokens/32][units of d][32 tokens],   [columns/32][units of tokens][32 columns], times g
//     rows     of a block  [columns/32][words][32 columns]                      wp = rows, where a unit is one number
//     wp       of a block  [columns/32][units of words][32 columns]
//     ev       E, a block  [tokens/32][units of words][32 tokens]
//     E        of a chunk  [words/12][tokens/32][12 words][32 tokens], written past the cache
// ---------------------------------------------------------------------------------------------------------------------

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,prefer-vector-width=512")

namespace avx512 {

constexpr int64_t LANES = 32, WORDS = 12;  // of a tile
constexpr double SAFE = 1e20;              // of s: E times anything stays finite in fp32
constexpr float LOWEST = -150;             // of z - ref: its exponential is 0
constexpr float NOWHERE = 1e30f;           // ref of a token that pads a panel: its E is 0
using Unit = uint32_t;
using Tile = __m512[WORDS][2];

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

inline __mmask16 first(int64_t count) { return count >= 16 ? 0xffff : (1 << std::max<int64_t>(count, 0)) - 1; }

inline __m512 widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

struct Matrix {  // fp32 or bf16, [rows, d], read as fp32
  const void* data;
  bool bf16;
  int64_t d;
  __m512 load(int64_t row, int64_t j) const {  // 16 numbers from column j on, zeros beyond the last
    const __mmask16 m = first(d - j);
    if (!bf16) return _mm512_maskz_loadu_ps(m, static_cast<const float*>(data) + row * d + j);
    return widened(_mm256_maskz_loadu_epi16(m, static_cast<const uint16_t*>(data) + row * d + j));
  }
};

// Where a gradient is summed: fp32; or bf16, whose upper halves stand in `high` and lower ones in `low` until the last
// sum is rounded, so that a narrow table costs no second buffer and no second pass.
struct Sum {
  float* wide;
  uint16_t *high, *low;
  explicit operator bool() const { return wide || high; }
  void prefetch(int64_t i) const {
    if (wide) _mm_prefetch(wide + i, _MM_HINT_T0), _mm_prefetch(wide + i + 16, _MM_HINT_T0);
    else _mm_prefetch(high + i, _MM_HINT_T0), _mm_prefetch(low + i, _MM_HINT_T0);
  }
  __m512 load(int64_t i, __mmask16 m) const {
    if (wide) return _mm512_maskz_loadu_ps(m, wide + i);
    const auto half = [&](const uint16_t* x) { return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, x + i)); };
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_slli_epi32(half(high), 16), half(low)));
  }
  void store(int64_t i, __mmask16 m, __m512 x, bool last) const {
    if (wide) return _mm512_mask_storeu_ps(wide + i, m, x);
    __m512i bits = _mm512_castps_si512(x);
    if (last) {  // to nearest, ties to even
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
      bits = _mm512_mask_mov_epi32(nearest, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    } else {
      _mm512_mask_cvtepi32_storeu_epi16(low + i, m, bits);
    }
    _mm512_mask_cvtepi32_storeu_epi16(high + i, m, _mm512_srli_epi32(bits, 16));
  }
};

// What differs between the kinds of units.
struct Single {
  static constexpr int64_t PER = 1;
  static __m512 dot(__m512 c, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), c);
  }
  static __m512 rounded(__m512 x) { return x; }
};

struct Pair {
  static constexpr int64_t PER = 2;
  static __m512 dot(__m512 c, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(c, std::bit_cast<__m512bh>(a), std::bit_cast<__m512bh>(b));
  }
  static __m512 rounded(__m512 x) { return widened(std::bit_cast<__m256i>(_mm512_cvtneps_pbh(x))); }
};

inline __m512i along(__m512 x, __m512 y) { return std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x)); }  // 32 of bf16

// x_i, y_i for 16 numbers of bf16 each, where the second number of `from` is the first of y
inline __m512i order(int from, int second = 32) {
  const __m512i pair = _mm512_add_epi32(_mm512_set1_epi32(second << 16), _mm512_set1_epi32(from * 0x10001));
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_add_epi32(pair, _mm512_mullo_epi32(_mm512_set1_epi32(0x10001), lanes));
}

inline __m512i across(__m512 x, __m512 y) { return _mm512_permutexvar_epi16(order(0, 16), along(x, y)); }

// c += a b for M rows of a (apart by `row`, along the reduction by `step`) and a panel b [k][32].
template <class K, int M>
inline __attribute__((always_inline)) void multiply(Tile& c, const Unit* a, int64_t row, int64_t step, const Unit* b,
                                                    int64_t k) {
  for (int64_t i = 0; i < k; i++) {
    const __m512i b0 = _mm512_load_si512(b + i * LANES), b1 = _mm512_load_si512(b + i * LANES + 16);
#pragma GCC unroll 16
    for (int r = 0; r < M; r++) {
      const __m512i x = _mm512_set1_epi32(a[r * row + i * step]);
      c[r][0] = K::dot(c[r][0], x, b0);
      c[r][1] = K::dot(c[r][1], x, b1);
    }
  }
}

// e^x for x >= LOWEST, relative error 1.2e-7: 2^n 2^f with the fraction from a fused product and log2(e) in two parts;
// nan stays nan.
inline __m512 exponential(__m512 x) {
  const __m512 high = _mm512_set1_ps(1.442695f), n = _mm512_roundscale_ps(_mm512_mul_ps(x, high), 0);
  const __m512 f = _mm512_fmadd_ps(x, _mm512_set1_ps(1.925963e-8f), _mm512_fmsub_ps(x, high, n));
  __m512 p = _mm512_set1_ps(1.5353362e-4f);
  for (float a : {1.3398874e-3f, 9.618437e-3f, 5.5503324e-2f, 2.4022648e-1f, 6.931472e-1f, 1.f})
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(a));
  return _mm512_scalef_ps(p, n);
}

// tanh, relative error 2e-7: near 0 a polynomial, fitted for this; nan stays nan
inline __m512 tangent(__m512 x) {
  const __m512 one = _mm512_set1_ps(1), u = _mm512_mul_ps(x, x), twice = _mm512_abs_ps(_mm512_add_ps(x, x));
  __m512 p = _mm512_set1_ps(-5.70495334e-3f);
  for (float a : {2.06390545e-2f, -5.37397042e-2f, .133314416f, -.333332807f})
    p = _mm512_fmadd_ps(p, u, _mm512_set1_ps(a));
  const __m512 near = _mm512_fmadd_ps(_mm512_mul_ps(x, u), p, x);
  const __m512 e = exponential(_mm512_min_ps(_mm512_set1_ps(80), twice));
  const __m512 far = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2), _mm512_add_ps(e, one)));
  const __m512 signed_far = _mm512_or_ps(far, _mm512_and_ps(x, _mm512_set1_ps(-0.f)));
  return _mm512_mask_mov_ps(near, _mm512_cmp_ps_mask(twice, _mm512_set1_ps(1.25f), _CMP_GT_OQ), signed_far);
}

struct Loss {
  Matrix features, weight;
  const float* bias;            // [V] or null
  const int64_t* targets;       // [n], all in [0, V)
  const float *c, *q, *k;       // [n]; k may be null
  int64_t n, V;
  float scale, softcap;  // 0 where there is none
  const float* known;          // lse [n] or null
  float *nll, *lse, *entropy;  // [n]; entropy may be null
  Sum by_features, by_weight;  // [n, d], [V, d], nowhere if not wanted
  float* by_bias;              // [V] or null
  int64_t most, rows;                        // threads; tokens of a chunk, a multiple of 32
  bool pairs;                                // multiply in bf16
  bool onto = false;                         // by_weight is added to what stands there

  int64_t d() const { return weight.d; }
  int64_t columns() const { return up(d(), LANES); }
  int64_t words() const { return up(V, WORDS); }
  int64_t block() const {  // of words: stays in L2
    return up(std::clamp<int64_t>((pairs ? 150'000 : 100'000) / columns(), 48, 384), 48);
  }
  int64_t threads() const { return std::min(most, words() / WORDS); }  // each has a word
  bool later() const { return by_weight || by_bias; }

  // The workspace, in units: what all threads share, and then each one's own.
  int64_t per() const { return pairs ? 2 : 1; }  // numbers of a unit
  int64_t shared() const {
    return rows * ((later() ? words() : 0) + 2 * columns()) / per() + 5 * rows + up(V + n, 64) / 4;
  }
  int64_t own() const { return rows * (columns() + block() / per() + 7) + block() * columns() + block(); }
  int64_t workspace() const { return shared() + threads() * own(); }

  void run(Unit* space) const;
};

// One chunk after another; an object per thread.
template <class K>
struct Team {
  static constexpr int64_t PER = K::PER;
  const Loss& l;
  const int64_t d = l.d(), columns = l.columns(), units = up(d, PER) / PER;
  const int64_t id = omp_get_thread_num(), threads = omp_get_num_threads();
  const int64_t from = l.words() / WORDS * id / threads * WORDS, to = l.words() / WORDS * (id + 1) / threads * WORDS;
  Unit *E, *hp, *hs, *rows, *wp, *ev;
  float *ref, *target, *g, *level, *tilt, *acc, *sum, *moment, *pivot, *bias;
  bool *has_target, *first_of;  // [V] of a word; [n] of a token: none before it has its target
  double *total, *moments;  // of E, and of E (z - ref)
  const int64_t all_own;
  int64_t at = 0, here = 0, panels = 0;  // of the chunk

  Team(const Loss& l, Unit* space) : l(l), all_own(l.own()) {
    Unit* next = space;
    auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
    auto floats = [&take](int64_t count) { return reinterpret_cast<float*>(take(count)); };
    E = l.later() ? take(l.rows * l.words() / PER) : nullptr;
    hp = take(l.rows * columns / PER), hs = take(l.rows * columns / PER);
    ref = floats(l.rows), target = floats(l.rows), g = floats(l.rows);
    level = floats(l.rows), tilt = floats(l.rows);
    has_target = reinterpret_cast<bool*>(next), first_of = has_target + l.V;
    next = space + l.shared() + id * all_own;
    total = reinterpret_cast<double*>(take(2 * l.rows)), moments = reinterpret_cast<double*>(take(2 * l.rows));
    acc = floats(l.rows * columns), sum = floats(l.rows), moment = floats(l.rows), pivot = floats(l.rows);
    ev = take(l.rows * l.block() / PER), rows = take(l.block() * columns / PER);
    wp = PER == 1 ? rows : take(l.block() * columns / PER);
    bias = floats(l.block());
  }

  template <class T>
  T* of(int64_t thread, T* mine) const {  // another thread's
    return reinterpret_cast<T*>(reinterpret_cast<Unit*>(mine) + (thread - id) * all_own);
  }

  // Where E has the 12 words from v on, 12 x 32 tokens.
  Unit* in_E(int64_t v, int64_t p) const { return E + (v * (l.rows / LANES) + p * WORDS) * (LANES / PER); }

  // 16 units of a row from unit u on.
  __m512i load(const Matrix& m, int64_t row, int64_t u) const {
    if constexpr (PER == 1) return _mm512_castps_si512(m.load(row, u));
    if (m.bf16) {
      const __mmask32 there = d - 2 * u >= 32 ? 0xffffffff : (1u << std::max<int64_t>(d - 2 * u, 0)) - 1;
      return _mm512_maskz_loadu_epi16(there, static_cast<const uint16_t*>(m.data) + row * d + 2 * u);
    }
    return along(m.load(row, 2 * u), m.load(row, 2 * u + 16));
  }

  // 32 rows as a panel [units][32]; zeros for those that are not there
  template <class Row>
  void panel(Unit* to, const Matrix& m, int64_t there, Row row) const {
    alignas(64) Unit x[16] = {};
    for (int64_t i = 0; i < LANES; i++)
      for (int64_t u = 0; u < units; u += 16) {
        _mm512_store_si512(x, i < there ? load(m, row(i), u) : _mm512_setzero_si512());
        for (int64_t e = 0; e < std::min<int64_t>(16, units - u); e++) to[(u + e) * LANES + i] = x[e];
      }
  }

  // hp, and the targets' logits in the order of the tile, so that E at the target is 1 to the last bit.
  void begin() const {
#pragma omp for
    for (int64_t p = 0; p < panels; p++) {
      const int64_t t0 = at + p * LANES, there = std::min(LANES, at + here - t0);
      Unit *mine = hp + p * units * LANES, *words = reinterpret_cast<Unit*>(acc);
      panel(words, l.weight, there, [&](int64_t i) { return l.targets[t0 + i]; });
      panel(mine, l.features, there, [&](int64_t i) { return t0 + i; });
      for (int64_t half = 0; half < LANES; half += 16) {
        __m512 z = _mm512_setzero_ps();
        for (int64_t u = 0; u < units; u++)
          z = K::dot(z, _mm512_load_si512(words + u * LANES + half), _mm512_load_si512(mine + u * LANES + half));
        const int64_t lane = p * LANES + half;
        for (int64_t i = lane; i < lane + 16; i++) target[i] = l.bias && i < here ? l.bias[l.targets[at + i]] : 0.f;
        z = capped(_mm512_fmadd_ps(_mm512_set1_ps(l.scale), z, _mm512_load_ps(target + lane)), nullptr);
        _mm512_store_ps(target + lane, z);
        for (int64_t i = lane; i < lane + 16; i++) {
          ref[i] = i >= here ? NOWHERE : l.known ? l.known[at + i] : target[i];
          level[i] = i < here && l.known ? l.c[at + i] : 0.f, tilt[i] = i < here && l.known && l.k ? l.k[at + i] : 0.f;
        }
      }
    }
  }

  // c tanh(z / c), and its slope
  __m512 capped(__m512 z, __m512* slope) const {
    if (!l.softcap) return z;
    const __m512 t = tangent(_mm512_div_ps(z, _mm512_set1_ps(l.softcap)));
    if (slope) *slope = _mm512_fnmadd_ps(t, t, _mm512_set1_ps(1));
    return _mm512_mul_ps(t, _mm512_set1_ps(l.softcap));
  }

  void pack_weight(int64_t v0, int64_t words) const {
    const Matrix& w = l.weight;
    for (int64_t v = 0; v < words; v += PER) {
      for (int64_t r = v; r < v + PER; r++) bias[r] = l.bias && v0 + r < l.V ? l.bias[v0 + r] : 0.f;
      const int64_t u0 = PER * 16;  // numbers of a register
      for (int64_t j = 0; j < columns; j += u0) {
        __m512i x[PER];
        for (int64_t r = 0; r < PER; r++) {
          x[r] = v0 + v + r < l.V ? load(w, v0 + v + r, j / PER) : _mm512_setzero_si512();
          _mm512_store_si512(rows + ((j / LANES * words + v + r) * LANES + j % LANES) / PER, x[r]);
        }
        if constexpr (PER == 2) {
          Unit* to = wp + (j * words + v * LANES) / PER;
          _mm512_store_si512(to, _mm512_permutex2var_epi16(x[0], order(0), x[1]));
          _mm512_store_si512(to + 16, _mm512_permutex2var_epi16(x[0], order(16), x[1]));
        }
      }
    }
  }

  // Logits of 12 words and 32 tokens, and what becomes of them while they are in registers.
  void tile(int64_t v0, int64_t v, int64_t words, int64_t p, bool maximum) const {
    constexpr int64_t wide = LANES / PER;
    Tile c{};
    for (int64_t u = 0; u < units; u += wide)
      multiply<K, WORDS>(c, rows + (u / wide * words + v) * wide, wide, 1, hp + (p * units + u) * LANES,
                         std::min(wide, units - u));
    const __m512 scale = _mm512_set1_ps(l.scale);
#pragma GCC unroll 16
    for (int half = 0; half < 2; half++) {
      const int64_t lane = p * LANES + half * 16;
      const __m512 from = _mm512_load_ps(ref + lane), mean = _mm512_load_ps(pivot + lane);
      const __m512 flat = _mm512_load_ps(level + lane), steep = _mm512_load_ps(tilt + lane);
      __m512 s = _mm512_load_ps(sum + lane), m = _mm512_load_ps(moment + lane), slope;
#pragma GCC unroll 16
      for (int r = 0; r < WORDS; r++) {
        __m512 z = capped(_mm512_fmadd_ps(scale, c[r][half], _mm512_set1_ps(bias[v + r])), &slope);
        if (v0 + v + r >= l.V) z = _mm512_set1_ps(-INFINITY);  // a word that is none
        const __m512 x = _mm512_max_ps(_mm512_set1_ps(LOWEST), _mm512_sub_ps(z, from)), e = exponential(x);
        s = maximum ? _mm512_max_ps(s, z) : _mm512_add_ps(s, e);
        if (l.entropy) m = _mm512_fmadd_ps(e, _mm512_sub_ps(x, mean), m);
        c[r][half] = l.known ? _mm512_mul_ps(e, _mm512_fmadd_ps(steep, x, flat)) : e;
        if (l.softcap) c[r][half] = _mm512_mul_ps(c[r][half], slope);
      }
      _mm512_store_ps(sum + lane, s);
      if (l.entropy) _mm512_store_ps(moment + lane, m);
    }
    if (maximum) return;
    Unit *to = ev + (p * words + v) / PER * LANES, *later = in_E(v0 + v, p);
#pragma GCC unroll 16
    for (int r = 0; r < WORDS; r += PER)
      for (int half = 0; l.by_features && half < 2; half++) {
        const __m512i x = PER == 1 ? _mm512_castps_si512(c[r][half]) : across(c[r][half], c[r + PER - 1][half]);
        _mm512_store_si512(to + r / PER * LANES + half * 16, x);
      }
#pragma GCC unroll 16
    for (int r = 0; r < WORDS && E; r++) {
      const auto keep = [&](int64_t i, __m512i x) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(later + r * wide + i), x);
      };
      if constexpr (PER == 1) keep(0, _mm512_castps_si512(c[r][0])), keep(16, _mm512_castps_si512(c[r][1]));
      else keep(0, along(c[r][0], c[r][1]));
    }
  }

  // This thread's words: their sums, E and dfeatures; with `maximum` only the largest logits.
  void scan_words(bool maximum) const {
    std::fill(total, total + panels * LANES, 0.);
    std::fill(moments, moments + panels * LANES, 0.);
    std::fill(sum, sum + panels * LANES, -INFINITY);
    for (int64_t v0 = from; v0 < to; v0 += l.block()) {
      const int64_t words = std::min(l.block(), to - v0);
      pack_weight(v0, words);
      // log s - m / s would cancel: m is summed about a mean of z - ref, which the first block is run twice for
      for (int64_t i = 0; i < panels * LANES; i++) pivot[i] = v0 > from && total[i] > 0 ? moments[i] / total[i] : 0;
      for (bool once = !l.entropy || maximum || v0 > from;; once = true) {
        if (!maximum) std::fill(sum, sum + panels * LANES, 0.f), std::fill(moment, moment + panels * LANES, 0.f);
        for (int64_t p = 0; p < panels; p++)
          for (int64_t v = 0; v < words; v += WORDS) tile(v0, v, words, p, maximum);
        if (once) break;
        for (int64_t i = 0; i < panels * LANES; i++) pivot[i] = sum[i] > 0 ? moment[i] / sum[i] : 0;
      }
      if (maximum) continue;
      for (int64_t i = 0; i < panels * LANES; i++)
        total[i] += sum[i], moments[i] += moment[i] + double(pivot[i]) * sum[i];
      if (!l.by_features) continue;
      for (int64_t j = 0; j < columns; j += LANES)
        for (int64_t i = 0; i < panels * LANES; i += 8) {
          Tile c{};
          float* to = acc + i * columns + j;
          for (int r = 0; r < 16; r++) _mm_prefetch(to + r / 2 * columns + r % 2 * 16, _MM_HINT_T0);
          const Unit* some = ev + i / LANES * (words / PER) * LANES + i % LANES;
          multiply<K, 8>(c, some, 1, LANES, wp + j * words / PER, words / PER);
#pragma GCC unroll 16
          for (int r = 0; r < 8; r++)
#pragma GCC unroll 16
            for (int half = 0; half < 2; half++) {
              float* o = to + r * columns + half * 16;
              _mm512_store_ps(o, v0 > from ? _mm512_add_ps(c[r][half], _mm512_load_ps(o)) : c[r][half]);
            }
        }
    }
    _mm_sfence();  // E is read by other threads
  }

  // Whether every sum of the chunk is in the safe range.
  bool safe() const {
    for (int64_t i = 0; i < here; i++) {
      double s = 0;
      for (int64_t thread = 0; thread < threads; thread++) s += of(thread, total)[i];
      if (!(s < SAFE)) return false;
    }
    return true;
  }

  // Losses, g and dfeatures of the chunk, from what each thread has found.
  void finish() const {
#pragma omp for
    for (int64_t i = 0; i < panels * LANES; i++) {
      g[i] = 0;
      if (i >= here) continue;
      const int64_t row = at + i, t = l.targets[row];
      double s = 0, m = 0;
      for (int64_t thread = 0; thread < threads; thread++) s += of(thread, total)[i], m += of(thread, moments)[i];
      const double log = std::log(s);
      l.nll[row] = log + (double(ref[i]) - target[i]);
      l.lse[row] = log + ref[i];
      if (l.entropy) l.entropy[row] = log - m / s;
      g[i] = l.known ? 1.f : (l.c[row] + (l.k ? l.k[row] * l.lse[row] : 0.f)) / s;
      for (int64_t j = 0; l.by_features && j < d; j += 16) {
        __m512 x = _mm512_setzero_ps();
        for (int64_t thread = 0; thread < threads; thread++)
          x = _mm512_add_ps(x, _mm512_load_ps(of(thread, acc) + i * columns + j));
        const __m512 at_target = _mm512_mul_ps(_mm512_set1_ps(l.q[row]), K::rounded(l.weight.load(t, j)));
        x = _mm512_mul_ps(_mm512_fmsub_ps(_mm512_set1_ps(g[i]), x, at_target), _mm512_set1_ps(l.scale));
        l.by_features.store(row * d + j, first(d - j), x, true);
      }
    }
  }

  // dweight and dbias of the chunk's tokens.
  void other_gradients() const {
    const int64_t lot = l.rows / PER;  // units of tokens
#pragma omp for
    for (int64_t i = 0; i < panels * LANES; i += PER)
      for (int64_t j = 0; j < columns; j += 16) {
        __m512 x[2];
        for (int64_t r = 0; r < PER; r++) {
          x[r] = i + r < here ? K::rounded(l.features.load(at + i + r, j)) : _mm512_setzero_ps();
          x[r] = _mm512_mul_ps(x[r], _mm512_set1_ps(l.scale * g[i + r]));
        }
        _mm512_store_si512(hs + (j / LANES * lot + i / PER) * LANES + j % LANES,
                           PER == 1 ? _mm512_castps_si512(x[0]) : across(x[0], x[PER - 1]));
      }
    constexpr int64_t wide = LANES / PER;
    const bool summed = at || l.onto;  // there is something to add to, at every word
#pragma omp for schedule(dynamic, 1)
    for (int64_t v0 = 0; v0 < l.V; v0 += 16 * WORDS) {  // a panel of hs stays in the cache for 16 tiles
      const int64_t end = std::min(v0 + 16 * WORDS, l.V);
      for (int64_t j = 0; l.by_weight && j < columns; j += LANES)
        for (int64_t v = v0; v < end; v += WORDS) {
          Tile c{};
          const int64_t there = std::min(WORDS, l.V - v);
          for (int64_t r = 0; summed && r < there; r++) l.by_weight.prefetch((v + r) * d + j);
          for (int64_t p = 0; p < panels; p++) {
            const Unit* next = in_E(v + WORDS, p);
            for (int64_t r = 0; j == 0 && r < WORDS * wide; r += 16) _mm_prefetch(next + r, _MM_HINT_T1);
            multiply<K, WORDS>(c, in_E(v, p), wide, 1, hs + (j * lot + p * wide * LANES), wide);
          }
#pragma GCC unroll 16
          for (int r = 0; r < WORDS; r++)
#pragma GCC unroll 16
            for (int half = 0; half < 2; half++) {
              const int64_t o = (v + r) * d + j + half * 16;
              const __mmask16 m = r < there ? first(d - j - half * 16) : 0;
              if (m && (summed || has_target[v + r])) c[r][half] = _mm512_add_ps(c[r][half], l.by_weight.load(o, m));
              if (m) l.by_weight.store(o, m, c[r][half], at + l.rows >= l.n);
            }
        }
      for (int64_t v = v0; l.by_bias && v < end; v++) {
        __m512 s = _mm512_setzero_ps();
        for (int64_t i = 0; i < panels * LANES; i += 16) {
          const Unit* e = in_E(v / WORDS * WORDS, i / LANES) + v % WORDS * wide + i % LANES / PER;
          __m512 x;
          if constexpr (PER == 1) x = _mm512_load_ps(e);
          else x = widened(_mm256_load_si256(reinterpret_cast<const __m256i*>(e)));
          s = _mm512_fmadd_ps(x, _mm512_load_ps(g + i), s);
        }
        l.by_bias[v] += _mm512_reduce_add_ps(s);
      }
    }
  }

  // The targets' terms of dweight and dbias, which no sum needs to be known for, before any other.
  void targets() const {
#pragma omp for
    for (int64_t v = 0; v < l.V; v++) {
      has_target[v] = false;
      if (l.by_bias) l.by_bias[v] = 0;
    }
#pragma omp single
    for (int64_t i = 0; i < l.n; i++) {
      first_of[i] = !std::exchange(has_target[l.targets[i]], true);
      if (l.by_bias) l.by_bias[l.targets[i]] -= l.q[i];
    }
    const int64_t begin = up(d, 16) / 16 * id / threads * 16, end = up(d, 16) / 16 * (id + 1) / threads * 16;
    for (int64_t i = 0; l.by_weight && i < l.n; i++)  // two tokens may share a row: each thread has some columns
      for (int64_t j = begin; j < end; j += 16) {
        const int64_t o = l.targets[i] * d + j;
        const __mmask16 m = first(d - j);
        const __m512 before = first_of[i] && !l.onto ? _mm512_setzero_ps() : l.by_weight.load(o, m);
        const __m512 x = _mm512_fnmadd_ps(_mm512_set1_ps(l.scale * l.q[i]), K::rounded(l.features.load(i, j)), before);
        l.by_weight.store(o, m, x, false);
      }
#pragma omp barrier
  }

  void run() {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);  // what is below 1e-38 counts as 0: E is full of it, and it would take 100 times as long
    if (l.later()) targets();
    for (at = 0; at < l.n; at += l.rows) {
      here = std::min(l.rows, l.n - at), panels = up(here, LANES) / LANES;
      begin();
      scan_words(false);
#pragma omp barrier
      if (!l.known && !safe()) {
#pragma omp barrier
        scan_words(true);
#pragma omp barrier
#pragma omp for
        for (int64_t i = 0; i < here; i++) {
          float most = -INFINITY;
          for (int64_t thread = 0; thread < threads; thread++) most = std::max(most, of(thread, sum)[i]);
          ref[i] = most;
        }
        scan_words(false);
#pragma omp barrier
      }
      finish();
      if (l.later()) other_gradients();
#pragma omp barrier
    }
    _mm_setcsr(mode);
  }
};

void Loss::run(Unit* space) const {
#pragma omp parallel num_threads(threads())
  pairs ? Team<Pair>(*this, space).run() : Team<Single>(*this, space).run();
}

}  // namespace avx512

#pragma GCC pop_options

// ---------------------------------------------------------------------------------------------------------------------
// What exact_top.py sees of a table in int8: seen_nv = step_v sigma_n (q_v.a_n + q_v.b_n / 256), rounded to fp32 once.
//
// `vpdpbusd` multiplies bytes of 0 to 255 by int8 and adds exactly. So the table is flipped to q + 128 as it comes, and
// 128 times the sum of the digits is taken off again. The table is read once for all queries, as fast as memory
// delivers it: the prefetch crosses ends of pages, where the processor's own stops.
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

// in large pages, where the system has them
Tensor made(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType type = ScalarType::Float) {
  const Tensor made = torch::stable::new_empty(like, shape, type);
  constexpr uintptr_t page = 1 << 21;
  const auto from = reinterpret_cast<uintptr_t>(made.data_ptr()), start = (from + page - 1) / page * page;
  const uintptr_t end = (from + made.numel() * made.element_size()) / page * page;
  if (end > start) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
  return made;
}

avx512::Matrix matrix(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "features and weight must be contiguous matrices");
  const bool bf16 = x.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(bf16 || x.scalar_type() == ScalarType::Float, "features and weight must be float32 or bfloat16");
  return {x.data_ptr(), bf16, x.size(1)};
}

// nll [n], lse [n], the entropy where it is asked for, and the gradients of
// sum_i (c_i lse_i - q_i z_it + k_i lse_i^2 / 2) that are wanted, else empty; those of features and weight in bf16 where
// `narrow`. Where `into` is given weight's is added to it, and what is returned of it is empty. With `known` see above.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> vocabulary_loss(
    Tensor features, Tensor weight, std::optional<Tensor> bias, Tensor targets, Tensor c, Tensor q,
    std::optional<Tensor> k, std::optional<Tensor> known, std::optional<Tensor> into, double scale, double softcap, int64_t rows, bool pairs,
    bool narrow, bool entropy, bool by_features, bool by_weight, bool by_bias) {
  const int64_t n = features.size(0), d = features.size(1), V = weight.size(0);
  auto vector = [](const std::optional<Tensor>& x, int64_t size) -> const float* {
    if (!x) return nullptr;
    STD_TORCH_CHECK(x->dim() == 1 && x->size(0) == size && x->is_contiguous(), "need a vector of ", size, " numbers");
    return x->const_data_ptr<float>();
  };
  STD_TORCH_CHECK(weight.size(1) == d && targets.numel() == n && targets.is_contiguous(), "shapes do not meet");
  STD_TORCH_CHECK(n && V && d, "nothing to compute");
  const ScalarType type = narrow ? ScalarType::BFloat16 : ScalarType::Float;
  Tensor nll = made(features, {n}), lse = made(features, {n}), h = made(features, {entropy ? n : 0});
  Tensor db = made(features, {by_bias ? V : 0});
  STD_TORCH_CHECK(!into || (into->dim() == 2 && into->size(0) == V && into->size(1) == d && into->is_contiguous() &&
                            into->scalar_type() == ScalarType::Float), "into must be like weight, in float32");
  const bool fresh = by_weight && !into;
  Tensor dh = made(features, {by_features ? n : 0, d}, type), dw = made(features, {fresh ? V : 0, d}, type);
  auto floats = [](const Tensor& x) { return x.numel() ? static_cast<float*>(x.data_ptr()) : nullptr; };
  const Tensor low = made(features, {narrow && fresh ? V : 0, d}, type);  // while it is summed
  auto halves = [&](const Tensor& x) { return narrow ? reinterpret_cast<uint16_t*>(floats(x)) : nullptr; };
  auto sum = [&](const Tensor& x) { return avx512::Sum{narrow ? nullptr : floats(x), halves(x), halves(low)}; };
  const avx512::Sum onto{into && by_weight ? floats(*into) : nullptr};
  const avx512::Loss loss{matrix(features), matrix(weight), vector(bias, V), targets.const_data_ptr<int64_t>(),
                          vector(c, n), vector(q, n), vector(k, n), n, V, float(scale), float(softcap),
                          vector(known, n), floats(nll), floats(lse), floats(h), sum(dh), into ? onto : sum(dw), floats(db),
                          omp_get_max_threads(), avx512::up(std::min(rows, n), avx512::LANES), pairs,
                          into.has_value()};
  const Tensor space = made(features, {loss.workspace()});
  loss.run(reinterpret_cast<avx512::Unit*>(floats(space)));
  return {nll, lse, h, dh, dw, db};
}

Tensor seen_in_int8_op(Tensor q, Tensor step, Tensor digits, Tensor sigma) {
  const int64_t V = q.size(0), e = q.size(1), n = digits.size(0);
  for (const Tensor& x : {q, step, digits, sigma})
    STD_TORCH_CHECK(x.is_contiguous(), "seen_in_int8: contiguous tensors");
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
      " Tensor? known, Tensor(a!)? into, float scale, float softcap, int rows, bool pairs, bool narrow, bool entropy,"
      " bool by_features, bool by_weight, bool by_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
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
