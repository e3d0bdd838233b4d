// XLA custom calls for quantized_matmul of groups on CPU; the work is in int4.h.
#include "../native/xla_threads.h"
#include "int4.h"

namespace {

namespace ffi = xla::ffi;
using jaxpaged::groups::Bits;
using jaxpaged::groups::Matrix;

using Float16s = ffi::BufferR4<ffi::F16>;

// Whether there is a half float for each output and group of `values`.
template <typename Values>
bool fits(const Values& values, const Float16s& numbers) {
  const auto of_values = values.dimensions(), shape = numbers.dimensions();
  return shape[0] == of_values[0] && shape[1] == of_values[1] && shape[2] == of_values[2] && shape[3] == jaxpaged::groups::kTile;
}

template <Bits bits, typename Values>
ffi::Error matmul(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const Values& values, const Float16s& scales, const Float16s& minima,
                  const ffi::BufferR0<ffi::S32>& layer, ffi::Result<ffi::BufferR2<ffi::F32>>& out) {
  namespace groups = jaxpaged::groups;
  const auto rows = x.dimensions(), shape = values.dimensions(), of_out = out->dimensions();
  if (rows.size() != 2 || shape[3] != groups::bytes_of_group(bits) || rows[1] != shape[2] * groups::kGroup || !fits(values, scales) ||
      !fits(values, minima) || of_out[0] != rows[0] || of_out[1] != shape[1] * groups::kTile) {
    return ffi::Error::InvalidArgument("group_matmul: shapes do not fit one another");
  }
  const int64_t index = layer.typed_data()[0];
  if (index < 0 || index >= shape[0]) return ffi::Error::InvalidArgument("group_matmul: there is no such layer");
  const int64_t place = index * shape[1] * shape[2];
  const auto* stored = reinterpret_cast<const uint8_t*>(values.typed_data());
  const Matrix matrix{stored + place * groups::bytes_of_group(bits),
                      reinterpret_cast<const uint16_t*>(scales.untyped_data()) + place * groups::kTile,
                      reinterpret_cast<const uint16_t*>(minima.untyped_data()) + place * groups::kTile, shape[1], shape[2]};
  jaxpaged::XlaThreads threads(pool);
  const auto instructions = jaxpaged::instructions();
  const bool has_amx = instructions == jaxpaged::Instructions::kAvx512Vnni && jaxpaged::amx_is_allowed();
  switch (x.element_type()) {
    case ffi::F32:
      groups::matmul<bits>(threads, instructions, has_amx, static_cast<const float*>(x.untyped_data()), rows[0], matrix,
                           out->typed_data());
      return ffi::Error::Success();
    case ffi::BF16:
      groups::matmul<bits>(threads, instructions, has_amx, static_cast<const jaxpaged::BFloat16*>(x.untyped_data()), rows[0], matrix,
                           out->typed_data());
      return ffi::Error::Success();
    default:
      return ffi::Error::InvalidArgument("group_matmul: rows are float32 or bfloat16");
  }
}

// x [rows, in], values [layers, tiles, groups, 256], scales and minima [layers, tiles, groups, 16], layer -> float32 [rows, out]
ffi::Error q4_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::BufferR4<ffi::U8> values, Float16s scales, Float16s minima,
                     ffi::BufferR0<ffi::S32> layer, ffi::Result<ffi::BufferR2<ffi::F32>> out) {
  return matmul<Bits::kFour>(pool, x, values, scales, minima, layer, out);
}

// x [rows, in], values [layers, tiles, groups, 512], scales [layers, tiles, groups, 16], layer -> float32 [rows, out]
ffi::Error q8_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::BufferR4<ffi::S8> values, Float16s scales, ffi::BufferR0<ffi::S32> layer,
                     ffi::Result<ffi::BufferR2<ffi::F32>> out) {
  return matmul<Bits::kEight>(pool, x, values, scales, scales, layer, out);
}

}  // namespace

JAXPAGED_EXPORTED(jaxpaged_q4_matmul)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_q4_matmul, q4_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR4<ffi::U8>>()
                                  .Arg<Float16s>()
                                  .Arg<Float16s>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());

JAXPAGED_EXPORTED(jaxpaged_q8_matmul)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_q8_matmul, q8_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR4<ffi::S8>>()
                                  .Arg<Float16s>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>());
