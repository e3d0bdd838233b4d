// Root mean square normalization of rows: 64 sums of squares a row, which are added up in one order, so that a row is the same bits alone
// and among others. The work is in norm_rows.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../native/instructions.h"
#include "../native/numbers.h"
#include "../native/parallel.h"
#include "../native/vectors.h"

namespace jaxpaged {
namespace rms {

// One call; the contract is that of pallas_kernels.rms_norm.
template <typename Number>
struct Norm {
  const Number* x;       // [rows, width]
  const Number* weight;  // [width]
  Number* out;
  int64_t rows, width;
  float eps, offset;
  bool is_scaled_wide;
};

constexpr int64_t kNumbersOfChunk = 32 << 10;

}  // namespace rms
}  // namespace jaxpaged

#define JAXPAGED_EACH_SET "../rms_norm/norm_rows.h"
#include "../native/each_set.h"

namespace jaxpaged {
namespace rms {

template <typename Number>
void norm_rows(Threads& threads, Instructions instructions, const Norm<Number>& norm) {
  const int64_t rows = std::max<int64_t>(1, kNumbersOfChunk / std::max<int64_t>(1, norm.width));
  for_chunks(threads, (norm.rows + rows - 1) / rows, [&norm, instructions, rows](int64_t chunk) {
    const int64_t first = chunk * rows, last = std::min(first + rows, norm.rows);
    switch (instructions) {
#if defined(JAXPAGED_SETS_OF_X86)
      case Instructions::kAvx512Vnni: return avx512::norm_rows(norm, first, last);
      case Instructions::kAvx2: return avx2::norm_rows(norm, first, last);
#endif
      default: return portable::norm_rows(norm, first, last);
    }
  });
}

}  // namespace rms
}  // namespace jaxpaged
