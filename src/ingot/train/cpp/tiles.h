// Products of small matrices that lie in the cache, for attention.
//
// Three layouts let dpbf16 add over
//   features: rows of a head as they are, times panels of 16 tokens, D / 2 x 16 pairs of features;
//   keys:     rows of probabilities as they are, times pairs of tokens, T / 2 x D;
//   queries:  probabilities as pairs of queries, T / 2 x keys, times pairs of tokens.
#pragma once
#include <new>

#include "layouts.h"

namespace attention {

constexpr long BLOCK = 96;  // keys, and queries, whose probabilities are kept at a time; tiles of 6, 8, 16 divide it

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

// Panels of 16 tokens from P x D.
template <class Size>
static void put_panels(int* to, const bf16* from, long T, Size D) {
  for (long t = 0; t < T; t += 16)
    for (long d = 0; d < D; d += 32) {
      __m512i r[16];
      __mmask32 some = d + 32 <= D ? ~0u : 0xffff;
      for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi16(some, from + (t + i) * D + d);
      transpose(r);
      int* panel = to + t * D / 2 + d / 2 * 16;
      for (int i = 0; i < 16 && d + 2 * i < D; i++) _mm512_storeu_si512(panel + i * 16, r[i]);
    }
}

// Pairs of tokens from P x D.
template <class Size>
static void put_pairs(int* to, const bf16* from, long T, Size D) {
  for (long t = 0; t < T; t += 2, from += 2 * D, to += D)
    for (long d = 0; d < D; d += 16)
      _mm512_storeu_si512(to + d, pair(halves(from + d), halves(from + d + D)));
}

// What each row has its own number of in each step: rows in memory, or a block's columns.
struct Rows {
  const int* at;
  long stride;
  int operator()(int r, long i) const { return at[r * stride + i]; }
};
struct Columns {
  const int* at;
  int operator()(int r, long i) const { return at[i * BLOCK + r]; }
};
// What all rows share a vector of in each step, and for each vector of the sums.
template <class Size>
struct Panels {
  const int* at;
  Size D;
  const int* operator()(long i, long j) const { return at + j * (D / 2 * V) + i * V; }
};
template <class Size>
struct Pairs {
  const int* at;
  Size D;
  const int* operator()(long i, long j) const { return at + i * D + j * V; }
};

// Sums of R rows and W vectors from j on; with `add` in addition to what is there.
template <int R, int W, class A, class B>
static void tile(bool add, float* out, long stride, A a, B b, long j0, long steps) {
  Floats sum[R][W] = {};
  if (add)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < W; j++) sum[r][j] = load(out + r * stride + (j0 + j) * V);
  for (long i = 0; i < steps; i++) {
    __m512bh shared[W];
#pragma GCC unroll 4
    for (int j = 0; j < W; j++) shared[j] = (__m512bh)_mm512_loadu_si512(b(i, j0 + j));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      __m512bh own = (__m512bh)_mm512_set1_epi32(a(r, i));
#pragma GCC unroll 4
      for (int j = 0; j < W; j++) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], own, shared[j]);
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
  constexpr int MOST = 24 / R;
  for (long j = 0; j < vectors;) {
    long left = vectors - j, n = left > MOST && left < 2 * MOST ? (left + 1) / 2 : std::min<long>(left, MOST);
    if (n == 1) tile<R, 1>(add, out, stride, a, b, j, steps);
    else if (n == 2) tile<R, 2>(add, out, stride, a, b, j, steps);
    else if (n == 3) tile<R, 3>(add, out, stride, a, b, j, steps);
    else tile<R, MOST>(add, out, stride, a, b, j, steps);
    j += n;
  }
}

}  // namespace attention
