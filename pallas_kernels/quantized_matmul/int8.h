// Rows times an int8 matrix: rows are quantized one by one to 15 bits, in a high and a low int8 part; sums of each part are int32 and
// exact, so that every path gives equal bits.
//
// The matrix lies as checkpoints have it, [out, in], the same memory that XLA's implementation reads, and is read once; packing it would
// cost a second copy. Quantized rows may serve several matrices: quantize_block() for each block, then multiply_rows() for each matrix.
#pragma once

#include <limits>
#include <vector>

#include "../native/parallel.h"
#include "int8_amx.h"
#include "int8_avx2.h"
#include "int8_avx512.h"
#include "int8_rows.h"

namespace jaxpaged {
namespace int8 {

constexpr int64_t kChunkBytes = 32 << 10;
constexpr int64_t kLeastOuts = 32;       // of a chunk; chunks are multiples of it
constexpr int64_t kFewRows = 4;          // so many are multiplied as fast without tiles

// Up to so many rows a path is faster than XLA's own product, which packs a copy of the matrix for each call.
inline int64_t max_rows(Path path) { return path == Path::kAmx ? std::numeric_limits<int64_t>::max() : 8; }

// Room for so many rows, on this thread and until it asks again: it is kept between calls, since a step makes hundreds of them.
inline Rows make_rows(Path path, int64_t num_rows, int64_t num_in) {
  static thread_local std::vector<uint8_t> values;
  static thread_local std::vector<float> scales;
  const int64_t whole = ceil_div(num_rows, kBlockRows) * kBlockRows, num_bytes = 2 * whole * padded(num_in) + kLanes;
  if (static_cast<int64_t>(values.size()) < num_bytes) values.resize(num_bytes);
  if (static_cast<int64_t>(scales.size()) < whole) scales.resize(whole);
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(values.data()) + kLanes - 1) / kLanes * kLanes;
  return {path, path == Path::kAmx && num_rows > kFewRows, num_rows, num_in, reinterpret_cast<uint8_t*>(begin), scales.data()};
}

// Quantizes a block of up to 16 rows, of which `x` is the first. Number is float, or uint16_t for bfloat16.
template <typename Number>
void quantize_block(const Rows& rows, int64_t block, const Number* x) {
  const int64_t num_rows = rows.rows_of(block), first = block * kBlockRows;
  float* const scales = rows.scales + first;
#if defined(JAXPAGED_X86)
  if (rows.is_packed) {
    for (int64_t r = num_rows; r < kBlockRows; ++r) scales[r] = 0.0f;
    return pack_block(x, num_rows, rows.num_in, rows.packed(block), scales);
  }
#endif
  for (int64_t r = 0; r < num_rows; ++r) {
    uint8_t* const high = rows.values + 2 * (first + r) * rows.stride();
    uint8_t* const low = high + rows.stride();
    const Number* const row = x + r * rows.num_in;
#if defined(JAXPAGED_X86)
    if (rows.path >= Path::kAvx512Vnni) {
      quantize_row_avx512(row, rows.num_in, high, low, scales + r);
      continue;
    }
#endif
    quantize_row_portable(row, rows.num_in, high, low, scales + r);
  }
}

// Outputs [first, last) of all rows, on this thread.
inline void multiply_outs(const Rows& rows, const Matrix& matrix, int64_t first, int64_t last, float* out) {
#if defined(JAXPAGED_X86) && defined(JAXPAGED_AMX)
  if (rows.is_packed) {
    static thread_local std::vector<int8_t> spare;
    if (static_cast<int64_t>(spare.size()) < kTileOuts * padded(matrix.num_in)) spare.resize(kTileOuts * padded(matrix.num_in));
    return multiply_amx(rows, matrix, first, last, spare.data(), out);
  }
#endif
#if defined(JAXPAGED_X86)
  if (rows.path >= Path::kAvx512Vnni) return multiply_avx512(rows, matrix, first, last, out);
  if (rows.path == Path::kAvx2) return multiply_avx2(rows, matrix, first, last, out);
#endif
  multiply_portable(rows, matrix, first, last, out);
}

// out [rows, out] = quantized rows times the matrix.
inline void multiply_rows(Threads& threads, const Rows& rows, const Matrix& matrix, float* out) {
  if (rows.num_rows == 0 || matrix.num_out == 0) return;
  // Chunks of whole blocks whose weights fit the first cache, and at least four a thread where there is so much.
  int64_t outs = kChunkBytes / (matrix.num_in > 0 ? matrix.num_in : 1);
  const int64_t even = matrix.num_out / (4 * threads.count());
  outs = even < outs ? even : outs;
  outs = outs / kLeastOuts * kLeastOuts;
  if (outs < kLeastOuts) outs = kLeastOuts;
  for_chunks(threads, ceil_div(matrix.num_out, outs), [=, &rows, &matrix](int64_t chunk) {
    const int64_t first = chunk * outs;
    multiply_outs(rows, matrix, first, first + outs < matrix.num_out ? first + outs : matrix.num_out, out);
  });
}

// out [rows, out] = x [rows, in] times the matrix. Number is float, or uint16_t for bfloat16.
template <typename Number>
void matmul(Threads& threads, Path path, const Number* x, int64_t num_rows, const Matrix& matrix, float* out) {
  if (num_rows == 0 || matrix.num_out == 0) return;
  const Rows rows = make_rows(path, num_rows, matrix.num_in);
  for_chunks(threads, rows.num_blocks(), [=, &rows](int64_t block) { quantize_block(rows, block, x + block * kBlockRows * rows.num_in); });
  multiply_rows(threads, rows, matrix, out);
}

}  // namespace int8
}  // namespace jaxpaged
