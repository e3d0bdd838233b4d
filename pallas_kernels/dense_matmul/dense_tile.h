// Some outputs of all rows by vectors; included by dense.h once for each set of instructions (no include guard), in the namespace
// JAXPAGED_DENSE. JAXPAGED_DENSE_LANES: sums of a vector. With JAXPAGED_DENSE_PAIRS rows and weights are bfloat16, and a sum takes two
// products at a time.

namespace jaxpaged {
namespace dense {
namespace JAXPAGED_DENSE {

constexpr int64_t kLanes = JAXPAGED_DENSE_LANES;
// Side by side in registers: sums of kMostRows rows and kBlockOuts outputs, and what is multiplied.
constexpr int64_t kBlockOuts = kLanes == 16 ? 4 : 2;
constexpr int kMostRows = 6;

typedef float Vector __attribute__((vector_size(4 * kLanes)));

#if defined(JAXPAGED_DENSE_PAIRS)

constexpr int64_t kNumbers = 2 * kLanes;  // of a row in one step
typedef __m512i Numbers;

inline Numbers load(const BFloat16* numbers) { return _mm512_loadu_si512(numbers); }
inline Vector multiplied(Vector sums, Numbers x, Numbers weights) {
  return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)weights);
}

#else

constexpr int64_t kNumbers = kLanes;
typedef Vector Numbers;

inline Numbers load(const float* numbers) {
  typedef float Unaligned __attribute__((vector_size(4 * kLanes), aligned(4)));
  return *reinterpret_cast<const Unaligned*>(numbers);
}
inline Numbers load(const BFloat16* numbers) {
  typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2)));
  const Words wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(numbers), Words) << 16;
  return reinterpret_cast<const Vector&>(wide);
}
inline Vector multiplied(const Vector& sums, const Numbers& x, const Numbers& weights) { return sums + x * weights; }

#endif

// The first `count` numbers, and zeros.
template <typename Number>
inline Numbers load_part(const Number* numbers, int64_t count) {
  Number whole[kNumbers] = {};
  std::memcpy(whole, numbers, count * sizeof(Number));
  return load(whole);
}

// Each vector's sum, into out[0 .. num_outs).
inline void store_totals(const Vector (&sums)[kBlockOuts], int64_t num_outs, float* out) {
#if JAXPAGED_DENSE_LANES == 16
  const __m512 a = (__m512)sums[0], b = (__m512)sums[1], c = (__m512)sums[2], d = (__m512)sums[3];
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d even = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), odd = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
  const __m512 all = _mm512_add_ps((__m512)even, (__m512)odd);
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_mask_storeu_ps(out, (1u << num_outs) - 1, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  for (int64_t o = 0; o < num_outs; ++o) {
    typedef float Quarter __attribute__((vector_size(16)));
    Quarter quarters[kLanes / 4];
    std::memcpy(quarters, &sums[o], sizeof(quarters));
    Quarter total = quarters[0];
    for (int64_t i = 1; i < kLanes / 4; ++i) total += quarters[i];
    out[o] = (total[0] + total[1]) + (total[2] + total[3]);
  }
#endif
}

// kRows rows from `row` on times `num_outs` (at most kBlockOuts) outputs from `o` on. kIsFirst: these weights were not read before.
template <int kRows, bool kIsFirst, typename Row, typename Number>
inline void tile(const Product<Row, Number>& product, int64_t row, int64_t o, int64_t num_outs) {
  const int64_t num_in = product.num_in, whole = num_in / kNumbers * kNumbers;
  const Number* weights[kBlockOuts];
  for (int64_t w = 0; w < kBlockOuts; ++w) weights[w] = product.matrix + (o + (w < num_outs ? w : 0)) * num_in;
  const Row* const x = product.x + row * num_in;
  Vector sums[kRows][kBlockOuts];
  for (int r = 0; r < kRows; ++r)
    for (int64_t w = 0; w < kBlockOuts; ++w) sums[r][w] = Vector{};
  for (int64_t i = 0; i < whole; i += kNumbers) {
    if (kIsFirst && (i * sizeof(Number)) % 64 == 0) {
      const char* const ahead = reinterpret_cast<const char*>(weights[0]) + kAheadBytes + kBlockOuts * i * sizeof(Number);
      for (int64_t line = 0; line < kBlockOuts; ++line) __builtin_prefetch(ahead + 64 * line);
    }
    Numbers of_outs[kBlockOuts];
#pragma GCC unroll 8
    for (int64_t w = 0; w < kBlockOuts; ++w) of_outs[w] = load(weights[w] + i);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Numbers numbers = load(x + r * num_in + i);
#pragma GCC unroll 8
      for (int64_t w = 0; w < kBlockOuts; ++w) sums[r][w] = multiplied(sums[r][w], numbers, of_outs[w]);
    }
  }
  if (whole < num_in) {
    for (int64_t w = 0; w < kBlockOuts; ++w) {
      const Numbers part = load_part(weights[w] + whole, num_in - whole);
      for (int r = 0; r < kRows; ++r) sums[r][w] = multiplied(sums[r][w], load_part(x + r * num_in + whole, num_in - whole), part);
    }
  }
  for (int r = 0; r < kRows; ++r) store_totals(sums[r], num_outs, product.out + (row + r) * product.num_out + o);
}

// Outputs [first, last) of kRows rows from `row` on.
template <int kRows, bool kIsFirst, typename Row, typename Number>
void tiles(const Product<Row, Number>& product, int64_t row, int64_t first, int64_t last) {
  for (int64_t o = first; o < last; o += kBlockOuts) tile<kRows, kIsFirst>(product, row, o, std::min(kBlockOuts, last - o));
}

// The same of `rows` rows, at most kMostRows.
template <bool kIsFirst, int kRows = kMostRows, typename Row, typename Number>
void some_rows(const Product<Row, Number>& product, int64_t row, int64_t rows, int64_t first, int64_t last) {
  if (rows == kRows) return tiles<kRows, kIsFirst>(product, row, first, last);
  if constexpr (kRows > 1) some_rows<kIsFirst, kRows - 1>(product, row, rows, first, last);
}

template <typename Row, typename Number>
void multiply(const Product<Row, Number>& product, int64_t first, int64_t last) {
  const int64_t bytes_of_out = std::max<int64_t>(1, product.num_in * sizeof(Number));
  const int64_t outs = std::max(kNearBytes / bytes_of_out / kBlockOuts * kBlockOuts, kBlockOuts);
  for (int64_t o = first; o < last; o += outs) {
    const int64_t stop = std::min(o + outs, last);
    some_rows<true>(product, 0, std::min<int64_t>(kMostRows, product.num_rows), o, stop);
    for (int64_t row = kMostRows; row < product.num_rows; row += kMostRows)
      some_rows<false>(product, row, std::min<int64_t>(kMostRows, product.num_rows - row), o, stop);
  }
}

}  // namespace JAXPAGED_DENSE
}  // namespace dense
}  // namespace jaxpaged
