// Products of small matrices that lie in the cache, for attention.
//
// Three layouts let them be added up over
//   features: rows of a head as they are, times panels of V tokens, D / PAIR x V pairs of features;
//   keys:     rows of probabilities as they are, times pairs of tokens, T / PAIR x D;
//   queries:  probabilities as pairs of queries, T / PAIR x keys, times pairs of tokens.
// Matrix tiles have the third one as rows of keys.
#pragma once
#include "layouts.h"

namespace attention {

constexpr long BLOCK = 96;  // keys, and queries, whose probabilities are kept at a time; tiles of 6, 8, 16 divide it

// Panels of V tokens from P x D.
template <class Size>
static void put_panels(Number* to, const Number* from, long T, Size D) {
  for (long t = 0; t < T; t += V)
    for (long d = 0; d < D; d += PAIR * V) {
      Ints square[V];
      for (int i = 0; i < V; i++) square[i] = pairs(from + (t + i) * D + d, D - d);
      transpose(square);
      for (long i = 0; i < V && d + PAIR * i < D; i++) put(to + t * D + (d + PAIR * i) * V, square[i]);
    }
}

// Pairs of tokens from P x D.
template <class Size>
static void put_pairs(Number* to, const Number* from, long T, Size D) {
  for (long t = 0; t < T; t += PAIR, from += PAIR * D, to += PAIR * D)
    for (long d = 0; d < D; d += V) put(to + d * PAIR, pairs(from + d, from + d + D, V));
}

// What each row has its own pair of in each step: rows in memory, or a block's columns.
struct Rows {
  const Number* at;
  long stride;
  const Number* operator()(int r, long i) const { return at + r * stride + i * PAIR; }
};
struct Transposed {
  const Number* at;
  const Number* operator()(int r, long i) const { return at + (i * BLOCK + r) * PAIR; }
};
// What all rows share a vector of in each step, and for each vector of the sums.
template <class Size>
struct Panels {
  const Number* at;
  Size D;
  const Number* operator()(long i, long j) const { return at + j * D * V + i * V * PAIR; }
};
template <class Size>
struct Pairs {
  const Number* at;
  Size D;
  const Number* operator()(long i, long j) const { return at + (i * D + j * V) * PAIR; }
};

// Sums of R rows and W vectors from j on; with `add` in addition to what is there.
template <int R, int W, class A, class B>
static void tile(bool add, float* out, long stride, A a, B b, long j0, long steps) {
  typedef Factor<Number> F;
  Floats sum[R][W] = {};
  if (add)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < W; j++) sum[r][j] = load(out + r * stride + (j0 + j) * V);
  for (long i = 0; i < steps; i++) {
    F::Type shared[W];
#pragma GCC unroll 4
    for (int j = 0; j < W; j++) shared[j] = F::read(b(i, j0 + j));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      auto own = F::repeat(a(r, i));
#pragma GCC unroll 4
      for (int j = 0; j < W; j++) F::add(sum[r][j], own, shared[j]);
    }
  }
  asm("" : "+r"(out));  // addresses are not kept in the meantime
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < W; j++) store(out + r * stride + (j0 + j) * V, sum[r][j]);
}

// The same of any number of vectors, as many at a time as leave registers for the factors.
template <int R, class A, class B>
static inline void multiply(bool add, float* out, long stride, A a, B b, long vectors, long steps) {
  constexpr int MOST = ROWS * WIDE / R;
  for (long j = 0; j < vectors;) {
    long left = vectors - j, n = left > MOST && left < 2 * MOST ? (left + 1) / 2 : std::min<long>(left, MOST);
    if (n == 1) tile<R, 1>(add, out, stride, a, b, j, steps);
    else if (n == 2) tile<R, std::min(2, MOST)>(add, out, stride, a, b, j, steps);
    else if (n == 3) tile<R, std::min(3, MOST)>(add, out, stride, a, b, j, steps);
    else tile<R, MOST>(add, out, stride, a, b, j, steps);
    j += n;
  }
}

#if HAS_TILES
// D x 16 rows of `a` times columns, by matrix tiles: `vectors` of V sums, each of so many products.
template <int D>
static inline void multiply_tiles(bool add, float* out, long stride, const Number* a, long ld, Columns b, long vectors,
                                  long products) {
  for (long j = 0; j < vectors;) {
    long left = vectors - j, n = left % 2 && left > 1 ? 3 : std::min(left, 2L);
    auto some = [&](auto J) {
      float* to = out + j * V;
      if (add) load_tiles<D, J.value>(to, to + SIDE * stride, stride * sizeof(float));
      else clear_tiles<D, J.value>();
      const char* w = (const char*)b.at + j * b.next;
      for (long i = 0; i < products; i += DEEP, w += SIDE * b.apart)
        add_tiles<D, J.value>(a + i, a + SIDE * ld + i, ld * sizeof(Number), {w, b.apart, b.next});
      store_tiles<D, J.value>(to, to + SIDE * stride, stride * sizeof(float));
    };
    if (n == 3) some(std::integral_constant<int, 3>());
    else if (n == 2) some(std::integral_constant<int, 2>());
    else some(std::integral_constant<int, 1>());
    j += n;
  }
}
#endif

}  // namespace attention
