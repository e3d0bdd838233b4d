// XLA custom call for paged_attention on CPU; the work is in attend.h.
#include "../native/xla_threads.h"
#include "attend.h"

namespace {

namespace ffi = xla::ffi;
using jaxpaged::BFloat16;
using jaxpaged::attention::Call;
using jaxpaged::attention::Float8E4M3FN;

struct Arguments {
  ffi::ThreadPool pool;
  ffi::AnyBuffer q, k_pages, v_pages;
  ffi::BufferR3<ffi::S32> tables;
  ffi::BufferR1<ffi::S32> kv_lens, cu_q_lens;
  int64_t layer, group;
  float scale, v_scale, soft_cap;
  int64_t window;
  bool is_causal;
  ffi::BufferR1<ffi::F32> sinks;
  ffi::AnyBuffer out;
};

template <typename Query, typename Page>
ffi::Error run(const Arguments& given, void* out) {
  const auto q = given.q.dimensions(), pages = given.k_pages.dimensions(), tables = given.tables.dimensions();
  const int64_t layer_size = pages[1] * pages[2] * pages[3] * pages[4];
  Call<Query, Page> call;
  call.q = static_cast<const Query*>(given.q.untyped_data());
  call.k_pages = static_cast<const Page*>(given.k_pages.untyped_data()) + given.layer * layer_size;
  call.v_pages = static_cast<const Page*>(given.v_pages.untyped_data()) + given.layer * layer_size;
  call.tables = given.tables.typed_data() + given.group * tables[1] * tables[2];
  call.kv_lens = given.kv_lens.typed_data();
  call.cu_q_lens = given.cu_q_lens.typed_data();
  call.sinks = given.sinks.dimensions()[0] == 0 ? nullptr : given.sinks.typed_data();
  call.tokens = q[0], call.seqs = tables[1], call.kv_heads = pages[2], call.heads_per_kv_head = q[1] / pages[2], call.head_dim = q[2];
  call.num_pages = pages[1], call.page_size = pages[3], call.max_pages = tables[2];
  call.scale = given.scale, call.v_scale = given.v_scale, call.soft_cap = given.soft_cap;
  call.window = given.window;
  call.is_causal = given.is_causal;
  call.out = static_cast<Query*>(out);
  ffi::ThreadPool pool = given.pool;
  jaxpaged::XlaThreads threads(pool);
  jaxpaged::attention::attend(threads, jaxpaged::instructions(), jaxpaged::attention::has_tiles(), call);
  return ffi::Error::Success();
}

template <typename Query>
ffi::Error run_with(const Arguments& given, void* out) {
  switch (given.k_pages.element_type()) {
    case ffi::F32: return run<Query, float>(given, out);
    case ffi::BF16: return run<Query, BFloat16>(given, out);
    case ffi::F8E4M3FN: return run<Query, Float8E4M3FN>(given, out);
    default: return ffi::Error::InvalidArgument("paged_attention: pages are float32, bfloat16 or float8_e4m3fn");
  }
}

// q [tokens, heads, head_dim], pages [layers, pages, kv_heads, page_size, head_dim], tables [groups, seqs, max_pages], kv_lens [seqs],
// cu_q_lens [seqs + 1], places {layer, group, window}, factors {scale, v_scale}, sinks [heads or 0] -> like q
ffi::Error paged_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages,
                           ffi::BufferR3<ffi::S32> tables, ffi::BufferR1<ffi::S32> kv_lens, ffi::BufferR1<ffi::S32> cu_q_lens,
                           ffi::BufferR1<ffi::S32> places, ffi::BufferR1<ffi::F32> factors, ffi::BufferR1<ffi::F32> sinks,
                           ffi::Result<ffi::AnyBuffer> out, float soft_cap, bool is_causal) {
  const auto of_q = q.dimensions(), of_k = k_pages.dimensions(), of_tables = tables.dimensions(), of_out = out->dimensions();
  const bool fits = of_q.size() == 3 && of_k.size() == 5 && k_pages.dimensions() == v_pages.dimensions() && of_q == of_out &&
                    k_pages.element_type() == v_pages.element_type() && q.element_type() == out->element_type() && of_k[4] == of_q[2] &&
                    of_k[2] > 0 && of_q[1] % of_k[2] == 0 && kv_lens.dimensions()[0] == of_tables[1] &&
                    cu_q_lens.dimensions()[0] == of_tables[1] + 1 && places.dimensions()[0] == 3 && factors.dimensions()[0] == 2;
  if (!fits) return ffi::Error::InvalidArgument("paged_attention: shapes do not fit one another");
  const int32_t* own = places.typed_data();
  if (own[0] < 0 || own[0] >= of_k[0]) return ffi::Error::InvalidArgument("paged_attention: there is no such layer");
  if (own[1] < 0 || own[1] >= of_tables[0]) return ffi::Error::InvalidArgument("paged_attention: there is no such group");
  const Arguments given{pool,   q,      k_pages,  v_pages,   tables, kv_lens, cu_q_lens, own[0], own[1], factors.typed_data()[0], factors.typed_data()[1],
                        soft_cap, own[2], is_causal, sinks,  q};
  switch (q.element_type()) {
    case ffi::F32: return run_with<float>(given, out->untyped_data());
    case ffi::BF16: return run_with<BFloat16>(given, out->untyped_data());
    default: return ffi::Error::InvalidArgument("paged_attention: queries are float32 or bfloat16");
  }
}

}  // namespace

JAXPAGED_EXPORTED(jaxpaged_paged_attention)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_paged_attention, paged_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR3<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("is_causal"));
