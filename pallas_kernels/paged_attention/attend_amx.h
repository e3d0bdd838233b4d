// Attention of one tile of bfloat16 rows over bfloat16 pages with Intel's matrix tiles; included by attend.h (no include guard).
//
// Products are exact and their sums float32; weights are rounded to bfloat16 before they meet the values. An element of a matrix product is
// the same bits whatever else its tile holds and whichever of the two factors is laid out in pairs, so few rows take keys as they lie and
// many rows take them turned. Exponents are of base 2.

namespace jaxpaged {
namespace attention {
namespace amx {

constexpr int64_t kGroup = 16;     // rows of a matrix tile
constexpr int64_t kDims = 32;      // numbers of a row of a matrix tile
constexpr int64_t kFewRows = 8;    // up to here keys are taken as they lie
constexpr float kLog2E = 1.44269504f;

// 2^x = 1 + x (kPower[0] + x (kPower[1] + ..)) in [0, 1), within 1e-7 of it.
constexpr float kPower[5] = {0.693151295f, 0.240164444f, 0.0557999127f, 0.00901702978f, 0.00186713017f};

// GCC's tile loads do not say that they read memory.
inline void written() { asm volatile("" ::: "memory"); }

// 2 to the power of numbers up to 0, within 3 units of the last place; exactly 1 for 0 and 0 for -inf. NaN stays NaN.
inline __m512 power_of_two(__m512 x) {
  const __m512 rest = _mm512_reduce_ps(x, 1);  // over the whole number below
  __m512 sum = _mm512_fmadd_ps(rest, _mm512_set1_ps(kPower[4]), _mm512_set1_ps(kPower[3]));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(kPower[2]));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(kPower[1]));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(kPower[0]));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(sum, x);
}

// Lane i of the result is the maximum or sum of vectors[i], halves first, then quarters and so on.
template <bool kIsSum>
inline __m512 across(const __m512* vectors) {
  const auto both = [](__m512 a, __m512 b) { return kIsSum ? _mm512_add_ps(a, b) : _mm512_max_ps(a, b); };
  __m512 halves[8], quarters[4], pairs[2];
  for (int i = 0; i < 8; ++i)
    halves[i] = both(_mm512_shuffle_f32x4(vectors[i], vectors[i + 8], 0x44), _mm512_shuffle_f32x4(vectors[i], vectors[i + 8], 0xee));
  for (int i = 0; i < 4; ++i)
    quarters[i] = both(_mm512_shuffle_f32x4(halves[i], halves[i + 4], 0x88), _mm512_shuffle_f32x4(halves[i], halves[i + 4], 0xdd));
  for (int i = 0; i < 2; ++i)
    pairs[i] = both(_mm512_shuffle_ps(quarters[i], quarters[i + 2], 0x44), _mm512_shuffle_ps(quarters[i], quarters[i + 2], 0xee));
  const __m512 mixed = both(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15), mixed);
}

// out [16, stride apart] = in [16], transposed; numbers of 32 bits.
inline void turn(const __m512i* in, uint32_t* out, int64_t stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // b[4 j + i] holds columns i, 4 + i, 8 + i, 12 + i of rows 4 j to 4 j + 3
    const __m512i low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), high = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd), odd_high = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    _mm512_store_si512(out + i * stride, _mm512_shuffle_i32x4(low, high, 0x88));
    _mm512_store_si512(out + (4 + i) * stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    _mm512_store_si512(out + (8 + i) * stride, _mm512_shuffle_i32x4(low, high, 0xdd));
    _mm512_store_si512(out + (12 + i) * stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
  }
}

// A block, beginning at position `start`, of which a tile sees [first, last), and where each of its positions lies.
struct Block {
  int64_t first, last, start;
  int64_t places[kBlock];
};

