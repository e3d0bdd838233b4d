// Numbers that end where readable memory does, for reads that sanitizers do not see.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

template <typename Number>
class BeforeMemoryEnd {
 public:
  explicit BeforeMemoryEnd(int64_t count) {
    const int64_t page = sysconf(_SC_PAGESIZE), bytes = count * sizeof(Number);
    readable_ = (bytes + page - 1) / page * page;
    size_ = readable_ + page;
    start_ = static_cast<char*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (start_ == MAP_FAILED || mprotect(start_ + readable_, page, PROT_NONE) != 0) std::abort();
    numbers_ = reinterpret_cast<Number*>(start_ + readable_ - bytes);
    count_ = count;
  }
  ~BeforeMemoryEnd() { munmap(start_, size_); }
  BeforeMemoryEnd(const BeforeMemoryEnd&) = delete;
  BeforeMemoryEnd& operator=(const BeforeMemoryEnd&) = delete;
  Number* begin() const { return numbers_; }
  Number* end() const { return numbers_ + count_; }
  Number& operator[](int64_t index) const { return numbers_[index]; }

 private:
  char* start_;
  int64_t readable_, size_;
  Number* numbers_;
  int64_t count_;
};
