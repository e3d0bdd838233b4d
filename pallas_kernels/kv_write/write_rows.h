// Turning queries and keys of one token, and writing keys and values; included by write.h once for each set of instructions, in the
// namespace JAXPAGED_SET.

namespace jaxpaged {
namespace kv {
namespace JAXPAGED_SET {

using namespace vectors::JAXPAGED_SET;

// The pairs (in[i], in[i + half_dim]) turned; dimensions from 2 * half_dim on stay.
template <typename Number>
inline void turn(const Number* in, const float* cos, const float* sin, int64_t half_dim, int64_t head_dim, Number* out) {
  for (int64_t at = 0; at < half_dim; at += kLanes) {
    const int64_t count = half_dim - at;
    const Vector first = load_some(in + at, count), second = load_some(in + half_dim + at, count);
    const Vector c = load_some(cos + at, count), s = load_some(sin + at, count);
    store_some(out + at, count, first * c - second * s);
    store_some(out + half_dim + at, count, second * c + first * s);
  }
  std::memcpy(out + 2 * half_dim, in + 2 * half_dim, (head_dim - 2 * half_dim) * sizeof(Number));
}

inline void put(const float* numbers, int64_t count, float* page) { std::memcpy(page, numbers, count * sizeof(float)); }
inline void put(const BFloat16* numbers, int64_t count, BFloat16* page) { std::memcpy(page, numbers, count * sizeof(BFloat16)); }
inline void put(const BFloat16* numbers, int64_t count, float* page) {
  for (int64_t at = 0; at < count; at += kLanes) store_some(page + at, count - at, load_some(numbers + at, count - at));
}
inline void put(const float* numbers, int64_t count, BFloat16* page) {
  const Vector limit = all(kHighestBFloat16);
  for (int64_t at = 0; at < count; at += kLanes) {
    const Vector wide = load_some(numbers + at, count - at);
    const Vector low = wide > limit ? limit : wide;  // NaN is not larger, and stays
    store_some(page + at, count - at, low < -limit ? -limit : low);
  }
}
template <typename Number>
inline void put(const Number* numbers, int64_t count, Float8E4M3FN* page) {
  for (int64_t at = 0; at < count; ++at) page[at] = to_float8(jaxpaged::widened(numbers[at]));
}

template <typename Number, typename Page>
inline void write(const Call<Number, Page>& call, int64_t first, int64_t last) {
  const int64_t dim = call.head_dim, half = call.half_dim;
  Number turned[kMaxHeadDim];
  for (int64_t token = first; token < last; ++token) {
    const float *cos = call.cos + token * half, *sin = call.sin + token * half;
    for (int64_t head = token * call.heads; head < (token + 1) * call.heads; ++head)
      turn(call.q + head * dim, cos, sin, half, dim, call.out + head * dim);
    const int64_t page = call.write_pages[token], offset = call.write_offsets[token];
    if (page < 0 || page >= call.num_pages || offset < 0 || offset >= call.page_size) continue;
    for (int64_t head = 0; head < call.kv_heads; ++head) {
      const int64_t own = (token * call.kv_heads + head) * dim, place = ((page * call.kv_heads + head) * call.page_size + offset) * dim;
      turn(call.k + own, cos, sin, half, dim, turned);
      put(turned, dim, call.k_pages + place);
      put(call.v + own, dim, call.v_pages + place);
    }
  }
}

}  // namespace JAXPAGED_SET
}  // namespace kv
}  // namespace jaxpaged
