// The gradient of weights: dW[N,K] = G^T X of the gradients G [M,N] and the inputs X [M,K] of M tokens; summed and
// written in fp32, or added to what is there.
//
// Both are packed as they are multiplied, pairs of tokens after each other: G in strips of ROWS columns, a group of
// which stays in the second cache, X in strips of V columns, 3 at a time, a panel that is packed right before the
// group's strips pass it. What is packed next is asked for meanwhile.
#pragma once
#include <omp.h>
#include "layouts.h"

constexpr long TOKENS = 512 * PAIR;  // that are packed at once: the more, the more seldom sums are read and written
constexpr long GROUP = 192;    // columns of G that are packed at once: with those asked for they fill the second cache
constexpr long EVERY = 16;     // pairs of tokens between two requests

// From one strip to the next: 64 bytes more than it needs, or all would start in the same set of the first cache.
template <int W>
constexpr long STRIP = (TOKENS / PAIR * W + 16) * PAIR;
struct alignas(64) Packed {
  Number g[GROUP / ROWS * STRIP<ROWS>], x[WIDE * STRIP<V>];
};

// Pairs of W columns each; a last token without another is paired with 0.
template <int W>
static inline void pack(Number* to, const Number* from, long ld, long tokens, long columns) {
  for (long t = 0; t < tokens; t += PAIR, from += PAIR * ld, to += PAIR * W)
    for (long c = 0; c < columns; c += V) {
      Ints both = pairs(from + c, t + 1 < tokens ? from + ld + c : nullptr, columns - c);
      Number* strip = to + c / W * STRIP<W>;
      for (int i = 0; i < V / W; i++) memcpy(strip + i * STRIP<W>, (int*)&both + i * W, W * sizeof(int));
    }
}

// Asks for the lines of a part of a matrix, a share of them at each of so many calls.
struct Ahead {
  static constexpr long LINE = 64 / sizeof(Number);
  const Number* row;
  long ld, rows, columns, share, at = 0;
  Ahead(const Number* row, long ld, long rows, long columns, long calls)
      : row(row), ld(ld), rows(rows), columns(columns), share((rows * up(columns, LINE) / LINE + calls - 1) / calls) {}
  inline void ask() {
    for (long n = 0; n < share && rows; n++) {
      fetch(row + at);
      if ((at += LINE) >= columns) at = 0, row += ld, rows--;
    }
  }
};

// A strip of G times J strips of X, written to `out` or added there. The next tile's place is asked for.
template <int J, class Ask>
static inline void tile(float* out, float* next, long ld, long rows, long columns, const Number* g,
                        const Number* x, long pairs, bool onto, Ask ask) {
  typedef Factor<Number> F;
  Floats sum[ROWS][J] = {};
  auto sums = [&](auto f) {
    for (int r = 0; r < ROWS; r++)
      for (int j = 0; j < J; j++)
        if (r < rows) f(sum[r][j], out + r * ld + j * V, j + 1 < J ? V : columns - j * V);
  };
  if (onto) sums([](Floats& s, float* p, long n) { s = n == V ? load(p) : load(p, n); });
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < J; j++) __builtin_prefetch(next + r * ld + j * V, 1);
  for (long i = 0; i < pairs; i++) {
    if (i % EVERY == 0) ask();
    F::Type w[J];
    for (int j = 0; j < J; j++) w[j] = F::read(x + i * V * PAIR + j * STRIP<V>);
    for (int r = 0; r < ROWS; r++) {
      auto one = F::repeat(g + (i * ROWS + r) * PAIR);
      for (int j = 0; j < J; j++) F::add(sum[r][j], one, w[j]);
    }
  }
  sums([](Floats& s, float* p, long n) { n == V ? store(p, s) : store(p, s, n); });
}

