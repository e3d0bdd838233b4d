// Cutting work into chunks that threads take one after the other.
//
// The kernels do not know where threads come from: under XLA they are those of its own pool, so that a step never runs more threads
// than XLA was given; in the test driver they are plain threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace jaxpaged {

// Where threads come from.
class Threads {
 public:
  virtual ~Threads() = default;
  virtual int64_t count() const = 0;
  // Runs `task` once, on another thread, soon or late.
  virtual void start(std::function<void()> task) = 0;
};

// Calls run(chunk) for each chunk in [0, num_chunks), on this thread and on up to count() - 1 others, and returns when all are done.
//
// This thread works too and takes what is left, so nothing waits for a thread that is busy elsewhere: one that comes late finds no chunk.
template <typename Run>
void for_chunks(Threads& threads, int64_t num_chunks, const Run& run) {
  const int64_t num_threads = num_chunks < threads.count() ? num_chunks : threads.count();
  if (num_threads <= 1) {
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) run(chunk);
    return;
  }
  // Shared, since a late thread looks at it after this call has returned.
  struct Progress {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  auto progress = std::make_shared<Progress>();
  auto work = [progress, num_chunks, &run] {
    int64_t chunk;
    while ((chunk = progress->next.fetch_add(1, std::memory_order_relaxed)) < num_chunks) {
      run(chunk);
      progress->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t other = 1; other < num_threads; ++other) threads.start(work);
  work();
  while (progress->done.load(std::memory_order_acquire) < num_chunks) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace jaxpaged
