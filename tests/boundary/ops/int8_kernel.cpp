// Products with an int8 table without torch, under a sanitizer: odd shapes, compared with integer sums.
#include SOURCE

#include <cstdio>
#include <cstdlib>
#include <limits>

#include <unistd.h>

// memory that ends at a page that may not be accessed: sanitizers do not check masked loads
int8_t* at_the_end(int64_t size) {
  const int64_t page = getpagesize(), whole = (size + page - 1) / page * page;
  char* at = static_cast<char*>(mmap(nullptr, whole + page, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (at == MAP_FAILED || mprotect(at + whole, page, PROT_NONE)) std::abort();
  return reinterpret_cast<int8_t*>(at + whole - size);
}

int main() {
  int problems = 0;
  for (int64_t V : {1, 2, 13, 129})
    for (int64_t e : {1, 63, 64, 65, 127, 128, 130, 321, 4096})
      for (int64_t n : {1, 3}) {
        unsigned seed = 1 + problems++;
        const bool ends = problems % 2;  // every number is ±127
        auto draw = [&] { return ends ? 127 - 254 * (rand_r(&seed) % 2) : rand_r(&seed) % 255 - 127; };
        int8_t *q = at_the_end(V * e), *digits = at_the_end(2 * n * e);
        for (int64_t i = 0; i < V * e; i++) q[i] = draw();
        for (int64_t i = 0; i < 2 * n * e; i++) digits[i] = draw();
        std::vector<float> step(V), seen(n * V);
        std::vector<double> sigma(n);
        for (float& x : step) x = rand_r(&seed) / float(RAND_MAX);
        for (double& x : sigma) x = rand_r(&seed) / double(RAND_MAX);
        seen_in_int8(q, step.data(), V, e, digits, sigma.data(), n, seen.data());
        for (int64_t j = 0; j < n; j++)
          for (int64_t i = 0; i < V; i++) {
            int64_t dot = 0;  // 256 times q.(a + b / 256)
            for (int64_t c = 0; c < e; c++)
              dot += q[i * e + c] * (256 * digits[2 * j * e + c] + digits[(2 * j + 1) * e + c]);
            const double truth = step[i] * sigma[j] * (dot / 256.0), off = std::abs(seen[j * V + i] - truth);
            if (!(off <= std::abs(truth) * std::numeric_limits<float>::epsilon() / 2 * (1 + 1e-6)))
              return std::fprintf(stderr, "V %ld e %ld n %ld: %g, not %g\n", V, e, n, seen[j * V + i], truth), 1;
          }
      }
  std::printf("%d problems\n", problems);
}
