// XLA custom call for grouped_matmul on CPU; the work is in grouped.h.
#include "../native/xla_threads.h"
#include "grouped.h"

namespace {

namespace ffi = xla::ffi;

// x [rows, in], weights [layers, groups, out, in] of the same type, sizes [groups], layer -> float32 [rows, out]
ffi::Error grouped_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::BufferR1<ffi::S32> sizes,
                          ffi::BufferR0<ffi::S32> layer, ffi::Result<ffi::BufferR2<ffi::F32>> out) {
  const auto rows = x.dimensions(), shape = weights.dimensions(), of_out = out->dimensions();
  if (rows.size() != 2 || shape.size() != 4 || rows[1] != shape[3] || of_out[0] != rows[0] || of_out[1] != shape[2] ||
      sizes.dimensions()[0] != shape[1] || x.element_type() != weights.element_type()) {
    return ffi::Error::InvalidArgument("grouped_matmul: shapes or types do not fit one another");
  }
  const int64_t index = layer.typed_data()[0];
  if (index < 0 || index >= shape[0]) return ffi::Error::InvalidArgument("grouped_matmul: there is no such layer");
  if (!jaxpaged::grouped::are_sizes(sizes.typed_data(), shape[1], rows[0])) {
    return ffi::Error::InvalidArgument("grouped_matmul: groups have more rows than there are, or fewer than none");
  }
  jaxpaged::XlaThreads threads(pool);
  const auto run = [&](auto* numbers, const auto* stacked) {
    const auto* const own = stacked + index * shape[1] * shape[2] * shape[3];
    const auto level = jaxpaged::dense::best_level();
    jaxpaged::grouped::matmul(threads, level, numbers, rows[0], own, sizes.typed_data(), shape[1], shape[2], shape[3], out->typed_data());
    return ffi::Error::Success();
  };
  switch (x.element_type()) {
    case ffi::F32: return run(static_cast<const float*>(x.untyped_data()), static_cast<const float*>(weights.untyped_data()));
    case ffi::BF16: {
      using jaxpaged::BFloat16;
      return run(static_cast<const BFloat16*>(x.untyped_data()), static_cast<const BFloat16*>(weights.untyped_data()));
    }
    default: return ffi::Error::InvalidArgument("grouped_matmul: numbers are float32 or bfloat16");
  }
}

}  // namespace

JAXPAGED_EXPORTED(jaxpaged_grouped_matmul)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_grouped_matmul, grouped_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());
