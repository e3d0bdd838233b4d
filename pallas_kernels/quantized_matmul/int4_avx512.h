// The products of groups with AVX512-VNNI: unsigned times signed bytes, four at a time.
#pragma once

#include <utility>

#include "int4_rows.h"

#if defined(JAXPAGED_X86)

namespace jaxpaged {
namespace groups {

#define JAXPAGED_AVX512_GROUPS __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")))

JAXPAGED_AVX512_GROUPS JAXPAGED_INLINED __m512 load16(const float* numbers) { return _mm512_loadu_ps(numbers); }
JAXPAGED_AVX512_GROUPS JAXPAGED_INLINED __m512 load16(const BFloat16* numbers) {
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

template <typename Number>
JAXPAGED_AVX512_GROUPS void quantize_row_avx512(Bits bits, const Number* row, int64_t num_groups, int8_t* values, int32_t* sums,
                                                float* scale) {
  __m512 peaks = _mm512_setzero_ps();
  __mmask16 not_finite = 0;
  for (int64_t i = 0; i < num_groups * kGroup; i += 16) {
    const __m512 numbers = load16(row + i);
    not_finite |= _mm512_fpclass_ps_mask(numbers, 0x01 | 0x08 | 0x10 | 0x80);  // NaN of both kinds, infinities
    peaks = _mm512_max_ps(peaks, _mm512_abs_ps(numbers));
  }
  const RowScale found = scale_of(_mm512_reduce_max_ps(peaks), not_finite == 0);
  const __m512 step = _mm512_set1_ps(found.step);
  const __mmask16 keep = not_finite == 0 ? 0xffff : 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    __m512i summed = _mm512_setzero_si512();
    for (int64_t i = 0; i < kGroup; i += 16) {
      const __m512i whole = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(load16(row + g * kGroup + i), step));
      const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(kLowLevels / 2)), 7);
      const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 7));
      int8_t* const to = values + g * kRecord + i;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(upper));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kGroup), _mm512_cvtepi32_epi8(lower));
      summed = _mm512_add_epi32(summed, whole);
    }
    sums[g] = sum_as_kept(bits, _mm512_reduce_add_epi32(summed));
  }
  *scale = found.scale;
}

JAXPAGED_AVX512_GROUPS JAXPAGED_INLINED __m512i quad_avx512(const int8_t* numbers) {
  int32_t quad;
  std::memcpy(&quad, numbers, sizeof(quad));
  return _mm512_set1_epi32(quad);
}

JAXPAGED_AVX512_GROUPS JAXPAGED_INLINED __m512 load_float16_avx512(const uint16_t* numbers) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers)));
}

// Bytes of the matrix that are asked for before they are needed.
constexpr int64_t kAheadBytes = 2048;

// Adds the products of one quad of inputs to the sums of each row's two parts.
template <size_t... row>
JAXPAGED_AVX512_GROUPS JAXPAGED_INLINED void add_quad(std::index_sequence<row...>, __m512i weight, const int8_t* own, int64_t stride,
                                                      __m512i* high, __m512i* low) {
  ((high[row] = _mm512_dpbusd_epi32(high[row], weight, quad_avx512(own + row * stride)),
    low[row] = _mm512_dpbusd_epi32(low[row], weight, quad_avx512(own + row * stride + kGroup))),
   ...);
}

template <Bits bits>
JAXPAGED_AVX512_GROUPS JAXPAGED_INLINED void add_sum(__m512i high, __m512i low, int32_t of_row, __m512 scales, __m512 minima,
                                                     __m512& added) {
  __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
  if (bits == Bits::kEight) sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(of_row));
  added = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scales, added);
  if (bits == Bits::kFour) added = _mm512_fmadd_ps(_mm512_set1_ps(from_bits(of_row)), minima, added);
}

