// Rows times a matrix of groups: four bits with a scale and a minimum, or eight bits with a scale, a group of 32 inputs.
//
// Rows are quantized one by one to 15 bits, in a high and a low int8 part. The sum of a group is an int32 and exact; groups are then
// added in float32 in the order of the inputs, each by one fused multiplication and addition (and with four bits a second one for the
// minimum), so that every set of instructions and every number of rows gives equal bits.
//
// The matrix lies in tiles of 16 outputs: four neighbouring inputs of each of them side by side, so that a lane is an output and nothing
// is summed up across lanes. group_weights.py says which byte is which. Nibbles are unsigned, as VNNI wants one side; weights of eight
// bits are moved up by 128, and 128 times the sum of a row's group is taken off again.
#pragma once

#include <vector>

#include "../native/instructions.h"
#include "../native/parallel.h"
#include "int4_amx.h"
#include "int4_avx2.h"
#include "int4_avx512.h"
#include "int4_rows.h"

namespace jaxpaged {
namespace groups {

template <typename Number>
void quantize_row(Instructions instructions, Bits bits, const Number* row, int64_t num_groups, int8_t* values, int32_t* sums,
                  float* scale) {
#if defined(JAXPAGED_X86)
  if (instructions == Instructions::kAvx512Vnni) return quantize_row_avx512(bits, row, num_groups, values, sums, scale);
  if (instructions == Instructions::kAvx2) return quantize_row_avx2(bits, row, num_groups, values, sums, scale);
#endif
  quantize_row_portable(bits, row, num_groups, values, sums, scale);
}

template <Bits bits>
void multiply(Instructions instructions, bool has_amx, const Rows& rows, const Matrix& matrix, int64_t first, int64_t last, float* out) {
#if defined(JAXPAGED_X86)
#if defined(JAXPAGED_AMX)
  if (has_amx && rows.num_rows >= kLeastAmxTotal) return multiply_amx<bits>(rows, matrix, first, last, out);
#endif
  if (instructions == Instructions::kAvx512Vnni) return multiply_avx512<bits>(rows, matrix, first, last, out);
  if (instructions == Instructions::kAvx2) return multiply_avx2<bits>(rows, matrix, first, last, out);
#endif
  multiply_portable<bits>(rows, matrix, first, last, out);
}

// out [rows, 16 * tiles] = x [rows, 32 * groups] times the matrix. Number is float or BFloat16; `has_amx` goes with AVX512-VNNI alone.
template <Bits bits, typename Number>
void matmul(Threads& threads, Instructions instructions, bool has_amx, const Number* x, int64_t num_rows, const Matrix& matrix, float* out) {
  const int64_t num_groups = matrix.num_groups;
  if (num_rows == 0 || matrix.num_tiles == 0) return;
  // Kept between calls: a step makes hundreds of them.
  static thread_local std::vector<int8_t> values;
  static thread_local std::vector<int32_t> sums;
  static thread_local std::vector<float> scales;
  // Room for whole blocks of 16 rows, which matrix tiles read.
  const int64_t stride = stride_of(num_groups), room = (num_rows + 15) / 16 * 16;
  if (static_cast<int64_t>(values.size()) < room * stride) values.resize(room * stride);
  if (static_cast<int64_t>(sums.size()) < room * num_groups) sums.resize(room * num_groups);
  if (static_cast<int64_t>(scales.size()) < num_rows) scales.resize(num_rows);
  int8_t* const quantized = values.data();
  int32_t* const row_sums = sums.data();
  float* const row_scales = scales.data();

  constexpr int64_t kRowsOfChunk = 16;
  for_chunks(threads, (num_rows + kRowsOfChunk - 1) / kRowsOfChunk, [=](int64_t chunk) {
    const int64_t stop = (chunk + 1) * kRowsOfChunk < num_rows ? (chunk + 1) * kRowsOfChunk : num_rows;
    for (int64_t row = chunk * kRowsOfChunk; row < stop; ++row) {
      quantize_row(instructions, bits, x + row * num_groups * kGroup, num_groups, quantized + row * stride,
                   row_sums + row * num_groups, row_scales + row);
    }
  });

  const Rows rows{quantized, row_sums, row_scales, num_rows, num_groups, stride};
  // Chunks whose weights fit the first cache, and at least four a thread where there is so much.
  int64_t tiles = kChunkBytes / (num_groups > 0 ? num_groups * bytes_of_group(bits) : 1);
  const int64_t even = matrix.num_tiles / (4 * threads.count());
  tiles = even < tiles ? even : tiles;
  tiles = tiles < 1 ? 1 : tiles;
  for_chunks(threads, (matrix.num_tiles + tiles - 1) / tiles, [=, &matrix](int64_t chunk) {
    const int64_t first = chunk * tiles;
    multiply<bits>(instructions, has_amx, rows, matrix, first, first + tiles < matrix.num_tiles ? first + tiles : matrix.num_tiles, out);
  });
}

}  // namespace groups
}  // namespace jaxpaged
