// Runs norms, gated products and writes of keys and values without XLA, on plain threads, for sanitizers: every set of instructions against
// loops over numbers, and the last row alone against the same row among others. Operands lie in buffers of just their size.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../../../pallas_kernels/gated_product/gate.h"
#include "../../../pallas_kernels/kv_write/write.h"
#include "../../../pallas_kernels/rms_norm/norm.h"
#include "plain_threads.h"

namespace {

using jaxpaged::BFloat16;
using jaxpaged::Float8E4M3FN;
using jaxpaged::Instructions;
using jaxpaged::gated::Activation;

void require(bool holds, const char* what, Instructions instructions) {
  if (holds) return;
  std::printf("%s: instructions %d\n", what, static_cast<int>(instructions));
  std::exit(1);
}

float wide(float number) { return number; }
float wide(BFloat16 number) { return jaxpaged::widened(number); }
void narrow(float number, float* out) { *out = number; }
void narrow(float number, BFloat16* out) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  out->bits = bits >> 16;
}

template <typename Number>
std::vector<Number> normal(std::mt19937& random, int64_t count) {
  std::vector<Number> numbers(count);
  for (auto& number : numbers) narrow(std::normal_distribution<float>()(random), &number);
  return numbers;
}

template <typename Number>
bool near(double expected, Number got) {
  return std::abs(expected - wide(got)) <= (sizeof(Number) == 2 ? 2e-2 : 1e-5) * (1e-3 + std::abs(expected));
}

template <typename Number>
void check_norm(Instructions instructions, int64_t rows, int64_t width, bool is_scaled_wide) {
  std::mt19937 random(static_cast<uint32_t>(rows * 31 + width));
  const auto x = normal<Number>(random, rows * width), weight = normal<Number>(random, width);
  std::vector<Number> out(rows * width), alone(width);
  const float offset = is_scaled_wide ? 1.0f : 0.0f;
  PlainThreads threads(3);
  jaxpaged::rms::norm_rows(threads, instructions,
                           jaxpaged::rms::Norm<Number>{x.data(), weight.data(), out.data(), rows, width, 1e-5f, offset, is_scaled_wide});
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (int64_t i = 0; i < width; ++i) sum += double(wide(x[row * width + i])) * wide(x[row * width + i]);
    for (int64_t i = 0; i < width; ++i)
      require(near(wide(x[row * width + i]) / std::sqrt(sum / width + 1e-5) * (offset + wide(weight[i])), out[row * width + i]), "norm",
              instructions);
  }
  const int64_t last = (rows - 1) * width;
  jaxpaged::rms::norm_rows(threads, instructions,
                           jaxpaged::rms::Norm<Number>{x.data() + last, weight.data(), alone.data(), 1, width, 1e-5f, offset, is_scaled_wide});
  require(std::memcmp(alone.data(), out.data() + last, width * sizeof(Number)) == 0, "norm has other bits alone", instructions);
}

template <Activation kActivation, typename Number>
void check_gate(Instructions instructions, int64_t size) {
  std::mt19937 random(static_cast<uint32_t>(size));
  const auto gate = normal<Number>(random, size), up = normal<Number>(random, size);
  std::vector<Number> out(size);
  PlainThreads threads(2);
  jaxpaged::gated::multiply<kActivation>(threads, instructions, jaxpaged::gated::Call<Number, Number>{gate.data(), up.data(), out.data(), size});
  for (int64_t i = 0; i < size; ++i) {
    const double x = wide(gate[i]), inner = kActivation == Activation::kSilu ? x : 1.5957691216057308 * (x + 0.044715 * x * x * x);
    require(near(x / (1 + std::exp(-inner)) * wide(up[i]), out[i]), "gate", instructions);
  }
}

double page_number(float number) { return number; }
double page_number(BFloat16 number) { return wide(number); }
double page_number(Float8E4M3FN number) {
  const int exponent = number.bits >> 3 & 15, fraction = number.bits & 7;
  const double size = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return number.bits & 128 ? -size : size;
}

