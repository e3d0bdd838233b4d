// Rows times an int8 matrix: rows are quantized one by one to 15 bits, in a high and a low int8 part; sums of each part are int32 and
// exact, so that every path gives equal bits.
//
// The matrix lies as checkpoints have it, [out, in], the same memory that XLA's implementation reads: a dot walks both operands along
// `in`, 64 numbers at a time, and sums up the lanes at its end. Packing would save those last sums and cost a second copy of the weights.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "../native/instructions.h"
#include "../native/parallel.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define JAXPAGED_X86 1
#endif

namespace jaxpaged {
namespace int8 {

constexpr int kLowLevels = 128;  // a number of a row is high * kLowLevels + low
constexpr float kLevels = 127.0f * kLowLevels;
constexpr float kStep = static_cast<float>(1 / (127.0 * kLowLevels));
constexpr float kLeastPeak = 1e-30f;
constexpr int64_t kLanes = 64;        // numbers of a row that are looked at at once; rows are padded to a multiple of it
constexpr int64_t kBlockOuts = 4;     // rows of the matrix that are walked side by side
constexpr int64_t kChunkBytes = 32 << 10;

inline int64_t padded(int64_t num_in) { return (num_in + kLanes - 1) / kLanes * kLanes; }

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

// Quantized rows: `values` [num_parts, padded(in)], the high part of each row and then its low part. For VNNI, which multiplies unsigned by
// signed numbers, 128 is added to each. Padding is anything. `scales` [num_parts / 2].
struct Rows {
  const uint8_t* values;
  const float* scales;
  int64_t num_parts, num_in, stride;
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

// --- portable

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
    for (int64_t r = 0; r < rows.num_parts / 2; ++r) {
      const int8_t* high = reinterpret_cast<const int8_t*>(rows.values + 2 * r * rows.stride);
      const int8_t* low = high + rows.stride;
      int32_t of_high = 0, of_low = 0;
      for (int64_t i = 0; i < matrix.num_in; ++i) {
        of_high += static_cast<int32_t>(high[i]) * weight[i];
        of_low += static_cast<int32_t>(low[i]) * weight[i];
      }
      out[r * matrix.num_out + o] = combined(of_high, of_low, matrix.scales[o], rows.scales[r]);
    }
  }
}

#if defined(JAXPAGED_X86)

// --- AVX2: int8 widened to int16, pairs multiplied and added

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
  const int8_t* weights[kBlockOuts / 2];
  for (int64_t w = 0; w < kBlockOuts / 2; ++w) weights[w] = matrix.values + (o + (w < num_outs ? w : 0)) * num_in;
  const int8_t* own[kRows];
  for (int r = 0; r < kRows; ++r) own[r] = reinterpret_cast<const int8_t*>(rows.values + (row + r) * rows.stride);
  __m256i sums[kRows][kBlockOuts / 2];
  for (auto& of_row : sums)
    for (auto& sum : of_row) sum = _mm256_setzero_si256();
  for (int64_t i = 0; i < whole; i += 16) {
    __m256i w[kBlockOuts / 2];
    for (int64_t j = 0; j < kBlockOuts / 2; ++j) w[j] = load16(weights[j] + i);
    for (int r = 0; r < kRows; ++r) {
      const __m256i x = load16(own[r] + i);
      for (int64_t j = 0; j < kBlockOuts / 2; ++j) sums[r][j] = _mm256_add_epi32(sums[r][j], _mm256_madd_epi16(x, w[j]));
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
  constexpr int64_t step = kBlockOuts / 2;
  for (int64_t o = first; o < last; o += step) {
    const int64_t num_outs = last - o < step ? last - o : step;
    int64_t row = 0;
    for (; row + 4 <= rows.num_parts; row += 4) tile_avx2<4>(rows, matrix, row, o, num_outs, out);
    for (; row < rows.num_parts; row += 2) tile_avx2<2>(rows, matrix, row, o, num_outs, out);
  }
}

// --- AVX512-VNNI: unsigned times signed bytes, four at a time; 128 is added to rows, and 128 times the sum of weights taken off again

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
  const int64_t num_in = matrix.num_in, whole = num_in / kLanes * kLanes, stride = rows.stride;
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
    if (rows.num_parts >= 4) {
      tile_avx512<4, true>(rows, matrix, 0, o, num_outs, corrections, out);
      row = 4;
    } else {
      tile_avx512<2, true>(rows, matrix, 0, o, num_outs, corrections, out);
      row = 2;
    }
    for (; row + 6 <= rows.num_parts; row += 6) tile_avx512<6, false>(rows, matrix, row, o, num_outs, corrections, out);
    for (; row + 4 <= rows.num_parts; row += 4) tile_avx512<4, false>(rows, matrix, row, o, num_outs, corrections, out);
    for (; row < rows.num_parts; row += 2) tile_avx512<2, false>(rows, matrix, row, o, num_outs, corrections, out);
  }
}

