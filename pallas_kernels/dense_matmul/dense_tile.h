// Some outputs of all rows; included by dense.h once for each set of instructions (no include guard), in the namespace JAXPAGED_DENSE.

namespace jaxpaged {
namespace dense {
namespace JAXPAGED_DENSE {

typedef float Vector __attribute__((vector_size(64)));
typedef float UnalignedVector __attribute__((vector_size(64), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));

inline Vector load(const float* numbers) { return *reinterpret_cast<const UnalignedVector*>(numbers); }
inline Vector load(const BFloat16* numbers) {
  const Words wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(numbers), Words) << 16;
  return reinterpret_cast<const Vector&>(wide);
}

// The first `count` numbers, and zeros.
template <typename Number>
inline Vector load_part(const Number* numbers, int64_t count) {
  Number whole[kLanes] = {};
  std::memcpy(whole, numbers, count * sizeof(Number));
  return load(whole);
}

inline float total(Vector vector) {
  typedef float Half __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  Half halves[2];
  std::memcpy(halves, &vector, sizeof(vector));
  const Half half = halves[0] + halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, &half, sizeof(half));
  const Quarter quarter = quarters[0] + quarters[1];
  return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
}

// kRows rows from `row` on times `num_outs` (at most kBlockOuts) outputs from `o` on. kIsFirst: these weights were not read before.
template <int kRows, bool kIsFirst, typename Number>
inline void tile(const Product<Number>& product, int64_t row, int64_t o, int64_t num_outs) {
  const int64_t num_in = product.num_in, whole = num_in / kLanes * kLanes;
  const Number* weights[kBlockOuts];
  for (int64_t w = 0; w < kBlockOuts; ++w) weights[w] = product.matrix + (o + (w < num_outs ? w : 0)) * num_in;
  const float* const x = product.x + row * product.stride;
  Vector sums[kRows][kBlockOuts];
  for (int r = 0; r < kRows; ++r)
    for (int64_t w = 0; w < kBlockOuts; ++w) sums[r][w] = Vector{};
  for (int64_t i = 0; i < whole; i += kLanes) {
    if (kIsFirst && (i * sizeof(Number)) % 64 == 0) {
      const char* const ahead = reinterpret_cast<const char*>(weights[0]) + kAheadBytes + kBlockOuts * i * sizeof(Number);
      for (int64_t line = 0; line < kBlockOuts; ++line) __builtin_prefetch(ahead + 64 * line);
    }
    const Vector w0 = load(weights[0] + i), w1 = load(weights[1] + i), w2 = load(weights[2] + i), w3 = load(weights[3] + i);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vector numbers = load(x + r * product.stride + i);
      sums[r][0] += numbers * w0;
      sums[r][1] += numbers * w1;
      sums[r][2] += numbers * w2;
      sums[r][3] += numbers * w3;
    }
  }
  if (whole < num_in) {
    for (int64_t w = 0; w < kBlockOuts; ++w) {
      const Vector part = load_part(weights[w] + whole, num_in - whole);
      for (int r = 0; r < kRows; ++r) sums[r][w] += load(x + r * product.stride + whole) * part;
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int64_t w = 0; w < num_outs; ++w) product.out[(row + r) * product.num_out + o + w] = total(sums[r][w]);
}

template <typename Number>
void multiply(const Product<Number>& product, int64_t first, int64_t last) {
  constexpr int kMost = 6;
  for (int64_t o = first; o < last; o += kBlockOuts) {
    const int64_t num_outs = std::min(kBlockOuts, last - o), rows = product.num_rows;
    int64_t row = rows >= 2 ? 2 : 1;
    if (rows >= 2) tile<2, true>(product, 0, o, num_outs);
    else tile<1, true>(product, 0, o, num_outs);
    for (; row + kMost <= rows; row += kMost) tile<kMost, false>(product, row, o, num_outs);
    for (; row + 2 <= rows; row += 2) tile<2, false>(product, row, o, num_outs);
    for (; row < rows; ++row) tile<1, false>(product, row, o, num_outs);
  }
}

}  // namespace JAXPAGED_DENSE
}  // namespace dense
}  // namespace jaxpaged
