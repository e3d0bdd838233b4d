// Rows times a matrix of groups: four bits with a scale and a minimum, or eight bits with a scale, a group of 32 inputs.
//
// Rows are quantized one by one to 15 bits, in a high and a low int8 part. The sum of a group is an int32 and exact; groups are then
// added in float32 in the order of the inputs, each by one fused multiplication and addition (and with four bits a second one for the
// minimum), so that every set of instructions and every number of rows gives equal bits.
//
// The matrix lies in tiles of 16 outputs: four neighbouring inputs of each of them side by side, so that a lane is an output and nothing
// is summed up across lanes. group_weights.py says which byte is which. Nibbles are unsigned, as VNNI wants one side; weights of eight
// bits are moved up by 128, and 128 times the sum of a row's group is taken off again.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "../native/instructions.h"
#include "../native/numbers.h"
#include "../native/parallel.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define JAXPAGED_X86 1
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

// Quantized rows: `values` [rows, groups, kRecord]; `sums` [rows, groups], of four bits the sum of a group's numbers as float32, of eight
// 128 times it as int32; `scales` [rows].
struct Rows {
  const int8_t* values;
  const int32_t* sums;
  const float* scales;
  int64_t num_rows, num_groups;
};

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
        const int8_t* own = rows.values + (r * rows.num_groups + g) * kRecord;
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

#if defined(JAXPAGED_X86)

#define JAXPAGED_INLINED __attribute__((always_inline)) inline

// --- AVX2: unsigned times signed bytes in pairs of int16; half a tile at a time

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
        const int8_t* own = rows.values + ((row + r) * rows.num_groups + g) * kRecord + 4 * q;
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

// --- AVX512-VNNI: unsigned times signed bytes, four at a time

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
                                                       const uint16_t* of_minima, const int8_t* own, const int32_t* sums,
                                                       int64_t num_groups, __m512 (&added)[sizeof...(row)]) {
  const int64_t stride = num_groups * kRecord;
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
  const int8_t* own = rows.values + first_row * num_groups * kRecord;
  const int32_t* sums = rows.sums + first_row * num_groups;
  for (int64_t g = 0; g < num_groups; ++g) {
    add_group<bits>(each, weights, scales, minima, own, sums, num_groups, added);
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

template <Bits bits>
JAXPAGED_AVX512_GROUPS void multiply_avx512(const Rows& rows, const Matrix& matrix, int64_t first, int64_t last, float* out) {
  for (int64_t t = first; t < last; ++t) {
    int64_t row = 0;
    for (; row + 4 <= rows.num_rows; row += 4) tile_avx512<bits>(std::make_index_sequence<4>{}, rows, matrix, row, t, out);
    for (; row + 2 <= rows.num_rows; row += 2) tile_avx512<bits>(std::make_index_sequence<2>{}, rows, matrix, row, t, out);
    for (; row < rows.num_rows; ++row) tile_avx512<bits>(std::make_index_sequence<1>{}, rows, matrix, row, t, out);
  }
}

#endif  // JAXPAGED_X86

template <typename Number>
void quantize_row(Instructions instructions, Bits bits, const Number* row, int64_t num_groups, int8_t* values, int32_t* sums,
                  float* scale) {
#if defined(JAXPAGED_X86)
  if (instructions == Instructions::kAvx512Vnni) return quantize_row_avx512(bits, row, num_groups, values, sums, scale);
  if (instructions == Instructions::kAvx2) return quantize_row_avx2(bits, row, num_groups, values, sums, scale);
#endif
  quantize_row_portable(bits, row, num_groups, values, sums, scale);
}

template <Bits bits>
void multiply(Instructions instructions, const Rows& rows, const Matrix& matrix, int64_t first, int64_t last, float* out) {
#if defined(JAXPAGED_X86)
  if (instructions == Instructions::kAvx512Vnni) return multiply_avx512<bits>(rows, matrix, first, last, out);
  if (instructions == Instructions::kAvx2) return multiply_avx2<bits>(rows, matrix, first, last, out);
#endif
  multiply_portable<bits>(rows, matrix, first, last, out);
}

// out [rows, 16 * tiles] = x [rows, 32 * groups] times the matrix. Number is float or BFloat16.
template <Bits bits, typename Number>
void matmul(Threads& threads, Instructions instructions, const Number* x, int64_t num_rows, const Matrix& matrix, float* out) {
  const int64_t num_groups = matrix.num_groups;
  if (num_rows == 0 || matrix.num_tiles == 0) return;
  // Kept between calls: a step makes hundreds of them.
  static thread_local std::vector<int8_t> values;
  static thread_local std::vector<int32_t> sums;
  static thread_local std::vector<float> scales;
  if (static_cast<int64_t>(values.size()) < num_rows * num_groups * kRecord) values.resize(num_rows * num_groups * kRecord);
  if (static_cast<int64_t>(sums.size()) < num_rows * num_groups) sums.resize(num_rows * num_groups);
  if (static_cast<int64_t>(scales.size()) < num_rows) scales.resize(num_rows);
  int8_t* const quantized = values.data();
  int32_t* const row_sums = sums.data();
  float* const row_scales = scales.data();

  constexpr int64_t kRowsOfChunk = 16;
  for_chunks(threads, (num_rows + kRowsOfChunk - 1) / kRowsOfChunk, [=](int64_t chunk) {
    const int64_t stop = (chunk + 1) * kRowsOfChunk < num_rows ? (chunk + 1) * kRowsOfChunk : num_rows;
    for (int64_t row = chunk * kRowsOfChunk; row < stop; ++row) {
      quantize_row(instructions, bits, x + row * num_groups * kGroup, num_groups, quantized + row * num_groups * kRecord,
                   row_sums + row * num_groups, row_scales + row);
    }
  });

  const Rows rows{quantized, row_sums, row_scales, num_rows, num_groups};
  // Chunks whose weights fit the first cache, and at least four a thread where there is so much.
  int64_t tiles = kChunkBytes / (num_groups > 0 ? num_groups * bytes_of_group(bits) : 1);
  const int64_t even = matrix.num_tiles / (4 * threads.count());
  tiles = even < tiles ? even : tiles;
  tiles = tiles < 1 ? 1 : tiles;
  for_chunks(threads, (matrix.num_tiles + tiles - 1) / tiles, [=, &matrix](int64_t chunk) {
    const int64_t first = chunk * tiles;
    multiply<bits>(instructions, rows, matrix, first, first + tiles < matrix.num_tiles ? first + tiles : matrix.num_tiles, out);
  });
}

}  // namespace groups
}  // namespace jaxpaged
