// Runs the grouped product without XLA, on plain threads, for sanitizers: every level against loops over numbers, with matrices of empty
// groups and rows behind the last group NaN, and each group alone. Weights end where memory does: sanitizers do not see what tiles load.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "../../../pallas_kernels/grouped_matmul/grouped.h"
#include "memory_end.h"
#include "plain_threads.h"

namespace {

using jaxpaged::BFloat16;
using jaxpaged::dense::Level;

void require(bool holds, const char* what, int64_t num_in, int64_t num_out, Level level) {
  if (holds) return;
  std::printf("%s: %ld in, %ld out, level %d\n", what, static_cast<long>(num_in), static_cast<long>(num_out), static_cast<int>(level));
  std::exit(1);
}

void narrowed(float wide, float* number) { *number = wide; }
void narrowed(float wide, BFloat16* number) {
  uint32_t bits;
  std::memcpy(&bits, &wide, sizeof(bits));
  number->bits = static_cast<uint16_t>(bits >> 16);
}

template <typename Number>
void check(Level level, const std::vector<int32_t>& sizes, int64_t num_padding, int64_t num_in, int64_t num_out, int64_t num_threads) {
  std::mt19937 random(num_in * 31 + num_out);
  std::normal_distribution<float> normal;
  int64_t num_owned = 0;
  for (const int32_t size : sizes) num_owned += size;
  const int64_t num_groups = sizes.size(), num_rows = num_owned + num_padding;
  const BeforeMemoryEnd<Number> x(num_rows * num_in), weights(num_groups * num_out * num_in);
  for (int64_t i = 0; i < num_rows * num_in; ++i) narrowed(i < num_owned * num_in ? normal(random) : NAN, &x[i]);
  for (int64_t i = 0; i < num_groups * num_out * num_in; ++i) {
    narrowed(sizes[i / (num_out * num_in)] > 0 ? normal(random) : NAN, &weights[i]);
  }
  const auto run = [&](const Number* rows, int64_t count, const std::vector<int32_t>& own) {
    std::vector<float> out(count * num_out, -1.0f);
    PlainThreads threads(num_threads);
    jaxpaged::grouped::matmul(threads, level, rows, count, weights.begin(), own.data(), num_groups, num_out, num_in, out.data());
    return out;
  };
  const std::vector<float> out = run(x.begin(), num_rows, sizes);
  int64_t first = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    for (int64_t row = first; row < first + sizes[group]; ++row) {
      for (int64_t o = 0; o < num_out; ++o) {
        double expected = 0, size = 0;
        for (int64_t i = 0; i < num_in; ++i) {
          using jaxpaged::widened;
          const double product = double(widened(x[row * num_in + i])) * widened(weights[(group * num_out + o) * num_in + i]);
          expected += product, size += std::abs(product);
        }
        require(std::abs(out[row * num_out + o] - expected) <= (num_in + 1) * 6e-8 * size, "another number", num_in, num_out, level);
      }
    }
    std::vector<int32_t> alone(num_groups, 0);
    alone[group] = sizes[group];
    const std::vector<float> own = run(x.begin() + first * num_in, sizes[group], alone);
    require(std::equal(own.begin(), own.end(), out.begin() + first * num_out), "other bits in company", num_in, num_out, level);
    first += sizes[group];
  }
  require(std::all_of(out.begin() + num_owned * num_out, out.end(), [](float sum) { return sum == 0; }), "padding", num_in, num_out, level);
}

}  // namespace

int main() {
  const std::vector<int32_t> groups[] = {{1}, {0, 0, 0}, {0, 3, 0, 0, 19, 0}, {8, 17, 9, 16, 1, 0, 24}, {33, 0, 0, 70}};
  for (const auto level : {Level::kPortable, Level::kAvx2, Level::kAvx512, Level::kPairs, Level::kTiles}) {
    if (level > jaxpaged::dense::best_level()) continue;
    for (const auto& sizes : groups) {
      for (const int64_t threads : {1, 3}) {
        check<float>(level, sizes, 2, 17, 13, threads);
        check<BFloat16>(level, sizes, 2, 17, 13, threads);
        check<BFloat16>(level, sizes, 0, 64, 48, threads);
      }
    }
  }
  std::printf("best level: %d; all equal\n", static_cast<int>(jaxpaged::dense::best_level()));
  return 0;
}