// One tile's work; its memory is the thread's.
struct Work {
  const Call<BFloat16, BFloat16>& call;
  const Tile& tile;
  const int64_t heads, num_rows, num_groups, width;  // width: head_dim rounded up to whole tiles
  const bool is_few, lies_well;                      // lies_well: 16 positions of a page are a tile
  const float factor;                                // of logits
  int64_t start, kv_len, before;
  float *sums, *logits, *peaks, *totals;             // [rows, width], its columns mixed; [16, kBlock] or [kBlock, 16]; [rows] each
  BFloat16 *q, *weights, *keys;                      // [rows, width] or in pairs [width / 2, 16]; [16, kBlock]; [kBlock, width]
  uint32_t *turned, *values;                         // pairs: [width / 2, kBlock], [kBlock / 2, width], its columns mixed
  Block block;

  Work(const Call<BFloat16, BFloat16>& call, const Tile& tile, Scratch& scratch)
      : call(call), tile(tile), heads(call.heads_per_kv_head), num_rows(tile.count * heads), num_groups((num_rows + kGroup - 1) / kGroup),
        width((call.head_dim + kDims - 1) / kDims * kDims), is_few(num_rows <= kFewRows),
        lies_well(call.head_dim % kDims == 0 && call.page_size % kGroup == 0),
        factor(call.soft_cap != 0.0f ? kLog2E : call.scale * kLog2E) {
    const int64_t rows = num_groups * kGroup;
    const int64_t of_rows = rows * width + 2 * rows + rows * width / 2, of_block = 3 * kBlock * width / 2, of_group = kGroup * kBlock * 3 / 2;
    float* memory = scratch.at_least(of_rows + of_block + of_group);
    const auto taken = [&memory](int64_t count) {
      float* const own = memory;
      memory += count;
      return own;
    };
    sums = taken(rows * width), logits = taken(kGroup * kBlock), peaks = taken(rows), totals = taken(rows);
    q = reinterpret_cast<BFloat16*>(taken(rows * width / 2)), weights = reinterpret_cast<BFloat16*>(taken(kGroup * kBlock / 2));
    keys = reinterpret_cast<BFloat16*>(taken(kBlock * width / 2));
    turned = reinterpret_cast<uint32_t*>(taken(kBlock * width / 2)), values = reinterpret_cast<uint32_t*>(taken(kBlock * width / 2));
    start = call.cu_q_lens[tile.seq] + tile.first, kv_len = call.kv_lens[tile.seq];
    before = kv_len - (call.cu_q_lens[tile.seq + 1] - call.cu_q_lens[tile.seq]) + tile.first;
  }

  int64_t place(int64_t row) const {
    return (((start + row / heads) * call.kv_heads + tile.kv_head) * heads + row % heads) * call.head_dim;
  }
  int64_t position_of(int64_t row) const { return call.is_causal ? before + row / heads : kv_len - 1; }
  int64_t lowest_of(int64_t row) const { return std::max<int64_t>(0, position_of(row) - call.window + 1); }

  void begin() {
    std::memset(sums, 0, num_groups * kGroup * width * sizeof(float));
    std::memset(q, 0, num_groups * kGroup * width * sizeof(BFloat16));
    for (int64_t row = 0; row < num_groups * kGroup; ++row) {
      const bool has_sink = row < num_rows && call.sinks != nullptr;
      peaks[row] = has_sink ? call.sinks[tile.kv_head * heads + row % heads] * kLog2E : kNothing;
      totals[row] = has_sink ? 1.0f : 0.0f;
      if (row >= num_rows) continue;
      const BFloat16* const own = call.q + place(row);
      if (is_few)
        for (int64_t dim = 0; dim < call.head_dim; ++dim) q[(dim / 2 * kGroup + row) * 2 + dim % 2] = own[dim];
      else
        std::memcpy(q + row * width, own, call.head_dim * sizeof(BFloat16));
    }
  }

  // Where the positions of a block lie that are seen.
  void find(int64_t begin, int64_t lowest, int64_t highest) {
    block.start = begin, block.first = std::max<int64_t>(lowest - begin, 0), block.last = std::min(highest - begin, kBlock);
    int64_t entry = begin / call.page_size, within = begin % call.page_size;
    const int32_t* const table = call.tables + tile.seq * call.max_pages;
    const auto page_of = [&] {
      const int64_t page = table[std::min(entry, call.max_pages - 1)];
      return (std::min(std::max<int64_t>(page, 0), call.num_pages - 1) * call.kv_heads + tile.kv_head) * call.page_size * call.head_dim;
    };
    int64_t page = page_of();
    for (int64_t position = 0; position < block.last; ++position) {
      block.places[position] = page + within * call.head_dim;
      if (++within == call.page_size && position + 1 < block.last) within = 0, ++entry, page = page_of();
    }
  }

