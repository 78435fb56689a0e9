// Work distribution over threads, and memory per thread.
#pragma once
#include <omp.h>

#include <atomic>
#include <new>
#include <vector>

// A queue of tasks. Each thread first runs its own contiguous range in order, so that it finds the data of the previous
// kernel in its caches, and then steals from the others. Static scheduling would wait for the slowest core: cores
// differ by design, and one that is shared with another program may be several times slower.
class Tasks {
  struct alignas(64) Range {
    std::atomic<long> next;
    long end;
  };
  std::vector<Range> ranges;

 public:
  Tasks(long tasks, long threads) : ranges(threads) {
    for (long t = 0; t < threads; t++) ranges[t].next = tasks * t / threads, ranges[t].end = tasks * (t + 1) / threads;
  }
  // Calls f(task) for the tasks of the calling thread; to be called once by each thread.
  template <class Function>
  void run(Function f) {
    for (long i = 0, threads = ranges.size(), first = omp_get_thread_num(); i < threads; i++) {
      Range& range = ranges[(first + i) % threads];
      for (long task; (task = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) f(task);
    }
  }
};

// An object per thread that persists between calls. A function call, so that its address is computed only once.
template <class T>
[[gnu::noipa]] static T& thread_buffer() {
  static thread_local T buffer;
  return buffer;
}

// Vectors that are aligned to a cache line: loads across lines take twice as long.
template <class T>
struct CacheAligned {
  typedef T value_type;
  CacheAligned() = default;
  template <class U>
  CacheAligned(const CacheAligned<U>&) {}
  T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), std::align_val_t(64)); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  bool operator==(const CacheAligned&) const { return true; }
  bool operator!=(const CacheAligned&) const { return false; }
};
template <class T>
using AlignedVector = std::vector<T, CacheAligned<T>>;
