// The products of groups with matrix tiles (AMX): 16 rows times 16 outputs of one group. A row's record is a row of the first operand, both
// parts side by side; the second operand has weights for one part and zeros for the other.
#pragma once

#include <vector>

#include "../native/amx.h"
#include "int4_avx512.h"

#if defined(JAXPAGED_X86) && defined(JAXPAGED_AMX)

namespace jaxpaged {
namespace groups {

#define JAXPAGED_AMX_GROUPS __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")))

constexpr int64_t kAmxRows = 16;
constexpr int64_t kLeastAmxRows = 12;  // of a block: fewer are done sooner without tiles
constexpr int64_t kLeastAmxTotal = 32;  // fewer do not pay for the unpacking
constexpr int64_t kUnpackedBytes = 2 * kTile * kGroup;

// Sums of two groups that follow one another, of the high and the low parts.
struct alignas(64) AmxSums {
  int32_t of[2][2][kAmxRows * kTile];
};

// A tile's weights as bytes, before and after each group as many zeros.
template <Bits bits>
JAXPAGED_AVX512_GROUPS void unpack_tile(const Matrix& matrix, int64_t t, uint8_t* unpacked) {
  const uint8_t* weights = matrix.values + t * matrix.num_groups * bytes_of_group(bits);
  const __m512i low_half = _mm512_set1_epi8(15);
  for (int64_t g = 0; g < matrix.num_groups; ++g, unpacked += kUnpackedBytes, weights += bytes_of_group(bits)) {
    for (int64_t q = 0; q < kQuads; ++q) {
      _mm512_storeu_si512(unpacked + 64 * q, _mm512_setzero_si512());
      __m512i own = _mm512_loadu_si512(weights + 64 * (bits == Bits::kFour ? q % 4 : q));
      if (bits == Bits::kFour) own = _mm512_and_si512(q < 4 ? own : _mm512_srli_epi16(own, 4), low_half);
      _mm512_storeu_si512(unpacked + 64 * (kQuads + q), own);
    }
  }
  std::memset(unpacked, 0, kUnpackedBytes / 2);
}

template <Bits bits, int parity>
JAXPAGED_AMX_GROUPS JAXPAGED_INLINED void sum_group_amx(const int8_t* own, int64_t stride, const uint8_t* unpacked, AmxSums& sums) {
  // Numbers of tiles are part of the instructions' names.
  _tile_loadd(4, own, stride);
  _tile_loadd(5, unpacked + kUnpackedBytes / 2, 64);
  _tile_loadd(6, unpacked, 64);
  if constexpr (parity == 0) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (bits == Bits::kFour) {
      _tile_dpbsud(0, 4, 5);
      _tile_dpbsud(1, 4, 6);
    } else {
      _tile_dpbssd(0, 4, 5);
      _tile_dpbssd(1, 4, 6);
    }
    _tile_stored(0, sums.of[0][0], 64);
    _tile_stored(1, sums.of[0][1], 64);
  } else {
    _tile_zero(2);
    _tile_zero(3);
    if constexpr (bits == Bits::kFour) {
      _tile_dpbsud(2, 4, 5);
      _tile_dpbsud(3, 4, 6);
    } else {
      _tile_dpbssd(2, 4, 5);
      _tile_dpbssd(3, 4, 6);
    }
    _tile_stored(2, sums.of[1][0], 64);
    _tile_stored(3, sums.of[1][1], 64);
  }
}

template <Bits bits, size_t... row>
JAXPAGED_AMX_GROUPS JAXPAGED_INLINED void add_group_amx(std::index_sequence<row...>, const AmxSums& sums, int64_t parity,
                                                        const uint16_t* of_scales, const uint16_t* of_minima, const int32_t* of_rows,
                                                        int64_t num_groups, __m512 (&added)[sizeof...(row)]) {
  const __m512 scales = load_float16_avx512(of_scales);
  const __m512 minima = bits == Bits::kFour ? load_float16_avx512(of_minima) : scales;
  const int32_t* high = sums.of[parity][0];
  const int32_t* low = sums.of[parity][1];
  // Weights of eight bits are signed here, so nothing is taken off.
  (add_sum<bits>(_mm512_load_si512(high + row * kTile), _mm512_load_si512(low + row * kTile),
                 bits == Bits::kFour ? of_rows[row * num_groups] : 0, scales, minima, added[row]),
   ...);
}

// One tile of outputs times up to 16 rows; rows behind the last are computed and not stored.
template <Bits bits, size_t... row>
JAXPAGED_AMX_GROUPS JAXPAGED_INLINED void block_amx(std::index_sequence<row...> each, const Rows& rows, const Matrix& matrix,
                                                    int64_t first_row, int64_t t, const uint8_t* unpacked, float* out) {
  AmxSums sums;
  __m512 added[sizeof...(row)];
  ((added[row] = _mm512_setzero_ps()), ...);
  const int64_t num_groups = matrix.num_groups;
  const uint16_t* scales = matrix.scales + t * num_groups * kTile;
  const uint16_t* minima = bits == Bits::kFour ? matrix.minima + t * num_groups * kTile : scales;
  const int8_t* own = rows.values + first_row * rows.stride;
  const int32_t* of_rows = rows.sums + first_row * num_groups;
  // The next group is on its way through the tiles while this one is scaled.
  sum_group_amx<bits, 0>(own, rows.stride, unpacked, sums);
  for (int64_t g = 0; g < num_groups; ++g) {
    if (g + 1 < num_groups) {
      const int8_t* next = own + (g + 1) * kRecord;
      const uint8_t* weights = unpacked + (g + 1) * kUnpackedBytes;
      if (g % 2 == 0) {
        sum_group_amx<bits, 1>(next, rows.stride, weights, sums);
      } else {
        sum_group_amx<bits, 0>(next, rows.stride, weights, sums);
      }
    }
    add_group_amx<bits>(each, sums, g % 2, scales + g * kTile, minima + g * kTile, of_rows + g, num_groups, added);
  }
  const int64_t count = rows.num_rows - first_row;
  (static_cast<void>(static_cast<int64_t>(row) < count
                         ? _mm512_storeu_ps(out + ((first_row + static_cast<int64_t>(row)) * matrix.num_tiles + t) * kTile,
                                            _mm512_mul_ps(added[row], _mm512_set1_ps(rows.scales[first_row + row])))
                         : static_cast<void>(0)),
   ...);
}

template <Bits bits>
JAXPAGED_AMX_GROUPS void multiply_amx(const Rows& rows, const Matrix& matrix, int64_t first, int64_t last, float* out) {
  static thread_local std::vector<uint8_t> unpacked;
  const int64_t room = matrix.num_groups * kUnpackedBytes + kUnpackedBytes;
  if (static_cast<int64_t>(unpacked.size()) < room) unpacked.resize(room);
  const Tiles tiles;
  for (int64_t t = first; t < last; ++t) {
    unpack_tile<bits>(matrix, t, unpacked.data());
    asm volatile("" ::: "memory");  // tiles are loaded without a word to the compiler of what they read
    int64_t row = 0;
    for (; rows.num_rows - row >= kLeastAmxRows; row += kAmxRows) {
      block_amx<bits>(std::make_index_sequence<kAmxRows>{}, rows, matrix, row, t, unpacked.data(), out);
    }
    rows_avx512<bits>(rows, matrix, row, t, out);
  }
}

}  // namespace groups
}  // namespace jaxpaged

#endif
