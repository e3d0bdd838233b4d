// Some outputs of bfloat16 rows with Intel's matrix tiles; included by dense.h, compiled for processors that have them.
//
// A tile of weights is 16 outputs times 32 numbers as they lie in the matrix; a tile of rows is packed, 16 rows times 32 numbers in pairs;
// their product is 16 outputs times 16 rows of float32 sums. Each sum is of one row and one output, added up 32 numbers at a time in the
// order of the numbers: the same bits whatever rows and outputs lie beside it.
#pragma once

#include <immintrin.h>

#include "../native/amx.h"

namespace jaxpaged {
namespace dense {
namespace amx {

constexpr int64_t kSide = 16;        // rows, or outputs, of a tile
constexpr int64_t kNumbers = 32;     // of a row in a tile
constexpr int64_t kTileWords = 256;  // 32 bits each: two numbers, or one sum
constexpr int64_t kAheadTiles = 6;   // tiles of weights that are asked for before they are needed

inline int64_t steps(int64_t num_in) { return (num_in + kNumbers - 1) / kNumbers; }

// Room for packed rows, kept between calls.
class PackedRows {
 public:
  uint32_t* room(int64_t num_rows, int64_t num_in) {
    const int64_t words = (num_rows + kSide - 1) / kSide * steps(num_in) * kTileWords;
    if (static_cast<int64_t>(lines_.size()) < words / 16) lines_.resize(words / 16);
    return reinterpret_cast<uint32_t*>(lines_.data());
  }

