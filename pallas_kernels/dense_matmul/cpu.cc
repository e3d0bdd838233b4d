// XLA custom call for dense_matmul on CPU; the work is in dense.h.
#include "../native/xla_threads.h"
#include "dense.h"

namespace {

namespace ffi = xla::ffi;

// x [rows, in], matrix [layers, out, in] of the same type, layer -> float32 [rows, out]
ffi::Error dense_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer matrix, ffi::BufferR0<ffi::S32> layer,
                        ffi::Result<ffi::BufferR2<ffi::F32>> out) {
  const auto rows = x.dimensions(), shape = matrix.dimensions(), of_out = out->dimensions();
  if (rows.size() != 2 || shape.size() != 3 || rows[1] != shape[2] || of_out[0] != rows[0] || of_out[1] != shape[1] ||
      x.element_type() != matrix.element_type()) {
    return ffi::Error::InvalidArgument("dense_matmul: shapes or types do not fit one another");
  }
  const int64_t index = layer.typed_data()[0];
  if (index < 0 || index >= shape[0]) return ffi::Error::InvalidArgument("dense_matmul: there is no such layer");
  jaxpaged::XlaThreads threads(pool);
  const auto run = [&](auto* numbers, const auto* weights) {
    const auto* const matrix = weights + index * shape[1] * shape[2];
    jaxpaged::dense::matmul(threads, jaxpaged::dense::best_level(), numbers, rows[0], matrix, shape[1], shape[2], out->typed_data());
    return ffi::Error::Success();
  };
  switch (x.element_type()) {
    case ffi::F32: return run(static_cast<const float*>(x.untyped_data()), static_cast<const float*>(matrix.untyped_data()));
    case ffi::BF16: {
      using jaxpaged::BFloat16;
      return run(static_cast<const BFloat16*>(x.untyped_data()), static_cast<const BFloat16*>(matrix.untyped_data()));
    }
    default: return ffi::Error::InvalidArgument("dense_matmul: numbers are float32 or bfloat16");
  }
}

}  // namespace

JAXPAGED_EXPORTED(jaxpaged_dense_matmul)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_dense_matmul, dense_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());
