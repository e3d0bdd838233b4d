// Which vector instructions the processor has.
#pragma once

namespace jaxpaged {

enum class Instructions { kPortable, kAvx2, kAvx512Vnni };

inline Instructions best_instructions() {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512dq");
  if (has_avx512 && __builtin_cpu_supports("avx512vnni")) return Instructions::kAvx512Vnni;
  // Conversion of half floats (f16c) came before AVX2, and not every compiler can ask for it.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Instructions::kAvx2;
#endif
  return Instructions::kPortable;
}

// Found out once.
inline Instructions instructions() {
  static const Instructions best = best_instructions();
  return best;
}

}  // namespace jaxpaged