// What one thread does: all tokens, some rows and columns of the output.
static void gradient_part(float* out, long ld_out, const Number* g, long ld_g, const Number* x, long ld_x, bool onto,
                          long M, long N, long K) {
  static thread_local Packed packed;
  long group = equal(N, GROUP, ROWS), tokens = equal(M, TOKENS, PAIR);
  for (long n = 0; n < N; n += group)
    for (long m = 0; m < M; m += tokens) {
      bool same = m + tokens < M;  // as the group that is packed next
      long then_n = same ? n : n + group, then_m = same ? m + tokens : 0, then = std::min(tokens, M - then_m);
      if (then_n >= N) then = 0;
      long some = std::min(tokens, M - m), pairs = up(some, PAIR) / PAIR, rows = std::min(group, N - n);
      long calls = (rows + ROWS - 1) / ROWS * ((pairs + EVERY - 1) / EVERY);
      Ahead next_g(g + then_m * ld_g + then_n, ld_g, then, std::min(group, N - then_n), calls * ((K - 1) / PANEL + 1));
      pack<ROWS>(packed.g, g + m * ld_g + n, ld_g, some, rows);
      for (long k = 0; k < K; k += PANEL) {
        bool last = k + PANEL >= K;
        long wide = std::min<long>(PANEL, K - k);
        Ahead next_x(x + (last ? then_m * ld_x : m * ld_x + k + PANEL), ld_x, last ? then : some, PANEL, calls);
        auto ask = [&] { next_x.ask(), next_g.ask(); };
        pack<V>(packed.x, x + m * ld_x + k, ld_x, some, wide);
        auto any = wide > 2 * V ? tile<3, decltype(ask)> : wide > V ? tile<2, decltype(ask)> : tile<1, decltype(ask)>;
        for (long r = 0; r < rows; r += ROWS) {
          float* to = out + (n + r) * ld_out + k;
          float* next = r + ROWS < rows ? to + ROWS * ld_out : out + n * ld_out + k + PANEL;
          any(to, next, ld_out, rows - r, wide, packed.g + r / ROWS * STRIP<ROWS>, packed.x, pairs, onto || m, ask);
        }
      }
    }
}

