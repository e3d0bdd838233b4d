// activation(gate) * up, number by number, in float32 and rounded once. The work is in gate_rows.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../native/instructions.h"
#include "../native/numbers.h"
#include "../native/parallel.h"
#include "../native/vectors.h"

namespace jaxpaged {
namespace gated {

enum class Activation { kSilu, kGeluTanh };

// One call; the contract is that of pallas_kernels.gated_product.
template <typename Number, typename Result>
struct Call {
  const Number* gate;
  const Number* up;
  Result* out;
  int64_t size;
};

constexpr int64_t kNumbersOfChunk = 32 << 10;  // whole vectors, so that a number is computed alike wherever chunks end

}  // namespace gated
}  // namespace jaxpaged

#define JAXPAGED_EACH_SET "../gated_product/gate_rows.h"
#include "../native/each_set.h"

namespace jaxpaged {
namespace gated {

template <Activation kActivation, typename Number, typename Result>
void multiply(Threads& threads, Instructions instructions, const Call<Number, Result>& call) {
  for_chunks(threads, (call.size + kNumbersOfChunk - 1) / kNumbersOfChunk, [&call, instructions](int64_t chunk) {
    const int64_t first = chunk * kNumbersOfChunk, last = std::min(first + kNumbersOfChunk, call.size);
    switch (instructions) {
#if defined(JAXPAGED_SETS_OF_X86)
      case Instructions::kAvx512Vnni: return avx512::multiply<kActivation>(call, first, last);
      case Instructions::kAvx2: return avx2::multiply<kActivation>(call, first, last);
#endif
      default: return portable::multiply<kActivation>(call, first, last);
    }
  });
}

}  // namespace gated
}  // namespace jaxpaged