 private:
  struct alignas(64) Line {
    uint32_t words[16];
  };
  std::vector<Line> lines_;
};

// Turns a tile over its diagonal, in place.
inline void transpose(__m512i (&tile)[kSide]) {
  __m512i pairs[kSide], quads[kSide];
  for (int i = 0; i < kSide; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(tile[i], tile[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(tile[i], tile[i + 1]);
  }
  for (int i = 0; i < kSide; i += 4) {
    quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512i even0 = _mm512_shuffle_i32x4(quads[i], quads[4 + i], 0x88);
    const __m512i even1 = _mm512_shuffle_i32x4(quads[8 + i], quads[12 + i], 0x88);
    const __m512i odd0 = _mm512_shuffle_i32x4(quads[i], quads[4 + i], 0xdd);
    const __m512i odd1 = _mm512_shuffle_i32x4(quads[8 + i], quads[12 + i], 0xdd);
    tile[i] = _mm512_shuffle_i32x4(even0, even1, 0x88);
    tile[4 + i] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
    tile[8 + i] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
    tile[12 + i] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
  }
}

// Packs at most 16 rows into steps(num_in) tiles, and zeros where there are no rows or numbers.
inline void pack(const BFloat16* x, int64_t num_rows, int64_t num_in, uint32_t* packed) {
  for (int64_t first = 0; first < num_in; first += kNumbers, packed += kTileWords) {
    const __mmask32 mask = num_in - first >= kNumbers ? ~0u : (1u << (num_in - first)) - 1;
    __m512i tile[kSide];
    for (int64_t r = 0; r < kSide; ++r)
      tile[r] = r < num_rows ? _mm512_maskz_loadu_epi16(mask, x + r * num_in + first) : _mm512_setzero_si512();
    transpose(tile);
    for (int64_t r = 0; r < kSide; ++r) _mm512_store_si512(packed + r * kSide, tile[r]);
  }
}

// Weights of up to 32 outputs, rows `stride` bytes apart that hold whole tiles.
struct Weights {
  const char* values;
  int64_t stride;
};

inline void ask_for(const char* values, int64_t stride, int64_t tile, int64_t num_steps) {
  // Behind the last tile of these outputs come those of the next 16.
  const char* const ahead = values + tile / num_steps * kSide * stride + tile % num_steps * 64;
  for (int64_t line = 0; line < kSide; ++line) _mm_prefetch(ahead + line * stride, _MM_HINT_T0);
}

// kOutTiles times 16 outputs of kRowTiles times 16 rows, into `sums`: tiles [out tile][row tile], each [output][row].
template <int kOutTiles, int kRowTiles, bool kIsFirst>
inline void block(const Weights& weights, const uint32_t* rows, int64_t num_steps, uint32_t* sums) {
  const char* const lower = weights.values + kSide * weights.stride;
  const uint32_t* const others = rows + num_steps * kTileWords;
  _tile_zero(0);
  if constexpr (kRowTiles == 2) _tile_zero(1);
  if constexpr (kOutTiles == 2) _tile_zero(2);
  if constexpr (kOutTiles == 2 && kRowTiles == 2) _tile_zero(3);
  for (int64_t step = 0; step < num_steps; ++step) {
    if (kIsFirst) {
      ask_for(weights.values, weights.stride, step + kAheadTiles, num_steps);
      if constexpr (kOutTiles == 2) ask_for(lower, weights.stride, step + kAheadTiles, num_steps);
    }
    _tile_loadd(4, rows + step * kTileWords, 64);
    if constexpr (kRowTiles == 2) _tile_loadd(5, others + step * kTileWords, 64);
    _tile_loadd(6, weights.values + 64 * step, weights.stride);
    _tile_dpbf16ps(0, 6, 4);
    if constexpr (kRowTiles == 2) _tile_dpbf16ps(1, 6, 5);
    if constexpr (kOutTiles == 2) {
      _tile_loadd(7, lower + 64 * step, weights.stride);
      _tile_dpbf16ps(2, 7, 4);
      if constexpr (kRowTiles == 2) _tile_dpbf16ps(3, 7, 5);
    }
  }
  _tile_stored(0, sums, 64);
  if constexpr (kRowTiles == 2) _tile_stored(1, sums + kTileWords, 64);
  if constexpr (kOutTiles == 2) _tile_stored(2, sums + kRowTiles * kTileWords, 64);
  if constexpr (kOutTiles == 2 && kRowTiles == 2) _tile_stored(3, sums + 3 * kTileWords, 64);
}

inline void store(const uint32_t* sums, float* out, int64_t num_out, int64_t num_rows, int64_t num_outs) {
  __m512i tile[kSide];
  for (int64_t r = 0; r < kSide; ++r) tile[r] = _mm512_load_si512(sums + r * kSide);
  transpose(tile);
  const __mmask16 mask = num_outs >= kSide ? 0xffff : (1u << num_outs) - 1;
  for (int64_t r = 0; r < std::min(num_rows, kSide); ++r) _mm512_mask_storeu_epi32(out + r * num_out, mask, tile[r]);
}

// Where sums of up to kOutTiles times 16 outputs go.
struct Outputs {
  float* out;  // of the first row and output; rows are num_out apart
  int64_t num_out, num_rows, num_outs;
};

// kRowTiles times 16 rows from `row` on.
template <int kOutTiles, int kRowTiles, bool kIsFirst>
inline void run(const Weights& weights, const uint32_t* rows, int64_t row, int64_t num_steps, const Outputs& to) {
  alignas(64) uint32_t sums[kOutTiles * kRowTiles * kTileWords];
  block<kOutTiles, kRowTiles, kIsFirst>(weights, rows + row / kSide * num_steps * kTileWords, num_steps, sums);
  for (int64_t o = 0; o < kOutTiles; ++o) {
    for (int64_t r = 0; r < kRowTiles; ++r) {
      const int64_t first = row + r * kSide;
      store(sums + (o * kRowTiles + r) * kTileWords, to.out + first * to.num_out + o * kSide, to.num_out, to.num_rows - first,
            to.num_outs - o * kSide);
    }
  }
}

template <int kOutTiles>
inline void run_all(const Weights& weights, const uint32_t* rows, int64_t num_steps, const Outputs& to) {
  if (to.num_rows <= kSide) return run<kOutTiles, 1, true>(weights, rows, 0, num_steps, to);
  run<kOutTiles, 2, true>(weights, rows, 0, num_steps, to);
  int64_t row = 2 * kSide;
  for (; row + kSide < to.num_rows; row += 2 * kSide) run<kOutTiles, 2, false>(weights, rows, row, num_steps, to);
  if (row < to.num_rows) run<kOutTiles, 1, false>(weights, rows, row, num_steps, to);
}

// Outputs [first, last) of rows that `pack` packed, 16 by 16; `out` [num_rows, num_out].
inline void multiply(const uint32_t* rows, int64_t num_rows, const BFloat16* matrix, int64_t num_out, int64_t num_in, int64_t first,
                     int64_t last, float* out) {
  const Tiles tiles;
  const int64_t num_steps = steps(num_in), stride = num_in * sizeof(BFloat16);
  for (int64_t o = first; o < last; o += 2 * kSide) {
    const Outputs to{out + o, num_out, num_rows, std::min(2 * kSide, last - o)};
    Weights weights{reinterpret_cast<const char*>(matrix + o * num_in), stride};
    if (to.num_outs % kSide != 0 || num_in % kNumbers != 0) {
      // Tiles would reach beyond the matrix, or into the next row.
      static thread_local std::vector<BFloat16> whole;
      const int64_t wide = num_steps * kNumbers;
      whole.assign(2 * kSide * wide, BFloat16{0});
      for (int64_t i = 0; i < to.num_outs; ++i) std::memcpy(whole.data() + i * wide, matrix + (o + i) * num_in, stride);
      weights = {reinterpret_cast<const char*>(whole.data()), wide * static_cast<int64_t>(sizeof(BFloat16))};
    }
    if (to.num_outs > kSide) run_all<2>(weights, rows, num_steps, to);
    else run_all<1>(weights, rows, num_steps, to);
  }
}

}  // namespace amx
}  // namespace dense
}  // namespace jaxpaged
