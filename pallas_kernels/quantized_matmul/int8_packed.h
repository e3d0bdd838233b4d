// Quantizing rows into the packed layout of `Rows`, with AVX-512: 16 rows at a time, whose quads of inputs end up side by side.
#pragma once

#include "int8_avx512.h"

#if defined(JAXPAGED_X86)

namespace jaxpaged {
namespace int8 {

// Turns 16 vectors of 16 numbers of 32 bits round: number c of vector r becomes number r of vector c.
JAXPAGED_AVX512 JAXPAGED_INLINED void transpose(__m512i (&v)[16]) {
  __m512i pairs[16];
  for (int r = 0; r < 16; r += 2) {
    pairs[r] = _mm512_unpacklo_epi32(v[r], v[r + 1]);
    pairs[r + 1] = _mm512_unpackhi_epi32(v[r], v[r + 1]);
  }
  for (int r = 0; r < 16; r += 4) {  // v[r + i] has, in each quarter q, number 4q + i of four vectors
    v[r] = _mm512_unpacklo_epi64(pairs[r], pairs[r + 2]);
    v[r + 1] = _mm512_unpackhi_epi64(pairs[r], pairs[r + 2]);
    v[r + 2] = _mm512_unpacklo_epi64(pairs[r + 1], pairs[r + 3]);
    v[r + 3] = _mm512_unpackhi_epi64(pairs[r + 1], pairs[r + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512i low = _mm512_shuffle_i32x4(v[i], v[4 + i], 0x44), high = _mm512_shuffle_i32x4(v[i], v[4 + i], 0xee);
    const __m512i low2 = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0x44), high2 = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0xee);
    pairs[i] = _mm512_shuffle_i32x4(low, low2, 0x88);
    pairs[4 + i] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    pairs[8 + i] = _mm512_shuffle_i32x4(high, high2, 0x88);
    pairs[12 + i] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
  for (int r = 0; r < 16; ++r) v[r] = pairs[r];
}

constexpr __mmask16 kAll = 0xffff;

inline __mmask16 first_of_16(int64_t num) { return num >= 16 ? kAll : num > 0 ? (1u << num) - 1 : 0; }

template <typename Number>
JAXPAGED_AVX512 JAXPAGED_INLINED __m512i sizes_of(const Number* numbers, __mmask16 mask) {
  return _mm512_and_si512(_mm512_castps_si512(load_wide(numbers, mask)), _mm512_set1_epi32(0x7fffffff));
}

template <typename Number>
JAXPAGED_AVX512 inline RowScale scale_of_row(const Number* row, int64_t num_in) {
  // Sizes in the order of their bits; NaN and infinities are larger than all numbers.
  __m512i peaks = _mm512_setzero_si512(), others = peaks;
  int64_t i = 0;
  for (; i + 32 <= num_in; i += 32) {
    peaks = _mm512_max_epi32(peaks, sizes_of(row + i, kAll));
    others = _mm512_max_epi32(others, sizes_of(row + i + 16, kAll));
  }
  for (; i < num_in; i += 16) peaks = _mm512_max_epi32(peaks, sizes_of(row + i, first_of_16(num_in - i)));
  peaks = _mm512_max_epi32(peaks, others);
  const int32_t bits = _mm512_reduce_max_epi32(peaks);
  float peak;
  std::memcpy(&peak, &bits, sizeof(peak));
  return scale_of(peak, bits < 0x7f800000);
}

// The parts of 64 numbers, each with its four inputs side by side: lane l of 16 bytes has quads l, 4 + l, 8 + l and 12 + l.
template <bool kIsWhole, typename Number>
JAXPAGED_AVX512 JAXPAGED_INLINED void quantize_64(const Number* numbers, int64_t left, __m512 step, __m512i& high, __m512i& low) {
  __m512i upper[4], lower[4];
  for (int quarter = 0; quarter < 4; ++quarter) {
    const __mmask16 mask = kIsWhole ? kAll : first_of_16(left - 16 * quarter);
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load_wide(numbers + 16 * quarter, mask), step));
    upper[quarter] = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(kLowLevels / 2)), 7);
    lower[quarter] = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper[quarter], 7));
  }
  high = _mm512_packs_epi16(_mm512_packs_epi32(upper[0], upper[1]), _mm512_packs_epi32(upper[2], upper[3]));
  low = _mm512_packs_epi16(_mm512_packs_epi32(lower[0], lower[1]), _mm512_packs_epi32(lower[2], lower[3]));
}

// The place of the quads that `quantize_64` leaves at number `at` of its vectors.
inline int64_t quad_of(int at) { return at % 4 * 4 + at / 4; }

// Turns 16 vectors of four inputs a row round and stores them.
JAXPAGED_AVX512 JAXPAGED_INLINED void store_quads(const __m512i (&of_rows)[kBlockRows], uint8_t* packed) {
  __m512i turned[kBlockRows];
  for (int64_t r = 0; r < kBlockRows; ++r) turned[r] = of_rows[r];
  transpose(turned);
  for (int at = 0; at < 16; ++at) _mm512_storeu_si512(packed + quad_of(at) * kLanes, turned[at]);
}

// A block of rows, signed. Rows that are not there are zeros.
template <typename Number>
JAXPAGED_AVX512 void pack_block(const Number* x, int64_t num_rows, int64_t num_in, uint8_t* packed, float* scales) {
  __m512 steps[kBlockRows];
  for (int64_t r = 0; r < num_rows; ++r) {
    const RowScale found = scale_of_row(x + r * num_in, num_in);
    steps[r] = _mm512_set1_ps(found.step);
    scales[r] = found.scale;
  }
  const int64_t stop = padded(num_in);
  const bool is_half = num_rows <= kHalfRows;
  __m512i high[kBlockRows], low[kBlockRows];
  for (auto& of_row : high) of_row = _mm512_setzero_si512();
  for (auto& of_row : low) of_row = _mm512_setzero_si512();
  for (int64_t i = 0; i < stop; i += kLanes) {
    for (int64_t r = 0; r < num_rows; ++r) {
      const Number* const numbers = x + r * num_in + i;
      __m512i& of_low = is_half ? high[kHalfRows + r] : low[r];
      if (num_in - i >= kLanes) {
        quantize_64<true>(numbers, kLanes, steps[r], high[r], of_low);
      } else {
        quantize_64<false>(numbers, num_in - i, steps[r], high[r], of_low);
      }
    }
    store_quads(high, packed);
    packed += kBlockRows * kLanes;
    if (is_half) continue;
    store_quads(low, packed);
    packed += kBlockRows * kLanes;
  }
}

JAXPAGED_AVX512 JAXPAGED_INLINED __m512i products(__m512i high, __m512i low, float weight_scale, __m512 row_scales) {
  const __m512 both = _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(kLowLevels)), _mm512_cvtepi32_ps(low));
  return _mm512_castps_si512(_mm512_mul_ps(_mm512_mul_ps(both, _mm512_set1_ps(weight_scale)), row_scales));
}

// Products of up to 16 outputs, a vector each, with a block of rows: turned round and stored row by row.
JAXPAGED_AVX512 JAXPAGED_INLINED void store_turned(__m512i (&v)[16], int64_t num_rows, int64_t num_outs, float* out, int64_t num_out) {
  transpose(v);
  const __mmask16 mask = num_outs >= 16 ? 0xffff : (1u << num_outs) - 1;
  for (int64_t r = 0; r < num_rows; ++r) _mm512_mask_storeu_ps(out + r * num_out, mask, _mm512_castsi512_ps(v[r]));
}

}  // namespace int8
}  // namespace jaxpaged

#endif  // JAXPAGED_X86
