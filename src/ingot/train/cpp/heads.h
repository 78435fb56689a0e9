// What attention's forward and backward pass share: which keys a query sees, rotation, and a thread's memory.
//
// Shapes: B rows, T tokens, N = H + 2K heads: H of queries, then K of keys, K of values; D features of a head.
#pragma once
#include "power.h"
#include "tiles.h"

namespace attention {

struct Shape {
  long B, T, H, K, D;
  long heads() const { return H + 2 * K; }
  long padded() const { return up(T, BLOCK); }  // what rooms hold; zeros after the last token
};

struct Sight {
  Vector<int> first, low, high;  // low and high: the least panel and the last token that a tile of R queries begins at
  template <int R>
  void look(const int32_t* from, long T, long P) {  // queries that are not there see what the last one does
    for (auto* x : {&first, &low, &high}) x->assign(P, 0);
    if (!from) return;
    for (long t = 0; t < P; t++) first[t] = from[std::min(t, T - 1)];
    for (long t = 0; t + R <= P; t += R) {
      low[t] = *std::min_element(&first[t], &first[t] + R) / V * V;
      high[t] = *std::max_element(&first[t], &first[t] + R);
    }
  }
  // Whether all queries of a tile see all of a panel of keys.
  bool whole(long q, long key) const { return key + V - 1 <= q && high[q] <= key; }
  __mmask16 seen(long q, long key) const {
    auto below = [](long n) { return n <= 0 ? 0u : n >= V ? 0xffffu : (1u << n) - 1; };
    return below(q + 1 - key) & ~below(first[q] - key);
  }
};

// Turns the pairs (d, d + D / 2) by cosines and sines side by side, forth (+1) or back (-1).
template <class T, class Size>
static inline void turned(bf16* to, const T* x, const float* turn, float direction, float scale, Size D) {
  long E = D / 2;
  for (long e = 0; e < E; e += V) {
    long n = std::min<long>(V, E - e);
    Floats cos = Floats{} + scale, sin = {};
    Floats a = n == V ? wide(x + e) : load(x + e, n), b = n == V ? wide(x + e + E) : load(x + e + E, n);
    if (turn) {
      const float* t = turn + 2 * e;
      Floats one = load(t), two = n == V ? load(t + V) : one;
      Ints even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
      cos = (Floats)_mm512_permutex2var_ps(one, (__m512i)even, two) * scale;
      sin = (Floats)_mm512_permutex2var_ps(one, (__m512i)(even + 1), two) * (scale * direction);
    }
    Floats c = a * cos - b * sin, d = b * cos + a * sin;
    if (n == V) store(to + e, c), store(to + e + E, d);
    else store(to + e, c, n), store(to + e + E, d, n);
  }
}

// What a thread keeps from call to call. Behind a call: a thread's own addresses cost one each time they are needed.
template <class T>
[[gnu::noipa]] static T& own() {
  static thread_local T room;
  return room;
}

template <class Size>
static inline void copy_features(bf16* to, const bf16* from, Size D) {  // without a call, and as wide as written
  for (long d = 0; d < D; d += 16) put(to + d, halves(from + d));
}

// What one head is going to need, asked for while the one before is computed. Its tokens lie far apart, which the
// processor does not foresee, and all at once they are as slow as the memory.
struct Soon {
  struct Strip {
    const bf16* at;
    long stride;
  };
  Strip strips[8];
  long D, count = 0;
  Soon(long T, long D) : D(T * D > 1 << 15 ? 0 : D) {}  // no more than the second cache has room for
  void add(const bf16* at, long stride) { strips[count++] = {at, stride}; }
  void ask(long t, long rows) const {
    for (long i = 0; i < count; i++)
      for (long r = t; r < t + rows; r++)
        for (long d = 0; d < D; d += 32)  // the compiler drops calls of what does nothing but __builtin_prefetch
          asm volatile("prefetcht1 %0" : : "m"(strips[i].at[r * strips[i].stride + d]));
  }
  // The head after h of b's, of queries and where these are others of keys and values.
  void next(const bf16* qkv, long b, long h, const Shape& s) {
    long N = s.heads(), group = s.H / s.K;
    b += ++h / s.H, h %= s.H;
    if (b == s.B) return;
    const bf16* x = qkv + b * s.T * N * s.D;
    add(x + h * s.D, N * s.D);
    if (h % group) return;
    add(x + (s.H + h / group) * s.D, N * s.D);
    add(x + (s.H + s.K + h / group) * s.D, N * s.D);
  }
};

// Calls f with the rows of its tiles, and with the number of features, known to the compiler where it is common.
template <class Function>
static void sized(long D, Function f) {
  std::integral_constant<int, 8> eight;
  std::integral_constant<int, 6> six;
  if (D == 32) f(eight, std::integral_constant<long, 32>());
  else if (D == 64) f(six, std::integral_constant<long, 64>());
  else if (D == 128) f(six, std::integral_constant<long, 128>());
  else if (D < 64) f(eight, D);
  else f(six, D);
}

}  // namespace attention
