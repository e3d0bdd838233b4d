// The int8 product with AVX2: int8 widened to int16, pairs multiplied and added.
#pragma once

#include "int8_rows.h"

#if defined(JAXPAGED_X86)

namespace jaxpaged {
namespace int8 {

constexpr int64_t kAvx2Outs = 2;  // rows of the matrix that are walked side by side

#define JAXPAGED_AVX2 __attribute__((target("avx2,fma")))

JAXPAGED_AVX2 inline int32_t sum_lanes(__m256i lanes) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtsi128_si32(half);
}

JAXPAGED_AVX2 inline __m256i load16(const void* numbers) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(numbers)));
}

template <int kRows>
JAXPAGED_AVX2 void tile_avx2(const Rows& rows, const Matrix& matrix, int64_t row, int64_t o, int64_t num_outs, float* out) {
  const int64_t num_in = matrix.num_in, whole = num_in / 16 * 16;
  const int8_t* weights[kAvx2Outs];
  for (int64_t w = 0; w < kAvx2Outs; ++w) weights[w] = matrix.values + (o + (w < num_outs ? w : 0)) * num_in;
  const int8_t* own[kRows];
  for (int r = 0; r < kRows; ++r) own[r] = reinterpret_cast<const int8_t*>(rows.values + (row + r) * rows.stride());
  __m256i sums[kRows][kAvx2Outs];
  for (auto& of_row : sums)
    for (auto& sum : of_row) sum = _mm256_setzero_si256();
  for (int64_t i = 0; i < whole; i += 16) {
    __m256i w[kAvx2Outs];
    for (int64_t j = 0; j < kAvx2Outs; ++j) w[j] = load16(weights[j] + i);
    for (int r = 0; r < kRows; ++r) {
      const __m256i x = load16(own[r] + i);
      for (int64_t j = 0; j < kAvx2Outs; ++j) sums[r][j] = _mm256_add_epi32(sums[r][j], _mm256_madd_epi16(x, w[j]));
    }
  }
  for (int r = 0; r < kRows; r += 2) {
    for (int64_t j = 0; j < num_outs; ++j) {
      int32_t high = sum_lanes(sums[r][j]), low = sum_lanes(sums[r + 1][j]);
      for (int64_t i = whole; i < num_in; ++i) {
        high += static_cast<int32_t>(own[r][i]) * weights[j][i];
        low += static_cast<int32_t>(own[r + 1][i]) * weights[j][i];
      }
      const int64_t of = (row + r) / 2;
      out[of * matrix.num_out + o + j] = combined(high, low, matrix.scales[o + j], rows.scales[of]);
    }
  }
}

JAXPAGED_AVX2 inline void multiply_avx2(const Rows& rows, const Matrix& matrix, int64_t first, int64_t last, float* out) {
  constexpr int64_t step = kAvx2Outs;
  for (int64_t o = first; o < last; o += step) {
    const int64_t num_outs = last - o < step ? last - o : step;
    int64_t row = 0;
    for (; row + 4 <= 2 * rows.num_rows; row += 4) tile_avx2<4>(rows, matrix, row, o, num_outs, out);
    for (; row < 2 * rows.num_rows; row += 2) tile_avx2<2>(rows, matrix, row, o, num_outs, out);
  }
}

}  // namespace int8
}  // namespace jaxpaged

#endif  // JAXPAGED_X86
