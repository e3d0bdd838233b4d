// Threads of XLA's own pool, so that a step runs no more of them than XLA was given.
#pragma once

#include <utility>

#include "parallel.h"
#include "xla/ffi/api/ffi.h"

// All else is hidden, so that nothing of ours is taken for a symbol of another library.
#define JAXPAGED_EXPORTED(name) extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* call);

namespace jaxpaged {

class XlaThreads final : public Threads {
 public:
  explicit XlaThreads(xla::ffi::ThreadPool& pool) : pool_(pool), count_(pool.num_threads()) {}
  int64_t count() const override { return count_; }
  void start(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  xla::ffi::ThreadPool& pool_;
  const int64_t count_;
};

}  // namespace jaxpaged
