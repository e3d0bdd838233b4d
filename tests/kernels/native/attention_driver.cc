// Runs paged attention without XLA, on plain threads, for sanitizers: every set of instructions against loops over numbers, and rows
// decoded one by one against the same rows prefilled.
//
// Operands lie in buffers of just their size; what nobody owns is NaN, and table entries that nobody may follow name no page.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "../../../pallas_kernels/paged_attention/attend.h"
#include "plain_threads.h"

namespace {

using jaxpaged::Instructions;
using jaxpaged::BFloat16;
using jaxpaged::attention::Call;
using jaxpaged::attention::Float8E4M3FN;
using jaxpaged::attention::widened;

struct Size {
  std::vector<std::pair<int64_t, int64_t>> spans;  // query rows and stored tokens of each sequence
  int64_t kv_heads, heads_per_kv_head, head_dim, page_size, window;
  float soft_cap;
  bool is_causal, has_sinks;
};

void require(bool holds, const char* what, int64_t row, int instructions) {
  if (holds) return;
  std::printf("%s: row %ld, instructions %d\n", what, static_cast<long>(row), instructions);
  std::exit(1);
}

void made(std::mt19937& random, float* number) { *number = std::normal_distribution<float>()(random); }
void made(std::mt19937& random, BFloat16* number) { jaxpaged::attention::narrowed(std::normal_distribution<float>()(random), number); }
void made(std::mt19937& random, Float8E4M3FN* number) { number->bits = static_cast<uint8_t>(random() % 2 * 128 + 24 + random() % 40); }
void not_a_number(float* number) { *number = std::nanf(""); }
void not_a_number(BFloat16* number) { number->bits = 0x7fc0; }
void not_a_number(Float8E4M3FN* number) { number->bits = 0x7f; }

template <typename Query, typename Page>
void check(Instructions vectors, bool with_tiles, const Size& size, int64_t num_threads) {
  const int instructions = static_cast<int>(vectors) + 10 * with_tiles;  // what a failure names
  std::mt19937 random(static_cast<uint32_t>(size.head_dim * 7919 + size.spans.size()));
  const int64_t seqs = size.spans.size(), heads = size.kv_heads * size.heads_per_kv_head, dim = size.head_dim, padding = 3;
  int64_t max_pages = 1, num_pages = 1, tokens = 0;
  for (const auto& [rows, stored] : size.spans) {
    const int64_t pages = (stored + size.page_size - 1) / size.page_size;
    max_pages = std::max(max_pages, pages), num_pages += pages, tokens += rows;
  }
  std::vector<int32_t> tables(seqs * max_pages, INT32_MAX), kv_lens(seqs), cu(seqs + 1);
  std::vector<Page> k(num_pages * size.kv_heads * size.page_size * dim), v(k.size());
  for (auto& number : k) not_a_number(&number);
  for (auto& number : v) not_a_number(&number);
  int32_t next = 1;
  for (int64_t s = 0; s < seqs; ++s) {
    const auto [rows, stored] = size.spans[s];
    cu[s + 1] = cu[s] + rows, kv_lens[s] = stored;
    for (int64_t t = 0; t < stored; ++t) {
      if (t % size.page_size == 0) tables[s * max_pages + t / size.page_size] = next++;
      for (int64_t h = 0; h < size.kv_heads; ++h)
        for (int64_t d = 0; d < dim; ++d) {
          const int64_t at = (((next - 1) * size.kv_heads + h) * size.page_size + t % size.page_size) * dim + d;
          made(random, &k[at]), made(random, &v[at]);
        }
    }
  }
  std::vector<Query> q((tokens + padding) * heads * dim), out(q.size());
  std::vector<float> sinks(heads);
  for (auto& number : q) made(random, &number);
  for (auto& number : sinks) made(random, &number);
  Call<Query, Page> call{q.data(), k.data(), v.data(), tables.data(), kv_lens.data(), cu.data(), size.has_sinks ? sinks.data() : nullptr,
                         tokens + padding, seqs, size.kv_heads, size.heads_per_kv_head, dim, num_pages, size.page_size, max_pages,
                         0.3f, 2.0f, size.soft_cap, size.window, size.is_causal, out.data()};
  {
    PlainThreads threads(num_threads);
    jaxpaged::attention::attend(threads, vectors, with_tiles, call);
  }
  for (int64_t at = tokens * heads * dim; at < static_cast<int64_t>(out.size()); ++at)
    require(widened(out[at]) == 0.0f, "padding is not 0", at, instructions);
  for (int64_t s = 0; s < seqs; ++s) {
    const auto [rows, stored] = size.spans[s];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = size.is_causal ? stored - rows + r : stored - 1, low = std::max<int64_t>(0, position - size.window + 1);
      for (int64_t h = 0; h < heads; ++h) {
        std::vector<double> logits, sums(dim, 0.0);
        const Query* own = &q[((cu[s] + r) * heads + h) * dim];
        const auto place = [&](int64_t t) { return call.offset(s, h / size.heads_per_kv_head, t); };
        double peak = size.has_sinks ? sinks[h] : -1e30, total;
        for (int64_t t = low; t <= position; ++t) {
          double logit = 0;
          for (int64_t d = 0; d < dim; ++d) logit += double(widened(own[d])) * widened(k[place(t) + d]);
          logit *= 0.3f;
          if (size.soft_cap != 0) logit = size.soft_cap * std::tanh(logit / size.soft_cap);
          logits.push_back(logit), peak = std::max(peak, logit);
        }
        total = size.has_sinks ? std::exp(sinks[h] - peak) : 0;
        for (int64_t t = low; t <= position; ++t) {
          const double weight = std::exp(logits[t - low] - peak);
          total += weight;
          for (int64_t d = 0; d < dim; ++d) sums[d] += weight * widened(v[place(t) + d]);
        }
        for (int64_t d = 0; d < dim; ++d) {
          const double expected = sums[d] / total * 2, got = widened(out[((cu[s] + r) * heads + h) * dim + d]);
          const double tolerance = sizeof(Query) == 2 ? 1e-2 : 1e-4;
          require(std::abs(got - expected) <= tolerance * (1 + std::abs(expected)), "another number", r, instructions);
        }
      }
    }
    if (!size.is_causal) continue;
    for (int64_t r = 0; r < rows; ++r) {  // each row alone, as if it were decoded
      const std::vector<int32_t> alone_cu = {0, 1}, alone_len = {static_cast<int32_t>(stored - rows + r + 1)};
      std::vector<Query> one(heads * dim), from(&q[(cu[s] + r) * heads * dim], &q[(cu[s] + r) * heads * dim] + heads * dim);
      Call<Query, Page> alone = call;
      alone.q = from.data(), alone.out = one.data(), alone.tables = tables.data() + s * max_pages, alone.kv_lens = alone_len.data();
      alone.cu_q_lens = alone_cu.data(), alone.seqs = 1, alone.tokens = 1;
      PlainThreads threads(1);
      jaxpaged::attention::attend(threads, vectors, with_tiles, alone);
      require(std::memcmp(one.data(), &out[(cu[s] + r) * heads * dim], one.size() * sizeof(Query)) == 0, "other bits alone", r, instructions);
    }
  }
}

}  // namespace

