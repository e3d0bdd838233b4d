// Threads for the drivers that run kernels without XLA, under sanitizers.
#pragma once

#include <thread>
#include <vector>

#include "../../../pallas_kernels/native/parallel.h"

class PlainThreads final : public jaxpaged::Threads {
 public:
  explicit PlainThreads(int64_t count) : count_(count) {}
  ~PlainThreads() override {
    for (auto& thread : started_) thread.join();
  }
  int64_t count() const override { return count_; }
  void start(std::function<void()> task) override { started_.emplace_back(std::move(task)); }

 private:
  int64_t count_;
  std::vector<std::thread> started_;
};
