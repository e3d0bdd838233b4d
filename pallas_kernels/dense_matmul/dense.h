// Rows times a matrix of float32 or bfloat16, for few rows: bound by reading the matrix once.
//
// The matrix lies as checkpoints have it, [out, in]. Products and sums are float32, 16 sums an output which are added up in one order at the
// end: a row's result is the same bits whatever rows are beside it. The work is in dense_tile.h, compiled for each set of instructions.
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

namespace jaxpaged {
namespace dense {

constexpr int64_t kLanes = 16;
constexpr int64_t kBlockOuts = 4;  // rows of the matrix that are walked side by side
constexpr int64_t kChunkBytes = 64 << 10;
constexpr int64_t kAheadBytes = 2048;  // asked for before it is needed; see quantized_matmul/int8.h

inline int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// x: float32 rows, `stride` apart, zeros behind their numbers; matrix: [num_out, num_in].
template <typename Number>
struct Product {
  const float* x;
  const Number* matrix;
  float* out;  // [num_rows, num_out]
  int64_t num_rows, stride, num_out, num_in;
};

}  // namespace dense
}  // namespace jaxpaged

#define JAXPAGED_DENSE portable
#include "dense_tile.h"
#undef JAXPAGED_DENSE

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define JAXPAGED_DENSE_OF_X86 1
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define JAXPAGED_DENSE avx2
#include "dense_tile.h"
#undef JAXPAGED_DENSE
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
#define JAXPAGED_DENSE avx512
#include "dense_tile.h"
#undef JAXPAGED_DENSE
#pragma GCC pop_options
#elif defined(__x86_64__) && defined(__clang__)
#define JAXPAGED_DENSE_OF_X86 1
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#define JAXPAGED_DENSE avx2
#include "dense_tile.h"
#undef JAXPAGED_DENSE
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#define JAXPAGED_DENSE avx512
#include "dense_tile.h"
#undef JAXPAGED_DENSE
#pragma clang attribute pop
#endif

#if defined(JAXPAGED_AMX)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#include "dense_amx.h"
#pragma clang attribute pop
#else
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
#include "dense_amx.h"
#pragma GCC pop_options
#endif
#endif

namespace jaxpaged {
namespace dense {

// How products are added up. Each level takes what the one before does and more; float32 is the same from kAvx512 on.
enum class Level { kPortable, kAvx2, kAvx512, kTiles };

inline Level best_level() {
  switch (instructions()) {
    case Instructions::kAvx512Vnni: return amx_is_allowed() ? Level::kTiles : Level::kAvx512;
    case Instructions::kAvx2: return Level::kAvx2;
    default: return Level::kPortable;
  }
}

// Outputs of a chunk: whole blocks of at most kChunkBytes, and at least four chunks a thread where there is so much.
inline int64_t outs_of_chunk(const Threads& threads, int64_t num_out, int64_t bytes_of_out, int64_t block) {
  const int64_t outs = std::min(kChunkBytes / std::max<int64_t>(1, bytes_of_out), num_out / (4 * threads.count()));
  return std::max(outs / block * block, block);
}

// out [rows, out] = x [rows, in] times the matrix, by vectors.
template <typename Number>
void matmul_by_vectors(Threads& threads, Level level, const Number* x, int64_t num_rows, const Number* matrix, int64_t num_out, int64_t num_in,
                       float* out) {
  const int64_t stride = padded(num_in);
  static thread_local std::vector<float> rows;  // kept between calls: a step makes hundreds of them
  rows.assign(num_rows * stride, 0.0f);
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t i = 0; i < num_in; ++i) rows[row * stride + i] = widened(x[row * num_in + i]);
  const Product<Number> product{rows.data(), matrix, out, num_rows, stride, num_out, num_in};
  const int64_t outs = outs_of_chunk(threads, num_out, num_in * sizeof(Number), kBlockOuts);
  for_chunks(threads, (num_out + outs - 1) / outs, [&product, level, outs](int64_t chunk) {
    const int64_t first = chunk * outs, last = std::min(first + outs, product.num_out);
    switch (level) {
#if defined(JAXPAGED_DENSE_OF_X86)
      case Level::kTiles:
      case Level::kAvx512: return avx512::multiply(product, first, last);
      case Level::kAvx2: return avx2::multiply(product, first, last);
#endif
      default: return portable::multiply(product, first, last);
    }
  });
}

#if defined(JAXPAGED_AMX)

// out [rows, out] = x [rows, in] times the matrix, by tiles.
inline void matmul_by_tiles(Threads& threads, const BFloat16* x, int64_t num_rows, const BFloat16* matrix, int64_t num_out, int64_t num_in,
                            float* out) {
  static thread_local amx::PackedRows packed;
  uint32_t* const rows = packed.room(num_rows, num_in);
  const int64_t words = amx::steps(num_in) * amx::kTileWords;  // of 16 rows
  constexpr int64_t kRowsOfPacking = 4 * amx::kSide;
  for_chunks(threads, (num_rows + kRowsOfPacking - 1) / kRowsOfPacking, [=](int64_t chunk) {
    const int64_t last = std::min(num_rows, (chunk + 1) * kRowsOfPacking);
    for (int64_t row = chunk * kRowsOfPacking; row < last; row += amx::kSide)
      amx::pack(x + row * num_in, std::min(amx::kSide, last - row), num_in, rows + row / amx::kSide * words);
  });
  // So many rows that they stay in the second cache: the weights are read once for them, and again for the next.
  constexpr int64_t kRowsOfChunk = 512;
  const int64_t outs = outs_of_chunk(threads, num_out, num_in * sizeof(BFloat16), 2 * amx::kSide);
  const int64_t chunks_of_outs = (num_out + outs - 1) / outs, chunks_of_rows = (num_rows + kRowsOfChunk - 1) / kRowsOfChunk;
  for_chunks(threads, chunks_of_rows * chunks_of_outs, [=](int64_t chunk) {
    const int64_t row = chunk / chunks_of_outs * kRowsOfChunk, first = chunk % chunks_of_outs * outs;
    amx::multiply(rows + row / amx::kSide * words, std::min(kRowsOfChunk, num_rows - row), matrix, num_out, num_in, first,
                  std::min(first + outs, num_out), out + row * num_out);
  });
}

#endif

// out [rows, out] = x [rows, in] times the matrix.
template <typename Number>
void matmul(Threads& threads, Level level, const Number* x, int64_t num_rows, const Number* matrix, int64_t num_out, int64_t num_in, float* out) {
  if (num_rows == 0 || num_out == 0) return;
#if defined(JAXPAGED_AMX)
  if constexpr (std::is_same_v<Number, BFloat16>)
    if (level == Level::kTiles) return matmul_by_tiles(threads, x, num_rows, matrix, num_out, num_in, out);
#endif
  matmul_by_vectors(threads, level, x, num_rows, matrix, num_out, num_in, out);
}

}  // namespace dense
}  // namespace jaxpaged
