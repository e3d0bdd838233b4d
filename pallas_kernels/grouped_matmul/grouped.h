// Rows in groups, each group times a matrix of its own out of a stack: only matrices of groups that own rows are read. The products are
// those of dense_matmul/dense.h, one part a group.
#pragma once

#include "../dense_matmul/dense.h"

namespace jaxpaged {
namespace grouped {

// Whether sizes are none negative, and together at most `num_rows`.
inline bool are_sizes(const int32_t* sizes, int64_t num_groups, int64_t num_rows) {
  int64_t total = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    if (sizes[group] < 0) return false;
    total += sizes[group];
  }
  return total <= num_rows;
}

// out [rows, out] = x [rows, in] times `weights` [groups, out, in] of each row's group, and 0 for the rows behind the last group's.
template <typename Number>
void matmul(Threads& threads, dense::Level level, const Number* x, int64_t num_rows, const Number* weights, const int32_t* sizes,
            int64_t num_groups, int64_t num_out, int64_t num_in, float* out) {
  static thread_local std::vector<dense::Part<Number>> parts;  // kept between calls
  parts.clear();
  int64_t row = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    if (sizes[group] > 0) parts.push_back({weights + group * num_out * num_in, row, sizes[group], 0, 0});
    row += sizes[group];
  }
  dense::multiply_parts(threads, level, x, parts.data(), parts.size(), num_out, num_in, out);
  std::fill(out + row * num_out, out + num_rows * num_out, 0.0f);
}

}  // namespace grouped
}  // namespace jaxpaged
