// How threads share what there is to do, and what each keeps.
#pragma once
#include <omp.h>

#include <atomic>
#include <new>
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

// What a thread keeps from call to call. Behind a call: a thread's own addresses cost one each time they are needed.
template <class T>
[[gnu::noipa]] static T& own() {
  static thread_local T room;
  return room;
}

// Vectors that begin where a line of the cache does: reading across lines takes twice as long.
template <class T>
struct Lines {
  typedef T value_type;
  Lines() = default;
  template <class U>
  Lines(const Lines<U>&) {}
  T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), std::align_val_t(64)); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  bool operator==(const Lines&) const { return true; }
  bool operator!=(const Lines&) const { return false; }
};
template <class T>
using Vector = std::vector<T, Lines<T>>;
