// The int8 product of few rows with AVX512-VNNI: unsigned times signed bytes, four at a time; 128 is added to rows, and 128 times the sum
// of weights taken off again.
//
// A dot walks both operands along `in`, 64 numbers at a time, and sums up the lanes at its end.
#pragma once

#include <utility>

#include "int8_rows.h"

#if defined(JAXPAGED_X86)

namespace jaxpaged {
namespace int8 {

constexpr int64_t kBlockOuts = 4;  // rows of the matrix that are walked side by side

#define JAXPAGED_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")))

JAXPAGED_AVX512 inline __m512 load_wide(const float* numbers, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, numbers); }
JAXPAGED_AVX512 inline __m512 load_wide(const uint16_t* numbers, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, numbers)), 16));
}

template <typename Number>
JAXPAGED_AVX512 void quantize_row_avx512(const Number* row, int64_t num_in, uint8_t* high, uint8_t* low, float* scale) {
  __m512 peaks = _mm512_setzero_ps();
  __mmask16 not_finite = 0;
  for (int64_t i = 0; i < num_in; i += 16) {
    const __mmask16 mask = num_in - i >= 16 ? 0xffff : (1u << (num_in - i)) - 1;
    const __m512 numbers = load_wide(row + i, mask);
    not_finite |= _mm512_fpclass_ps_mask(numbers, 0x01 | 0x08 | 0x10 | 0x80);  // NaN of both kinds, infinities
    peaks = _mm512_max_ps(peaks, _mm512_abs_ps(numbers));
  }
  const RowScale found = scale_of(_mm512_reduce_max_ps(peaks), not_finite == 0);
  const __m512 step = _mm512_set1_ps(found.step);
  const __mmask16 keep = not_finite == 0 ? 0xffff : 0;
  const int64_t stop = padded(num_in);
  for (int64_t i = 0; i < stop; i += 16) {
    const __mmask16 mask = num_in - i >= 16 ? 0xffff : num_in > i ? (1u << (num_in - i)) - 1 : 0;
    const __m512i whole = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(load_wide(row + i, mask), step));
    const __m512i offset = _mm512_set1_epi32(128);
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(kLowLevels / 2)), 7);
    const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 7));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(_mm512_add_epi32(upper, offset)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i), _mm512_cvtepi32_epi8(_mm512_add_epi32(lower, offset)));
  }
  *scale = found.scale;
}

