// Runs the dense product without XLA, on plain threads, for sanitizers: every set of level against loops over numbers, and the
// first rows alone against the same rows among others. Operands lie in buffers of just their size, and the matrix ends where memory does:
// sanitizers do not see what tiles load.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "../../../pallas_kernels/dense_matmul/dense.h"
#include "memory_end.h"
#include "plain_threads.h"

namespace {

using jaxpaged::dense::Level;
using jaxpaged::BFloat16;
using jaxpaged::widened;

void require(bool holds, const char* what, int64_t rows, int64_t num_in, int64_t num_out, Level level) {
  if (holds) return;
  std::printf("%s: %ld rows, %ld in, %ld out, level %d\n", what, static_cast<long>(rows), static_cast<long>(num_in),
              static_cast<long>(num_out), static_cast<int>(level));
  std::exit(1);
}

void narrowed(float wide, float* number) { *number = wide; }
void narrowed(float wide, BFloat16* number) {
  uint32_t bits;
  std::memcpy(&bits, &wide, sizeof(bits));
  number->bits = static_cast<uint16_t>(bits >> 16);
}

template <typename Number>
void check(Level level, int64_t num_rows, int64_t num_in, int64_t num_out, int64_t num_threads) {
  std::mt19937 random(num_rows * 7919 + num_in * 31 + num_out);
  std::normal_distribution<float> normal;
  std::vector<Number> x(num_rows * num_in);
  const BeforeMemoryEnd<Number> matrix(num_out * num_in);
  std::vector<float> out(num_rows * num_out, -1.0f);
  for (auto& number : x) narrowed(normal(random), &number);
  for (auto& number : matrix) narrowed(normal(random), &number);
  if (num_rows > 2) narrowed(NAN, &x[2 * num_in]);
  const auto run = [&](int64_t rows, std::vector<float>& to) {
    const BeforeMemoryEnd<Number> own(rows * num_in);
    std::copy_n(x.begin(), rows * num_in, own.begin());
    PlainThreads threads(num_threads);
    jaxpaged::dense::matmul(threads, level, own.begin(), rows, matrix.begin(), num_out, num_in, to.data());
  };
  run(num_rows, out);
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t o = 0; o < num_out; ++o) {
      double expected = 0, size = 0;
      for (int64_t i = 0; i < num_in; ++i) {
        const double product = double(widened(x[r * num_in + i])) * widened(matrix[o * num_in + i]);
        expected += product, size += std::abs(product);
      }
      const double got = out[r * num_out + o];
      if (r == 2) require(std::isnan(got), "NaN is lost", num_rows, num_in, num_out, level);
      else require(std::abs(got - expected) <= (num_in + 1) * 6e-8 * size, "another number", num_rows, num_in, num_out, level);
    }
  }
  for (int64_t rows = 1; rows < num_rows; rows += num_rows > 16 ? 13 : 3) {
    std::vector<float> alone(rows * num_out);
    run(rows, alone);
    const bool is_equal = std::memcmp(alone.data(), out.data(), alone.size() * sizeof(float)) == 0;
    require(is_equal, "other bits in company", rows, num_in, num_out, level);
  }
}

}  // namespace

int main() {
  const int64_t sizes[][3] = {{0, 5, 3},   {1, 1, 1},    {1, 7, 5},     {2, 64, 4},   {3, 65, 63},  {5, 131, 37},
                              {7, 200, 130}, {13, 15, 66}, {16, 193, 97}, {17, 64, 16}, {33, 96, 80}, {600, 32, 48}};
  for (const auto level : {Level::kPortable, Level::kAvx2, Level::kAvx512, Level::kPairs, Level::kTiles}) {
    if (level > jaxpaged::dense::best_level()) continue;
    for (const auto& size : sizes) {
      for (const int64_t threads : {1, 3}) {
        check<float>(level, size[0], size[1], size[2], threads);
        check<BFloat16>(level, size[0], size[1], size[2], threads);
      }
    }
  }
  std::printf("best level: %d; all equal\n", static_cast<int>(jaxpaged::dense::best_level()));
  return 0;
}