#endif  // JAXPAGED_X86

template <typename Number>
void quantize_row(Instructions instructions, const Number* row, int64_t num_in, uint8_t* high, uint8_t* low, float* scale) {
#if defined(JAXPAGED_X86)
  if (instructions == Instructions::kAvx512Vnni) return quantize_row_avx512(row, num_in, high, low, scale);
#endif
  quantize_row_portable(row, num_in, high, low, scale);
}

inline void multiply(Instructions instructions, const Rows& rows, const Matrix& matrix, int64_t first, int64_t last, float* out) {
#if defined(JAXPAGED_X86)
  if (instructions == Instructions::kAvx512Vnni) return multiply_avx512(rows, matrix, first, last, out);
  if (instructions == Instructions::kAvx2) return multiply_avx2(rows, matrix, first, last, out);
#endif
  multiply_portable(rows, matrix, first, last, out);
}

// out [rows, out] = x [rows, in] times the matrix. Number is float, or uint16_t for bfloat16.
template <typename Number>
void matmul(Threads& threads, Instructions instructions, const Number* x, int64_t num_rows, const Matrix& matrix, float* out) {
  if (num_rows == 0 || matrix.num_out == 0) return;
  const int64_t num_in = matrix.num_in, stride = padded(num_in);
  // Kept between calls: a step makes hundreds of them.
  static thread_local std::vector<uint8_t> values;
  static thread_local std::vector<float> scales;
  if (static_cast<int64_t>(values.size()) < 2 * num_rows * stride) values.resize(2 * num_rows * stride);
  if (static_cast<int64_t>(scales.size()) < num_rows) scales.resize(num_rows);
  uint8_t* const quantized = values.data();
  float* const row_scales = scales.data();

  constexpr int64_t kRowsOfChunk = 32;
  for_chunks(threads, (num_rows + kRowsOfChunk - 1) / kRowsOfChunk, [=](int64_t chunk) {
    const int64_t stop = (chunk + 1) * kRowsOfChunk < num_rows ? (chunk + 1) * kRowsOfChunk : num_rows;
    for (int64_t row = chunk * kRowsOfChunk; row < stop; ++row) {
      uint8_t* const high = quantized + 2 * row * stride;
      quantize_row(instructions, x + row * num_in, num_in, high, high + stride, row_scales + row);
    }
  });

  const Rows rows{quantized, row_scales, 2 * num_rows, num_in, stride};
  // Chunks of whole blocks whose weights fit the first cache a few times over, and at least four a thread where there is so much.
  int64_t outs = kChunkBytes / (num_in > 0 ? num_in : 1);
  const int64_t even = matrix.num_out / (4 * threads.count());
  outs = even < outs ? even : outs;
  const int64_t least = 4 * kBlockOuts;
  outs = (outs < least ? least : outs) / kBlockOuts * kBlockOuts;
  for_chunks(threads, (matrix.num_out + outs - 1) / outs, [=, &matrix](int64_t chunk) {
    const int64_t first = chunk * outs;
    multiply(instructions, rows, matrix, first, first + outs < matrix.num_out ? first + outs : matrix.num_out, out);
  });
}

}  // namespace int8
}  // namespace jaxpaged