// Sums of the lanes of four vectors, side by side.
JAXPAGED_AVX512 inline __m128i sum_four(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// Bytes of the matrix that are asked for before they are needed: four short rows side by side are more than the processor foresees, and
// with this they come as fast as memory reads (16 instead of 13 GB/s on one core).
constexpr int64_t kAhead = 2048;

#define JAXPAGED_INLINED __attribute__((always_inline)) inline

// What one walk along `in` keeps in registers: for each of kRows rows, and for the weights alone, sums of four outputs.
template <int kRows>
struct Sums {
  __m512i of_rows[kRows][4];
  __m512i of_weights[4];
};

// Adds 64 products a row and output. Rows are counted at compile time, or the sums would lie in memory.
template <bool kCorrects, int kRows, size_t... row>
JAXPAGED_AVX512 JAXPAGED_INLINED void add_products(std::index_sequence<row...>, Sums<kRows>& sums, const uint8_t* own, int64_t stride,
                                                   const __m512i& a, const __m512i& b, const __m512i& c, const __m512i& d) {
  if (kCorrects) {
    const __m512i offsets = _mm512_set1_epi8(static_cast<char>(128));
    sums.of_weights[0] = _mm512_dpbusd_epi32(sums.of_weights[0], offsets, a);
    sums.of_weights[1] = _mm512_dpbusd_epi32(sums.of_weights[1], offsets, b);
    sums.of_weights[2] = _mm512_dpbusd_epi32(sums.of_weights[2], offsets, c);
    sums.of_weights[3] = _mm512_dpbusd_epi32(sums.of_weights[3], offsets, d);
  }
  __m512i x;
  ((x = _mm512_loadu_si512(own + row * stride),                                     //
    sums.of_rows[row][0] = _mm512_dpbusd_epi32(sums.of_rows[row][0], x, a),         //
    sums.of_rows[row][1] = _mm512_dpbusd_epi32(sums.of_rows[row][1], x, b),         //
    sums.of_rows[row][2] = _mm512_dpbusd_epi32(sums.of_rows[row][2], x, c),         //
    sums.of_rows[row][3] = _mm512_dpbusd_epi32(sums.of_rows[row][3], x, d)),
   ...);
}

template <int kRows, size_t... row>
JAXPAGED_AVX512 JAXPAGED_INLINED void clear(std::index_sequence<row...>, Sums<kRows>& sums) {
  const __m512i zero = _mm512_setzero_si512();
  ((sums.of_rows[row][0] = zero, sums.of_rows[row][1] = zero, sums.of_rows[row][2] = zero, sums.of_rows[row][3] = zero), ...);
  sums.of_weights[0] = sums.of_weights[1] = sums.of_weights[2] = sums.of_weights[3] = zero;
}

JAXPAGED_AVX512 JAXPAGED_INLINED void store(const __m512i (&high)[4], const __m512i (&low)[4], __m128i corrections, __m128 scales,
                                            float scale, __mmask8 outs, float* out) {
  const __m128 of_high = _mm_cvtepi32_ps(_mm_sub_epi32(sum_four(high[0], high[1], high[2], high[3]), corrections));
  const __m128 of_low = _mm_cvtepi32_ps(_mm_sub_epi32(sum_four(low[0], low[1], low[2], low[3]), corrections));
  const __m128 both = _mm_add_ps(_mm_mul_ps(of_high, _mm_set1_ps(kLowLevels)), of_low);
  _mm_mask_storeu_ps(out, outs, _mm_mul_ps(_mm_mul_ps(both, scales), _mm_set1_ps(scale)));
}

template <int kRows, size_t... row>
JAXPAGED_AVX512 JAXPAGED_INLINED void store_rows(std::index_sequence<row...>, const Sums<kRows>& sums, __m128i corrections, __m128 scales,
                                                 const float* row_scales, __mmask8 outs, float* out, int64_t num_out) {
  (store(sums.of_rows[2 * row], sums.of_rows[2 * row + 1], corrections, scales, row_scales[row], outs, out + row * num_out), ...);
}

// kRows parts (half as many rows) times four outputs; with kCorrects, `corrections` becomes 128 times the sum of each output's weights.
template <int kRows, bool kCorrects>
JAXPAGED_AVX512 inline void tile_avx512(const Rows& rows, const Matrix& matrix, int64_t row, int64_t o, int64_t num_outs,
                                        __m128i& corrections, float* out) {
  constexpr auto each = std::make_index_sequence<kRows>{};
  const int64_t num_in = matrix.num_in, whole = num_in / kLanes * kLanes, stride = rows.stride();
  const int8_t* w0 = matrix.values + o * num_in;
  const int8_t* w1 = num_outs > 1 ? w0 + num_in : w0;
  const int8_t* w2 = num_outs > 2 ? w1 + num_in : w0;
  const int8_t* w3 = num_outs > 3 ? w2 + num_in : w0;
  const uint8_t* own = rows.values + row * stride;
  Sums<kRows> sums;
  clear(each, sums);
  for (int64_t i = 0; i < whole; i += kLanes) {
    if (kCorrects) {  // the first walk over these weights
      const char* ahead = reinterpret_cast<const char*>(w0) + kAhead + kBlockOuts * i;
      for (int64_t line = 0; line < kBlockOuts; ++line) _mm_prefetch(ahead + line * kLanes, _MM_HINT_T0);
    }
    add_products<kCorrects>(each, sums, own + i, stride, _mm512_loadu_si512(w0 + i), _mm512_loadu_si512(w1 + i),
                            _mm512_loadu_si512(w2 + i), _mm512_loadu_si512(w3 + i));
  }
  if (whole < num_in) {
    const __mmask64 mask = (1ull << (num_in - whole)) - 1;
    add_products<kCorrects>(each, sums, own + whole, stride, _mm512_maskz_loadu_epi8(mask, w0 + whole),
                            _mm512_maskz_loadu_epi8(mask, w1 + whole), _mm512_maskz_loadu_epi8(mask, w2 + whole),
                            _mm512_maskz_loadu_epi8(mask, w3 + whole));
  }
  if (kCorrects) corrections = sum_four(sums.of_weights[0], sums.of_weights[1], sums.of_weights[2], sums.of_weights[3]);
  const __mmask8 outs = (1u << num_outs) - 1;
  const __m128 scales = _mm_maskz_loadu_ps(outs, matrix.scales + o);
  store_rows(std::make_index_sequence<kRows / 2>{}, sums, corrections, scales, rows.scales + row / 2, outs,
             out + row / 2 * matrix.num_out + o, matrix.num_out);
}

JAXPAGED_AVX512 inline void multiply_avx512(const Rows& rows, const Matrix& matrix, int64_t first, int64_t last, float* out) {
  for (int64_t o = first; o < last; o += kBlockOuts) {
    const int64_t num_outs = last - o < kBlockOuts ? last - o : kBlockOuts;
    __m128i corrections;
    int64_t row;
    if (2 * rows.num_rows >= 4) {
      tile_avx512<4, true>(rows, matrix, 0, o, num_outs, corrections, out);
      row = 4;
    } else {
      tile_avx512<2, true>(rows, matrix, 0, o, num_outs, corrections, out);
      row = 2;
    }
    for (; row + 6 <= 2 * rows.num_rows; row += 6) tile_avx512<6, false>(rows, matrix, row, o, num_outs, corrections, out);
    for (; row + 4 <= 2 * rows.num_rows; row += 4) tile_avx512<4, false>(rows, matrix, row, o, num_outs, corrections, out);
    for (; row < 2 * rows.num_rows; row += 2) tile_avx512<2, false>(rows, matrix, row, o, num_outs, corrections, out);
  }
}

}  // namespace int8
}  // namespace jaxpaged

#endif  // JAXPAGED_X86
