// XLA custom call for gated_product on CPU; the work is in gate.h.
#include "../native/xla_threads.h"
#include "gate.h"

namespace {

namespace ffi = xla::ffi;
using jaxpaged::BFloat16;
using jaxpaged::gated::Activation;

// gate and up of one shape and type -> of that shape
ffi::Error gated_product(ffi::ThreadPool pool, ffi::AnyBuffer gate, ffi::AnyBuffer up, ffi::Result<ffi::AnyBuffer> out, bool is_gelu) {
  if (!(gate.dimensions() == up.dimensions()) || !(gate.dimensions() == out->dimensions()) || gate.element_type() != up.element_type())
    return ffi::Error::InvalidArgument("gated_product: shapes or types do not fit one another");
  jaxpaged::XlaThreads threads(pool);
  const auto run = [&](auto* numbers, auto* result) {
    using Number = std::remove_const_t<std::remove_pointer_t<decltype(numbers)>>;
    using Result = std::remove_pointer_t<decltype(result)>;
    const jaxpaged::gated::Call<Number, Result> call{numbers, static_cast<const Number*>(up.untyped_data()), result,
                                                     static_cast<int64_t>(gate.element_count())};
    if (is_gelu) jaxpaged::gated::multiply<Activation::kGeluTanh>(threads, jaxpaged::instructions(), call);
    else jaxpaged::gated::multiply<Activation::kSilu>(threads, jaxpaged::instructions(), call);
    return ffi::Error::Success();
  };
  const auto from = gate.element_type(), to = out->element_type();
  const auto* wide = static_cast<const float*>(gate.untyped_data());
  void* const result = out->untyped_data();
  if (from == ffi::F32 && to == ffi::F32) return run(wide, static_cast<float*>(result));
  if (from == ffi::F32 && to == ffi::BF16) return run(wide, static_cast<BFloat16*>(result));
  if (from == ffi::BF16 && to == ffi::BF16) return run(static_cast<const BFloat16*>(gate.untyped_data()), static_cast<BFloat16*>(result));
  return ffi::Error::InvalidArgument("gated_product: numbers are float32 or bfloat16");
}

}  // namespace

JAXPAGED_EXPORTED(jaxpaged_gated_product)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_gated_product, gated_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("is_gelu"));
