// What is compiled on the user's machine, by `tiewise kernels build`: one file, one library, one table of operators.
//
// The library starts on any processor: code for wider registers is in functions that are compiled for them (the pragma
// below), and the Python side asks `instruction_sets` before it calls one.

#include <cpuid.h>
#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

namespace {

// Whether this process may use tiles of bf16. Their 8 KB of state need a permission of Linux (5.16 or newer), which old
// systems, some hypervisors and small signal stacks refuse.
bool ask_for_tiles() {
  constexpr unsigned AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & AMX_BF16) || !(d & AMX_TILE)) return false;
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// Bits in the order of INSTRUCTION_SETS in compiled_kernels.py, as the processor and the operating system have them.
int64_t instruction_sets() {
  static const bool tiles = ask_for_tiles();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool pairs = avx512 && __builtin_cpu_supports("avx512bf16");
  return avx512 | (avx512 && __builtin_cpu_supports("avx512vnni")) << 1 | pairs << 2 | (pairs && tiles) << 3;
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
// with AMX:
constexpr int64_t LOT = 200'000;         // numbers of the features of a lot of tokens
constexpr int64_t STEP_WORDS = 512;      // words of which E is multiplied at once
constexpr int64_t BLOCK = 1'500'000;     // numbers of a block of words
constexpr int64_t E_IN_CACHE = 1 << 20;  // bytes of E that stay in L2 for all columns of dweight
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

// How the loss multiplies: in fp32; in bf16 with AVX-512, with AMX, or with an emulation of AMX for tests.
enum class Products : int64_t { FP32, PAIRS, TILES, EMULATED_TILES };

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
  Products products;                         // how to multiply
  bool onto = false;                         // by_weight is added to what stands there

  int64_t d() const { return weight.d; }
  int64_t columns() const { return up(d(), LANES); }
  bool tiles() const { return products >= Products::TILES; }
  int64_t tile_words() const { return tiles() ? LANES : WORDS; }
  int64_t words() const { return up(V, tile_words()); }
  int64_t block() const {  // of words: stays in L2; with AMX in L3, while all tokens pass
    if (tiles()) return std::min(words(), up(std::clamp<int64_t>(BLOCK / columns(), 256, 4096), 256));
    return up(std::clamp<int64_t>((per() == 2 ? 150'000 : 100'000) / columns(), 48, 384), 48);
  }
  int64_t lot() const {  // of tokens: with AMX its features and their gradient stay in L2, while a block passes
    return tiles() ? std::min(rows, up(std::clamp<int64_t>(LOT / columns(), 64, 512), LANES)) : rows;
  }
  int64_t step_words() const { return tiles() ? std::min(STEP_WORDS, block()) : block(); }
  int64_t threads() const { return std::min(most, words() / tile_words()); }  // each has a word
  bool later() const { return by_weight || by_bias; }

  // With AMX threads may share the tokens as well as the words. A share of words costs a sum of dfeatures, written and
  // read; a share of tokens costs a packed copy of the words.
  int64_t token_shares() const {
    if (!tiles() || !by_features) return 1;
    int64_t best = 1;
    const auto cost = [&](int64_t shares) { return threads() / shares * rows * 8 + shares * V * 6; };
    for (int64_t shares = 2; shares <= std::min(threads(), rows / LANES); shares++)
      if (threads() % shares == 0 && cost(shares) < cost(best)) best = shares;
    return best;
  }
  int64_t word_shares() const { return threads() / token_shares(); }

  // The workspace, in units: what all threads share, and then each one's own.
  int64_t per() const { return products == Products::FP32 ? 1 : 2; }  // numbers of a unit
  int64_t sums() const { return rows * columns(); }                   // of dfeatures, for a share of the words
  int64_t shared() const {
    const int64_t by_target = up(tiles() ? 4 * (V + rows) : V + n, 64) / 4;
    return rows * ((later() ? words() : 0) + 2 * columns()) / per() + 5 * rows + by_target + word_shares() * sums();
  }
  int64_t own() const {
    const int64_t squares = tiles() ? 2 * LANES * LANES : 0;
    return up(rows * 7 + lot() * step_words() / per() + block() * columns() + block() + squares, 16);
  }
  int64_t workspace() const { return shared() + threads() * own(); }

  void run(Unit* space) const;
};

