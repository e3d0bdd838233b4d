// Attention of one tile; included by attend.h once for each set of instructions (no include guard), in the namespace JAXPAGED_TILE.
//
// Vectors are 16 floats wide everywhere; a compiler that has narrower ones takes several.

namespace jaxpaged {
namespace attention {
namespace JAXPAGED_TILE {

typedef float Vector __attribute__((vector_size(64), aligned(64)));
typedef int32_t Integers __attribute__((vector_size(64), aligned(64)));

constexpr int64_t kLanes = 16;
constexpr int64_t kPanels = kBlock / kLanes;  // vectors of a block's logits
constexpr int kRows = JAXPAGED_TILE_ROWS;     // rows whose sums are kept in registers

inline Vector load(const float* numbers) { return *reinterpret_cast<const Vector*>(numbers); }
inline void store(float* numbers, Vector vector) { *reinterpret_cast<Vector*>(numbers) = vector; }
inline Vector all(float number) { return Vector{} + number; }

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
  const Integers exponent = (reinterpret_cast<const Integers&>(shifted) - reinterpret_cast<const Integers&>(static_cast<const Vector&>(all(kRounder))) + 127) << 23;
  const Vector result = power * reinterpret_cast<const Vector&>(exponent);
  return is_tiny ? Vector{} : result;
}

inline float largest(Vector vector) {
  float peak = vector[0];
  for (int64_t lane = 1; lane < kLanes; ++lane) peak = vector[lane] > peak ? vector[lane] : peak;
  return peak;
}

inline float total(Vector vector) {
  typedef float Half __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  Half low, high;
  std::memcpy(&low, &vector, 32);
  std::memcpy(&high, reinterpret_cast<const char*>(&vector) + 32, 32);
  const Half half = low + high;
  Quarter first, second;
  std::memcpy(&first, &half, 16);
  std::memcpy(&second, reinterpret_cast<const char*>(&half) + 16, 16);
  const Quarter quarter = first + second;
  return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
}

// out [16, kBlock apart] = in [16, stride apart], transposed.
inline void transpose(const float* in, int64_t stride, float* out) {
#if defined(JAXPAGED_HAS_SHUFFLES)
  // Laying the halves of 256 numbers into one another four times exchanges rows and columns.
  Vector a[kLanes], b[kLanes];
  for (int64_t row = 0; row < kLanes; ++row) a[row] = load(in + row * stride);
  for (int round = 0; round < 4; ++round) {
    for (int64_t row = 0; row < kLanes / 2; ++row) {
      const Vector x = a[row], y = a[row + kLanes / 2];
      b[2 * row] = __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      b[2 * row + 1] = __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int64_t row = 0; row < kLanes; ++row) a[row] = b[row];
  }
  for (int64_t row = 0; row < kLanes; ++row) store(out + row * kBlock, a[row]);
#else
  for (int64_t row = 0; row < kLanes; ++row)
    for (int64_t column = 0; column < kLanes; ++column) out[column * kBlock + row] = in[row * stride + column];
#endif
}

// logits [rows, kBlock] = q [rows, stride] times keys [head_dim, kBlock], times scale.
template <int kCount>
inline void multiply_keys(const float* q, int64_t stride, const float* keys, int64_t head_dim, float scale, float* logits) {
  Vector sums[kCount][kPanels];
  for (int row = 0; row < kCount; ++row)
    for (int64_t panel = 0; panel < kPanels; ++panel) sums[row][panel] = Vector{};
  for (int64_t dim = 0; dim < head_dim; ++dim) {
    const float* key = keys + dim * kBlock;
    const Vector k0 = load(key), k1 = load(key + kLanes), k2 = load(key + 2 * kLanes), k3 = load(key + 3 * kLanes);
#pragma GCC unroll 8
    for (int row = 0; row < kCount; ++row) {
      const Vector number = all(q[row * stride + dim]);
      sums[row][0] += number * k0;
      sums[row][1] += number * k1;
      sums[row][2] += number * k2;
      sums[row][3] += number * k3;
    }
  }
  for (int row = 0; row < kCount; ++row)
    for (int64_t panel = 0; panel < kPanels; ++panel) store(logits + row * kBlock + panel * kLanes, sums[row][panel] * scale);
}

// sums [rows, stride], 64 numbers of each from here, += weights [rows, kBlock] times values [positions, stride].
template <int kCount>
inline void add_values(const float* weights, const float* values, int64_t stride, int64_t first, int64_t last, float* sums) {
  Vector own[kCount][kPanels];
#pragma GCC unroll 8
  for (int row = 0; row < kCount; ++row)
    for (int64_t panel = 0; panel < kPanels; ++panel) own[row][panel] = load(sums + row * stride + panel * kLanes);
  for (int64_t position = first; position < last; ++position) {
    const float* value = values + position * stride;
    const Vector v0 = load(value), v1 = load(value + kLanes), v2 = load(value + 2 * kLanes), v3 = load(value + 3 * kLanes);
#pragma GCC unroll 8
    for (int row = 0; row < kCount; ++row) {
      const Vector weight = all(weights[row * kBlock + position]);
      own[row][0] += weight * v0;
      own[row][1] += weight * v1;
      own[row][2] += weight * v2;
      own[row][3] += weight * v3;
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kCount; ++row)
    for (int64_t panel = 0; panel < kPanels; ++panel) store(sums + row * stride + panel * kLanes, own[row][panel]);
}

// Calls run<count>(row) for all rows, kRows at a time as long as there are so many.
#define JAXPAGED_FOR_ROWS(num_rows, run)                                     \
  {                                                                          \
    int64_t row = 0;                                                         \
    for (; row + kRows <= num_rows; row += kRows) run(kRows, row);           \
    if (kRows > 3 && row + 3 <= num_rows) { run(3, row); row += 3; }         \
    for (; row < num_rows; ++row) run(1, row);                               \
  }

template <typename Query, typename Page>
void attend_tile(const Call<Query, Page>& call, const Tile& tile, Scratch& scratch) {
  const int64_t head_dim = call.head_dim, heads = call.heads_per_kv_head, num_rows = tile.count * heads;
  const int64_t width = (head_dim + kBlock - 1) / kBlock * kBlock;  // of rows in memory; what is behind head_dim stays 0
  float* const q = scratch.at_least((2 * num_rows + 2 * kBlock) * width + width * kBlock + num_rows * (kBlock + 3));
  float* const sums = q + num_rows * width;
  float* const keys = sums + num_rows * width;      // as they come, [kBlock, width]
  float* const values = keys + kBlock * width;      // [kBlock, width]
  float* const turned = values + kBlock * width;    // keys, [width, kBlock]
  float* const weights = turned + width * kBlock;   // [rows, kBlock]
  float* const peaks = weights + num_rows * kBlock, *const totals = peaks + num_rows, *const factors = totals + num_rows;

  const int64_t start = call.cu_q_lens[tile.seq] + tile.first, kv_len = call.kv_lens[tile.seq];
  const int64_t before = kv_len - (call.cu_q_lens[tile.seq + 1] - call.cu_q_lens[tile.seq]) + tile.first;
  const auto place = [&](int64_t row) { return ((start + row / heads) * call.kv_heads + tile.kv_head) * heads * head_dim + row % heads * head_dim; };
  const auto position_of = [&](int64_t row) { return call.is_causal ? before + row / heads : kv_len - 1; };
  const auto lowest_of = [&](int64_t row) { return std::max<int64_t>(0, position_of(row) - call.window + 1); };

  std::memset(q, 0, 2 * num_rows * width * sizeof(float));
  for (int64_t row = 0; row < num_rows; ++row) {
    const Query* own = call.q + place(row);
    for (int64_t dim = 0; dim < head_dim; ++dim) q[row * width + dim] = widened(own[dim]);
    const bool has_sink = call.sinks != nullptr;
    peaks[row] = has_sink ? call.sinks[tile.kv_head * heads + row % heads] : kNothing;
    totals[row] = has_sink ? 1.0f : 0.0f;
  }

  const int64_t lowest = lowest_of(0), highest = std::min(kv_len, position_of(num_rows - 1) + 1);
  if (width > head_dim) std::memset(keys, 0, 2 * kBlock * width * sizeof(float));
  for (int64_t block = lowest / kBlock * kBlock; block < highest; block += kBlock) {
    const int64_t first = std::max(lowest - block, int64_t{0}), last = std::min(highest - block, kBlock);
    int64_t offset = 0, left = 0;  // left: positions of a page that lie one after another
    for (int64_t position = 0; position < kBlock; ++position) {
      float* const key = keys + position * width;
      float* const value = values + position * width;
      if (position < first || position >= last) {
        std::memset(key, 0, head_dim * sizeof(float));
        continue;
      }
      offset += head_dim;
      if (left == 0) {
        offset = call.offset(tile.seq, tile.kv_head, block + position);
        left = call.page_size - (block + position) % call.page_size;
      }
      --left;
      const Page* const own_key = call.k_pages + offset;
      const Page* const own_value = call.v_pages + offset;
      for (int64_t dim = 0; dim < head_dim; ++dim) key[dim] = widened(own_key[dim]);
      for (int64_t dim = 0; dim < head_dim; ++dim) value[dim] = widened(own_value[dim]);
    }
    for (int64_t dim = 0; dim < head_dim; dim += kLanes)
      for (int64_t position = 0; position < kBlock; position += kLanes)
        transpose(keys + position * width + dim, width, turned + dim * kBlock + position);

#define JAXPAGED_RUN(count, row) multiply_keys<count>(q + row * width, width, turned, head_dim, call.scale, weights + row * kBlock)
    JAXPAGED_FOR_ROWS(num_rows, JAXPAGED_RUN)
#undef JAXPAGED_RUN

    for (int64_t row = 0; row < num_rows; ++row) {
      float* const own = weights + row * kBlock;
      if (call.soft_cap != 0.0f)
        for (int64_t lane = 0; lane < kBlock; ++lane) own[lane] = call.soft_cap * std::tanh(own[lane] / call.soft_cap);
      const int64_t from = std::max(lowest_of(row) - block, int64_t{0}), to = std::min(position_of(row) + 1 - block, last);
      for (int64_t lane = 0; lane < from && lane < kBlock; ++lane) own[lane] = kNothing;
      for (int64_t lane = std::max<int64_t>(to, 0); lane < kBlock; ++lane) own[lane] = kNothing;
      Vector logits[kPanels], both[2];
      for (int64_t panel = 0; panel < kPanels; ++panel) logits[panel] = load(own + panel * kLanes);
      for (int64_t half = 0; half < 2; ++half) both[half] = logits[half] > logits[half + 2] ? logits[half] : logits[half + 2];
      const float seen = largest(both[0] > both[1] ? both[0] : both[1]);
      const float peak = seen > peaks[row] ? seen : peaks[row], finite = peak == kNothing ? 0.0f : peak;
      // Before the first position that a row sees, its peak is -inf, and the factor is the 0 that it needs.
      factors[row] = peak == peaks[row] ? 1.0f : exponential(all(peaks[row] - finite))[0];
      peaks[row] = peak;
      Vector summed[kPanels];
      for (int64_t panel = 0; panel < kPanels; ++panel) {
        summed[panel] = exponential(logits[panel] - finite);
        store(own + panel * kLanes, summed[panel]);
      }
      totals[row] = totals[row] * factors[row] + total((summed[0] + summed[1]) + (summed[2] + summed[3]));
      if (factors[row] != 1.0f)
        for (int64_t dim = 0; dim < width; dim += kLanes) store(sums + row * width + dim, load(sums + row * width + dim) * factors[row]);
    }

    for (int64_t dim = 0; dim < width; dim += kBlock) {
#define JAXPAGED_RUN(count, row) add_values<count>(weights + row * kBlock, values + dim, width, first, last, sums + row * width + dim)
      JAXPAGED_FOR_ROWS(num_rows, JAXPAGED_RUN)
#undef JAXPAGED_RUN
    }
  }

  for (int64_t row = 0; row < num_rows; ++row) {
    Query* const out = call.out + place(row);
    const float by = totals[row] == 0.0f ? 1.0f : totals[row];
    for (int64_t dim = 0; dim < head_dim; ++dim) narrowed(sums[row * width + dim] / by * call.v_scale, out + dim);
  }
}

#undef JAXPAGED_FOR_ROWS

}  // namespace JAXPAGED_TILE
}  // namespace attention
}  // namespace jaxpaged