template <Bits bits, size_t... row>
JAXPAGED_AVX512_GROUPS JAXPAGED_INLINED void add_group(std::index_sequence<row...> each, const uint8_t* weights, const uint16_t* of_scales,
                                                       const uint16_t* of_minima, const int8_t* own, int64_t stride, const int32_t* sums,
                                                       int64_t num_groups, __m512 (&added)[sizeof...(row)]) {
  __m512i high[sizeof...(row)], low[sizeof...(row)];
  ((high[row] = low[row] = _mm512_setzero_si512()), ...);
  if constexpr (bits == Bits::kFour) {
    const __m512i low_half = _mm512_set1_epi8(15);
    for (int64_t q = 0; q < kQuads / 2; ++q) {
      const __m512i both = _mm512_loadu_si512(weights + 64 * q);
      add_quad(each, _mm512_and_si512(both, low_half), own + 4 * q, stride, high, low);
      add_quad(each, _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half), own + 4 * (q + kQuads / 2), stride, high, low);
    }
  } else {
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(128));
    for (int64_t q = 0; q < kQuads; ++q) {
      add_quad(each, _mm512_xor_si512(_mm512_loadu_si512(weights + 64 * q), offset), own + 4 * q, stride, high, low);
    }
  }
  const __m512 scales = load_float16_avx512(of_scales);
  const __m512 minima = bits == Bits::kFour ? load_float16_avx512(of_minima) : scales;
  (add_sum<bits>(high[row], low[row], sums[row * num_groups], scales, minima, added[row]), ...);
}

template <Bits bits, size_t... row>
JAXPAGED_AVX512_GROUPS JAXPAGED_INLINED void tile_avx512(std::index_sequence<row...> each, const Rows& rows, const Matrix& matrix,
                                                         int64_t first_row, int64_t t, float* out) {
  __m512 added[sizeof...(row)];
  ((added[row] = _mm512_setzero_ps()), ...);
  const int64_t num_groups = matrix.num_groups, place = t * num_groups;
  const uint8_t* weights = matrix.values + place * bytes_of_group(bits);
  const uint16_t* scales = matrix.scales + place * kTile;
  const uint16_t* minima = bits == Bits::kFour ? matrix.minima + place * kTile : scales;
  const int8_t* own = rows.values + first_row * rows.stride;
  const int32_t* sums = rows.sums + first_row * num_groups;
  for (int64_t g = 0; g < num_groups; ++g) {
    if (first_row == 0) {
      for (int64_t line = 0; line < bytes_of_group(bits) / 64; ++line) {
        _mm_prefetch(reinterpret_cast<const char*>(weights) + kAheadBytes + 64 * line, _MM_HINT_T0);
      }
      _mm_prefetch(reinterpret_cast<const char*>(scales) + kAheadBytes / 8, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(minima) + kAheadBytes / 8, _MM_HINT_T0);
    }
    add_group<bits>(each, weights, scales, minima, own, rows.stride, sums, num_groups, added);
    weights += bytes_of_group(bits);
    scales += kTile;
    minima += kTile;
    own += kRecord;
    ++sums;
  }
  (_mm512_storeu_ps(out + ((first_row + static_cast<int64_t>(row)) * matrix.num_tiles + t) * kTile,
                    _mm512_mul_ps(added[row], _mm512_set1_ps(rows.scales[first_row + row]))),
   ...);
}

// One tile of outputs times the rows from `row` on.
template <Bits bits>
JAXPAGED_AVX512_GROUPS JAXPAGED_INLINED void rows_avx512(const Rows& rows, const Matrix& matrix, int64_t row, int64_t t, float* out) {
  for (; row + 4 <= rows.num_rows; row += 4) tile_avx512<bits>(std::make_index_sequence<4>{}, rows, matrix, row, t, out);
  for (; row + 2 <= rows.num_rows; row += 2) tile_avx512<bits>(std::make_index_sequence<2>{}, rows, matrix, row, t, out);
  for (; row < rows.num_rows; ++row) tile_avx512<bits>(std::make_index_sequence<1>{}, rows, matrix, row, t, out);
}

template <Bits bits>
JAXPAGED_AVX512_GROUPS void multiply_avx512(const Rows& rows, const Matrix& matrix, int64_t first, int64_t last, float* out) {
  for (int64_t t = first; t < last; ++t) rows_avx512<bits>(rows, matrix, 0, t, out);
}

}  // namespace groups
}  // namespace jaxpaged

#endif
