// Work in two parts that threads share: first what all else needs, then chunks in the order of memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "parallel.h"

namespace jaxpaged {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Chunks [0, num_chunks) for several threads: each begins with a range of its own and walks it in order, so that what it asks memory for in
// advance is its own next chunk; one that has nothing left takes the last chunk of another's range.
class ChunkRanges {
 public:
  ChunkRanges(int64_t num_chunks, int64_t num_threads) : num_ranges_(num_threads), ranges_(new Range[num_threads]) {
    for (int64_t t = 0; t < num_threads; ++t) ranges_[t].left = packed(num_chunks * t / num_threads, num_chunks * (t + 1) / num_threads);
  }

  // A chunk for the thread whose range is `own`, or -1 when none is left.
  int64_t take(int64_t own) {
    for (int64_t other = 0; other < num_ranges_; ++other) {
      std::atomic<uint64_t>& left = ranges_[(own + other) % num_ranges_].left;
      uint64_t seen = left.load(std::memory_order_relaxed);
      while (first(seen) < last(seen)) {
        const uint64_t rest = other == 0 ? packed(first(seen) + 1, last(seen)) : packed(first(seen), last(seen) - 1);
        if (left.compare_exchange_weak(seen, rest, std::memory_order_relaxed)) return other == 0 ? first(seen) : last(seen) - 1;
      }
    }
    return -1;
  }

 private:
  struct alignas(64) Range {
    std::atomic<uint64_t> left;
  };
  static uint64_t packed(int64_t first, int64_t last) { return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(last); }
  static int64_t first(uint64_t range) { return static_cast<int64_t>(range >> 32); }
  static int64_t last(uint64_t range) { return static_cast<int64_t>(range & 0xffffffff); }

  const int64_t num_ranges_;
  const std::unique_ptr<Range[]> ranges_;
};

// Calls prepare(part) for each part in [0, num_parts), and when all have returned, on each thread that has come by then and found work,
// run(take), which calls take() for chunks in [0, num_chunks) until it gives -1. Returns when all chunks are done.
//
// As with for_chunks(), this thread works too and nothing waits for a thread that has not come: only for parts and chunks that are being
// done.
template <typename Prepare, typename Run>
void for_parts_and_chunks(Threads& threads, int64_t num_parts, int64_t num_chunks, const Prepare& prepare, const Run& run) {
  const int64_t most = num_parts > num_chunks ? num_parts : num_chunks;
  const int64_t num_threads = most < threads.count() ? most : threads.count();
  if (num_threads <= 1) {
    for (int64_t part = 0; part < num_parts; ++part) prepare(part);
    int64_t next = 0;
    if (num_chunks > 0) run([&] { return next < num_chunks ? next++ : int64_t{-1}; });
    return;
  }
  // Shared, since a late thread looks at it after this call has returned.
  struct Progress {
    Progress(int64_t num_chunks, int64_t num_threads) : ranges(num_chunks, num_threads) {}
    std::atomic<int64_t> next_part{0}, parts_done{0}, chunks_done{0}, arrived{0};
    ChunkRanges ranges;
  };
  auto progress = std::make_shared<Progress>(num_chunks, num_threads);
  auto work = [progress, num_parts, &prepare, &run] {
    int64_t part;
    while ((part = progress->next_part.fetch_add(1, std::memory_order_relaxed)) < num_parts) {
      prepare(part);
      progress->parts_done.fetch_add(1, std::memory_order_release);
    }
    while (progress->parts_done.load(std::memory_order_acquire) < num_parts) pause();
    const int64_t own = progress->arrived.fetch_add(1, std::memory_order_relaxed);
    // The call may have returned long ago: nothing of it is touched before there is a chunk.
    const int64_t begin = progress->ranges.take(own);
    if (begin < 0) return;
    int64_t taken = begin, num_done = 0;
    run([&, is_first = true]() mutable {
      if (is_first) {
        is_first = false;
        return taken;
      }
      ++num_done;
      return taken = progress->ranges.take(own);
    });
    progress->chunks_done.fetch_add(num_done, std::memory_order_release);
  };
  for (int64_t other = 1; other < num_threads; ++other) threads.start(work);
  work();
  while (progress->chunks_done.load(std::memory_order_acquire) < num_chunks) pause();
}

}  // namespace jaxpaged
