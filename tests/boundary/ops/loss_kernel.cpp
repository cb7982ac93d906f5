// The kernel of the loss without torch, under a sanitizer: odd shapes and all sets of outputs, compared with sums in double.
#include SOURCE

#include <cstdio>
#include <cstdlib>
#include <vector>

int main() {
  int problems = 0;
  for (int64_t n : {1, 33, 777})
    for (int64_t V : {1, 13, 257, 401})
      for (int64_t d : {1, 16, 33, 64, 100}) {
        const bool by_h = problems % 3 != 1, by_w = problems % 3 != 2, huge = problems % 5 == 4;
        std::vector<float> h(n * d), W(V * d), b(V), c(n, .5f), q(n, .25f), nll(n), lse(n), dh(n * d), dW(V * d), db(V);
        std::vector<uint16_t> narrow(V * d);
        std::vector<int64_t> t(n);
        const bool onto = problems % 4 < 2;
        unsigned seed = 1 + problems++;
        auto draw = [&] { return rand_r(&seed) / float(RAND_MAX) * 2 - 1; };
        for (float& x : h) x = draw() * (huge ? 400 : 1);
        for (int64_t i = 0; i < V * d; i++) {
          narrow[i] = std::bit_cast<uint32_t>(draw()) >> 16;
          W[i] = std::bit_cast<float>(uint32_t(narrow[i]) << 16);
        }
        for (float& x : b) x = draw();
        for (int64_t& x : t) x = rand_r(&seed) % V;
        const bool bf16 = problems % 2;
        const bool pairs = bf16 && problems % 4 == 3 && __builtin_cpu_supports("avx512bf16");
        // a sanitizer sees the loads and stores of emulated tiles, and none of the processor's
        const avx512::Products products = !pairs           ? avx512::Products::FP32
                                          : problems % 8 < 4 ? avx512::Products::PAIRS
                                                             : avx512::Products::EMULATED_TILES;
        if (onto)
          for (float& x : dW) x = draw();
        const std::vector<float> before = dW;
        const void* weight = bf16 ? (void*)narrow.data() : (void*)W.data();
        const avx512::Loss loss{{h.data(), false, d}, {weight, bf16, d}, b.data(), t.data(), c.data(), q.data(), nullptr,
                                n, V, .7f, 0, nullptr, nll.data(), lse.data(), nullptr, {by_h ? dh.data() : nullptr},
                                {by_w ? dW.data() : nullptr}, by_w ? db.data() : nullptr, 1 + problems % 4,
                                avx512::up(std::min<int64_t>(n, problems % 7 ? 96 : 1024), 32), products, onto};
        const size_t bytes = avx512::up(loss.workspace() * sizeof(float), 64);
        float* space = static_cast<float*>(aligned_alloc(64, bytes));
        omp_set_max_active_levels(problems % 6 ? 1 : 0);  // with 0 the system starts one thread, whatever is asked for
        loss.run(reinterpret_cast<avx512::Unit*>(space));
        free(space);
        std::vector<double> z(V), want_w(V * d);
        double off = 0;
        for (int64_t i = 0; i < n; i++) {
          double top = -1e300, sum = 0;
          for (int64_t v = 0; v < V; v++) {
            z[v] = b[v];
            for (int64_t j = 0; j < d; j++) z[v] += .7 * h[i * d + j] * W[v * d + j];
            top = std::max(top, z[v]);
          }
          for (double x : z) sum += std::exp(x - top);
          const double truth = top + std::log(sum) - z[t[i]];
          off = std::max(off, std::abs(truth - nll[i]) / (1 + std::abs(top)));
          for (int64_t j = 0; j < d; j++) {
            double g = -.25 * W[t[i] * d + j];
            for (int64_t v = 0; v < V; v++) g += .5 * std::exp(z[v] - top) / sum * W[v * d + j];
            if (by_h) off = std::max(off, std::abs(.7 * g - dh[i * d + j]) * (huge ? .01 : 1));
          }
          for (int64_t v = 0; v < V; v++)
            for (int64_t j = 0; j < d; j++)
              want_w[v * d + j] += .7 * h[i * d + j] * (.5 * std::exp(z[v] - top) / sum - .25 * (v == t[i]));
        }
        double size = 1e-3;
        for (double x : want_w) size = std::max(size, std::abs(x));
        for (int64_t i = 0; by_w && i < V * d; i++)
          off = std::max(off, std::abs(want_w[i] + before[i] - dW[i]) / size * (huge ? .01 : 1));
        if (!(off < (pairs ? 3e-2 : 1e-5)))
          return std::fprintf(stderr, "n %ld V %ld d %ld: off by %g\n", n, V, d, off), 1;
      }
  std::printf("%d problems\n", problems);
}
