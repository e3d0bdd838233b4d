// The int8 product with matrix tiles (AMX). A tile of 16 rows of the matrix, 64 inputs each, is read where it lies; tiles of rows are
// packed (`Rows`), so that a product has 16 outputs of 16 rows, or of both parts of 8.
#pragma once

#include <vector>

#include "int8_packed.h"

#if defined(JAXPAGED_X86) && defined(JAXPAGED_AMX)

namespace jaxpaged {
namespace int8 {

#define JAXPAGED_TILES __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")))

constexpr int64_t kTile = 16;
constexpr int64_t kTileOuts = 2 * kTile;  // outputs that are walked side by side
constexpr int64_t kTileBytes = kTile * kLanes;
constexpr int64_t kTileAhead = 2 * kTileOuts;  // outputs whose weights are asked for before they are needed
constexpr int64_t kGroupBytes = 512 << 10;  // packed rows that the weights of a chunk pass before the next are looked at

// Sums of four tiles [16 outputs, 16 rows].
struct alignas(64) TileSums {
  int32_t of[4][kTile * kTile];
};

// 32 outputs, of which `weights` has rows that are `stride` bytes apart, times a block of rows: the high and the low part of the first 16,
// then of the last. `ahead` are weights to ask memory for, or null.
JAXPAGED_TILES inline void sum_block(const int8_t* weights, int64_t stride, const uint8_t* packed, int64_t num_steps, const int8_t* ahead,
                                     TileSums& sums) {
  const int8_t* others = weights + kTile * stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < num_steps; ++step) {
    if (ahead != nullptr) {
      for (int64_t line = 0; line < kTileOuts; ++line) _mm_prefetch(ahead + (step * kTileOuts + line) * kLanes, _MM_HINT_T1);
    }
    _tile_loadd(4, weights + step * kLanes, stride);
    _tile_loadd(6, packed, kLanes);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, packed + kTileBytes, kLanes);
    _tile_dpbssd(1, 4, 7);
    _tile_loadd(5, others + step * kLanes, stride);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
    packed += 2 * kTileBytes;
  }
  _tile_stored(0, sums.of[0], kLanes);
  _tile_stored(1, sums.of[1], kLanes);
  _tile_stored(2, sums.of[2], kLanes);
  _tile_stored(3, sums.of[3], kLanes);
}

// The same of a block of up to 8 rows: both parts of the first 16 outputs in the first tile and of the last in the second. Two more tiles
// take every other step, since a product waits for the one before it in its tile.
JAXPAGED_TILES inline void sum_half_block(const int8_t* weights, int64_t stride, const uint8_t* packed, int64_t num_steps,
                                          const int8_t* ahead, TileSums& sums) {
  const int8_t* others = weights + kTile * stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < num_steps; ++step) {
    if (ahead != nullptr) {
      for (int64_t line = 0; line < kTileOuts; ++line) _mm_prefetch(ahead + (step * kTileOuts + line) * kLanes, _MM_HINT_T1);
    }
    _tile_loadd(4, weights + step * kLanes, stride);
    _tile_loadd(5, others + step * kLanes, stride);
    _tile_loadd(6, packed, kLanes);
    if (step % 2 == 0) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 5, 6);
    } else {
      _tile_dpbssd(2, 4, 6);
      _tile_dpbssd(3, 5, 6);
    }
    packed += kTileBytes;
  }
  _tile_stored(0, sums.of[0], kLanes);
  _tile_stored(1, sums.of[1], kLanes);
  _tile_stored(2, sums.of[2], kLanes);
  _tile_stored(3, sums.of[3], kLanes);
}

// Scales the sums of up to 16 outputs and stores them row by row.
JAXPAGED_AVX512 inline void store_block(const int32_t* high, const int32_t* low, const float* weight_scales, const float* row_scales,
                                        int64_t num_rows, int64_t num_outs, float* out, int64_t num_out) {
  const __m512 of_rows = _mm512_loadu_ps(row_scales);
  __m512i v[kTile];
  for (int64_t o = 0; o < kTile; ++o) {
    const float weight_scale = o < num_outs ? weight_scales[o] : 0.0f;
    v[o] = products(_mm512_loadu_si512(high + o * kTile), _mm512_loadu_si512(low + o * kTile), weight_scale, of_rows);
  }
  store_turned(v, num_rows, num_outs, out, num_out);
}

