// XLA custom call for rms_norm on CPU; the work is in norm.h.
#include "../native/xla_threads.h"
#include "norm.h"

namespace {

namespace ffi = xla::ffi;

// x [rows, width], weight [layers, width] of the same type, layer -> like x
ffi::Error rms_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::BufferR0<ffi::S32> layer,
                    ffi::Result<ffi::AnyBuffer> out, float eps, float offset, bool is_scaled_wide) {
  const auto of_x = x.dimensions(), of_weight = weight.dimensions();
  if (of_x.size() != 2 || of_weight.size() != 2 || of_x[1] != of_weight[1] || !(of_x == out->dimensions()) ||
      x.element_type() != weight.element_type() || x.element_type() != out->element_type())
    return ffi::Error::InvalidArgument("rms_norm: shapes or types do not fit one another");
  const int64_t index = layer.typed_data()[0];
  if (index < 0 || index >= of_weight[0]) return ffi::Error::InvalidArgument("rms_norm: there is no such layer");
  jaxpaged::XlaThreads threads(pool);
  const auto run = [&](auto* numbers) {
    using Number = std::remove_const_t<std::remove_pointer_t<decltype(numbers)>>;
    const auto* weights = static_cast<const Number*>(weight.untyped_data()) + index * of_x[1];
    const jaxpaged::rms::Norm<Number> norm{numbers, weights, static_cast<Number*>(out->untyped_data()), of_x[0], of_x[1], eps, offset,
                                           is_scaled_wide};
    jaxpaged::rms::norm_rows(threads, jaxpaged::instructions(), norm);
    return ffi::Error::Success();
  };
  switch (x.element_type()) {
    case ffi::F32: return run(static_cast<const float*>(x.untyped_data()));
    case ffi::BF16: return run(static_cast<const jaxpaged::BFloat16*>(x.untyped_data()));
    default: return ffi::Error::InvalidArgument("rms_norm: numbers are float32 or bfloat16");
  }
}

}  // namespace

JAXPAGED_EXPORTED(jaxpaged_rms_norm)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_rms_norm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset")
                                  .Attr<bool>("is_scaled_wide"));