template <typename Number, typename Page>
void check_write(Instructions instructions, int64_t tokens, int64_t head_dim, int64_t half_dim) {
  const int64_t heads = 3, kv_heads = 2, page_size = 3, pages = tokens / page_size + 2;
  std::mt19937 random(static_cast<uint32_t>(tokens * 31 + head_dim));
  const auto q = normal<Number>(random, tokens * heads * head_dim), k = normal<Number>(random, tokens * kv_heads * head_dim);
  const auto v = normal<Number>(random, tokens * kv_heads * head_dim);
  const auto cos = normal<float>(random, tokens * half_dim), sin = normal<float>(random, tokens * half_dim);
  std::vector<int32_t> write_pages(tokens), write_offsets(tokens);
  for (int64_t t = 0; t < tokens; ++t) {  // the last is padding
    write_pages[t] = t + 1 < tokens || tokens == 1 ? pages - 1 - t / page_size : pages;
    write_offsets[t] = t % page_size;
  }
  std::vector<Number> out(q.size());
  std::vector<Page> k_pages(pages * kv_heads * page_size * head_dim), v_pages(k_pages.size());
  std::memset(k_pages.data(), 0x7b, k_pages.size() * sizeof(Page));
  std::memset(v_pages.data(), 0x7b, v_pages.size() * sizeof(Page));
  const std::vector<Page> before = k_pages;
  jaxpaged::kv::Call<Number, Page> call{};
  call.q = q.data(), call.k = k.data(), call.v = v.data(), call.cos = cos.data(), call.sin = sin.data();
  call.write_pages = write_pages.data(), call.write_offsets = write_offsets.data();
  call.tokens = tokens, call.heads = heads, call.kv_heads = kv_heads, call.head_dim = head_dim, call.half_dim = half_dim;
  call.num_pages = pages, call.page_size = page_size;
  call.out = out.data(), call.k_pages = k_pages.data(), call.v_pages = v_pages.data();
  PlainThreads threads(3);
  jaxpaged::kv::write(threads, instructions, call);
  const auto turned = [&](const std::vector<Number>& from, int64_t token, int64_t at, int64_t d) {
    const double own = wide(from[at + d]);
    if (d >= 2 * half_dim) return own;
    const double other = wide(from[at + (d < half_dim ? d + half_dim : d - half_dim)]), c = cos[token * half_dim + d % half_dim];
    const double s = sin[token * half_dim + d % half_dim];
    return d < half_dim ? own * c - other * s : own * c + other * s;
  };
  const auto holds = [](double expected, double got, double unit) { return std::abs(expected - got) <= unit * (0.05 + std::abs(expected)); };
  const double unit = sizeof(Page) == 1 ? 0.07 : sizeof(Number) + sizeof(Page) < 8 ? 2e-2 : 1e-5;
  std::vector<bool> is_written(k_pages.size());
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t d = 0; d < head_dim; ++d) {
        const int64_t at = (t * heads + h) * head_dim;
        require(holds(turned(q, t, at, d), wide(out[at + d]), sizeof(Number) == 2 ? 2e-2 : 1e-5), "query", instructions);
      }
    if (write_pages[t] >= pages) continue;
    for (int64_t h = 0; h < kv_heads; ++h)
      for (int64_t d = 0; d < head_dim; ++d) {
        const int64_t at = (t * kv_heads + h) * head_dim, place = ((write_pages[t] * kv_heads + h) * page_size + write_offsets[t]) * head_dim + d;
        is_written[place] = true;
        require(holds(turned(k, t, at, d), page_number(k_pages[place]), unit), "key", instructions);
        require(holds(wide(v[at + d]), page_number(v_pages[place]), unit), "value", instructions);
      }
  }
  for (size_t place = 0; place < before.size(); ++place)
    if (!is_written[place]) {
      require(std::memcmp(&before[place], &k_pages[place], sizeof(Page)) == 0, "a key that is not ours", instructions);
      require(std::memcmp(&before[place], &v_pages[place], sizeof(Page)) == 0, "a value that is not ours", instructions);
    }
}

}  // namespace

int main() {
  for (const auto instructions : {Instructions::kPortable, Instructions::kAvx2, Instructions::kAvx512Vnni}) {
    if (instructions > jaxpaged::best_instructions()) continue;
    for (const int64_t width : {1, 16, 63, 64, 131, 600}) {
      check_norm<float>(instructions, 121, width, true);
      check_norm<BFloat16>(instructions, 121, width, false);
    }
    for (const int64_t size : {1, 16, 50001}) {
      check_gate<Activation::kSilu, float>(instructions, size);
      check_gate<Activation::kGeluTanh, float>(instructions, size);
      check_gate<Activation::kSilu, BFloat16>(instructions, size);
    }
    for (const int64_t tokens : {1, 7, 101}) {
      check_write<float, float>(instructions, tokens, 20, 5);
      check_write<BFloat16, BFloat16>(instructions, tokens, 64, 32);
      check_write<float, BFloat16>(instructions, tokens, 16, 0);
      check_write<BFloat16, float>(instructions, tokens, 17, 8);
      check_write<BFloat16, Float8E4M3FN>(instructions, tokens, 96, 48);
    }
  }
  std::printf("best instructions: %d; all equal\n", static_cast<int>(jaxpaged::best_instructions()));
  return 0;
}
