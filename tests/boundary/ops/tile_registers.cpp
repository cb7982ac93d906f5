// The emulated tile registers, compared with Intel's definition of TDPBF16PS in scalar numbers.
#include SOURCE

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

// Denormals count as 0, and so do results that are denormal.
float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; }

float widened(uint32_t number) { return flushed(std::bit_cast<float>(number << 16)); }

float fused(float a, float b, float c) { return flushed(std::fma(a, b, c)); }

// Intel's manual: the first and the second numbers of all pairs are summed apart, from 0 on, and then added to c.
float defined(const uint32_t* row_of_a, const uint32_t* b, int column, float c) {
  float firsts = 0, seconds = 0;
  for (int k = 0; k < 16; k++) {
    const uint32_t x = row_of_a[k], y = b[k * 16 + column];
    firsts = fused(widened(x & 0xffff), widened(y & 0xffff), firsts);
    seconds = fused(widened(x >> 16), widened(y >> 16), seconds);
  }
  return flushed(flushed(c) + flushed(firsts + seconds));
}

int main() {
  unsigned seed = 1;
  const auto draw = [&](int exponents) {  // a number of bf16 whose exponent is in a range about that of 1
    const uint32_t sign = rand_r(&seed) & 1, exponent = 127 - exponents + rand_r(&seed) % (2 * exponents + 1);
    return sign << 15 | exponent << 7 | (rand_r(&seed) & 127);
  };
  for (int problem = 0; problem < 200; problem++) {
    const int exponents = problem % 4 == 3 ? 80 : 1 + problem % 4 * 10;  // by 80 products are denormal, or infinite
    alignas(64) uint32_t a[256], b[256];
    alignas(64) float c[256];
    for (uint32_t& x : a) x = draw(exponents) | draw(exponents) << 16;
    for (uint32_t& x : b) x = draw(exponents) | draw(exponents) << 16;
    for (float& x : c) x = std::bit_cast<float>(draw(exponents) << 16 | (rand_r(&seed) & 0xffff));
    if (problem % 5 == 4) a[7] = 0x00017f80, b[112] = 0x7fc00001;  // a denormal and an infinity, a nan
    std::vector<float> wanted(256);
    for (int r = 0; r < 16; r++)
      for (int n = 0; n < 16; n++) wanted[r * 16 + n] = defined(a + r * 16, b, n, c[r * 16 + n]);
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);
    avx512::EmulatedTileRegisters tile;
    tile.load<0>(c, 64), tile.load<4>(a, 64), tile.load<6>(b, 64);
    tile.multiply<0, 4, 6>();
    tile.store<0>(c, 64);
    _mm_setcsr(mode);
    for (int i = 0; i < 256; i++)
      if (!(wanted[i] == c[i] || (std::isnan(wanted[i]) && std::isnan(c[i]))))
        return std::fprintf(stderr, "problem %d, sum %d: %g instead of %g\n", problem, i, c[i], wanted[i]), 1;
  }
  std::printf("200 problems\n");
}
