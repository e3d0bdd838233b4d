// Quantized rows and int8 matrices: what the paths of the int8 product share, and the product in plain C++.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../native/amx.h"
#include "../native/instructions.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define JAXPAGED_X86 1
#endif

namespace jaxpaged {
namespace int8 {

// How a product is computed: by the instructions of the processor, and with its matrix tiles where there are such.
enum class Path { kPortable, kAvx2, kAvx512Vnni, kAmx };

inline Path best_path() {
  switch (instructions()) {
    case Instructions::kAvx512Vnni: return amx_is_allowed() ? Path::kAmx : Path::kAvx512Vnni;
    case Instructions::kAvx2: return Path::kAvx2;
    default: return Path::kPortable;
  }
}

constexpr int kLowLevels = 128;  // a number of a row is high * kLowLevels + low
constexpr float kLevels = 127.0f * kLowLevels;
constexpr float kStep = static_cast<float>(1 / (127.0 * kLowLevels));
constexpr float kLeastPeak = 1e-30f;
constexpr int64_t kLanes = 64;       // numbers of a row that are looked at at once; rows are padded to a multiple of it
constexpr int64_t kBlockRows = 16;   // rows that are quantized together, and that share the vectors of packed rows
constexpr int64_t kHalfRows = kBlockRows / 2;

inline int64_t ceil_div(int64_t number, int64_t by) { return (number + by - 1) / by; }
inline int64_t padded(int64_t num_in) { return ceil_div(num_in, kLanes) * kLanes; }

inline float widened(float number) { return number; }
inline float widened(uint16_t bfloat16) {
  const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

// What a row's peak makes of it: the factor of its numbers, and the scale of the result; NaN where the row holds NaN or an infinity.
struct RowScale {
  float step;
  float scale;
};
inline RowScale scale_of(float peak, bool is_finite) {
  if (!is_finite) return {0.0f, std::nanf("")};
  if (peak < kLeastPeak) return {0.0f, 0.0f};
  return {kLevels / peak, peak * kStep};
}

// Quantized rows, in one of two layouts; `scales` [num_rows]. What stands for numbers behind num_in is zero.
//
// Plain, for portable code, AVX2 and few rows: [num_rows, 2, padded(num_in)], the high part of each row and then its low part. For VNNI,
// which multiplies unsigned by signed numbers, 128 is added to each.
//
// Packed, for matrix tiles: blocks of 16 rows, [padded(num_in) / 64, 2, 16, 16, 4], which are 64 inputs, part, four inputs, row, input.
// A last block of up to 8 rows has both parts in one: [padded(num_in) / 64, 16, 2, 8, 4], which are 64 inputs, four inputs, part, row,
// input.
struct Rows {
  Path path;
  bool is_packed;
  int64_t num_rows, num_in;
  uint8_t* values;
  float* scales;

  int64_t stride() const { return padded(num_in); }  // of plain parts
  int64_t num_blocks() const { return ceil_div(num_rows, kBlockRows); }
  int64_t rows_of(int64_t block) const {
    const int64_t left = num_rows - block * kBlockRows;
    return left < kBlockRows ? left : kBlockRows;
  }
  const uint8_t* part(int64_t part) const { return values + part * stride(); }
  uint8_t* packed(int64_t block) const { return values + block * 2 * kBlockRows * stride(); }
};

// The product of a row from the sums of its parts. The first product is exact, so it does not matter whether it is fused with the sum.
inline float combined(int32_t high, int32_t low, float weight_scale, float row_scale) {
  return (static_cast<float>(high) * kLowLevels + static_cast<float>(low)) * weight_scale * row_scale;
}

struct Matrix {
  const int8_t* values;  // [out, in]
  const float* scales;   // [out]
  int64_t num_out, num_in;
};

template <typename Number>
void quantize_row_portable(const Number* row, int64_t num_in, uint8_t* high, uint8_t* low, float* scale) {
  float peak = 0.0f;
  bool is_finite = true;
  for (int64_t i = 0; i < num_in; ++i) {
    const float size = std::fabs(widened(row[i]));
    is_finite &= std::isfinite(size);
    peak = size > peak ? size : peak;
  }
  const RowScale found = scale_of(peak, is_finite);
  for (int64_t i = 0; i < num_in; ++i) {
    const float scaled = is_finite ? std::nearbyintf(widened(row[i]) * found.step) : 0.0f;
    const int whole = static_cast<int>(scaled), upper = (whole + kLowLevels / 2 + (kLowLevels << 8)) / kLowLevels - (1 << 8);
    high[i] = static_cast<uint8_t>(upper);
    low[i] = static_cast<uint8_t>(whole - upper * kLowLevels);
  }
  std::memset(high + num_in, 0, padded(num_in) - num_in);
  std::memset(low + num_in, 0, padded(num_in) - num_in);
  *scale = found.scale;
}

inline void multiply_portable(const Rows& rows, const Matrix& matrix, int64_t first, int64_t last, float* out) {
  for (int64_t o = first; o < last; ++o) {
    const int8_t* weight = matrix.values + o * matrix.num_in;
    for (int64_t r = 0; r < rows.num_rows; ++r) {
      const int8_t* high = reinterpret_cast<const int8_t*>(rows.part(2 * r));
      const int8_t* low = reinterpret_cast<const int8_t*>(rows.part(2 * r + 1));
      int32_t of_high = 0, of_low = 0;
      for (int64_t i = 0; i < matrix.num_in; ++i) {
        of_high += static_cast<int32_t>(high[i]) * weight[i];
        of_low += static_cast<int32_t>(low[i]) * weight[i];
      }
      out[r * matrix.num_out + o] = combined(of_high, of_low, matrix.scales[o], rows.scales[r]);
    }
  }
}

}  // namespace int8
}  // namespace jaxpaged