  // Lays two and two positions' values into one another, and keys side by side when they do not lie so; what is not seen is 0.
  void take() {
    for (int64_t position = block.first / 2 * 2; position < block.last; position += 2) {
      const bool has_even = position >= block.first, has_odd = position + 1 < block.last;
      const BFloat16* const even = call.v_pages + block.places[position];
      const BFloat16* const odd = has_odd ? call.v_pages + block.places[position + 1] : even;
      uint32_t* const out = values + position / 2 * width;
      for (int64_t dim = 0; dim < width; dim += kDims) {
        const __mmask32 rest = call.head_dim - dim >= kDims ? ~0u : (1u << (call.head_dim - dim)) - 1;
        const __m512i a = _mm512_maskz_loadu_epi16(has_even ? rest : 0, even + dim), b = _mm512_maskz_loadu_epi16(has_odd ? rest : 0, odd + dim);
        _mm512_store_si512(out + dim, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(out + dim + kGroup, _mm512_unpackhi_epi16(a, b));
      }
    }
    // The rest of a matrix tile.
    const int64_t head = block.first / 2 * 2 / kDims * kDims, tail = (block.last + kDims - 1) / kDims * kDims, end = (block.last + 1) / 2 * 2;
    std::memset(values + head / 2 * width, 0, (block.first / 2 * 2 - head) / 2 * width * sizeof(uint32_t));
    std::memset(values + end / 2 * width, 0, (tail - end) / 2 * width * sizeof(uint32_t));
    if (lies_well) return;
    for (int64_t position = block.first; position < block.last; ++position) {
      std::memcpy(keys + position * width, call.k_pages + block.places[position], call.head_dim * sizeof(BFloat16));
      std::memset(keys + position * width + call.head_dim, 0, (width - call.head_dim) * sizeof(BFloat16));
    }
  }

  // 16 positions' keys, `width` numbers apart; those that are not seen may be anything.
  const BFloat16* keys_at(int64_t position) const {
    return lies_well ? call.k_pages + block.places[position] : keys + position * width;
  }

  void turn_keys() {
    for (int64_t position = block.first / kGroup * kGroup; position < block.last; position += kGroup) {
      const BFloat16* const own = keys_at(position);
      for (int64_t dim = 0; dim < width; dim += kDims) {
        __m512i rows[kGroup];
        for (int64_t row = 0; row < kGroup; ++row) rows[row] = _mm512_loadu_si512(own + row * width + dim);
        turn(rows, turned + dim / 2 * kBlock + position, kBlock);
      }
    }
  }

  // Logits of few rows, [kBlock, 16].
  void multiply_few() {
    written();
    for (int64_t position = block.first / kGroup * kGroup; position < block.last; position += kGroup) {
      const BFloat16* const own = keys_at(position);
      _tile_zero(0);
      for (int64_t dim = 0; dim < width; dim += kDims) {
        _tile_loadd(1, own + dim, width * sizeof(BFloat16));
        _tile_loadd(2, q + dim * kGroup, kGroup * sizeof(uint32_t));
        _tile_dpbf16ps(0, 1, 2);
      }
      _tile_stored(0, logits + position * kGroup, kGroup * sizeof(float));
    }
  }

  // Logits of 16 rows, [16, kBlock].
  void multiply(int64_t group, float* out) {
    written();
    const BFloat16* const rows = q + group * kGroup * width;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t dim = 0; dim < width; dim += kDims) {
      const uint32_t* const pairs = turned + dim / 2 * kBlock;
      _tile_loadd(4, rows + dim, width * sizeof(BFloat16));
      _tile_loadd(5, pairs, kBlock * sizeof(uint32_t));
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, pairs + kGroup, kBlock * sizeof(uint32_t));
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, pairs + 2 * kGroup, kBlock * sizeof(uint32_t));
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, pairs + 3 * kGroup, kBlock * sizeof(uint32_t));
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, out, kBlock * sizeof(float));
    _tile_stored(1, out + kGroup, kBlock * sizeof(float));
    _tile_stored(2, out + 2 * kGroup, kBlock * sizeof(float));
    _tile_stored(3, out + 3 * kGroup, kBlock * sizeof(float));
  }

  bool is_seen(int64_t group) const {
    const int64_t last = std::min((group + 1) * kGroup, num_rows) - 1;
    return block.start <= position_of(last) && block.start + kBlock > lowest_of(group * kGroup);
  }

  // Weights of a group's rows, and their running peaks, totals and sums.
  void weigh(int64_t group, float* own) {
    const int64_t first_row = group * kGroup, rows = std::min(num_rows - first_row, kGroup);
    const __m512 by = _mm512_set1_ps(factor);
    const __m512i column = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(kGroup));
    alignas(64) float few[kFewRows * kBlock];
    if (is_few) {
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t lane = 0; lane < kBlock; lane += kGroup)
          _mm512_store_ps(few + row * kBlock + lane, _mm512_i32gather_ps(column, own + lane * kGroup + row, 4));
      own = few;
    }
    if (call.soft_cap != 0.0f)
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t lane = block.first; lane < block.last; ++lane)
          own[row * kBlock + lane] = call.soft_cap * std::tanh(own[row * kBlock + lane] * call.scale / call.soft_cap);
    __m512 both[kGroup];
    for (int64_t row = 0; row < kGroup; ++row) both[row] = _mm512_set1_ps(kNothing);
    const bool is_whole = block.first == 0 && block.last == kBlock && position_of(first_row) >= block.start + kBlock - 1 &&
                          lowest_of(first_row + rows - 1) <= block.start;
    for (int64_t row = 0; row < rows; ++row) {
      float* const logit = own + row * kBlock;
      const auto scaled = [logit, by](int64_t panel) { return _mm512_mul_ps(_mm512_load_ps(logit + panel * kGroup), by); };
      __m512 a = scaled(0), b = scaled(1), c = scaled(2), d = scaled(3);
      if (!is_whole) {
        const int64_t from = std::max(lowest_of(first_row + row) - block.start, int64_t{0});
        const int64_t to = std::max<int64_t>(std::min(position_of(first_row + row) + 1 - block.start, block.last), 0);
        const uint64_t below = to >= 64 ? ~uint64_t{0} : (uint64_t{1} << to) - 1, visible = from >= 64 ? 0 : below >> from << from;
        const __m512 nothing = _mm512_set1_ps(kNothing);
        a = _mm512_mask_mov_ps(nothing, visible, a), b = _mm512_mask_mov_ps(nothing, visible >> 16, b);
        c = _mm512_mask_mov_ps(nothing, visible >> 32, c), d = _mm512_mask_mov_ps(nothing, visible >> 48, d);
      }
      _mm512_store_ps(logit, a), _mm512_store_ps(logit + kGroup, b);
      _mm512_store_ps(logit + 2 * kGroup, c), _mm512_store_ps(logit + 3 * kGroup, d);
      both[row] = _mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d));
    }
    const __m512 old = _mm512_load_ps(peaks + first_row), peak = _mm512_max_ps(old, across<false>(both));
    // A row that has seen nothing has peak -inf, and nothing is taken off it.
    const __mmask16 has_seen = _mm512_cmp_ps_mask(peak, _mm512_set1_ps(kNothing), _CMP_NEQ_UQ);
    const __mmask16 is_other = _mm512_cmp_ps_mask(peak, old, _CMP_NEQ_UQ);
    const __m512 decay = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), is_other, power_of_two(_mm512_sub_ps(old, peak)));
    alignas(64) float finite[kGroup], decays[kGroup];
    _mm512_store_ps(finite, _mm512_maskz_mov_ps(has_seen, peak)), _mm512_store_ps(decays, decay);
    _mm512_store_ps(peaks + first_row, peak);
    for (int64_t row = 0; row < kGroup; ++row) both[row] = _mm512_setzero_ps();
    for (int64_t row = 0; row < rows; ++row) {
      const float* const logit = own + row * kBlock;
      const __m512 off = _mm512_set1_ps(finite[row]);
      const auto weight = [logit, off](int64_t panel) { return power_of_two(_mm512_sub_ps(_mm512_load_ps(logit + panel * kGroup), off)); };
      const __m512 a = weight(0), b = weight(1), c = weight(2), d = weight(3);
      _mm512_store_si512(weights + row * kBlock, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
      _mm512_store_si512(weights + row * kBlock + kDims, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(d, c)));
      both[row] = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
    }
    _mm512_store_ps(totals + first_row, _mm512_fmadd_ps(_mm512_load_ps(totals + first_row), decay, across<true>(both)));
    for (int64_t row = 0; row < rows && is_other != 0; ++row)
      if (is_other >> row & 1)
        for (int64_t dim = 0; dim < width; dim += kGroup) {
          float* const sum = sums + (first_row + row) * width + dim;
          _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), _mm512_set1_ps(decays[row])));
        }
  }

  // The sums of a group's rows += weights times values.
  void add(int64_t group) {
    written();
    float* const own = sums + group * kGroup * width;
    const bool has_low = block.first < kDims, has_high = block.last > kDims;
    const uint32_t* const high = values + kGroup * width;
    if (has_low) _tile_loadd(4, weights, kBlock * sizeof(BFloat16));
    if (has_high) _tile_loadd(5, weights + kDims, kBlock * sizeof(BFloat16));
    for (int64_t dim = 0; dim < width; dim += 2 * kGroup) {
      _tile_loadd(0, own + dim, width * sizeof(float));
      _tile_loadd(1, own + dim + kGroup, width * sizeof(float));
      if (has_low) {
        _tile_loadd(6, values + dim, width * sizeof(uint32_t));
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values + dim + kGroup, width * sizeof(uint32_t));
        _tile_dpbf16ps(1, 4, 7);
      }
      if (has_high) {
        _tile_loadd(6, high + dim, width * sizeof(uint32_t));
        _tile_dpbf16ps(0, 5, 6);
        _tile_loadd(7, high + dim + kGroup, width * sizeof(uint32_t));
        _tile_dpbf16ps(1, 5, 7);
      }
      _tile_stored(0, own + dim, width * sizeof(float));
      _tile_stored(1, own + dim + kGroup, width * sizeof(float));
    }
  }

  void finish() const {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t row = 0; row < num_rows; ++row) {
      BFloat16* const out = call.out + place(row);
      const __m512 by = _mm512_set1_ps(call.v_scale / (totals[row] == 0.0f ? 1.0f : totals[row]));
      for (int64_t dim = 0; dim < call.head_dim; dim += kDims) {
        const __m512 low = _mm512_mul_ps(_mm512_load_ps(sums + row * width + dim), by);
        const __m512 high = _mm512_mul_ps(_mm512_load_ps(sums + row * width + dim + kGroup), by);
        const __m512 front = _mm512_permutex2var_ps(low, first, high), back = _mm512_permutex2var_ps(low, second, high);
        const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(back, front));
        const __mmask32 rest = call.head_dim - dim >= kDims ? ~0u : (1u << (call.head_dim - dim)) - 1;
        _mm512_mask_storeu_epi16(out + dim, rest, both);
      }
    }
  }

  void run() {
    begin();
    const int64_t lowest = lowest_of(0), highest = std::min(kv_len, position_of(num_rows - 1) + 1);
    for (int64_t begin = lowest / kBlock * kBlock; begin < highest; begin += kBlock) {
      find(begin, lowest, highest);
      take();
      if (is_few) {
        multiply_few();
        weigh(0, logits);
        add(0);
        continue;
      }
      turn_keys();
      for (int64_t group = 0; group < num_groups; ++group) {
        if (!is_seen(group)) continue;
        multiply(group, logits);
        weigh(group, logits);
        add(group);
      }
    }
    finish();
  }
};

inline void attend_tile(const Call<BFloat16, BFloat16>& call, const Tile& tile, Scratch& scratch) {
  const Tiles tiles;
  Work(call, tile, scratch).run();
}

}  // namespace amx
}  // namespace attention
}  // namespace jaxpaged
