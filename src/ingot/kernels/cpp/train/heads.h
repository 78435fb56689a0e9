// Common parts of attention's forward and backward pass: visible keys, rotation, prefetching.
//
// Shapes: B rows, T tokens, N = H + 2K heads: H query heads, then K key heads, K value heads; D features of a head.
#pragma once
#include "exp2.h"
#include "small_gemm.h"

namespace attention {

constexpr long KEYS = Operand<Number>::amx ? TILE_K : V;  // keys that are multiplied at a time

// Features of a row in buffers: D, with matrix tiles padded with zeros to the depth of a tile product.
template <long D>
static constexpr auto padded_features(std::integral_constant<long, D> x) { return x; }
static inline long padded_features(long D) { return Operand<Number>::amx ? round_up(D, TILE_K) : D; }

struct Shape {
  long B, T, H, K, D;
  long heads() const { return H + 2 * K; }
  long padded() const { return round_up(T, BLOCK); }  // tokens in buffers; zeros after the last token
};

// The keys that each query attends to: from first[q] to q.
struct VisibleKeys {
  AlignedVector<int> first, low, high;  // low and high: for the tile of R queries at q, the least and greatest `first`;
                                        // `low` is rounded down to a multiple of KEYS
  template <int R>
  void set(const int32_t* from, long T, long P) {  // padding queries get the keys of the last query
    for (auto* x : {&first, &low, &high}) x->assign(P, 0);
    if (!from) return;
    for (long t = 0; t < P; t++) first[t] = from[std::min(t, T - 1)];
    for (long t = 0; t + R <= P; t += R) {
      low[t] = *std::min_element(&first[t], &first[t] + R) / KEYS * KEYS;
      high[t] = *std::max_element(&first[t], &first[t] + R);
    }
  }
  // Whether all queries of the tile at q attend to all V keys from `key` on.
  bool all_visible(long q, long key) const { return key + V - 1 <= q && high[q] <= key; }
  // Replaces the elements of a vector of keys that q does not attend to.
  Floats mask(long q, long key, Floats x, float hidden) const {
    Ints at = lane_index() + (int)key;
    return (at <= (int)q) & (at >= first[q]) ? x : Floats{} + hidden;
  }
};

// Rotates the feature pairs (d, d + D / 2) by angles given as D / 2 cosines, then D / 2 sines; direction 1 or -1.
template <class T, class Size>
static inline void apply_rope(Number* to, const T* x, const float* rope, float direction, float scale, Size D) {
  long E = D / 2;
  each(E, [&](long e, auto n) {
    Floats cos = Floats{} + scale, sin = {};
    if (rope) cos *= load(rope + e, n), sin = load(rope + E + e, n) * (scale * direction);
    Floats a = widen(x + e, n), b = widen(x + e + E, n);
    store(to + e, a * cos - b * sin, n);
    store(to + e + E, b * cos + a * sin, n);
  });
}

template <class Size>
static inline void copy_features(Number* to, const Number* from, Size D) {  // inlined, unlike memcpy
  for (long d = 0; d < D; d += V) copy(to + d, from + d);
}

// Prefetches what the next head reads while the current one is computed. Its tokens are far apart, which the hardware
// prefetcher does not predict, and prefetching all at once would be limited by memory.
struct HeadPrefetch {
  struct Strip {
    const Number* at;
    long stride;
  };
  Strip strips[8];
  long D, count = 0;
  HeadPrefetch(long T, long D) : D(T * D * sizeof(Number) > 1 << 16 ? 0 : D) {}  // nothing if a head exceeds L2
  void add(const Number* at, long stride) { strips[count++] = {at, stride}; }
  void prefetch_rows(long t, long rows) const {  // assembly, because GCC drops functions that only prefetch
    for (long i = 0; i < count; i++)
      for (long r = t; r < t + rows; r++)
        for (long d = 0; d < D; d += 64 / sizeof(Number))
          asm volatile("prefetcht1 %0" : : "m"(strips[i].at[r * strips[i].stride + d]));
  }
  // Adds the queries of the head after head h of row b, and its keys and values if they are others.
  void add_next_head(const Number* qkv, long b, long h, const Shape& s) {
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

// Calls f(rows of a tile of queries, head size), both compile-time constants for the common head sizes.
template <class Function>
static void dispatch_head_size(long D, Function f) {
  constexpr bool amx = Operand<Number>::amx;
  std::integral_constant<int, amx ? TILE : V == 16 ? 8 : 6> eight;  // as many as have registers for their sums
  std::integral_constant<int, amx ? TILE : 6> six;
  if (D == 32) f(eight, std::integral_constant<long, 32>());
  else if (D == 64) f(six, std::integral_constant<long, 64>());
  else if (D == 128) f(six, std::integral_constant<long, 128>());
  else if (D < 64) f(eight, D);
  else f(six, D);
}

}  // namespace attention
