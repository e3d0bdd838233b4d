// Vectors of 16 numbers; included by vectors.h once for each set of instructions, in the namespace JAXPAGED_SET.

namespace jaxpaged {
namespace vectors {
namespace JAXPAGED_SET {

typedef float Vector __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr int64_t kLanes = 16;

inline Vector all(float number) { return Vector{} + number; }

inline Vector load(const float* numbers) {
  Vector vector;
  std::memcpy(&vector, numbers, sizeof(vector));
  return vector;
}
inline Vector load(const BFloat16* numbers) {
  Halves halves;
  std::memcpy(&halves, numbers, sizeof(halves));
  return (Vector)(__builtin_convertvector(halves, Words) << 16);
}
inline void store(float* numbers, Vector vector) { std::memcpy(numbers, &vector, sizeof(vector)); }
inline void store(BFloat16* numbers, Vector vector) {  // to even; NaN stays NaN
  const Words bits = (Words)vector, is_nan = (Words)(vector != vector);
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Halves halves = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), Halves);
  std::memcpy(numbers, &halves, sizeof(halves));
}

// The first `count` of 16, and zeros behind them.
template <typename Number>
inline Vector load_some(const Number* numbers, int64_t count) {
  if (count >= kLanes) return load(numbers);
  Number own[kLanes] = {};
  std::memcpy(own, numbers, count * sizeof(Number));
  return load(own);
}
template <typename Number>
inline void store_some(Number* numbers, int64_t count, Vector vector) {
  if (count >= kLanes) return store(numbers, vector);
  Number own[kLanes];
  store(own, vector);
  std::memcpy(numbers, own, count * sizeof(Number));
}

// What a number is once it has been stored.
inline Vector rounded_as(const float*, Vector vector) { return vector; }
inline Vector rounded_as(const BFloat16*, Vector vector) {
  BFloat16 own[kLanes];
  store(own, vector);
  return load(own);
}

// The sum of the lanes, in one order.
inline float total(Vector vector) {
  float lanes[kLanes];
  store(lanes, vector);
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// e to the power of numbers up to 0, within 2 units of the last place; exactly 1 for 0 and exactly 0 from -87 down. NaN stays NaN.
inline Vector exponential(Vector x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f, kRounder = 12582912.0f;
  const Integers is_tiny = x < -87.0f;
  const Vector bounded = is_tiny ? all(-87.0f) : x;
  const Vector shifted = bounded * kLog2E + kRounder;  // the whole number nearest stands in the low bits
  const Vector whole = shifted - kRounder;
  const Vector rest = (bounded - whole * kLn2High) - whole * kLn2Low;
  Vector sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  const Vector power = sum * (rest * rest) + rest + 1.0f;
  const Integers exponent = ((Integers)shifted - (Integers)all(kRounder) + 127) << 23;
  return is_tiny ? Vector{} : power * (Vector)exponent;
}

// 1 / (1 + e^-x)
inline Vector sigmoid(Vector x) {
  const Integers is_negative = x < 0.0f;
  const Vector small = exponential(is_negative ? x : -x);
  return (is_negative ? small : all(1.0f)) / (small + 1.0f);
}

}  // namespace JAXPAGED_SET
}  // namespace vectors
}  // namespace jaxpaged
