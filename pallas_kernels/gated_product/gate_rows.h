// An activation of one row times another; included by gate.h once for each set of instructions, in the namespace JAXPAGED_SET.

namespace jaxpaged {
namespace gated {
namespace JAXPAGED_SET {

using namespace vectors::JAXPAGED_SET;

template <Activation kActivation>
inline Vector activated(Vector x) {
  if (kActivation == Activation::kSilu) return x * sigmoid(x);
  // 0.5 (1 + tanh(y)) = sigmoid(2 y), for y = sqrt(2 / pi) (x + 0.044715 x^3)
  constexpr float kTwice = 1.5957691216f, kCubic = 0.044715f;
  return x * sigmoid((x + x * x * x * kCubic) * kTwice);
}

template <Activation kActivation, typename Number, typename Result>
inline void multiply(const Call<Number, Result>& call, int64_t first, int64_t last) {
  for (int64_t at = first; at < last; at += kLanes) {
    const int64_t count = last - at;
    const Vector gate = rounded_as(call.out, load_some(call.gate + at, count));
    const Vector up = rounded_as(call.out, load_some(call.up + at, count));
    store_some(call.out + at, count, activated<kActivation>(gate) * up);
  }
}

}  // namespace JAXPAGED_SET
}  // namespace gated
}  // namespace jaxpaged