// One chunk after another; an object per thread.
template <class K>
struct Team {
  static constexpr int64_t PER = K::PER;
  const Loss& l;
  const int64_t d = l.d(), columns = l.columns(), units = l.tiles() ? columns / PER : up(d, PER) / PER;
  const int64_t id = omp_get_thread_num(), threads = omp_get_num_threads();
  // the workspace is for `l.threads()`; if the system starts fewer, each token is summed over all words by one thread
  const int64_t token_shares = threads == l.threads() ? l.token_shares() : l.tiles() ? threads : 1;
  const int64_t word_shares = threads / token_shares, word_share = id % word_shares, token_share = id / word_shares;
  const int64_t from = first_word(word_share), to = first_word(word_share + 1);
  Unit *E, *hp, *hs, *rows, *wp, *ev;
  float *ref, *target, *g, *level, *tilt, *acc, *sum, *moment, *pivot, *bias, *squares;
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
    acc = floats(l.word_shares() * l.sums()) + word_share * l.sums();
    has_target = reinterpret_cast<bool*>(next), first_of = has_target + l.V;
    next = space + l.shared() + id * all_own;
    total = reinterpret_cast<double*>(take(2 * l.rows)), moments = reinterpret_cast<double*>(take(2 * l.rows));
    sum = floats(l.rows), moment = floats(l.rows), pivot = floats(l.rows);
    ev = take(l.lot() * l.step_words() / PER), rows = take(l.block() * columns / PER);
    wp = PER == 1 ? rows : take(l.block() * columns / PER);
    bias = floats(l.block()), squares = floats(0);
  }
  virtual ~Team() = default;

  int64_t first_word(int64_t share) const {
    return l.words() / l.tile_words() * share / word_shares * l.tile_words();
  }

  int64_t first_panel(int64_t share) const { return panels * share / token_shares; }

  // The array that is `mine` here, of the thread that sums token i over a share of the words.
  template <class T>
  T* of(int64_t i, int64_t share, T* mine) const {
    const int64_t thread = ((i / LANES + 1) * token_shares - 1) / panels * word_shares + share;
    return reinterpret_cast<T*>(reinterpret_cast<Unit*>(mine) + (thread - id) * all_own);
  }

  const float* acc_of(int64_t share) const { return acc + (share - word_share) * l.sums(); }

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
  virtual void begin() const {
#pragma omp for
    for (int64_t p = 0; p < panels; p++) {
      const int64_t t0 = at + p * LANES, there = std::min(LANES, at + here - t0);
      Unit *mine = hp + p * units * LANES, *words = rows;
      panel(words, l.weight, there, [&](int64_t i) { return l.targets[t0 + i]; });
      panel(mine, l.features, there, [&](int64_t i) { return t0 + i; });
      for (int64_t half = 0; half < LANES; half += 16) {
        __m512 z = _mm512_setzero_ps();
        for (int64_t u = 0; u < units; u++)
          z = K::dot(z, _mm512_load_si512(words + u * LANES + half), _mm512_load_si512(mine + u * LANES + half));
        refer_to_targets(p * LANES + half, z);
      }
    }
  }

  // What E is relative to, for 16 tokens from `lane` on, where z are the products of their features and targets.
  void refer_to_targets(int64_t lane, __m512 z) const {
    for (int64_t i = lane; i < lane + 16; i++) target[i] = l.bias && i < here ? l.bias[l.targets[at + i]] : 0.f;
    z = capped(_mm512_fmadd_ps(_mm512_set1_ps(l.scale), z, _mm512_load_ps(target + lane)), nullptr);
    _mm512_store_ps(target + lane, z);
    for (int64_t i = lane; i < lane + 16; i++) {
      ref[i] = i >= here ? NOWHERE : l.known ? l.known[at + i] : target[i];
      level[i] = i < here && l.known ? l.c[at + i] : 0.f, tilt[i] = i < here && l.known && l.k ? l.k[at + i] : 0.f;
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
  virtual void scan_words(bool maximum) const {
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
      for (int64_t share = 0; share < word_shares; share++) s += of(i, share, total)[i];
      if (!(s < SAFE)) return false;
    }
    return true;
  }

  // The loss and g of token i, from what each thread has found.
  void finish_token(int64_t i) const {
    g[i] = 0;
    if (i >= here) return;
    const int64_t row = at + i;
    double s = 0, m = 0;
    for (int64_t share = 0; share < word_shares; share++) s += of(i, share, total)[i], m += of(i, share, moments)[i];
    const double log = std::log(s);
    l.nll[row] = log + (double(ref[i]) - target[i]);
    l.lse[row] = log + ref[i];
    if (l.entropy) l.entropy[row] = log - m / s;
    g[i] = l.known ? 1.f : (l.c[row] + (l.k ? l.k[row] * l.lse[row] : 0.f)) / s;
  }

  // Losses, g and dfeatures of the chunk.
  virtual void finish() const {
#pragma omp for
    for (int64_t i = 0; i < panels * LANES; i++) {
      finish_token(i);
      if (i >= here) continue;
      const int64_t row = at + i, t = l.targets[row];
      for (int64_t j = 0; l.by_features && j < d; j += 16) {
        __m512 x = _mm512_setzero_ps();
        for (int64_t share = 0; share < word_shares; share++)
          x = _mm512_add_ps(x, _mm512_load_ps(acc_of(share) + i * columns + j));
        const __m512 at_target = _mm512_mul_ps(_mm512_set1_ps(l.q[row]), K::rounded(l.weight.load(t, j)));
        x = _mm512_mul_ps(_mm512_fmsub_ps(_mm512_set1_ps(g[i]), x, at_target), _mm512_set1_ps(l.scale));
        l.by_features.store(row * d + j, first(d - j), x, true);
      }
    }
  }

  // hs, of the features times g.
  void weigh_features() const {
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
  }

  // dweight and dbias of the chunk's tokens.
  virtual void other_gradients() const {
    weigh_features();
    constexpr int64_t wide = LANES / PER;
    const int64_t lot = l.rows / PER;  // units of tokens
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
  virtual void targets() const {
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
          for (int64_t share = 0; share < word_shares; share++) most = std::max(most, of(i, share, sum)[i]);
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

// ---------------------------------------------------------------------------------------------------------------------
// The same in bf16 with AMX, which has eight registers ("tiles") of 16 rows of 64 bytes. An instruction multiplies a
// tile a of 16 rows x 32 numbers by a tile b of 16 pairs of numbers x 16 lanes. It adds the product to a tile of fp32,
// 16 x 16. A square of 32 x 32 sums takes tiles 0 to 3; its factors take 4 and 5, 6 and 7.
//
// `Team` broadcasts units of rows; here they are stored as tiles a. Its panels are read as tiles b:
//
//     rows     of a block  [words/32][columns/32][2][16 words][32 columns]
//     wp       of a block  [columns/32][words/32][2][16 columns][32 words]
//     ev       E, of a step of words and a lot of tokens  [tokens/32][units of words][32 tokens]
//     E        of a chunk  [words/32][tokens/32][2][16 words][32 tokens]
//     acc      [tokens/32][columns/32][2][2][16 columns][16 tokens]
//
// A lot of tokens stays in L2 with its sums of dfeatures while the words of a block pass. A square's sums go to L1, and
// from there through the exponential between the tile instructions of the next square.
// ---------------------------------------------------------------------------------------------------------------------

// The processor's tiles, configured while an object of this type exists.
class TileRegisters {
 public:
  TileRegisters() {
    const Configuration shapes;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~TileRegisters() { asm volatile("tilerelease"); }
  TileRegisters(const TileRegisters&) = delete;

  template <int T>
  void clear() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  // 16 rows of 64 bytes, `stride` bytes apart. The operand "m" makes the compiler finish its stores to them.
  template <int T>
  void load(const void* from, int64_t stride) {
    const auto& bytes = *static_cast<const char(*)[REACH]>(from);
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T), "m"(bytes));
  }
  template <int T>
  void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }

 private:
  static constexpr int64_t REACH = 15 * 128 + 64;  // bytes of a tile with the largest stride
  struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_of_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t row_count[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
};

// The same on any processor with AVX-512, for tests. TDPBF16PS sums the first numbers of all pairs and the second ones
// separately, by fused products from 0 on, and then adds both sums to c (Intel's manual of instructions, volume 2). It
// counts denormals as 0; here the mode that `Team::run` sets does that.
class EmulatedTileRegisters {
 public:
  template <int T>
  void clear() {
    std::memset(tiles[T], 0, sizeof tiles[T]);
  }
  template <int T>
  void load(const void* from, int64_t stride) {
    for (int64_t r = 0; r < 16; r++) std::memcpy(tiles[T][r], static_cast<const char*>(from) + r * stride, 64);
  }
  template <int T>
  void store(void* to, int64_t stride) {
    for (int64_t r = 0; r < 16; r++) std::memcpy(static_cast<char*>(to) + r * stride, tiles[T][r], 64);
  }
  template <int C, int A, int B>
  void multiply() {
    for (int64_t r = 0; r < 16; r++) {
      __m512 firsts = _mm512_setzero_ps(), seconds = _mm512_setzero_ps();
      for (int64_t k = 0; k < 16; k++) {
        const __m512i a = _mm512_set1_epi32(tiles[A][r][k]), b = _mm512_load_si512(tiles[B][k]);
        firsts = _mm512_fmadd_ps(first_numbers(a), first_numbers(b), firsts);
        seconds = _mm512_fmadd_ps(second_numbers(a), second_numbers(b), seconds);
      }
      const __m512 sum = _mm512_add_ps(_mm512_load_ps(tiles[C][r]), _mm512_add_ps(firsts, seconds));
      _mm512_store_ps(tiles[C][r], sum);
    }
  }

 private:
  static __m512 first_numbers(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
  static __m512 second_numbers(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))));
  }
  alignas(64) Unit tiles[8][16][16] = {};
};

