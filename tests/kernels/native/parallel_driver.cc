// Cuts work into chunks from several callers at once, for sanitizers: every chunk runs once, and is over when its call is.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "plain_threads.h"

namespace {

void call_many(int64_t calls, int64_t num_threads) {
  PlainThreads threads(num_threads);
  for (int64_t call = 0; call < calls; ++call) {
    const int64_t count = 1 + call % 7;
    std::vector<int> runs(count, 0);  // plain numbers: who reads them after the call must see what was written
    jaxpaged::for_chunks(threads, count, [&runs](int64_t chunk) { ++runs[chunk]; });
    for (const int times : runs)
      if (times != 1) {
        std::printf("a chunk ran %d times in call %ld\n", times, static_cast<long>(call));
        std::exit(1);
      }
    if (call % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the others fall asleep
  }
}

}  // namespace

int main() {
  std::vector<std::thread> callers;
  for (const int64_t num_threads : {2, 3, 4}) callers.emplace_back(call_many, 300, num_threads);
  for (auto& caller : callers) caller.join();
  std::printf("all equal\n");
  return 0;
}
