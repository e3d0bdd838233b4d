// Runs the products of groups without XLA, on plain threads, for sanitizers: every set of instructions against loops over numbers.
//
// Operands lie in buffers of just their size, so that a read or write beyond one is an error of the address sanitizer.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../../../pallas_kernels/quantized_matmul/int4.h"
#include "plain_threads.h"

namespace {

using jaxpaged::BFloat16;
using jaxpaged::Instructions;
using jaxpaged::groups::Bits;

void require(bool holds, const char* what, int64_t rows, int64_t num_groups, int64_t num_tiles, Instructions instructions) {
  if (holds) return;
  std::printf("%s: %ld rows, %ld groups, %ld tiles, instructions %d\n", what, static_cast<long>(rows), static_cast<long>(num_groups),
              static_cast<long>(num_tiles), static_cast<int>(instructions));
  std::exit(1);
}

template <typename Number>
Number narrowed(float number);
template <>
float narrowed(float number) {
  return number;
}
template <>
BFloat16 narrowed(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return {static_cast<uint16_t>(bits >> 16)};
}

// A float16 of any sign and size that is a number, tiny ones included.
uint16_t some_float16(std::mt19937& random) {
  const uint16_t bits = static_cast<uint16_t>(random());
  return (bits >> 10 & 31) == 31 ? bits & 0x83ff : bits;
}

float from_float16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24) : std::ldexp(1024.0f + fraction, exponent - 25);
  return bits >> 15 ? -size : size;
}

template <Bits bits, typename Number>
void check(Instructions instructions, bool has_amx, int64_t num_rows, int64_t num_groups, int64_t num_tiles, int64_t num_threads) {
  namespace groups = jaxpaged::groups;
  std::mt19937 random(num_rows * 7919 + num_groups * 31 + num_tiles);
  std::normal_distribution<float> normal;
  const int64_t num_in = num_groups * 32, num_out = num_tiles * 16, size = groups::bytes_of_group(bits);
  std::vector<Number> x(num_rows * num_in);
  std::vector<uint8_t> values(num_tiles * num_groups * size);
  std::vector<uint16_t> scales(num_out * num_groups), minima(bits == Bits::kFour ? num_out * num_groups : 0);
  std::vector<float> out(num_rows * num_out, -1.0f);
  for (auto& number : x) number = narrowed<Number>(normal(random));
  for (auto& value : values) value = static_cast<uint8_t>(random());
  for (auto& scale : scales) scale = some_float16(random);
  for (auto& minimum : minima) minimum = some_float16(random);
  if (num_rows > 2) x[2 * num_in] = narrowed<Number>(INFINITY);
  if (num_rows > 3)
    for (int64_t i = 0; i < num_in; ++i) x[3 * num_in + i] = narrowed<Number>(0.0f);
  if (num_rows > 4) x[4 * num_in + num_in - 1] = narrowed<Number>(NAN);
  {
    PlainThreads threads(num_threads);
    groups::matmul<bits>(threads, instructions, has_amx, x.data(), num_rows, {values.data(), scales.data(), minima.data(), num_tiles, num_groups},
                         out.data());
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    float peak = 0;
    bool is_finite = true;
    for (int64_t i = 0; i < num_in; ++i) {
      const float number = std::fabs(jaxpaged::widened(x[r * num_in + i]));
      is_finite &= std::isfinite(number);
      peak = std::fmax(peak, number);
    }
    std::vector<int64_t> whole(num_in);
    for (int64_t i = 0; i < num_in && is_finite && peak > 0; ++i) {
      whole[i] = static_cast<int64_t>(std::nearbyintf(jaxpaged::widened(x[r * num_in + i]) * (16256.0f / peak)));
    }
    for (int64_t o = 0; o < num_out; ++o) {
      const float got = out[r * num_out + o];
      if (!is_finite) {
        require(std::isnan(got), "a number that is none is lost", num_rows, num_groups, num_tiles, instructions);
        continue;
      }
      float added = 0;
      for (int64_t g = 0; g < num_groups; ++g) {
        const int64_t place = o / 16 * num_groups + g;
        int64_t sum = 0, of_row = 0;
        for (int64_t i = 0; i < 32; ++i) {
          const int64_t half = bits == Bits::kFour ? i % 16 : i;
          const uint8_t stored = values[place * size + (half / 4 * 16 + o % 16) * 4 + half % 4];
          const int64_t weight = bits == Bits::kEight ? static_cast<int8_t>(stored) : i < 16 ? stored % 16 : stored / 16;
          sum += weight * whole[g * 32 + i];
          of_row += whole[g * 32 + i];
        }
        added = std::fmaf(static_cast<float>(sum), from_float16(scales[place * 16 + o % 16]), added);
        if (bits == Bits::kFour) added = std::fmaf(static_cast<float>(of_row), from_float16(minima[place * 16 + o % 16]), added);
      }
      require(got == added * (peak * static_cast<float>(1 / 16256.0)), "another number", num_rows, num_groups, num_tiles, instructions);
    }
  }
}

}  // namespace

int main() {
  const int64_t sizes[][3] = {{0, 5, 3}, {1, 1, 1}, {1, 7, 5}, {2, 2, 4}, {3, 3, 2}, {4, 5, 9}, {5, 4, 17}, {7, 18, 3}, {13, 2, 6}, {32, 4, 2}, {37, 3, 5}, {45, 2, 2}};
  for (const auto instructions : {Instructions::kPortable, Instructions::kAvx2, Instructions::kAvx512Vnni}) {
    if (instructions > jaxpaged::best_instructions()) continue;
    for (const bool has_amx : {false, true}) {
      if (has_amx && (instructions != Instructions::kAvx512Vnni || !jaxpaged::amx_is_allowed())) continue;
      for (const auto& size : sizes) {
        for (const int64_t threads : {1, 3}) {
          check<Bits::kFour, float>(instructions, has_amx, size[0], size[1], size[2], threads);
          check<Bits::kFour, BFloat16>(instructions, has_amx, size[0], size[1], size[2], threads);
          check<Bits::kEight, float>(instructions, has_amx, size[0], size[1], size[2], threads);
          check<Bits::kEight, BFloat16>(instructions, has_amx, size[0], size[1], size[2], threads);
        }
      }
    }
  }
  std::printf("best instructions: %d; all equal\n", static_cast<int>(jaxpaged::best_instructions()));
  return 0;
}