// x_ij and x_ji change places in 16 x 16 numbers of 32 bits.
inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {  // pairs of rows: 2 x 2 blocks
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // four rows: a column of them in 128 bits
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // a register of column i, i + 4, i + 8 and i + 12 of four rows each
    const __m512i upper_even = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    const __m512i upper_odd = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    const __m512i lower_even = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    const __m512i lower_odd = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    y[i] = _mm512_shuffle_i32x4(upper_even, lower_even, 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(upper_odd, lower_odd, 0x88);
    y[i + 8] = _mm512_shuffle_i32x4(upper_even, lower_even, 0xdd);
    y[i + 12] = _mm512_shuffle_i32x4(upper_odd, lower_odd, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) x[i] = y[i];
}

template <class Registers>
struct Tiles final : Team<Pair> {
  static constexpr int64_t DOUBLE = LANES * LANES / 2;  // units of two tiles, one below the other: 32 rows
  static constexpr int64_t SQUARE = LANES * LANES;      // sums of a square
  const int64_t depth = columns / LANES;
  // The chunk's tokens by target: the first of each word [V], the next with the same target [rows]; -1 for none.
  int32_t *const first_token = reinterpret_cast<int32_t*>(has_target), *const next_token = first_token + l.V;
  mutable Registers tile;

  using Team<Pair>::Team;

  void clear_square() const {
    tile.template clear<0>();
    tile.template clear<1>();
    tile.template clear<2>();
    tile.template clear<3>();
  }

  // Reads a square's four tiles, of which each has 16 rows `stride` bytes apart.
  void load_square(const float* from, int64_t right, int64_t below, int64_t stride) const {
    tile.template load<0>(from, stride);
    tile.template load<1>(from + right, stride);
    tile.template load<2>(from + below, stride);
    tile.template load<3>(from + below + right, stride);
  }

  void store_square(float* to, int64_t right, int64_t below, int64_t stride) const {
    tile.template store<0>(to, stride);
    tile.template store<1>(to + right, stride);
    tile.template store<2>(to + below, stride);
    tile.template store<3>(to + below + right, stride);
  }

  // Adds a b to the square, for 32 rows of a and a panel of b, over `steps` times 32 numbers. `meanwhile` is called
  // between the instructions of each step.
  template <class Work>
  inline __attribute__((always_inline)) void multiply_square(const Unit* a, const Unit* b, int64_t steps,
                                                             Work meanwhile) const {
    for (int64_t i = 0; i < steps; i++, a += DOUBLE, b += DOUBLE) {
      tile.template load<4>(a, 64);
      tile.template load<6>(b, 128);
      tile.template multiply<0, 4, 6>();
      tile.template load<7>(b + 16, 128);
      tile.template multiply<1, 4, 7>();
      tile.template load<5>(a + DOUBLE / 2, 64);
      tile.template multiply<2, 5, 6>();
      tile.template multiply<3, 5, 7>();
      meanwhile();
    }
  }

  struct Place {
    int64_t word, lane;  // of a square's first sum
  };

  // Squares one after another. While one is multiplied, `finish(sums, row, place)` gets the previous one's sums
  // [32][32] and each second row: it handles two.
  template <class Finish>
  class Pipeline {
   public:
    Pipeline(const Tiles& tiles, Finish finish) : tiles(tiles), finish(finish) {}

    inline __attribute__((always_inline)) void multiply(const Unit* a, const Unit* b, int64_t steps, Place place) {
      const float* previous = square(1 - current);
      const Place previous_place = places[1 - current];
      const int64_t rows_at_once = 2 * ((16 + steps - 1) / steps);
      int64_t row = has_previous ? 0 : LANES;
      tiles.clear_square();
      tiles.multiply_square(a, b, steps, [&] {
        for (const int64_t end = std::min(row + rows_at_once, LANES); row < end; row += 2)
          finish(previous, row, previous_place);
      });
      tiles.store_square(square(current), 16, 16 * LANES, 128);
      places[current] = place, has_previous = true, current = 1 - current;
    }

    void drain() {
      for (int64_t row = 0; has_previous && row < LANES; row += 2)
        finish(square(1 - current), row, places[1 - current]);
      has_previous = false;
    }

   private:
    float* square(int side) const { return tiles.squares + side * SQUARE; }
    const Tiles& tiles;
    Finish finish;
    Place places[2] = {};
    int current = 0;
    bool has_previous = false;
  };

  Unit* tiles_of_E(int64_t word, int64_t p) const { return E + (word / LANES * (l.rows / LANES) + p) * DOUBLE; }

  // hp, and the targets' logits by the same instructions as all others, so that E at the target is 1 to the last bit.
  void begin() const override {
#pragma omp for
    for (int64_t p = 0; p < panels; p++) {
      const int64_t t0 = at + p * LANES, there = std::min(LANES, at + here - t0);
      Unit *features = hp + p * units * LANES, *words = rows;
      panel(features, l.features, there, [&](int64_t i) { return t0 + i; });
      for (int64_t i = 0; i < LANES; i++)
        for (int64_t k = 0; k < depth; k++) {
          const __m512i x = i < there ? load(l.weight, l.targets[t0 + i], k * 16) : _mm512_setzero_si512();
          _mm512_store_si512(words + k * DOUBLE + i * 16, x);
        }
      clear_square();
      multiply_square(words, features, depth, [] {});
      store_square(squares, 16, 16 * LANES, 128);
      alignas(64) float diagonal[LANES];
      for (int64_t i = 0; i < LANES; i++) diagonal[i] = squares[i * LANES + i];
      for (int64_t half = 0; half < LANES; half += 16)
        refer_to_targets(p * LANES + half, _mm512_load_ps(diagonal + half));
    }
  }

  // rows and wp of a block of words.
  void pack_block(int64_t v0, int64_t words) const {
    for (int64_t v = 0; v < words; v += LANES) {
      for (int64_t w = v; w < v + LANES; w++) bias[w] = l.bias && v0 + w < l.V ? l.bias[v0 + w] : 0.f;
      for (int64_t k = 0; k < depth; k++) pack_square(v0, v, k);
    }
  }

  void pack_square(int64_t v0, int64_t v, int64_t k) const {
    Unit* to = rows + (v / LANES * depth + k) * DOUBLE;
    __m512i low[16], high[16];  // of the columns: pairs of words
    for (int64_t r = 0; r < LANES; r += 2) {
      __m512i x[2];
      for (int64_t i = 0; i < 2; i++) {
        x[i] = v0 + v + r + i < l.V ? load(l.weight, v0 + v + r + i, k * 16) : _mm512_setzero_si512();
        _mm512_store_si512(to + (r + i) * 16, x[i]);
      }
      low[r / 2] = _mm512_permutex2var_epi16(x[0], order(0), x[1]);
      high[r / 2] = _mm512_permutex2var_epi16(x[0], order(16), x[1]);
    }
    if (!l.by_features) return;
    transpose(low), transpose(high);
    to = wp + (k * (l.block() / LANES) + v / LANES) * DOUBLE;
    for (int64_t i = 0; i < 16; i++) {
      _mm512_store_si512(to + i * 16, low[i]);
      _mm512_store_si512(to + (16 + i) * 16, high[i]);
    }
  }

  enum class Pass { ALL, SUMS, MAXIMUM };  // E and its sums; the sums alone; the largest logits

  struct Step {  // words w0 to w1 of the block from word v0 on, and a lot of tokens
    int64_t v0, w0, w1, p0, p1;
    int64_t first() const { return p0 * LANES; }
    int64_t last() const { return p1 * LANES; }
  };

  // Two rows of a square of logits: what becomes of them. `plain` is a pass ALL of words that exist, without options.
  template <bool plain>
  inline __attribute__((always_inline)) void exponentials(const float* z, int64_t row, Place place, const Step& step,
                                                          Pass pass) const {
    const __m512 scale = _mm512_set1_ps(l.scale);
    const int64_t v = place.word + row;
    __m512 e[2][2];  // half of the tokens, word
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const int64_t lane = place.lane + half * 16;
      const __m512 from = _mm512_load_ps(ref + lane);
      __m512 s = _mm512_load_ps(sum + lane);
#pragma GCC unroll 2
      for (int w = 0; w < 2; w++) {
        const __m512 product = _mm512_load_ps(z + (row + w) * LANES + half * 16);
        __m512 y = _mm512_fmadd_ps(scale, product, _mm512_set1_ps(bias[v + w])), slope;
        if constexpr (!plain) {
          y = capped(y, &slope);
          if (step.v0 + v + w >= l.V) y = _mm512_set1_ps(-INFINITY);  // a word that is none
        }
        const __m512 x = _mm512_max_ps(_mm512_set1_ps(LOWEST), _mm512_sub_ps(y, from));
        e[half][w] = exponential(x);
        s = !plain && pass == Pass::MAXIMUM ? _mm512_max_ps(s, y) : _mm512_add_ps(s, e[half][w]);
        if constexpr (!plain) e[half][w] = bent(e[half][w], x, slope, lane);
      }
      _mm512_store_ps(sum + lane, s);
    }
    if (!plain && pass != Pass::ALL) return;
    if (l.by_features) {
      Unit* to = ev + ((place.lane / LANES - step.p0) * (l.step_words() / 2) + (v - step.w0) / 2) * LANES;
      _mm512_store_si512(to, across(e[0][0], e[0][1]));
      _mm512_store_si512(to + 16, across(e[1][0], e[1][1]));
    }
    if (E) {
      Unit* to = tiles_of_E(step.v0 + place.word, place.lane / LANES) + row * 16;
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), along(e[0][0], e[1][0]));
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 16), along(e[0][1], e[1][1]));
    }
  }

  // E with the options: its moment is summed, and its gradient differs from E by a known lse and a soft-cap's slope.
  __m512 bent(__m512 e, __m512 x, __m512 slope, int64_t lane) const {
    if (l.entropy) {
      const __m512 off = _mm512_sub_ps(x, _mm512_load_ps(pivot + lane));
      _mm512_store_ps(moment + lane, _mm512_fmadd_ps(e, off, _mm512_load_ps(moment + lane)));
    }
    if (l.known) e = _mm512_mul_ps(e, _mm512_fmadd_ps(_mm512_load_ps(tilt + lane), x, _mm512_load_ps(level + lane)));
    return l.softcap ? _mm512_mul_ps(e, slope) : e;
  }

  template <bool plain>
  void run_logits(const Step& step, Pass pass) const {
    Pipeline squares_of(*this, [&](const float* z, int64_t row, Place place) __attribute__((always_inline)) {
      exponentials<plain>(z, row, place, step, pass);
    });
    for (int64_t v = step.w0; v < step.w1; v += LANES)
      for (int64_t p = step.p0; p < step.p1; p++)
        squares_of.multiply(rows + v / LANES * depth * DOUBLE, hp + p * units * LANES, depth, {v, p * LANES});
    squares_of.drain();
  }

  void logits(const Step& step, Pass pass) const {
    const bool has_options = l.softcap || l.known || l.entropy;
    if (has_options || pass != Pass::ALL || step.v0 + step.w1 > l.V) run_logits<false>(step, pass);
    else run_logits<true>(step, Pass::ALL);
  }

  // dfeatures of a lot, summed over a step of words.
  void add_dfeatures(const Step& step) const {
    const bool is_first = step.v0 == from && step.w0 == 0;
    for (int64_t k = 0; k < depth; k++)
      for (int64_t p = step.p0; p < step.p1; p++) {
        float* sums = acc + (p * depth + k) * SQUARE;
        if (is_first) clear_square();
        else load_square(sums, 256, 512, 64);
        const Unit* words = wp + (k * (l.block() / LANES) + step.w0 / LANES) * DOUBLE;
        multiply_square(words, ev + (p - step.p0) * (l.step_words() / 2) * LANES, (step.w1 - step.w0) / LANES, [] {});
        store_square(sums, 256, 512, 64);
      }
  }

  void scan_words(bool maximum) const override {
    const int64_t first_p = first_panel(token_share), last_p = first_panel(token_share + 1);
    std::fill(total, total + panels * LANES, 0.);
    std::fill(moments, moments + panels * LANES, 0.);
    std::fill(sum, sum + panels * LANES, -INFINITY);
    for (int64_t v0 = from; v0 < to; v0 += l.block()) {
      const int64_t words = std::min(l.block(), to - v0);
      pack_block(v0, words);
      for (int64_t p0 = first_p; p0 < last_p; p0 += l.lot() / LANES) {
        const Step lot{v0, 0, words, p0, std::min(p0 + l.lot() / LANES, last_p)};
        if (!maximum) prepare_sums(lot);
        for (int64_t w0 = 0; w0 < words; w0 += l.step_words()) {
          const Step step{v0, w0, std::min(w0 + l.step_words(), words), lot.p0, lot.p1};
          logits(step, maximum ? Pass::MAXIMUM : Pass::ALL);
          if (!maximum && l.by_features) add_dfeatures(step);
        }
        for (int64_t i = lot.first(); !maximum && i < lot.last(); i++)
          total[i] += sum[i], moments[i] += moment[i] + double(pivot[i]) * sum[i];
      }
    }
    _mm_sfence();  // E is read by other threads
  }

  // Sums of 0 for a lot and the words of a block. Moments are summed about a mean: the one so far, or of the first words.
  void prepare_sums(const Step& lot) const {
    clear_sums(lot);
    for (int64_t i = lot.first(); i < lot.last(); i++) pivot[i] = total[i] > 0 ? moments[i] / total[i] : 0;
    if (!l.entropy || lot.v0 > from) return;
    logits({lot.v0, 0, std::min(l.step_words(), lot.w1), lot.p0, lot.p1}, Pass::SUMS);
    for (int64_t i = lot.first(); i < lot.last(); i++) pivot[i] = sum[i] > 0 ? moment[i] / sum[i] : 0;
    clear_sums(lot);
  }

  void clear_sums(const Step& lot) const {
    std::fill(sum + lot.first(), sum + lot.last(), 0.f);
    std::fill(moment + lot.first(), moment + lot.last(), 0.f);
  }

  void finish() const override {
#pragma omp for
    for (int64_t i = 0; i < panels * LANES; i++) finish_token(i);
    if (!l.by_features) return;
#pragma omp for collapse(2)
    for (int64_t i = 0; i < panels * LANES; i += 16)
      for (int64_t k = 0; k < depth; k++) {
        finish_dfeatures(i, k * LANES);
        finish_dfeatures(i, k * LANES + 16);
      }
  }

  // 16 tokens from i on, 16 columns from j on.
  void finish_dfeatures(int64_t i, int64_t j) const {
    const int64_t square = (i / LANES * depth + j / LANES) * SQUARE;
    const int64_t inside = j % LANES / 16 * 512 + i % LANES / 16 * 256;
    __m512i x[16];
    for (int64_t c = 0; c < 16; c++) {
      const int64_t from = square + inside + c * 16;
      __m512 s = _mm512_load_ps(acc_of(0) + from);
      for (int64_t share = 1; share < word_shares; share++) s = _mm512_add_ps(s, _mm512_load_ps(acc_of(share) + from));
      x[c] = _mm512_castps_si512(s);
    }
    transpose(x);
    for (int64_t r = 0; r < std::min<int64_t>(16, here - i); r++) {
      const int64_t row = at + i + r;
      const __m512 word = Pair::rounded(l.weight.load(l.targets[row], j));
      const __m512 at_target = _mm512_mul_ps(_mm512_set1_ps(l.q[row]), word);
      const __m512 y = _mm512_fmsub_ps(_mm512_set1_ps(g[i + r]), _mm512_castsi512_ps(x[r]), at_target);
      l.by_features.store(row * d + j, first(d - j), _mm512_mul_ps(y, _mm512_set1_ps(l.scale)), true);
    }
  }

  // Of dbias alone: dweight's are subtracted as its squares are stored, so that a single chunk needs no second table
  // for sums that are not rounded yet.
  void targets() const override {
    if (!l.by_bias) return;
#pragma omp single
    {
      std::fill(l.by_bias, l.by_bias + l.V, 0.f);
      for (int64_t i = 0; i < l.n; i++) l.by_bias[l.targets[i]] -= l.q[i];
    }
  }

  void list_tokens_by_target() const {
#pragma omp for
    for (int64_t v = 0; v < l.V; v++) first_token[v] = -1;
#pragma omp single
    for (int64_t i = here; i-- > 0;) next_token[i] = std::exchange(first_token[l.targets[at + i]], i);
  }

  // Two rows of a square of dweight: words, and 32 columns from place.lane on.
  inline __attribute__((always_inline)) void store_dweight(const float* sums, int64_t row, Place place) const {
    const bool summed = at || l.onto, last = at + l.rows >= l.n;
    const int64_t v = place.word + row;
    for (int64_t word = v; word < std::min(v + 2, l.V); word++)
      for (int64_t j = place.lane; j < std::min(place.lane + LANES, d); j += 16) {
        const __mmask16 there = first(d - j);
        __m512 x = _mm512_load_ps(sums + (word - place.word) * LANES + j - place.lane);
        for (int32_t i = first_token[word]; i >= 0; i = next_token[i]) {
          const __m512 h = Pair::rounded(l.features.load(at + i, j));
          x = _mm512_fnmadd_ps(_mm512_set1_ps(l.scale * l.q[at + i]), h, x);
        }
        if (summed) x = _mm512_add_ps(x, l.by_weight.load(word * d + j, there));
        l.by_weight.store(word * d + j, there, x, last);
      }
  }

  void other_gradients() const override {
    weigh_features();
    list_tokens_by_target();
    const bool summed = at || l.onto;
    const int64_t many = up(std::clamp<int64_t>(E_IN_CACHE / (2 * l.rows), LANES, 512), LANES);  // words
#pragma omp for schedule(dynamic, 1)
    for (int64_t v0 = 0; v0 < l.V; v0 += many) {
      const int64_t end = std::min(v0 + many, l.V);
      Pipeline squares_of(*this, [&](const float* sums, int64_t row, Place place) __attribute__((always_inline)) {
        store_dweight(sums, row, place);
      });
      for (int64_t j = 0; l.by_weight && j < columns; j += LANES)
        for (int64_t v = v0; v < end; v += LANES) {
          for (int64_t w = v; summed && w < std::min(v + LANES, l.V); w++) l.by_weight.prefetch(w * d + j);
          squares_of.multiply(tiles_of_E(v, 0), hs + j * (l.rows / 2), panels, {v, j});
        }
      squares_of.drain();
      for (int64_t v = v0; l.by_bias && v < end; v++) l.by_bias[v] += weighted_row_of_E(v);
    }
  }

  float weighted_row_of_E(int64_t v) const {
    __m512 s = _mm512_setzero_ps();
    for (int64_t i = 0; i < panels * LANES; i += 16) {
      const Unit* e = tiles_of_E(v, i / LANES) + v % LANES * 16 + i % LANES / 2;
      s = _mm512_fmadd_ps(widened(_mm256_load_si256(reinterpret_cast<const __m256i*>(e))), _mm512_load_ps(g + i), s);
    }
    return _mm512_reduce_add_ps(s);
  }
};

