// Rows times a matrix of float32 or bfloat16 that lies as checkpoints have it, [out, in].
//
// Sums are float32, added up in one order for each output: on one machine a row's result is the same bits whatever rows are beside it, one
// or a thousand. The work is in dense_tile.h, compiled for each set of instructions, and in dense_amx.h; here it is cut into chunks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../native/amx.h"
#include "../native/instructions.h"
#include "../native/numbers.h"
#include "../native/parallel.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define JAXPAGED_DENSE_OF_X86 1
#endif

namespace jaxpaged {
namespace dense {

constexpr int64_t kChunkBytes = 64 << 10;
constexpr int64_t kRowsBytes = 768 << 10;
constexpr int64_t kNearBytes = 24 << 10;  // of weights that stay in the first cache while rows go by
constexpr int64_t kAheadBytes = 2048;     // asked for before it is needed; see quantized_matmul/int8.h

// x: [num_rows, num_in]; matrix: [num_out, num_in].
template <typename Row, typename Number>
struct Product {
  const Row* x;
  const Number* matrix;
  float* out;  // [num_rows, num_out]
  int64_t num_rows, num_out, num_in;
};

}  // namespace dense
}  // namespace jaxpaged

#define JAXPAGED_DENSE portable
#define JAXPAGED_DENSE_LANES 4
#include "dense_tile.h"
#undef JAXPAGED_DENSE
#undef JAXPAGED_DENSE_LANES

#if defined(JAXPAGED_DENSE_OF_X86)
#if defined(__clang__)
#define JAXPAGED_DENSE_LANES 8
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#define JAXPAGED_DENSE avx2
#include "dense_tile.h"
#undef JAXPAGED_DENSE
#pragma clang attribute pop
#undef JAXPAGED_DENSE_LANES
#define JAXPAGED_DENSE_LANES 16
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#define JAXPAGED_DENSE avx512
#include "dense_tile.h"
#undef JAXPAGED_DENSE
#pragma clang attribute pop
#if defined(JAXPAGED_AMX)
#define JAXPAGED_DENSE_PAIRS 1
#pragma clang attribute push(__attribute__((target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#define JAXPAGED_DENSE pairs
#include "dense_tile.h"
#undef JAXPAGED_DENSE
#pragma clang attribute pop
#undef JAXPAGED_DENSE_PAIRS
#pragma clang attribute push(__attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#include "dense_amx.h"
#pragma clang attribute pop
#endif
#undef JAXPAGED_DENSE_LANES
#else
#define JAXPAGED_DENSE_LANES 8
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define JAXPAGED_DENSE avx2
#include "dense_tile.h"
#undef JAXPAGED_DENSE
#pragma GCC pop_options
#undef JAXPAGED_DENSE_LANES
#define JAXPAGED_DENSE_LANES 16
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
#define JAXPAGED_DENSE avx512
#include "dense_tile.h"
#undef JAXPAGED_DENSE
#pragma GCC pop_options
#if defined(JAXPAGED_AMX)
#define JAXPAGED_DENSE_PAIRS 1
#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
#define JAXPAGED_DENSE pairs
#include "dense_tile.h"
#undef JAXPAGED_DENSE
#pragma GCC pop_options
#undef JAXPAGED_DENSE_PAIRS
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
#include "dense_amx.h"
#pragma GCC pop_options
#endif
#undef JAXPAGED_DENSE_LANES
#endif
#endif

