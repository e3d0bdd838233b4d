// Operands of the products of groups (int4.h), and both steps in plain C++.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../native/instructions.h"
#include "../native/numbers.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define JAXPAGED_X86 1
#define JAXPAGED_INLINED __attribute__((always_inline)) inline
#endif

namespace jaxpaged {
namespace groups {

constexpr int64_t kGroup = 32;
constexpr int64_t kTile = 16;
constexpr int64_t kQuads = kGroup / 4;
constexpr int64_t kRecord = 2 * kGroup;  // bytes of a row's group: the high parts and the low ones
constexpr int kLowLevels = 128;
constexpr float kLevels = 127.0f * kLowLevels;
constexpr float kStep = static_cast<float>(1 / (127.0 * kLowLevels));
constexpr float kLeastPeak = 1e-30f;
constexpr int64_t kChunkBytes = 32 << 10;

enum class Bits { kFour, kEight };

constexpr int64_t bytes_of_group(Bits bits) { return kTile * kGroup / (bits == Bits::kFour ? 2 : 1); }

struct Matrix {
  const uint8_t* values;   // [tiles, groups, bytes_of_group]
  const uint16_t* scales;  // float16 [tiles, groups, 16]
  const uint16_t* minima;  // likewise, of four bits
  int64_t num_tiles, num_groups;
};

// Quantized rows: `values` [rows, groups, kRecord], rows `stride` bytes apart; `sums` [rows, groups], of four bits the sum of a group's numbers as float32, of eight
// 128 times it as int32; `scales` [rows].
struct Rows {
  const int8_t* values;
  const int32_t* sums;
  const float* scales;
  int64_t num_rows, num_groups, stride;
};

// An odd number of cache lines, so that rows do not share a few sets of the caches.
inline int64_t stride_of(int64_t num_groups) { return (num_groups | 1) * kRecord; }

inline float from_bits(int32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

inline int32_t sum_as_kept(Bits bits, int32_t sum) {
  if (bits == Bits::kEight) return sum * 128;
  const float wide = static_cast<float>(sum);
  int32_t kept;
  std::memcpy(&kept, &wide, sizeof(kept));
  return kept;
}

struct RowScale {
  float step, scale;
};
inline RowScale scale_of(float peak, bool is_finite) {
  if (!is_finite) return {0.0f, std::nanf("")};
  if (peak < kLeastPeak) return {0.0f, 0.0f};
  return {kLevels / peak, peak * kStep};
}

// --- portable

inline float from_float16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 0) {
    const float tiny = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  return from_bits(static_cast<int32_t>(sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13));
}

template <typename Number>
void quantize_row_portable(Bits bits, const Number* row, int64_t num_groups, int8_t* values, int32_t* sums, float* scale) {
  float peak = 0.0f;
  bool is_finite = true;
  for (int64_t i = 0; i < num_groups * kGroup; ++i) {
    const float size = std::fabs(widened(row[i]));
    is_finite &= std::isfinite(size);
    peak = size > peak ? size : peak;
  }
  const RowScale found = scale_of(peak, is_finite);
  for (int64_t g = 0; g < num_groups; ++g) {
    int32_t sum = 0;
    for (int64_t i = 0; i < kGroup; ++i) {
      const float scaled = is_finite ? std::nearbyintf(widened(row[g * kGroup + i]) * found.step) : 0.0f;
      const int whole = static_cast<int>(scaled), upper = (whole + kLowLevels / 2 + (kLowLevels << 8)) / kLowLevels - (1 << 8);
      values[g * kRecord + i] = static_cast<int8_t>(upper);
      values[g * kRecord + kGroup + i] = static_cast<int8_t>(whole - upper * kLowLevels);
      sum += whole;
    }
    sums[g] = sum_as_kept(bits, sum);
  }
  *scale = found.scale;
}

template <Bits bits>
void multiply_portable(const Rows& rows, const Matrix& matrix, int64_t first, int64_t last, float* out) {
  for (int64_t t = first; t < last; ++t) {
    for (int64_t r = 0; r < rows.num_rows; ++r) {
      float added[kTile] = {};
      for (int64_t g = 0; g < matrix.num_groups; ++g) {
        const int64_t place = t * matrix.num_groups + g;
        const uint8_t* weights = matrix.values + place * bytes_of_group(bits);
        const int8_t* own = rows.values + r * rows.stride + g * kRecord;
        const int32_t of_row = rows.sums[r * rows.num_groups + g];
        for (int64_t lane = 0; lane < kTile; ++lane) {
          int32_t sum = 0;
          for (int64_t i = 0; i < kGroup; ++i) {
            const int64_t half = bits == Bits::kFour ? i % 16 : i;
            const uint8_t stored = weights[(half / 4 * kTile + lane) * 4 + half % 4];
            const int weight = bits == Bits::kEight ? static_cast<int8_t>(stored) : i < 16 ? stored & 15 : stored >> 4;
            sum += weight * (own[i] * kLowLevels + own[kGroup + i]);
          }
          added[lane] = std::fmaf(static_cast<float>(sum), from_float16(matrix.scales[place * kTile + lane]), added[lane]);
          if (bits == Bits::kFour) {
            added[lane] = std::fmaf(from_bits(of_row), from_float16(matrix.minima[place * kTile + lane]), added[lane]);
          }
        }
      }
      float* const to = out + (r * matrix.num_tiles + t) * kTile;
      for (int64_t lane = 0; lane < kTile; ++lane) to[lane] = added[lane] * rows.scales[r];
    }
  }
}

}  // namespace groups
}  // namespace jaxpaged
