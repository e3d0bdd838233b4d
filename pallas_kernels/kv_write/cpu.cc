// XLA custom call for kv_write on CPU; the work is in write.h.
#include "../native/xla_threads.h"
#include "write.h"

namespace {

namespace ffi = xla::ffi;
using jaxpaged::BFloat16;
using jaxpaged::Float8E4M3FN;

struct Arguments {
  ffi::ThreadPool pool;
  ffi::AnyBuffer q, k, v, k_pages, v_pages;
  ffi::BufferR1<ffi::S32> write_pages, write_offsets;
  ffi::BufferR2<ffi::F32> cos, sin;
  int64_t layer;
};

template <typename Number, typename Page>
ffi::Error run(const Arguments& given, void* out) {
  const auto q = given.q.dimensions(), pages = given.k_pages.dimensions();
  const int64_t skipped = given.layer * pages[1] * pages[2] * pages[3] * pages[4];
  jaxpaged::kv::Call<Number, Page> call;
  call.q = static_cast<const Number*>(given.q.untyped_data());
  call.k = static_cast<const Number*>(given.k.untyped_data());
  call.v = static_cast<const Number*>(given.v.untyped_data());
  call.write_pages = given.write_pages.typed_data(), call.write_offsets = given.write_offsets.typed_data();
  call.cos = given.cos.typed_data(), call.sin = given.sin.typed_data();
  call.tokens = q[0], call.heads = q[1], call.kv_heads = pages[2], call.head_dim = q[2], call.half_dim = given.cos.dimensions()[1];
  call.num_pages = pages[1], call.page_size = pages[3];
  call.out = static_cast<Number*>(out);
  call.k_pages = static_cast<Page*>(given.k_pages.untyped_data()) + skipped;
  call.v_pages = static_cast<Page*>(given.v_pages.untyped_data()) + skipped;
  ffi::ThreadPool pool = given.pool;
  jaxpaged::XlaThreads threads(pool);
  jaxpaged::kv::write(threads, jaxpaged::instructions(), call);
  return ffi::Error::Success();
}

template <typename Number>
ffi::Error run_with(const Arguments& given, void* out) {
  switch (given.k_pages.element_type()) {
    case ffi::F32: return run<Number, float>(given, out);
    case ffi::BF16: return run<Number, BFloat16>(given, out);
    case ffi::F8E4M3FN: return run<Number, Float8E4M3FN>(given, out);
    default: return ffi::Error::InvalidArgument("kv_write: pages are float32, bfloat16 or float8_e4m3fn");
  }
}

// q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], pages [layers, pages, kv_heads, page_size, head_dim], write_pages and
// write_offsets [tokens], cos and sin [tokens, half_dim], layer -> like q, and the pages, which are the operands' own memory
ffi::Error kv_write(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer k_pages,
                    ffi::AnyBuffer v_pages, ffi::BufferR1<ffi::S32> write_pages, ffi::BufferR1<ffi::S32> write_offsets,
                    ffi::BufferR2<ffi::F32> cos, ffi::BufferR2<ffi::F32> sin, ffi::BufferR0<ffi::S32> layer,
                    ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> new_k_pages, ffi::Result<ffi::AnyBuffer> new_v_pages) {
  const auto of_q = q.dimensions(), of_k = k.dimensions(), of_pages = k_pages.dimensions();
  bool fits = of_q.size() == 3 && of_k.size() == 3 && of_k == v.dimensions() && of_pages.size() == 5 && of_pages == v_pages.dimensions() &&
              of_q == out->dimensions() && of_k[0] == of_q[0] && of_k[1] == of_pages[2] && of_k[2] == of_q[2] && of_q[2] == of_pages[4];
  fits = fits && q.element_type() == k.element_type() && k.element_type() == v.element_type() && q.element_type() == out->element_type() &&
         k_pages.element_type() == v_pages.element_type();
  fits = fits && static_cast<int64_t>(write_pages.dimensions()[0]) == of_q[0] && write_offsets.dimensions()[0] == of_q[0] &&
         cos.dimensions() == sin.dimensions() && cos.dimensions()[0] == of_q[0] && 2 * cos.dimensions()[1] <= of_q[2] &&
         of_q[2] <= jaxpaged::kv::kMaxHeadDim;
  if (!fits) return ffi::Error::InvalidArgument("kv_write: shapes or types do not fit one another");
  if (new_k_pages->untyped_data() != k_pages.untyped_data() || new_v_pages->untyped_data() != v_pages.untyped_data())
    return ffi::Error::InvalidArgument("kv_write: the pages' memory is not that of the result");
  const Arguments given{pool, q, k, v, k_pages, v_pages, write_pages, write_offsets, cos, sin, layer.typed_data()[0]};
  if (given.layer < 0 || given.layer >= of_pages[0]) return ffi::Error::InvalidArgument("kv_write: there is no such layer");
  switch (q.element_type()) {
    case ffi::F32: return run_with<float>(given, out->untyped_data());
    case ffi::BF16: return run_with<BFloat16>(given, out->untyped_data());
    default: return ffi::Error::InvalidArgument("kv_write: queries are float32 or bfloat16");
  }
}

}  // namespace

JAXPAGED_EXPORTED(jaxpaged_kv_write)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_kv_write, kv_write,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
