// The products of groups with AVX2: unsigned times signed bytes in pairs of int16; half a tile of outputs at a time.
#pragma once

#include "int4_rows.h"

#if defined(JAXPAGED_X86)

namespace jaxpaged {
namespace groups {

#define JAXPAGED_AVX2_GROUPS __attribute__((target("avx2,fma,f16c")))

JAXPAGED_AVX2_GROUPS JAXPAGED_INLINED __m256 load8(const float* numbers) { return _mm256_loadu_ps(numbers); }
JAXPAGED_AVX2_GROUPS JAXPAGED_INLINED __m256 load8(const BFloat16* numbers) {
  const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

// Eight int32 as int8, in order.
JAXPAGED_AVX2_GROUPS JAXPAGED_INLINED void store_narrow(__m256i numbers, int8_t* to) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
}

template <typename Number>
JAXPAGED_AVX2_GROUPS void quantize_row_avx2(Bits bits, const Number* row, int64_t num_groups, int8_t* values, int32_t* sums,
                                            float* scale) {
  const __m256 sign = _mm256_set1_ps(-0.0f), infinity = _mm256_set1_ps(INFINITY);
  __m256 peaks = _mm256_setzero_ps(), finite = _mm256_cmp_ps(sign, sign, _CMP_EQ_OQ);
  for (int64_t i = 0; i < num_groups * kGroup; i += 8) {
    const __m256 sizes = _mm256_andnot_ps(sign, load8(row + i));
    finite = _mm256_and_ps(finite, _mm256_cmp_ps(sizes, infinity, _CMP_LT_OQ));
    peaks = _mm256_max_ps(peaks, sizes);
  }
  const bool is_finite = _mm256_movemask_ps(finite) == 255;
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, peaks);
  float peak = 0.0f;
  for (const float lane : lanes) peak = lane > peak ? lane : peak;
  const RowScale found = scale_of(peak, is_finite);
  const __m256 step = _mm256_set1_ps(found.step);
  for (int64_t g = 0; g < num_groups; ++g) {
    __m256i summed = _mm256_setzero_si256();
    for (int64_t i = 0; i < kGroup; i += 8) {
      __m256i whole = _mm256_setzero_si256();
      if (is_finite) whole = _mm256_cvtps_epi32(_mm256_mul_ps(load8(row + g * kGroup + i), step));
      const __m256i upper = _mm256_srai_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(kLowLevels / 2)), 7);
      store_narrow(upper, values + g * kRecord + i);
      store_narrow(_mm256_sub_epi32(whole, _mm256_slli_epi32(upper, 7)), values + g * kRecord + kGroup + i);
      summed = _mm256_add_epi32(summed, whole);
    }
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(summed), _mm256_extracti128_si256(summed, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    sums[g] = sum_as_kept(bits, _mm_cvtsi128_si32(half));
  }
  *scale = found.scale;
}

JAXPAGED_AVX2_GROUPS JAXPAGED_INLINED __m256i quad_avx2(const int8_t* numbers) {
  int32_t quad;
  std::memcpy(&quad, numbers, sizeof(quad));
  return _mm256_set1_epi32(quad);
}

JAXPAGED_AVX2_GROUPS JAXPAGED_INLINED __m256 load_float16_avx2(const uint16_t* numbers) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
}

template <Bits bits, int kRows>
JAXPAGED_AVX2_GROUPS void tile_avx2(const Rows& rows, const Matrix& matrix, int64_t row, int64_t t, int64_t half, float* out) {
  const __m256i low_half = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256 added[kRows];
  for (auto& sum : added) sum = _mm256_setzero_ps();
  for (int64_t g = 0; g < matrix.num_groups; ++g) {
    const int64_t place = t * matrix.num_groups + g;
    const uint8_t* weights = matrix.values + place * bytes_of_group(bits) + 32 * half;
    // Of four bits sums of pairs stay in int16: 8 * 2 * 15 * 127 < 2**15.
    __m256i high[kRows], low[kRows];
    for (int r = 0; r < kRows; ++r) high[r] = low[r] = _mm256_setzero_si256();
    for (int64_t q = 0; q < kQuads; ++q) {
      const int64_t at = bits == Bits::kFour ? q % 4 : q;
      __m256i weight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 64 * at));
      if (bits == Bits::kFour) weight = _mm256_and_si256(q < 4 ? weight : _mm256_srli_epi16(weight, 4), low_half);
      const __m256i size = bits == Bits::kFour ? weight : _mm256_abs_epi8(weight);
      for (int r = 0; r < kRows; ++r) {
        const int8_t* own = rows.values + (row + r) * rows.stride + g * kRecord + 4 * q;
        const __m256i x = quad_avx2(own), y = quad_avx2(own + kGroup);
        if (bits == Bits::kFour) {
          high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(size, x));
          low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(size, y));
        } else {
          high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(x, weight)), ones));
          low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(y, weight)), ones));
        }
      }
    }
    const __m256 scales = load_float16_avx2(matrix.scales + place * kTile + 8 * half);
    const __m256 minima = bits == Bits::kFour ? load_float16_avx2(matrix.minima + place * kTile + 8 * half) : scales;
    for (int r = 0; r < kRows; ++r) {
      if (bits == Bits::kFour) {
        high[r] = _mm256_madd_epi16(high[r], ones);
        low[r] = _mm256_madd_epi16(low[r], ones);
      }
      const __m256 sum = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(high[r], 7), low[r]));
      added[r] = _mm256_fmadd_ps(sum, scales, added[r]);
      if (bits == Bits::kFour) {
        added[r] = _mm256_fmadd_ps(_mm256_set1_ps(from_bits(rows.sums[(row + r) * rows.num_groups + g])), minima, added[r]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const __m256 scaled = _mm256_mul_ps(added[r], _mm256_set1_ps(rows.scales[row + r]));
    _mm256_storeu_ps(out + ((row + r) * matrix.num_tiles + t) * kTile + 8 * half, scaled);
  }
}

template <Bits bits>
JAXPAGED_AVX2_GROUPS void multiply_avx2(const Rows& rows, const Matrix& matrix, int64_t first, int64_t last, float* out) {
  for (int64_t t = first; t < last; ++t) {
    for (int64_t half = 0; half < 2; ++half) {
      int64_t row = 0;
      for (; row + 2 <= rows.num_rows; row += 2) tile_avx2<bits, 2>(rows, matrix, row, t, half, out);
      for (; row < rows.num_rows; ++row) tile_avx2<bits, 1>(rows, matrix, row, t, half, out);
    }
  }
}

}  // namespace groups
}  // namespace jaxpaged

#endif
