// Paged attention on CPU: rows of one sequence and KV head, tile by tile, over blocks of 64 positions with a running softmax.
//
// Blocks begin at multiples of 64 positions, whatever the chunk of the prompt or the company, and every sum has one order: a row's result
// is the same bits alone, in a batch, decoded or prefilled. What no row may see is never read: pages that others own may hold anything.
// The work itself is in attend_tile.h, compiled once for each set of instructions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../native/amx.h"
#include "../native/instructions.h"
#include "../native/numbers.h"
#include "../native/parallel.h"

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define JAXPAGED_HAS_SHUFFLES 1
#endif
#endif

namespace jaxpaged {
namespace attention {

constexpr int64_t kBlock = 64;      // positions
constexpr int64_t kTileRows = 144;  // query rows of a tile at most, when a KV head has fewer query heads than that
constexpr int64_t kLeastRows = 48;
constexpr int64_t kChunks = 4;      // of a thread, if there is so much work
constexpr float kNothing = -INFINITY;

// What pages and queries are made of.
using Float32 = float;
using jaxpaged::Float8E4M3FN;

using jaxpaged::widened;
inline float widened(Float8E4M3FN number) {
  struct Table {
    float of[256];
    Table() {
      for (int code = 0; code < 256; ++code) {
        const int exponent = code >> 3 & 15, fraction = code & 7;
        const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9) : std::ldexp(8.0f + fraction, exponent - 10);
        of[code] = (code & 127) == 127 ? std::nanf("") : code & 128 ? -size : size;
      }
    }
  };
  static const Table table;
  return table.of[number.bits];
}

inline void narrowed(float wide, Float32* number) { *number = wide; }
inline void narrowed(float wide, BFloat16* number) {  // to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &wide, sizeof(bits));
  number->bits = std::isnan(wide) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// One call. `tables` and the pages are those of the layer and group; the contract is that of pallas_kernels.paged_attention.
template <typename Query, typename Page>
struct Call {
  const Query* q;          // [tokens, kv_heads * heads_per_kv_head, head_dim]
  const Page* k_pages;     // [num_pages, kv_heads, page_size, head_dim]
  const Page* v_pages;
  const int32_t* tables;   // [seqs, max_pages]
  const int32_t* kv_lens;  // [seqs]
  const int32_t* cu_q_lens;
  const float* sinks;  // [heads], or null
  int64_t tokens, seqs, kv_heads, heads_per_kv_head, head_dim, num_pages, page_size, max_pages;
  float scale, v_scale, soft_cap;  // soft_cap 0: none
  int64_t window;                  // a row sees itself and window - 1 positions before it
  bool is_causal;
  Query* out;

  // Where a position's numbers lie. A table that names no page of the pool is read as if it named the nearest.
  int64_t offset(int64_t seq, int64_t kv_head, int64_t position) const {
    const int64_t entry = std::min(position / page_size, max_pages - 1);
    const int64_t page = std::min<int64_t>(std::max<int64_t>(tables[seq * max_pages + entry], 0), num_pages - 1);
    return ((page * kv_heads + kv_head) * page_size + position % page_size) * head_dim;
  }
};

// Query rows of one sequence and KV head: the tokens [first, first + count) of those that the sequence has in this step.
struct Tile {
  int64_t seq, kv_head, first, count, cost;
};

// Memory of a thread, kept between calls.
struct Scratch {
  std::vector<float> numbers;

  float* at_least(int64_t count) {
    constexpr int64_t kAlignment = 16;
    if (static_cast<int64_t>(numbers.size()) < count + kAlignment) numbers.resize(count + kAlignment);
    float* start = numbers.data();
    while (reinterpret_cast<uintptr_t>(start) % (kAlignment * sizeof(float)) != 0) ++start;
    return start;
  }
};

}  // namespace attention
}  // namespace jaxpaged

#define JAXPAGED_TILE portable
#define JAXPAGED_TILE_ROWS 1
#include "attend_tile.h"
#undef JAXPAGED_TILE
#undef JAXPAGED_TILE_ROWS

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define JAXPAGED_TILES_OF_X86 1
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define JAXPAGED_TILE avx2
#define JAXPAGED_TILE_ROWS 1
#include "attend_tile.h"
#undef JAXPAGED_TILE
#undef JAXPAGED_TILE_ROWS
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
#define JAXPAGED_TILE avx512
#define JAXPAGED_TILE_ROWS 6
#include "attend_tile.h"
#undef JAXPAGED_TILE
#undef JAXPAGED_TILE_ROWS
#pragma GCC pop_options
#elif defined(__x86_64__) && defined(__clang__)
#define JAXPAGED_TILES_OF_X86 1
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#define JAXPAGED_TILE avx2
#define JAXPAGED_TILE_ROWS 1
#include "attend_tile.h"
#undef JAXPAGED_TILE
#undef JAXPAGED_TILE_ROWS
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#define JAXPAGED_TILE avx512
#define JAXPAGED_TILE_ROWS 6
#include "attend_tile.h"
#undef JAXPAGED_TILE
#undef JAXPAGED_TILE_ROWS
#pragma clang attribute pop
#endif

