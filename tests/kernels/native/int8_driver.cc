// Runs the int8 product without XLA, on plain threads, for sanitizers: every set of instructions against loops over numbers.
//
// Operands end where a page that nobody may touch begins: loads of matrix tiles are not seen by the address sanitizer.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../../../pallas_kernels/quantized_matmul/int8.h"
#include "plain_threads.h"

namespace {

using jaxpaged::int8::Path;

void require(bool holds, const char* what, int64_t rows, int64_t num_in, int64_t num_out, Path path) {
  if (holds) return;
  std::printf("%s: %ld rows, %ld in, %ld out, path %d\n", what, static_cast<long>(rows), static_cast<long>(num_in),
              static_cast<long>(num_out), static_cast<int>(path));
  std::exit(1);
}

template <typename Number>
Number narrowed(float number);
template <>
float narrowed(float number) {
  return number;
}
template <>
uint16_t narrowed(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

template <typename Number>
class Edged {
 public:
  explicit Edged(int64_t size) : size_(size) {
    const int64_t page = sysconf(_SC_PAGESIZE), num_bytes = size * sizeof(Number), room = (num_bytes + page - 1) / page * page;
    mapped_ = room + page;
    begin_ = static_cast<char*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (begin_ == MAP_FAILED || mprotect(begin_ + room, page, PROT_NONE) != 0) std::abort();
    data_ = reinterpret_cast<Number*>(begin_ + room - num_bytes);
  }
  ~Edged() { munmap(begin_, mapped_); }
  Edged(const Edged&) = delete;
  Edged& operator=(const Edged&) = delete;
  Number* data() { return data_; }
  Number* begin() { return data_; }
  Number* end() { return data_ + size_; }
  Number& operator[](int64_t at) { return data_[at]; }

 private:
  int64_t size_, mapped_;
  char* begin_;
  Number* data_;
};

template <typename Number>
void check_int8(Path path, int64_t num_rows, int64_t num_in, int64_t num_out, int64_t num_threads) {
  std::mt19937 random(num_rows * 7919 + num_in * 31 + num_out);
  std::normal_distribution<float> normal;
  Edged<Number> x(num_rows * num_in);
  Edged<int8_t> values(num_out * num_in);
  Edged<float> scales(num_out), out(num_rows * num_out);
  for (auto& number : x) number = narrowed<Number>(normal(random));
  for (auto& value : values) value = static_cast<int8_t>(static_cast<int>(random() % 255) - 127);
  for (auto& scale : scales) scale = 0.5f + 0.01f * static_cast<float>(random() % 100);
  if (num_rows > 2) x[2 * num_in] = narrowed<Number>(INFINITY);
  if (num_rows > 3)
    for (int64_t i = 0; i < num_in; ++i) x[3 * num_in + i] = narrowed<Number>(0.0f);
  {
    PlainThreads threads(num_threads);
    jaxpaged::int8::matmul(threads, path, x.data(), num_rows, {values.data(), scales.data(), num_out, num_in}, out.data());
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    float peak = 0;
    for (int64_t i = 0; i < num_in; ++i) peak = std::fmax(peak, std::fabs(jaxpaged::int8::widened(x[r * num_in + i])));
    for (int64_t o = 0; o < num_out; ++o) {
      const float got = out[r * num_out + o];
      if (std::isinf(peak)) {
        require(std::isnan(got), "an infinity is lost", num_rows, num_in, num_out, path);
        continue;
      }
      int64_t high = 0, low = 0;
      for (int64_t i = 0; i < num_in && peak > 0; ++i) {
        const float scaled = std::nearbyintf(jaxpaged::int8::widened(x[r * num_in + i]) * (16256.0f / peak));
        const int64_t upper = static_cast<int64_t>(std::floor((scaled + 64) / 128));
        high += upper * values[o * num_in + i];
        low += (static_cast<int64_t>(scaled) - upper * 128) * values[o * num_in + i];
      }
      const float expected =
          (static_cast<float>(high) * 128 + static_cast<float>(low)) * scales[o] * (peak * static_cast<float>(1 / 16256.0));
      require(got == expected, "another number", num_rows, num_in, num_out, path);
    }
  }
}

// Rows that are quantized once serve several matrices, in one call and in one each.
void check_several(Path path, int64_t num_rows, int64_t num_in, int64_t num_threads) {
  using namespace jaxpaged::int8;
  const int64_t num_outs[3] = {70, 9, 33};
  std::mt19937 random(num_rows);
  Edged<float> x(num_rows * num_in), scales(70);
  Edged<int8_t> values(70 * num_in);
  for (auto& number : x) number = static_cast<float>(random() % 1000) - 500.0f;
  for (auto& value : values) value = static_cast<int8_t>(static_cast<int>(random() % 255) - 127);
  for (auto& scale : scales) scale = 0.5f + 0.01f * static_cast<float>(random() % 100);
  std::vector<std::vector<float>> together, apart, each;
  for (const int64_t num_out : num_outs) together.emplace_back(num_rows * num_out);
  apart = each = together;
  PlainThreads threads(num_threads);
  std::vector<Product> products;
  for (int p = 0; p < 3; ++p) {
    products.push_back({{values.data(), scales.data(), num_outs[p], num_in}, together[p].data()});
    matmul(threads, path, x.data(), num_rows, products[p].matrix, each[p].data());
  }
  const Rows rows = make_rows(path, num_rows, num_in);
  const auto quantize = [&](int64_t block) { quantize_block(rows, block, x.data() + block * kBlockRows * num_in); };
  multiply_rows(threads, rows, products.data(), 3, quantize);
  for (int p = 0; p < 3; ++p) multiply_rows(threads, rows, products[p].matrix, apart[p].data());
  require(together == each && apart == each, "several products", num_rows, num_in, 0, path);
}

}  // namespace

int main() {
  const int64_t sizes[][3] = {{0, 5, 3},   {1, 1, 1},    {1, 7, 5},     {2, 64, 4},   {3, 65, 63},  {4, 63, 9},
                              {5, 128, 17}, {6, 131, 37}, {7, 200, 130}, {13, 15, 66}, {37, 193, 97}, {70, 16, 33},
                              {8, 64, 64}, {16, 192, 96}, {17, 128, 31},  {24, 65, 33},  {25, 64, 160}};
  for (const auto path : {Path::kPortable, Path::kAvx2, Path::kAvx512Vnni, Path::kAmx}) {
    if (path > jaxpaged::int8::best_path()) continue;
    for (const auto& size : sizes) {
      for (const int64_t threads : {1, 3}) {
        check_int8<float>(path, size[0], size[1], size[2], threads);
        check_int8<uint16_t>(path, size[0], size[1], size[2], threads);
      }
    }
  }
  for (const auto path : {Path::kPortable, Path::kAvx2, Path::kAvx512Vnni, Path::kAmx}) {
    if (path > jaxpaged::int8::best_path()) continue;
    for (const int64_t num_rows : {1, 5, 16, 40}) check_several(path, num_rows, 131, 3);
  }
  // More rows than are looked at together.
  check_int8<float>(jaxpaged::int8::best_path(), 1030, 260, 70, 3);
  std::printf("best path: %d; all equal\n", static_cast<int>(jaxpaged::int8::best_path()));
  return 0;
}
