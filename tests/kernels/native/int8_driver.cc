// Runs the int8 product without XLA, on plain threads, for sanitizers: every set of instructions against loops over numbers.
//
// Operands lie in buffers of just their size, so that a read or write beyond one is an error of the address sanitizer.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../../../pallas_kernels/quantized_matmul/int8.h"
#include "plain_threads.h"

namespace {

using jaxpaged::int8::Path;

void require(bool holds, const char* what, int64_t rows, int64_t num_in, int64_t num_out, Path path) {
  if (holds) return;
  std::printf("%s: %ld rows, %ld in, %ld out, path %d\n", what, static_cast<long>(rows), static_cast<long>(num_in),
              static_cast<long>(num_out), static_cast<int>(path));
  std::exit(1);
}

template <typename Number>
Number narrowed(float number);
template <>
float narrowed(float number) {
  return number;
}
template <>
uint16_t narrowed(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

template <typename Number>
void check_int8(Path path, int64_t num_rows, int64_t num_in, int64_t num_out, int64_t num_threads) {
  std::mt19937 random(num_rows * 7919 + num_in * 31 + num_out);
  std::normal_distribution<float> normal;
  std::vector<Number> x(num_rows * num_in);
  std::vector<int8_t> values(num_out * num_in);
  std::vector<float> scales(num_out), out(num_rows * num_out, -1.0f);
  for (auto& number : x) number = narrowed<Number>(normal(random));
  for (auto& value : values) value = static_cast<int8_t>(static_cast<int>(random() % 255) - 127);
  for (auto& scale : scales) scale = 0.5f + 0.01f * static_cast<float>(random() % 100);
  if (num_rows > 2) x[2 * num_in] = narrowed<Number>(INFINITY);
  if (num_rows > 3)
    for (int64_t i = 0; i < num_in; ++i) x[3 * num_in + i] = narrowed<Number>(0.0f);
  {
    PlainThreads threads(num_threads);
    jaxpaged::int8::matmul(threads, path, x.data(), num_rows, {values.data(), scales.data(), num_out, num_in}, out.data());
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    float peak = 0;
    for (int64_t i = 0; i < num_in; ++i) peak = std::fmax(peak, std::fabs(jaxpaged::int8::widened(x[r * num_in + i])));
    for (int64_t o = 0; o < num_out; ++o) {
      const float got = out[r * num_out + o];
      if (std::isinf(peak)) {
        require(std::isnan(got), "an infinity is lost", num_rows, num_in, num_out, path);
        continue;
      }
      int64_t high = 0, low = 0;
      for (int64_t i = 0; i < num_in && peak > 0; ++i) {
        const float scaled = std::nearbyintf(jaxpaged::int8::widened(x[r * num_in + i]) * (16256.0f / peak));
        const int64_t upper = static_cast<int64_t>(std::floor((scaled + 64) / 128));
        high += upper * values[o * num_in + i];
        low += (static_cast<int64_t>(scaled) - upper * 128) * values[o * num_in + i];
      }
      const float expected =
          (static_cast<float>(high) * 128 + static_cast<float>(low)) * scales[o] * (peak * static_cast<float>(1 / 16256.0));
      require(got == expected, "another number", num_rows, num_in, num_out, path);
    }
  }
}

}  // namespace

int main() {
  const int64_t sizes[][3] = {{0, 5, 3},   {1, 1, 1},    {1, 7, 5},     {2, 64, 4},   {3, 65, 63},  {4, 63, 9},
                              {5, 128, 17}, {6, 131, 37}, {7, 200, 130}, {13, 15, 66}, {37, 193, 97}, {70, 16, 33}};
  for (const auto path : {Path::kPortable, Path::kAvx2, Path::kAvx512Vnni, Path::kAmx}) {
    if (path > jaxpaged::int8::best_path()) continue;
    for (const auto& size : sizes) {
      for (const int64_t threads : {1, 3}) {
        check_int8<float>(path, size[0], size[1], size[2], threads);
        check_int8<uint16_t>(path, size[0], size[1], size[2], threads);
      }
    }
  }
  std::printf("best path: %d; all equal\n", static_cast<int>(jaxpaged::int8::best_path()));
  return 0;
}
