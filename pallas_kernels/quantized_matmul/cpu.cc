// XLA custom calls for quantized_matmul on CPU; the work is in int8.h.
#include <algorithm>

#include "../native/xla_threads.h"
#include "int8.h"

namespace {

namespace ffi = xla::ffi;
using jaxpaged::int8::Matrix;

// x [rows, in], values int8 [layers, out, in], scales [layers, out], layer -> float32 [rows, out]
// `most` is the last path that may be taken.
ffi::Error int8_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::BufferR3<ffi::S8> values, ffi::BufferR2<ffi::F32> scales,
                       ffi::BufferR0<ffi::S32> layer, int32_t most, ffi::Result<ffi::BufferR2<ffi::F32>> out) {
  const auto rows = x.dimensions();
  const auto shape = values.dimensions();
  const auto of_scales = scales.dimensions();
  const auto of_out = out->dimensions();
  if (rows.size() != 2 || rows[1] != shape[2] || of_scales[0] != shape[0] || of_scales[1] != shape[1] || of_out[0] != rows[0] ||
      of_out[1] != shape[1]) {
    return ffi::Error::InvalidArgument("int8_matmul: shapes do not fit one another");
  }
  const int64_t index = layer.typed_data()[0];
  if (index < 0 || index >= shape[0]) return ffi::Error::InvalidArgument("int8_matmul: there is no such layer");
  const Matrix matrix{values.typed_data() + index * shape[1] * shape[2], scales.typed_data() + index * shape[1], shape[1], shape[2]};
  jaxpaged::XlaThreads threads(pool);
  const auto path = std::min(jaxpaged::int8::best_path(), static_cast<jaxpaged::int8::Path>(most));
  switch (x.element_type()) {
    case ffi::F32:
      jaxpaged::int8::matmul(threads, path, static_cast<const float*>(x.untyped_data()), rows[0], matrix, out->typed_data());
      return ffi::Error::Success();
    case ffi::BF16:
      jaxpaged::int8::matmul(threads, path, static_cast<const uint16_t*>(x.untyped_data()), rows[0], matrix, out->typed_data());
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument("int8_matmul: rows are float32 or bfloat16");
  }
}

}  // namespace

JAXPAGED_EXPORTED(jaxpaged_int8_matmul)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_int8_matmul, int8_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR3<ffi::S8>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Attr<int32_t>("most")
                                  .Ret<ffi::BufferR2<ffi::F32>>());

// The best path of this processor.
extern "C" __attribute__((visibility("default"))) int64_t jaxpaged_int8_path() { return static_cast<int64_t>(jaxpaged::int8::best_path()); }

// Up to so many rows the product is faster than XLA's own with the instructions that this processor has.
extern "C" __attribute__((visibility("default"))) int64_t jaxpaged_int8_max_rows() {
  return jaxpaged::int8::max_rows(jaxpaged::int8::best_path());
}