namespace jaxpaged {
namespace dense {

// How products are added up. Each level takes what the one before does and more; float32 is the same from kAvx512 on.
enum class Level { kPortable, kAvx2, kAvx512, kPairs, kTiles };

inline Level best_level() {
  switch (instructions()) {
    case Instructions::kAvx512Vnni:
#if defined(JAXPAGED_AMX)
      if (amx_is_allowed()) return Level::kTiles;
      if (__builtin_cpu_supports("avx512bf16")) return Level::kPairs;
#endif
      return Level::kAvx512;
    case Instructions::kAvx2: return Level::kAvx2;
    default: return Level::kPortable;
  }
}

// Rows side by side that one matrix multiplies, at least one.
template <typename Number>
struct Part {
  const Number* matrix;  // [num_out, num_in]
  int64_t first_row, num_rows;
  int64_t first_chunk, first_tile;  // found by `Chunks`, and by `by_tiles`: tiles of 16 rows
};

// The part that has the `index`th of what `first` counts.
template <typename Number>
const Part<Number>& part_of(const Part<Number>* parts, int64_t num_parts, int64_t Part<Number>::*first, int64_t index) {
  const auto is_before = [first](int64_t index, const Part<Number>& part) { return index < part.*first; };
  return *(std::upper_bound(parts, parts + num_parts, index, is_before) - 1);
}

// Products cut into chunks: of outputs, of at most kChunkBytes of weights and at least four a thread where there is so much; and of so many
// rows that they stay in the second cache. Weights are read once for those, and again for the next.
template <typename Number>
class Chunks {
 public:
  struct Chunk {
    const Part<Number>& part;
    int64_t row, num_rows, first, last;  // rows from the part's first on; outputs
  };

  // Whole blocks of outputs, and of rows that are `row_bytes` long.
  Chunks(const Threads& threads, Part<Number>* parts, int64_t num_parts, int64_t num_out, int64_t num_in, int64_t row_bytes,
         int64_t block_outs, int64_t block_rows)
      : parts_(parts), num_parts_(num_parts), num_out_(num_out) {
    const int64_t out_bytes = std::max<int64_t>(1, num_in * sizeof(Number));
    const int64_t most = std::min(kChunkBytes / out_bytes, num_out / (4 * threads.count()));
    outs_ = std::max(most / block_outs * block_outs, block_outs);
    of_outs_ = (num_out + outs_ - 1) / outs_;
    rows_ = std::max(kRowsBytes / std::max<int64_t>(1, row_bytes) / block_rows * block_rows, block_rows);
    for (int64_t part = 0; part < num_parts; ++part) {
      parts[part].first_chunk = count_;
      count_ += (parts[part].num_rows + rows_ - 1) / rows_ * of_outs_;
    }
  }
  int64_t count() const { return count_; }
  Chunk operator[](int64_t index) const {
    const Part<Number>& part = part_of(parts_, num_parts_, &Part<Number>::first_chunk, index);
    const int64_t own = index - part.first_chunk, row = own / of_outs_ * rows_, first = own % of_outs_ * outs_;
    return {part, row, std::min(rows_, part.num_rows - row), first, std::min(first + outs_, num_out_)};
  }