#if HAS_TILES
// The same by tiles. G is packed by columns of SIDE, a tile of 32 tokens after the other, with the tokens of a column in
// a row, X by 48, a pair of tokens after the other. Tokens that are not there are zeros.
constexpr long TILED_TOKENS = 512, TILED_GROUP = 512;
struct alignas(64) TiledPacked {
  Number g[TILED_GROUP * TILED_TOKENS], x[PANEL * TILED_TOKENS];
};
static void pack_columns(Number* to, const Number* from, long ld, long tokens, long columns) {
  long whole = up(tokens, DEEP);
  for (long c = 0; c < columns; c += SIDE)
    for (long t = 0; t < tokens; t += DEEP) {
      Ints square[V];
      for (int i = 0; i < V; i++) {
        long at = t + 2 * i;
        square[i] = at < tokens ? pairs(from + at * ld + c, at + 1 < tokens ? from + (at + 1) * ld + c : nullptr, columns - c) : Ints{};
      }
      transpose(square);
      for (int i = 0; i < V; i++) put(to + c * whole + t * SIDE + i * DEEP, square[i]);
    }
}
static void pack_panel(Number* to, const Number* from, long ld, long tokens, long columns) {
  for (long t = 0; t < up(tokens, DEEP); t += 2, from += 2 * ld, to += 2 * PANEL)
    for (long c = 0; c < columns; c += V)
      put(to + 2 * c, t < tokens ? pairs(from + c, t + 1 < tokens ? from + ld + c : nullptr, columns - c) : Ints{});
}
template <int D, int J, class Ask>
static inline void gradient_tile(float* out, long ld, long rows, long columns, const Number* g, const Number* x, long tokens,
                                 bool onto, Ask ask) {
  alignas(64) float some[D * SIDE * J * V];
  bool whole = rows >= D * SIDE && columns >= J * V;
  float* sums = whole ? out : some;
  long stride = whole ? ld : J * V;
  auto copy = [&](bool back) {
    for (long r = 0; r < std::min(rows, D * SIDE); r++)
      for (long c = 0; c < std::min<long>(columns, J * V); c++)
        (back ? out[r * ld + c] : some[r * J * V + c]) = back ? some[r * J * V + c] : out[r * ld + c];
  };
  if (onto) {
    if (!whole) copy(false);
    load_tiles<D, J>(sums, sums + SIDE * stride, stride * sizeof(float));
  } else {
    clear_tiles<D, J>();
  }
  const Number* two = g + tokens * SIDE;
  for (long t = 0; t < tokens; t += DEEP) {
    ask();
    add_tiles<D, J>(g + t * SIDE, two + t * SIDE, LINE, {x + t * PANEL, PANEL * 2 * sizeof(Number)});
  }
  store_tiles<D, J>(sums, sums + SIDE * stride, stride * sizeof(float));
  if (!whole) copy(true);
}
static void gradient_part_tiled(float* out, long ld_out, const Number* g, long ld_g, const Number* x, long ld_x, bool onto,
                                long M, long N, long K) {
  static thread_local TiledPacked packed;
  Tiles tiles(SIDE);
  long group = equal(N, TILED_GROUP, 2 * SIDE), tokens = equal(M, TILED_TOKENS, DEEP);
  for (long n = 0; n < N; n += group)
    for (long m = 0; m < M; m += tokens) {
      bool same = m + tokens < M;  // as the group that is packed next
      long then_n = same ? n : n + group, then_m = same ? m + tokens : 0, then = std::min(tokens, M - then_m);
      if (then_n >= N) then = 0;
      long some = std::min(tokens, M - m), whole = up(some, DEEP), rows = std::min(group, N - n);
      long calls = (rows + 2 * SIDE - 1) / (2 * SIDE) * whole / DEEP;
      Ahead next_g(g + then_m * ld_g + then_n, ld_g, then, std::min(group, N - then_n), calls * ((K - 1) / PANEL + 1));
      pack_columns(packed.g, g + m * ld_g + n, ld_g, some, rows);
      for (long k = 0; k < K; k += PANEL) {
        bool last = k + PANEL >= K;
        long wide = std::min<long>(PANEL, K - k);
        Ahead next_x(x + (last ? then_m * ld_x : m * ld_x + k + PANEL), ld_x, last ? then : some, PANEL, calls);
        auto ask = [&] { next_x.ask(), next_g.ask(); };
        pack_panel(packed.x, x + m * ld_x + k, ld_x, some, wide);
        auto pass = [&](auto J) {
          for (long r = 0; r < rows; r += 2 * SIDE) {
            float* to = out + (n + r) * ld_out + k;
            const Number* strip = packed.g + r * whole;
            if (rows - r > SIDE)
              gradient_tile<2, J.value>(to, ld_out, rows - r, wide, strip, packed.x, whole, onto || m, ask);
            else
              gradient_tile<1, J.value>(to, ld_out, rows - r, wide, strip, packed.x, whole, onto || m, ask);
          }
        };
        if (wide > 2 * V) pass(std::integral_constant<int, 3>());
        else if (wide > V) pass(std::integral_constant<int, 2>());
        else pass(std::integral_constant<int, 1>());
      }
    }
}
#endif

static void weight_gradient(float* out, long ld_out, const Number* g, long ld_g, const Number* x, long ld_x, bool onto,
                            long M, long N, long K, int threads) {
#pragma omp parallel num_threads(threads) if (M * N * K > ALONE)
  {
    // Threads lie over the output as a grid that makes the largest part the least work: of products, and of packing.
    long T = omp_get_num_threads(), t = omp_get_thread_num(), strips = (N + ROWS - 1) / ROWS, panels = (K + V - 1) / V;
    long across = 1, least = 0;
    for (long a = 1; a <= T; a++) {
      long rows = (strips + T / a - 1) / (T / a) * ROWS, columns = (panels + a - 1) / a * V;
      long work = rows * columns + 6 * (rows + columns);
      if (T % a == 0 && (a == 1 || work < least)) across = a, least = work;
    }
    long down = T / across, i = t / across, j = t % across;
    long n = strips * i / down * ROWS, n1 = std::min(N, strips * (i + 1) / down * ROWS);
    long k = panels * j / across * V, k1 = std::min(K, panels * (j + 1) / across * V);
    auto part = gradient_part;
#if HAS_TILES
    if (Factor<Number>::tiles) part = gradient_part_tiled;
#endif
    if (n < n1 && k < k1) part(out + n * ld_out + k, ld_out, g + n, ld_g, x + k, ld_x, onto, M, n1 - n, k1 - k);
  }
}