int main() {
  const int64_t all = INT32_MAX;
  const std::vector<Size> sizes = {
      {{{1, 1}}, 1, 1, 16, 1, all, 0, true, false},
      {{{1, 70}, {5, 5}, {1, 129}, {64, 190}}, 2, 3, 64, 16, all, 0, true, false},
      {{{9, 137}, {1, 64}, {1, 65}}, 1, 5, 20, 8, 70, 5, true, true},
      {{{33, 90}, {1, 7}}, 3, 1, 96, 64, 8, 0, true, true},
      {{{67, 67}, {1, 1}}, 2, 2, 128, 5, all, 0, false, false},
      {{{3, 40}, {0, 0}, {1, 20}}, 1, 71, 33, 16, 1, 0, true, false},
  };
  for (const auto instructions : {Instructions::kPortable, Instructions::kAvx2, Instructions::kAvx512Vnni}) {
    if (instructions > jaxpaged::best_instructions()) continue;
    for (const auto& size : sizes) {
      check<float, float>(instructions, false, size, 3);
      check<BFloat16, BFloat16>(instructions, false, size, 1);
      check<float, Float8E4M3FN>(instructions, false, size, 2);
    }
  }
  for (const auto& size : sizes)
    if (jaxpaged::attention::has_tiles()) check<BFloat16, BFloat16>(Instructions::kAvx512Vnni, true, size, 2);
  std::printf("best instructions: %d, matrix tiles: %d; all equal\n", static_cast<int>(jaxpaged::best_instructions()),
              jaxpaged::attention::has_tiles());
  return 0;
}
