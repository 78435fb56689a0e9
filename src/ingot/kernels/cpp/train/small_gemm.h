// Products of small matrices in the cache, for attention.
//
// There are three layouts, by what the product sums over:
//   features: rows of a head as they are, times panels of V tokens, D / PAIR x V pairs of features;
//   keys:     rows of probabilities as they are, times pairs of tokens, T / PAIR x D;
//   queries:  probabilities as pairs of queries, T / PAIR x keys, times pairs of tokens.
// With matrix tiles the third layout has rows of keys.
#pragma once
#include "operands.h"

namespace attention {

constexpr long BLOCK = 96;  // keys and queries of a block of probabilities; a multiple of tiles of 6, 8 and 16

// Panels of V tokens from P x D.
template <class Size>
static void pack_panels(Number* to, const Number* from, long T, Size D) {
  for (long t = 0; t < T; t += V)
    for (long d = 0; d < D; d += PAIR * V) {
      Ints square[V];
      for (int i = 0; i < V; i++) square[i] = load_pairs(from + (t + i) * D + d, D - d);
      transpose(square);
      for (long i = 0; i < V && d + PAIR * i < D; i++) store_ints(to + t * D + (d + PAIR * i) * V, square[i]);
    }
}

// Pairs of tokens from P x D.
template <class Size>
static void pack_pairs(Number* to, const Number* from, long T, Size D) {
  for (long t = 0; t < T; t += PAIR, from += PAIR * D, to += PAIR * D)
    for (long d = 0; d < D; d += V) store_ints(to + d * PAIR, load_pairs(from + d, from + d + D, V));
}

// The left operand: a pair per row and step, from rows in memory or from columns of a block.
struct Rows {
  const Number* at;
  long stride;
  const Number* operator()(int r, long i) const { return at + r * stride + i * PAIR; }
};
struct Transposed {
  const Number* at;
  const Number* operator()(int r, long i) const { return at + (i * BLOCK + r) * PAIR; }
};
// The right operand: a vector per step and vector of sums, shared by all rows.
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

// R rows and J vectors of sums, starting with vector j0; with `add` added to the output.
template <int R, int J, class A, class B>
static void register_tile(bool add, float* out, long stride, A a, B b, long j0, long steps) {
  typedef Operand<Number> F;
  Floats sum[R][J] = {};
  if (add)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) sum[r][j] = load(out + r * stride + (j0 + j) * V);
  for (long i = 0; i < steps; i++) {
    F::Vec right[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) right[j] = F::read(b(i, j0 + j));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      auto left = F::broadcast(a(r, i));
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) F::multiply_add(sum[r][j], left, right[j]);
    }
  }
  asm("" : "+r"(out));  // else GCC keeps all output addresses in registers during the loop
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) store(out + r * stride + (j0 + j) * V, sum[r][j]);
}

// The same for any number of vectors, as many at a time as leave registers for the operands.
template <int R, class A, class B>
static inline void multiply(bool add, float* out, long stride, A a, B b, long vectors, long steps) {
  constexpr int MAX = MR * NR_VECTORS / R;
  for (long j = 0; j < vectors;) {
    long left = vectors - j, n = left > MAX && left < 2 * MAX ? (left + 1) / 2 : std::min<long>(left, MAX);
    if (n == 1) register_tile<R, 1>(add, out, stride, a, b, j, steps);
    else if (n == 2) register_tile<R, std::min(2, MAX)>(add, out, stride, a, b, j, steps);
    else if (n == 3) register_tile<R, std::min(3, MAX)>(add, out, stride, a, b, j, steps);
    else register_tile<R, MAX>(add, out, stride, a, b, j, steps);
    j += n;
  }
}

#if HAS_AMX
// D x 16 rows of `a` times columns with matrix tiles: `vectors` vectors of V sums over `depth` numbers.
template <int D>
static inline void multiply_tiles(bool add, float* out, long stride, const Number* a, long ld, TileColumns b,
                                  long vectors, long depth) {
  for (long j = 0; j < vectors;) {
    long left = vectors - j, n = left % 2 && left > 1 ? 3 : std::min(left, 2L);
    auto product = [&](auto J) {
      float* to = out + j * V;
      if (add) load_tiles<D, J.value>(to, to + TILE * stride, stride * sizeof(float));
      else clear_tiles<D, J.value>();
      const char* w = (const char*)b.at + j * b.next;
      for (long i = 0; i < depth; i += TILE_K, w += TILE * b.stride)
        accumulate_tiles<D, J.value>(a + i, a + TILE * ld + i, ld * sizeof(Number), {w, b.stride, b.next});
      store_tiles<D, J.value>(to, to + TILE * stride, stride * sizeof(float));
    };
    if (n == 3) product(std::integral_constant<int, 3>());
    else if (n == 2) product(std::integral_constant<int, 2>());
    else product(std::integral_constant<int, 1>());
    j += n;
  }
}
#endif

}  // namespace attention
