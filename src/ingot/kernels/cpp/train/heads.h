// What attention's forward and backward pass share: which keys a query sees, rotation, and a thread's memory.
//
// Shapes: B rows, T tokens, N = H + 2K heads: H of queries, then K of keys, K of values; D features of a head.
#pragma once
#include "power.h"
#include "tiles.h"

namespace attention {

constexpr long KEYS = Factor<Number>::tiles ? DEEP : V;  // that are multiplied at once

// Numbers from one row of features to the next: as many as are multiplied at once, of which the last are zeros.
template <long D>
static constexpr auto filled(std::integral_constant<long, D> x) { return x; }
static inline long filled(long D) { return Factor<Number>::tiles ? up(D, DEEP) : D; }

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
      low[t] = *std::min_element(&first[t], &first[t] + R) / KEYS * KEYS;
      high[t] = *std::max_element(&first[t], &first[t] + R);
    }
  }
  // Whether all queries of a tile see all of a panel of keys.
  bool whole(long q, long key) const { return key + V - 1 <= q && high[q] <= key; }
  // Of a vector of keys those that a query sees, the others as they are given.
  Floats seen(long q, long key, Floats x, float other) const {
    Ints at = lanes() + (int)key;
    return (at <= (int)q) & (at >= first[q]) ? x : Floats{} + other;
  }
};

// Turns the pairs (d, d + D / 2) by the cosines of D / 2 angles and their sines, forth (+1) or back (-1).
template <class T, class Size>
static inline void turned(Number* to, const T* x, const float* turn, float direction, float scale, Size D) {
  long E = D / 2;
  each(E, [&](long e, auto n) {
    Floats cos = Floats{} + scale, sin = {};
    if (turn) cos *= load(turn + e, n), sin = load(turn + E + e, n) * (scale * direction);
    Floats a = wide(x + e, n), b = wide(x + e + E, n);
    store(to + e, a * cos - b * sin, n);
    store(to + e + E, b * cos + a * sin, n);
  });
}

template <class Size>
static inline void copy_features(Number* to, const Number* from, Size D) {  // without a call, and as wide as written
  for (long d = 0; d < D; d += V) copy(to + d, from + d);
}

// What one head is going to need, asked for while the one before is computed. Its tokens lie far apart, which the
// processor does not foresee, and all at once they are as slow as the memory.
struct Soon {
  struct Strip {
    const Number* at;
    long stride;
  };
  Strip strips[8];
  long D, count = 0;
  Soon(long T, long D) : D(T * D * sizeof(Number) > 1 << 16 ? 0 : D) {}  // no more than the second cache has room for
  void add(const Number* at, long stride) { strips[count++] = {at, stride}; }
  void ask(long t, long rows) const {  // the compiler drops calls of what does nothing but __builtin_prefetch
    for (long i = 0; i < count; i++)
      for (long r = t; r < t + rows; r++)
        for (long d = 0; d < D; d += 64 / sizeof(Number))
          asm volatile("prefetcht1 %0" : : "m"(strips[i].at[r * strips[i].stride + d]));
  }
  // The head after h of b's, of queries and where these are others of keys and values.
  void next(const Number* qkv, long b, long h, const Shape& s) {
    long N = s.heads(), group = s.H / s.K;
    b += ++h / s.H, h %= s.H;
    if (b == s.B) return;
    const Number* x = qkv + b * s.T * N * s.D;
    add(x + h * s.D, N * s.D);
    if (h % group) return;
    add(x + (s.H + h / group) * s.D, N * s.D);
    add(x + (s.H + s.K + h / group) * s.D, N * s.D);
  }
};

// Calls f with the rows of its tiles, and with the number of features, known to the compiler where it is common.
template <class Function>
static void sized(long D, Function f) {
  constexpr bool tiles = Factor<Number>::tiles;
  std::integral_constant<int, tiles ? SIDE : V == 16 ? 8 : 6> eight;  // where their sums find registers
  std::integral_constant<int, tiles ? SIDE : 6> six;
  if (D == 32) f(eight, std::integral_constant<long, 32>());
  else if (D == 64) f(six, std::integral_constant<long, 64>());
  else if (D == 128) f(six, std::integral_constant<long, 128>());
  else if (D < 64) f(eight, D);
  else f(six, D);
}

}  // namespace attention
