// Rows times a matrix of float32 or bfloat16 that lies as checkpoints have it, [out, in].
//
// Sums are float32, added up in one order for each output: on one machine a row's result is the same bits whatever rows are beside it, one or a
// thousand. The work is in dense_tile.h, compiled for each set of instructions, and in dense_amx.h.
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

// A product cut into chunks: of outputs, of at most kChunkBytes of weights and at least four a thread where there is so much; and of so many rows
// that they stay in the second cache. Weights are read once for those, and again for the next.
struct Chunks {
  int64_t num_rows, num_out, outs, of_outs, most_rows;

  // Whole blocks of outputs, and of rows; `numbers` in a row, and so many bytes each.
  Chunks(const Threads& threads, int64_t num_rows, int64_t num_out, int64_t numbers, int64_t bytes, int64_t block_outs, int64_t block_rows)
      : num_rows(num_rows), num_out(num_out) {
    const int64_t row_bytes = std::max<int64_t>(1, numbers * bytes);
    const int64_t most = std::min(kChunkBytes / row_bytes, num_out / (4 * threads.count()));
    outs = std::max(most / block_outs * block_outs, block_outs);
    of_outs = (num_out + outs - 1) / outs;
    most_rows = std::max(kRowsBytes / row_bytes / block_rows * block_rows, block_rows);
  }
  int64_t count() const { return (num_rows + most_rows - 1) / most_rows * of_outs; }
  int64_t first_row(int64_t chunk) const { return chunk / of_outs * most_rows; }
  int64_t rows(int64_t chunk) const { return std::min(most_rows, num_rows - first_row(chunk)); }
  int64_t first(int64_t chunk) const { return chunk % of_outs * outs; }
  int64_t last(int64_t chunk) const { return std::min(first(chunk) + outs, num_out); }
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

// out [rows, out] = x [rows, in] times the matrix, by vectors.
template <typename Row, typename Number>
void by_vectors(Threads& threads, Level level, const Row* x, int64_t num_rows, const Number* matrix, int64_t num_out, int64_t num_in, float* out) {
  constexpr int64_t kBlockOuts = 4, kBlockRows = 6;  // of all sets of instructions
  const Chunks chunks(threads, num_rows, num_out, num_in, sizeof(Row), kBlockOuts, kBlockRows);
  for_chunks(threads, chunks.count(), [=](int64_t chunk) {
    const int64_t row = chunks.first_row(chunk);
    const Product<Row, Number> product{x + row * num_in, matrix, out + row * num_out, chunks.rows(chunk), num_out, num_in};
    multiply(level, product, chunks.first(chunk), chunks.last(chunk));
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

// out [rows, out] = x [rows, in] times the matrix, by tiles.
inline void by_tiles(Threads& threads, const BFloat16* x, int64_t num_rows, const BFloat16* matrix, int64_t num_out, int64_t num_in, float* out) {
  static thread_local amx::PackedRows packed;
  uint32_t* const rows = packed.room(num_rows, num_in);
  const int64_t words = amx::steps(num_in) * amx::kTileWords;  // of 16 rows
  constexpr int64_t kRowsOfPacking = 4 * amx::kSide;
  for_chunks(threads, (num_rows + kRowsOfPacking - 1) / kRowsOfPacking, [=](int64_t chunk) {
    const int64_t last = std::min(num_rows, (chunk + 1) * kRowsOfPacking);
    for (int64_t row = chunk * kRowsOfPacking; row < last; row += amx::kSide)
      amx::pack(x + row * num_in, std::min(amx::kSide, last - row), num_in, rows + row / amx::kSide * words);
  });
  const Chunks chunks(threads, num_rows, num_out, num_in, sizeof(BFloat16), 2 * amx::kSide, 2 * amx::kSide);
  for_chunks(threads, chunks.count(), [=](int64_t chunk) {
    const int64_t row = chunks.first_row(chunk);
    amx::multiply(rows + row / amx::kSide * words, chunks.rows(chunk), matrix, num_out, num_in, chunks.first(chunk), chunks.last(chunk),
                  out + row * num_out);
  });
}

#endif

// out [rows, out] = x [rows, in] times the matrix.
template <typename Number>
void matmul(Threads& threads, Level level, const Number* x, int64_t num_rows, const Number* matrix, int64_t num_out, int64_t num_in, float* out) {
  if (num_rows == 0 || num_out == 0) return;
  if constexpr (std::is_same_v<Number, float>) {
    by_vectors(threads, level, x, num_rows, matrix, num_out, num_in, out);
  } else {
#if defined(JAXPAGED_AMX)
    if (level == Level::kTiles) return by_tiles(threads, x, num_rows, matrix, num_out, num_in, out);
    if (level == Level::kPairs) return by_vectors(threads, level, x, num_rows, matrix, num_out, num_in, out);
#endif
    by_vectors(threads, level, widened(threads, x, num_rows, num_in), num_rows, matrix, num_out, num_in, out);
  }
}

}  // namespace dense
}  // namespace jaxpaged