#if defined(JAXPAGED_AMX) && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,amx-tile,amx-bf16"))), apply_to = function)
#include "attend_amx.h"
#pragma clang attribute pop
#elif defined(JAXPAGED_AMX)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,amx-tile,amx-bf16,prefer-vector-width=512")
#include "attend_amx.h"
#pragma GCC pop_options
#endif

namespace jaxpaged {
namespace attention {

// Matrix tiles can be used beside the best vectors; it is found out once.
inline bool has_tiles() {
#if defined(JAXPAGED_AMX)
  static const bool has = instructions() == Instructions::kAvx512Vnni && __builtin_cpu_supports("avx512bf16") && amx_is_allowed();
  return has;
#else
  return false;
#endif
}

template <typename Query, typename Page>
void attend_one(Instructions instructions, bool with_tiles, const Call<Query, Page>& call, const Tile& tile) {
  static thread_local Scratch scratch;
#if defined(JAXPAGED_AMX)
  if constexpr (std::is_same_v<Query, BFloat16> && std::is_same_v<Page, BFloat16>)
    if (with_tiles) return amx::attend_tile(call, tile, scratch);
#endif
  switch (instructions) {
#if defined(JAXPAGED_TILES_OF_X86)
    case Instructions::kAvx512Vnni: return avx512::attend_tile(call, tile, scratch);
    case Instructions::kAvx2: return avx2::attend_tile(call, tile, scratch);
#endif
    default: return portable::attend_tile(call, tile, scratch);
  }
}

// `with_tiles`: bfloat16 rows over bfloat16 pages take matrix tiles; only where `has_tiles`.
template <typename Query, typename Page>
void attend(Threads& threads, Instructions instructions, bool with_tiles, const Call<Query, Page>& call) {
  const int64_t width = call.kv_heads * call.heads_per_kv_head * call.head_dim;
  const int64_t share = call.tokens * call.kv_heads * call.heads_per_kv_head / (kChunks * threads.count());
  const int64_t rows_of_tile = std::min(kTileRows, std::max<int64_t>(1, (share + kLeastRows - 1) / kLeastRows) * kLeastRows);
  const int64_t tokens_of_tile = std::max<int64_t>(1, rows_of_tile / call.heads_per_kv_head);
  std::vector<Tile> tiles;
  int64_t live = 0;
  for (int64_t seq = 0; seq < call.seqs; ++seq) {
    const int64_t start = std::max<int64_t>(live, std::min<int64_t>(call.cu_q_lens[seq], call.tokens));
    const int64_t stop = std::max<int64_t>(start, std::min<int64_t>(call.cu_q_lens[seq + 1], call.tokens));
    live = stop;
    for (int64_t first = 0; first < stop - start; first += tokens_of_tile) {
      const int64_t count = std::min(tokens_of_tile, stop - start - first), rows = count * call.heads_per_kv_head;
      const int64_t seen = std::min(call.kv_lens[seq] - (stop - start) + first + count, call.window + count);
      const int64_t cost = (seen + kBlock) * (rows + kLeastRows);  // what a block takes by itself is that of some rows
      for (int64_t kv_head = 0; kv_head < call.kv_heads; ++kv_head) tiles.push_back({seq, kv_head, first, count, cost});
    }
  }
  std::memset(static_cast<void*>(call.out + live * width), 0, (call.tokens - live) * width * sizeof(Query));
  // The longest first, so that no thread begins one when the others are done; KV heads lie side by side in a page and stay together.
  std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.cost > b.cost; });
  const int64_t num_tiles = tiles.size(), of_chunk = num_tiles / call.kv_heads >= kChunks * threads.count() ? call.kv_heads : 1;
  for_chunks(threads, num_tiles / of_chunk, [&tiles, &call, instructions, with_tiles, of_chunk](int64_t chunk) {
    for (int64_t tile = chunk * of_chunk; tile < (chunk + 1) * of_chunk; ++tile) attend_one(instructions, with_tiles, call, tiles[tile]);
  });
}

}  // namespace attention
}  // namespace jaxpaged
