// Includes the file that JAXPAGED_EACH_SET names once for each set of instructions, in a namespace JAXPAGED_SET of its own: `portable`, and
// where JAXPAGED_SETS_OF_X86 is defined `avx2` and `avx512`. The name is relative to this folder. No include guard.
//
// Vectors are 16 floats wide everywhere; a compiler that has narrower ones takes several.
#define JAXPAGED_SET portable
#include JAXPAGED_EACH_SET
#undef JAXPAGED_SET

#if defined(__x86_64__) && defined(__GNUC__)
#undef JAXPAGED_SETS_OF_X86
#define JAXPAGED_SETS_OF_X86 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define JAXPAGED_SET avx2
#include JAXPAGED_EACH_SET
#undef JAXPAGED_SET
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
#endif
#define JAXPAGED_SET avx512
#include JAXPAGED_EACH_SET
#undef JAXPAGED_SET
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
#undef JAXPAGED_EACH_SET
