// Cutting work into chunks that threads take one after the other.
//
// The kernels do not know where threads come from: under XLA they are those of its own pool, so that a step never runs more threads
// than XLA was given; in the test driver they are plain threads.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

namespace jaxpaged {

// Where threads come from.
class Threads {
 public:
  virtual ~Threads() = default;
  virtual int64_t count() const = 0;
  // Runs `task` once, on another thread, soon or late.
  virtual void start(std::function<void()> task) = 0;
};

// One call's chunks. A thread that comes late finds none left, and touches nothing else of the call, which may have returned.
class Chunks {
 public:
  Chunks(int64_t count, void (*run)(const void*, int64_t), const void* context) : count_(count), run_(run), context_(context) {}

  void work() {
    int64_t chunk;
    while ((chunk = next_.fetch_add(1, std::memory_order_relaxed)) < count_) {
      run_(context_, chunk);
      done_.fetch_add(1, std::memory_order_release);
    }
  }
  bool are_done() const { return done_.load(std::memory_order_acquire) >= count_; }

 private:
  const int64_t count_;
  void (*const run_)(const void*, int64_t);
  const void* const context_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> done_{0};
};

// Threads that have worked stay awake for a moment, since waking one takes as long as a small call: 15 to 30 us on a virtual machine.
//
// Where others want the processor it is no use: who stays awake has no time left when it comes to work. So a thread that was kept from
// running while it waited goes to sleep, and so do all for a while.
class Awake {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kMoment{100}, kDisturbed{20}, kRest{20'000};

  // Never destroyed: a thread may look at it while the process ends.
  static Awake& all() {
    static Awake* const awake = new Awake;
    return *awake;
  }

  // Gives the chunks to up to `wanted` threads that are awake; how many took them.
  int64_t give(const std::shared_ptr<Chunks>& chunks, int64_t wanted) {
    int64_t given = 0;
    for (Place& place : places_) {
      if (given == wanted) break;
      State waiting = State::kWaiting;
      if (place.state.load(std::memory_order_relaxed) != waiting) continue;
      if (!place.state.compare_exchange_strong(waiting, State::kTaken, std::memory_order_acquire)) continue;
      place.chunks = chunks;
      place.state.store(State::kGiven, std::memory_order_release);
      ++given;
    }
    return given;
  }

  // Works, and then on what it is given, until nothing came for a moment.
  void work(std::shared_ptr<Chunks> chunks) {
    if (Clock::now().time_since_epoch().count() >= rests_until_.load(std::memory_order_relaxed))
      for (Place& place : places_) {
        State free = State::kFree;
        if (place.state.load(std::memory_order_relaxed) != free) continue;
        if (!place.state.compare_exchange_strong(free, State::kWaiting, std::memory_order_acq_rel)) continue;
        do chunks->work();
        while ((chunks = next(place)) != nullptr);
        return;
      }
    chunks->work();
  }

 private:
  // A thread at its last chunk waits already: it is free sooner than another is awake.
  enum class State { kFree, kWaiting, kTaken, kGiven };
  struct alignas(64) Place {
    std::atomic<State> state{State::kFree};
    std::shared_ptr<Chunks> chunks;  // belongs to the thread that waits while kGiven, to who gives while kTaken
  };

  std::shared_ptr<Chunks> next(Place& place) {
    const Clock::time_point start = Clock::now();
    Clock::time_point last = start;
    while (place.state.load(std::memory_order_acquire) != State::kGiven) {
      std::this_thread::yield();
      const Clock::time_point now = Clock::now();
      const bool is_disturbed = now - last > kDisturbed;
      if (is_disturbed) rests_until_.store((now + kRest).time_since_epoch().count(), std::memory_order_relaxed);
      State waiting = State::kWaiting;
      const bool is_over = is_disturbed || now - start > kMoment;
      if (is_over && place.state.compare_exchange_strong(waiting, State::kFree, std::memory_order_acq_rel)) return nullptr;
      last = now;
    }
    std::shared_ptr<Chunks> chunks = std::move(place.chunks);
    place.state.store(State::kWaiting, std::memory_order_release);
    return chunks;
  }

  std::atomic<Clock::rep> rests_until_{Clock::duration::min().count()};
  Place places_[64];  // threads beyond these go to sleep at once
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
  const auto run_one = [](const void* context, int64_t chunk) { (*static_cast<const Run*>(context))(chunk); };
  const auto chunks = std::make_shared<Chunks>(num_chunks, run_one, &run);
  int64_t others = Awake::all().give(chunks, num_threads - 1);
  for (; others < num_threads - 1; ++others) threads.start([chunks] { Awake::all().work(chunks); });
  chunks->work();
  while (!chunks->are_done()) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace jaxpaged