void Loss::run(Unit* space) const {
#pragma omp parallel num_threads(threads())
  switch (products) {
    case Products::FP32: Team<Single>(*this, space).run(); break;
    case Products::PAIRS: Team<Pair>(*this, space).run(); break;
    case Products::TILES: Tiles<TileRegisters>(*this, space).run(); break;
    case Products::EMULATED_TILES: Tiles<EmulatedTileRegisters>(*this, space).run(); break;
  }
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
// `products` is a number of avx512::Products.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> vocabulary_loss(
    Tensor features, Tensor weight, std::optional<Tensor> bias, Tensor targets, Tensor c, Tensor q,
    std::optional<Tensor> k, std::optional<Tensor> known, std::optional<Tensor> into, double scale, double softcap,
    int64_t rows, int64_t products, bool narrow, bool entropy, bool by_features, bool by_weight, bool by_bias) {
  const int64_t n = features.size(0), d = features.size(1), V = weight.size(0);
  auto vector = [](const std::optional<Tensor>& x, int64_t size) -> const float* {
    if (!x) return nullptr;
    STD_TORCH_CHECK(x->dim() == 1 && x->size(0) == size && x->is_contiguous(), "need a vector of ", size, " numbers");
    return x->const_data_ptr<float>();
  };
  STD_TORCH_CHECK(weight.size(1) == d && targets.numel() == n && targets.is_contiguous(), "shapes do not meet");
  STD_TORCH_CHECK(n && V && d, "nothing to compute");
  const auto unit = static_cast<avx512::Products>(products);
  STD_TORCH_CHECK(products >= 0 && unit <= avx512::Products::EMULATED_TILES, "products must be 0 to 3");
  const int64_t sets = instruction_sets();
  STD_TORCH_CHECK(unit == avx512::Products::FP32 || sets >> 2 & 1, "this processor has no dot product of bf16");
  STD_TORCH_CHECK(unit != avx512::Products::TILES || sets >> 3 & 1, "this processor or system has no AMX");
  const ScalarType type = narrow ? ScalarType::BFloat16 : ScalarType::Float;
  Tensor nll = made(features, {n}), lse = made(features, {n}), h = made(features, {entropy ? n : 0});
  Tensor db = made(features, {by_bias ? V : 0});
  STD_TORCH_CHECK(!into || (into->dim() == 2 && into->size(0) == V && into->size(1) == d && into->is_contiguous() &&
                            into->scalar_type() == ScalarType::Float), "into must be like weight, in float32");
  const bool fresh = by_weight && !into;
  Tensor dh = made(features, {by_features ? n : 0, d}, type), dw = made(features, {fresh ? V : 0, d}, type);
  auto floats = [](const Tensor& x) { return x.numel() ? static_cast<float*>(x.data_ptr()) : nullptr; };
  // while it is summed; tiles sum a single chunk without it
  const bool is_summed = rows < n || unit < avx512::Products::TILES;
  const Tensor low = made(features, {narrow && fresh && is_summed ? V : 0, d}, type);
  auto halves = [&](const Tensor& x) { return narrow ? reinterpret_cast<uint16_t*>(floats(x)) : nullptr; };
  auto sum = [&](const Tensor& x) { return avx512::Sum{narrow ? nullptr : floats(x), halves(x), halves(low)}; };
  const avx512::Sum onto{into && by_weight ? floats(*into) : nullptr};
  const avx512::Loss loss{matrix(features), matrix(weight), vector(bias, V), targets.const_data_ptr<int64_t>(),
                          vector(c, n), vector(q, n), vector(k, n), n, V, float(scale), float(softcap),
                          vector(known, n), floats(nll), floats(lse), floats(h), sum(dh), into ? onto : sum(dw), floats(db),
                          omp_get_max_threads(), avx512::up(std::min(rows, n), avx512::LANES), unit,
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
      " Tensor? known, Tensor(a!)? into, float scale, float softcap, int rows, int products, bool narrow, bool entropy,"
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
