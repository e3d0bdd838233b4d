// Numbers that C++ has no types for, as they lie in memory.
#pragma once

#include <cstdint>
#include <cstring>

namespace jaxpaged {

struct BFloat16 {
  uint16_t bits;
};

struct Float8E4M3FN {
  uint8_t bits;
};

inline float widened(float number) { return number; }
inline float widened(BFloat16 number) {
  const uint32_t bits = static_cast<uint32_t>(number.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

}  // namespace jaxpaged
