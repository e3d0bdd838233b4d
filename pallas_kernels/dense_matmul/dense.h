// Rows times a matrix of float32 or bfloat16, for few rows: bound by reading the matrix once.
//
// The matrix lies as checkpoints have it, [out, in]. Products and sums are float32, 16 sums an output which are added up in one order at the
// end: a row's result is the same bits whatever rows are beside it. The work is in dense_tile.h, compiled for each set of instructions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

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

namespace jaxpaged {
namespace dense {

// out [rows, out] = x [rows, in] times the matrix.
template <typename Number>
void matmul(Threads& threads, Instructions instructions, const Number* x, int64_t num_rows, const Number* matrix, int64_t num_out,
            int64_t num_in, float* out) {
  if (num_rows == 0 || num_out == 0) return;
  const int64_t stride = padded(num_in);
  static thread_local std::vector<float> rows;  // kept between calls: a step makes hundreds of them
  rows.assign(num_rows * stride, 0.0f);
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t i = 0; i < num_in; ++i) rows[row * stride + i] = widened(x[row * num_in + i]);
  const Product<Number> product{rows.data(), matrix, out, num_rows, stride, num_out, num_in};
  // Chunks of whole blocks, and at least four a thread where there is so much.
  int64_t outs = kChunkBytes / std::max<int64_t>(1, num_in * sizeof(Number));
  outs = std::min(outs, num_out / (4 * threads.count()));
  outs = std::max(outs / kBlockOuts * kBlockOuts, kBlockOuts);
  for_chunks(threads, (num_out + outs - 1) / outs, [&product, instructions, outs](int64_t chunk) {
    const int64_t first = chunk * outs, last = std::min(first + outs, product.num_out);
    switch (instructions) {
#if defined(JAXPAGED_DENSE_OF_X86)
      case Instructions::kAvx512Vnni: return avx512::multiply(product, first, last);
      case Instructions::kAvx2: return avx2::multiply(product, first, last);
#endif
      default: return portable::multiply(product, first, last);
    }
  });
}

}  // namespace dense
}  // namespace jaxpaged
