// Root mean square normalization of rows; included by norm.h once for each set of instructions, in the namespace JAXPAGED_SET.

namespace jaxpaged {
namespace rms {
namespace JAXPAGED_SET {

using namespace vectors::JAXPAGED_SET;

template <typename Number>
inline void norm_row(const Norm<Number>& norm, const Number* x, Number* out) {
  const int64_t width = norm.width;
  Vector sums[4] = {};
  int64_t at = 0;
  for (; at + 4 * kLanes <= width; at += 4 * kLanes)
    for (int64_t part = 0; part < 4; ++part) {
      const Vector numbers = load(x + at + part * kLanes);
      sums[part] += numbers * numbers;
    }
  for (int64_t part = 0; at < width; at += kLanes, ++part) {
    const Vector numbers = load_some(x + at, width - at);
    sums[part] += numbers * numbers;
  }
  const float mean = total((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(width);
  const Vector factor = all(1.0f / std::sqrt(mean + norm.eps));
  for (at = 0; at < width; at += kLanes) {
    const int64_t count = width - at;
    const Vector weight = load_some(norm.weight + at, count), normed = load_some(x + at, count) * factor;
    store_some(out + at, count, norm.is_scaled_wide ? normed * (weight + norm.offset) : rounded_as(x, normed) * weight);
  }
}

template <typename Number>
inline void norm_rows(const Norm<Number>& norm, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) norm_row(norm, norm.x + row * norm.width, norm.out + row * norm.width);
}

}  // namespace JAXPAGED_SET
}  // namespace rms
}  // namespace jaxpaged
