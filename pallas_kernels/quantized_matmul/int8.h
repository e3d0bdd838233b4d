// Rows times an int8 matrix: rows are quantized one by one to 15 bits, in a high and a low int8 part; sums of each part are int32 and
// exact, so that every path gives equal bits.
//
// The matrix lies as checkpoints have it, [out, in], the same memory that XLA's implementation reads, and is read once; packing it would
// cost a second copy. Quantized rows may serve several matrices: quantize_block() for each block, then multiply_rows() for each matrix.
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "../native/ranges.h"
#include "int8_amx.h"
#include "int8_avx2.h"
#include "int8_avx512.h"
#include "int8_rows.h"

namespace jaxpaged {
namespace int8 {

constexpr int64_t kChunkBytes = 128 << 10;
constexpr int64_t kChunkBytesOfFew = 32 << 10;
constexpr int64_t kLeastOuts = 32;  // of a chunk; chunks are multiples of it
constexpr int64_t kFewRows = 2;     // so many are multiplied as fast without tiles

// What a thread sets up before it multiplies.
class Worker {
 public:
  explicit Worker(const Rows& rows) {
#if defined(JAXPAGED_AMX)
    if (rows.is_packed) tiles_.emplace();
#endif
  }

 private:
#if defined(JAXPAGED_AMX)
  std::optional<Tiles> tiles_;
#endif
};

// Up to so many rows a path was measured to be faster than XLA's own product, which copies the layer's matrix out of its stack first.
inline int64_t max_rows(Path path) {
  switch (path) {
    case Path::kAmx: return std::numeric_limits<int64_t>::max();
    case Path::kAvx512Vnni: return 16;
    default: return 8;
  }
}

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

// Outputs [first, last) of all rows, on this thread, which holds a `Worker`.
inline void multiply_outs(const Rows& rows, const Matrix& matrix, int64_t first, int64_t last, float* out) {
#if defined(JAXPAGED_X86) && defined(JAXPAGED_AMX)
  if (rows.is_packed) return multiply_amx(rows, matrix, first, last, out);
#endif
#if defined(JAXPAGED_X86)
  if (rows.path >= Path::kAvx512Vnni) return multiply_avx512(rows, matrix, first, last, out);
  if (rows.path == Path::kAvx2) return multiply_avx2(rows, matrix, first, last, out);
#endif
  multiply_portable(rows, matrix, first, last, out);
}

// A matrix and where its product goes, [rows, out].
struct Product {
  Matrix matrix;
  float* out;
};

// Outputs of a chunk: a few rows of the matrix where it is bound by reading it, more where many rows of x pass it.
inline int64_t outs_of_chunk(const Rows& rows, int64_t num_out, int64_t num_threads) {
  int64_t outs = (rows.num_rows > kBlockRows ? kChunkBytes : kChunkBytesOfFew) / (rows.num_in > 0 ? rows.num_in : 1);
  const int64_t even = num_out / (4 * num_threads);
  outs = (even < outs ? even : outs) / kLeastOuts * kLeastOuts;
  return outs < kLeastOuts ? kLeastOuts : outs;
}

// Products of the same rows with one or more matrices of as many inputs. prepare(block) is called for each block of rows first, on any
// thread: it quantizes the block, if that has not been done.
template <typename Prepare>
void multiply_rows(Threads& threads, const Rows& rows, const Product* products, int64_t num_products, const Prepare& prepare) {
  int64_t num_out = 0, num_chunks = 0;
  for (int64_t p = 0; p < num_products; ++p) num_out += products[p].matrix.num_out;
  if (rows.num_rows == 0 || num_out == 0) return;
  const int64_t outs = outs_of_chunk(rows, num_out, threads.count());
  for (int64_t p = 0; p < num_products; ++p) num_chunks += ceil_div(products[p].matrix.num_out, outs);
  for_parts_and_chunks(threads, rows.num_blocks(), num_chunks, prepare, [=, &rows](auto&& take) {
    const Worker worker(rows);
    for (int64_t chunk = take(); chunk >= 0; chunk = take()) {
      const Product* product = products;
      for (int64_t of_this; chunk >= (of_this = ceil_div(product->matrix.num_out, outs)); ++product) chunk -= of_this;
      const int64_t first = chunk * outs, last = first + outs < product->matrix.num_out ? first + outs : product->matrix.num_out;
      multiply_outs(rows, product->matrix, first, last, product->out);
    }
  });
}

// out [rows, out] = rows that are quantized already times the matrix.
inline void multiply_rows(Threads& threads, const Rows& rows, const Matrix& matrix, float* out) {
  const Product product{matrix, out};
  multiply_rows(threads, rows, &product, 1, [](int64_t) {});
}

// out [rows, out] = x [rows, in] times the matrix. Number is float, or uint16_t for bfloat16.
template <typename Number>
void matmul(Threads& threads, Path path, const Number* x, int64_t num_rows, const Matrix& matrix, float* out) {
  const Rows rows = make_rows(path, num_rows, matrix.num_in);
  const Product product{matrix, out};
  const auto quantize = [=, &rows](int64_t block) { quantize_block(rows, block, x + block * kBlockRows * rows.num_in); };
  multiply_rows(threads, rows, &product, 1, quantize);
}

}  // namespace int8
}  // namespace jaxpaged