 private:
  const Part<Number>* parts_;
  int64_t num_parts_, num_out_, outs_, of_outs_, rows_, count_ = 0;
};

template <typename Row, typename Number>
void multiply(Level level, const Product<Row, Number>& product, int64_t first, int64_t last) {
#if defined(JAXPAGED_DENSE_OF_X86)
  if constexpr (std::is_same_v<Row, BFloat16>) {
#if defined(JAXPAGED_AMX)
    return pairs::multiply(product, first, last);
#endif
  } else {
    if (level >= Level::kAvx512) return avx512::multiply(product, first, last);
    if (level == Level::kAvx2) return avx2::multiply(product, first, last);
  }
#endif
  if constexpr (std::is_same_v<Row, float>) portable::multiply(product, first, last);
}

template <typename Row, typename Number>
void by_vectors(Threads& threads, Level level, const Row* x, Part<Number>* parts, int64_t num_parts, int64_t num_out, int64_t num_in,
                float* out) {
  constexpr int64_t kBlockOuts = 4, kBlockRows = 6;  // of all sets of instructions
  const Chunks<Number> chunks(threads, parts, num_parts, num_out, num_in, num_in * sizeof(Row), kBlockOuts, kBlockRows);
  for_chunks(threads, chunks.count(), [=, &chunks](int64_t index) {
    const auto chunk = chunks[index];
    const int64_t row = chunk.part.first_row + chunk.row;
    const Product<Row, Number> product{x + row * num_in, chunk.part.matrix, out + row * num_out, chunk.num_rows, num_out, num_in};
    multiply(level, product, chunk.first, chunk.last);
  });
}

// Rows in float32, kept between calls: a step makes hundreds of them.
inline const float* widened(Threads& threads, const BFloat16* x, int64_t num_rows, int64_t num_in) {
  static thread_local std::vector<float> wide;
  const int64_t count = num_rows * num_in;
  if (static_cast<int64_t>(wide.size()) < count) wide.resize(count);
  float* const to = wide.data();
  constexpr int64_t kOfChunk = 32 << 10;
  for_chunks(threads, (count + kOfChunk - 1) / kOfChunk, [=](int64_t chunk) {
    for (int64_t i = chunk * kOfChunk; i < std::min(count, (chunk + 1) * kOfChunk); ++i) to[i] = jaxpaged::widened(x[i]);
  });
  return to;
}

#if defined(JAXPAGED_AMX)

inline void by_tiles(Threads& threads, const BFloat16* x, Part<BFloat16>* parts, int64_t num_parts, int64_t num_out, int64_t num_in,
                     float* out) {
  static thread_local amx::PackedRows packed;
  int64_t num_tiles = 0;
  for (int64_t part = 0; part < num_parts; ++part) {
    parts[part].first_tile = num_tiles;
    num_tiles += (parts[part].num_rows + amx::kSide - 1) / amx::kSide;
  }
  uint32_t* const rows = packed.room(num_tiles * amx::kSide, num_in);
  const int64_t words = amx::steps(num_in) * amx::kTileWords;  // of 16 rows
  constexpr int64_t kTilesOfChunk = 4;
  for_chunks(threads, (num_tiles + kTilesOfChunk - 1) / kTilesOfChunk, [=](int64_t chunk) {
    for (int64_t tile = chunk * kTilesOfChunk; tile < std::min(num_tiles, (chunk + 1) * kTilesOfChunk); ++tile) {
      const Part<BFloat16>& part = part_of(parts, num_parts, &Part<BFloat16>::first_tile, tile);
      const int64_t row = (tile - part.first_tile) * amx::kSide;
      amx::pack(x + (part.first_row + row) * num_in, std::min(amx::kSide, part.num_rows - row), num_in, rows + tile * words);
    }
  });
  const Chunks<BFloat16> chunks(threads, parts, num_parts, num_out, num_in, num_in * sizeof(BFloat16), 2 * amx::kSide, 2 * amx::kSide);
  for_chunks(threads, chunks.count(), [=, &chunks](int64_t index) {
    const auto chunk = chunks[index];
    const uint32_t* const own = rows + (chunk.part.first_tile + chunk.row / amx::kSide) * words;
    float* const to = out + (chunk.part.first_row + chunk.row) * num_out;
    amx::multiply(own, chunk.num_rows, chunk.part.matrix, num_out, num_in, chunk.first, chunk.last, to);
  });
}

#endif

// out [row, out] = x [row, in] times the matrix of its part, for the rows of all parts, which follow one another from row 0 on.
template <typename Number>
void multiply_parts(Threads& threads, Level level, const Number* x, Part<Number>* parts, int64_t num_parts, int64_t num_out, int64_t num_in,
                    float* out) {
  if (num_parts == 0 || num_out == 0) return;
  if constexpr (std::is_same_v<Number, float>) {
    by_vectors(threads, level, x, parts, num_parts, num_out, num_in, out);
  } else {
#if defined(JAXPAGED_AMX)
    if (level == Level::kTiles) return by_tiles(threads, x, parts, num_parts, num_out, num_in, out);
    if (level == Level::kPairs) return by_vectors(threads, level, x, parts, num_parts, num_out, num_in, out);
#endif
    const Part<Number>& last = parts[num_parts - 1];
    const float* const wide = widened(threads, x, last.first_row + last.num_rows, num_in);
    by_vectors(threads, level, wide, parts, num_parts, num_out, num_in, out);
  }
}

// out [rows, out] = x [rows, in] times the matrix.
template <typename Number>
void matmul(Threads& threads, Level level, const Number* x, int64_t num_rows, const Number* matrix, int64_t num_out, int64_t num_in,
            float* out) {
  Part<Number> part{matrix, 0, num_rows, 0, 0};
  multiply_parts(threads, level, x, &part, num_rows > 0 ? 1 : 0, num_out, num_in, out);
}

}  // namespace dense
}  // namespace jaxpaged