JAXPAGED_AVX512 inline void store_half_block(const int32_t* even, const int32_t* odd, const float* weight_scales, const float* row_scales,
                                             int64_t num_rows, int64_t num_outs, float* out, int64_t num_out) {
  const __m512 of_rows = _mm512_loadu_ps(row_scales);
  __m512i v[kTile];
  for (int64_t o = 0; o < kTile; ++o) {
    const __m512i both = _mm512_add_epi32(_mm512_loadu_si512(even + o * kTile), _mm512_loadu_si512(odd + o * kTile));
    v[o] = products(both, _mm512_shuffle_i32x4(both, both, 0x0e), o < num_outs ? weight_scales[o] : 0.0f, of_rows);
  }
  store_turned(v, num_rows, num_outs, out, num_out);
}

// The rows of the matrix from o on that a tile reads past the end of the matrix, copied to where they may be: zeros for what is not there.
inline const int8_t* copied_end(const Matrix& matrix, int64_t o) {
  static thread_local std::vector<int8_t> copy;
  const int64_t stride = padded(matrix.num_in), left = matrix.num_out - o, num_outs = left < kTileOuts ? left : kTileOuts;
  copy.assign(kTileOuts * stride, 0);
  const int8_t* const end = matrix.values + o * matrix.num_in;
  for (int64_t row = 0; row < num_outs; ++row) std::memcpy(copy.data() + row * stride, end + row * matrix.num_in, matrix.num_in);
  asm volatile("" ::: "memory");  // GCC's tile loads say nothing of the memory that they read
  return copy.data();
}

// Outputs [first, last) of all rows, on a thread whose tiles are set up.
JAXPAGED_TILES inline void multiply_amx(const Rows& rows, const Matrix& matrix, int64_t first, int64_t last, float* out) {
  const int64_t num_in = matrix.num_in, num_steps = padded(num_in) / kLanes, num_blocks = rows.num_blocks();
  const int64_t of_block = 2 * kBlockRows * padded(num_in);
  const int64_t group = kGroupBytes / of_block > 1 ? kGroupBytes / of_block : 1;
  TileSums sums;
  for (int64_t from = 0; from < num_blocks; from += group) {
    const int64_t to = from + group < num_blocks ? from + group : num_blocks;
    for (int64_t o = first; o < last; o += kTileOuts) {
      const int64_t num_outs = last - o < kTileOuts ? last - o : kTileOuts;
      const int8_t* weights = matrix.values + o * num_in;
      int64_t stride = num_in;
      const bool is_end = (o + kTileOuts - 1) * num_in + padded(num_in) > matrix.num_out * num_in;
      if (is_end) {
        stride = padded(num_in);
        weights = copied_end(matrix, o);
      }
      for (int64_t block = from; block < to; ++block) {
        const int8_t* ahead = block == 0 && !is_end ? weights + kTileAhead * num_in : nullptr;
        const uint8_t* packed = rows.packed(block);
        const int64_t num_rows = rows.rows_of(block);
        const float* row_scales = rows.scales + block * kBlockRows;
        float* const to_rows = out + block * kBlockRows * matrix.num_out + o;
        const bool is_half = num_rows <= kHalfRows;
        if (is_half) {
          sum_half_block(weights, stride, packed, num_steps, ahead, sums);
        } else {
          sum_block(weights, stride, packed, num_steps, ahead, sums);
        }
        for (int half = 0; half * kTile < num_outs; ++half) {
          const float* weight_scales = matrix.scales + o + half * kTile;
          const int64_t left = num_outs - half * kTile;
          float* const to = to_rows + half * kTile;
          if (is_half) {
            store_half_block(sums.of[half], sums.of[2 + half], weight_scales, row_scales, num_rows, left, to, matrix.num_out);
          } else {
            store_block(sums.of[2 * half], sums.of[2 * half + 1], weight_scales, row_scales, num_rows, left, to, matrix.num_out);
          }
        }
      }
    }
  }
}

}  // namespace int8
}  // namespace jaxpaged

#endif  // JAXPAGED_AMX
