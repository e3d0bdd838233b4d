// Rotary embedding of new queries and keys, and the write of new keys and values into their pages, in place. The work is in write_rows.h.
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
namespace kv {

constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kNumbersOfChunk = 32 << 10;
constexpr float kHighestBFloat16 = 3.38953139e38f;

// To even; what is too large becomes 448, the largest number of the type, and NaN stays NaN.
inline Float8E4M3FN to_float8(float wide) {
  uint32_t bits;
  std::memcpy(&bits, &wide, sizeof(bits));
  const uint8_t sign = bits >> 24 & 0x80;
  const float size = std::fabs(wide);
  if (std::isnan(wide)) return {static_cast<uint8_t>(sign | 0x7f)};
  if (size >= 448.0f) return {static_cast<uint8_t>(sign | 0x7e)};
  if (size < 0.015625f) return {static_cast<uint8_t>(sign | static_cast<uint8_t>(std::nearbyint(size * 512.0f)))};  // multiples of 2^-9
  bits &= 0x7fffffff;
  return {static_cast<uint8_t>(sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)))};
}

// One call; the pages are those of the layer, and the contract is that of pallas_kernels.kv_write.
template <typename Number, typename Page>
struct Call {
  const Number *q, *k, *v;  // [tokens, heads or kv_heads, head_dim]
  const int32_t *write_pages, *write_offsets;
  const float *cos, *sin;  // [tokens, half_dim]
  int64_t tokens, heads, kv_heads, head_dim, half_dim, num_pages, page_size;
  Number* out;              // like q
  Page *k_pages, *v_pages;  // [num_pages, kv_heads, page_size, head_dim]
};

}  // namespace kv
}  // namespace jaxpaged

#define JAXPAGED_EACH_SET "../kv_write/write_rows.h"
#include "../native/each_set.h"

namespace jaxpaged {
namespace kv {

template <typename Number, typename Page>
void write(Threads& threads, Instructions instructions, const Call<Number, Page>& call) {
  const int64_t numbers_of_token = (call.heads + 2 * call.kv_heads) * call.head_dim;
  const int64_t tokens = std::max<int64_t>(1, kNumbersOfChunk / std::max<int64_t>(1, numbers_of_token));
  for_chunks(threads, (call.tokens + tokens - 1) / tokens, [&call, instructions, tokens](int64_t chunk) {
    const int64_t first = chunk * tokens, last = std::min(first + tokens, call.tokens);
    switch (instructions) {
#if defined(JAXPAGED_SETS_OF_X86)
      case Instructions::kAvx512Vnni: return avx512::write(call, first, last);
      case Instructions::kAvx2: return avx2::write(call, first, last);
#endif
      default: return portable::write(call, first, last);
    }
  });
}

}  // namespace kv
}  // namespace jaxpaged
