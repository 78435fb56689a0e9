// How threads share what there is to do.
#pragma once
#include <omp.h>

#include <atomic>
#include <vector>

// Tasks, of which each thread does its share in order, so that it finds in its caches what it wrote in the step before,
// and then what is left of others'. Cores are unequally fast: some are built so, and a core that another program or
// another virtual machine computes on as well may be four times slower for seconds.
class Tasks {
  struct alignas(64) Share {
    std::atomic<long> next;
    long end;
  };
  std::vector<Share> shares;

 public:
  Tasks(long tasks, long threads) : shares(threads) {
    for (long t = 0; t < threads; t++) shares[t].next = tasks * t / threads, shares[t].end = tasks * (t + 1) / threads;
  }
  // Calls f(task) for those that this thread does; each thread calls it once.
  template <class Function>
  void work(Function f) {
    for (long i = 0, threads = shares.size(), own = omp_get_thread_num(); i < threads; i++) {
      Share& share = shares[(own + i) % threads];
      for (long task; (task = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) f(task);
    }
  }
};
