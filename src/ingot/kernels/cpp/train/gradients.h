// The gradient of weights: dW[N,K] = G^T X of the gradients G [M,N] and the inputs X [M,K] of M tokens; summed and
// written in fp32, or added to what is there.
//
// Both are packed as they are multiplied: G in strips of some columns, a group of which stays in the second cache, X in
// panels, each packed right before the group's strips pass it. What is packed next is asked for meanwhile.
#pragma once
#include <omp.h>
#include "layouts.h"

// By vectors: pairs of tokens after each other, G in strips of ROWS columns, X in strips of V, 3 of them in a panel.
struct ByVectors {
  static constexpr long STRIP = ROWS, GROUP = 192;  // columns of G: with those asked for they fill the second cache
  static constexpr long STEP = PAIR, TOKENS = 512 * PAIR;  // the more, the more seldom sums are read and written
  static constexpr long EVERY = 16 * PAIR;                 // tokens between two requests
  static constexpr long ACROSS = PANEL;                    // columns of X at once
  typedef Nothing Tools;
  // From one strip to the next: 64 bytes more than it needs, or all would start in the same set of the first cache.
  template <int W>
  static constexpr long APART = (TOKENS / PAIR * W + 16) * PAIR;
  struct alignas(64) Packed {
    Number g[GROUP / ROWS * APART<ROWS>], x[WIDE * APART<V>];
  };

  // A last token without another is paired with 0.
  template <int W>
  static inline void pack(Number* to, const Number* from, long ld, long tokens, long columns) {
    for (long t = 0; t < tokens; t += PAIR, from += PAIR * ld, to += PAIR * W)
      for (long c = 0; c < columns; c += V) {
        Ints both = pairs(from + c, t + 1 < tokens ? from + ld + c : nullptr, columns - c);
        Number* strip = to + c / W * APART<W>;
        for (int i = 0; i < V / W; i++) memcpy(strip + i * APART<W>, (int*)&both + i * W, W * sizeof(int));
      }
  }
  static inline void pack_g(Packed& to, const Number* from, long ld, long tokens, long columns) {
    pack<ROWS>(to.g, from, ld, tokens, columns);
  }
  static inline void pack_x(Packed& to, const Number* from, long ld, long tokens, long columns) {
    pack<V>(to.x, from, ld, tokens, columns);
  }

  // A strip of G, from column r on, times all of X, written to `out` or added there. The next one's place is asked for.
  template <class Ask>
  static inline void multiply(float* out, float* next, long ld, long rows, long columns, const Packed& packed, long r,
                              long tokens, bool onto, bool, Ask ask) {
    if (columns > 2 * V) some<3>(out, next, ld, rows, columns, packed, r, tokens, onto, ask);
    else if (columns > V) some<2>(out, next, ld, rows, columns, packed, r, tokens, onto, ask);
    else some<1>(out, next, ld, rows, columns, packed, r, tokens, onto, ask);
  }
  template <int J, class Ask>
  static inline void some(float* out, float* next, long ld, long rows, long columns, const Packed& packed, long r,
                          long tokens, bool onto, Ask ask) {
    typedef Factor<Number> F;
    const Number *g = packed.g + r / ROWS * APART<ROWS>, *x = packed.x;
    Floats sum[ROWS][J] = {};
    auto sums = [&](auto f) {
      for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < J; j++)
          if (r < rows) f(sum[r][j], out + r * ld + j * V, j + 1 < J ? V : columns - j * V);
    };
    if (onto) sums([](Floats& s, float* p, long n) { s = n == V ? load(p) : load(p, n); });
    for (int r = 0; r < ROWS; r++)
      for (int j = 0; j < J; j++) __builtin_prefetch(next + r * ld + j * V, 1);
    for (long i = 0; i < tokens / PAIR; i++) {
      if (i % (EVERY / PAIR) == 0) ask();
      F::Type w[J];
      for (int j = 0; j < J; j++) w[j] = F::read(x + i * V * PAIR + j * APART<V>);
      for (int r = 0; r < ROWS; r++) {
        auto one = F::repeat(g + (i * ROWS + r) * PAIR);
        for (int j = 0; j < J; j++) F::add(sum[r][j], one, w[j]);
      }
    }
    sums([](Floats& s, float* p, long n) { n == V ? store(p, s) : store(p, s, n); });
  }
};

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

#if HAS_TILES
#include "gradients_by_tiles.h"
#endif

// What one thread does: all tokens, some rows and columns of the output.
template <class Way>
static void gradient_part(float* out, long ld_out, const Number* g, long ld_g, const Number* x, long ld_x, bool onto,
                          long M, long N, long K, bool past) {
  static thread_local typename Way::Packed packed;
  typename Way::Tools tools(SIDE);
  constexpr long STRIP = Way::STRIP;
  long group = equal(N, Way::GROUP, STRIP), tokens = equal(M, Way::TOKENS, Way::STEP);
  past = past && tokens >= M && !onto;  // nothing is added to it later
  for (long n = 0; n < N; n += group)
    for (long m = 0; m < M; m += tokens) {
      bool same = m + tokens < M;  // as the group that is packed next
      long then_n = same ? n : n + group, then_m = same ? m + tokens : 0, then = std::min(tokens, M - then_m);
      if (then_n >= N) then = 0;
      long some = std::min(tokens, M - m), filled = up(some, Way::STEP), rows = std::min(group, N - n);
      long calls = (rows + STRIP - 1) / STRIP * ((filled + Way::EVERY - 1) / Way::EVERY);
      Ahead next_g(g + then_m * ld_g + then_n, ld_g, then, std::min(group, N - then_n),
                   calls * ((K - 1) / Way::ACROSS + 1));
      Way::pack_g(packed, g + m * ld_g + n, ld_g, some, rows);
      for (long k = 0; k < K; k += Way::ACROSS) {
        bool last = k + Way::ACROSS >= K;
        long wide = std::min<long>(Way::ACROSS, K - k);
        Ahead next_x(x + (last ? then_m * ld_x : m * ld_x + k + Way::ACROSS), ld_x, last ? then : some, Way::ACROSS,
                     calls);
        auto ask = [&] { next_x.ask(), next_g.ask(); };
        Way::pack_x(packed, x + m * ld_x + k, ld_x, some, wide);
        for (long r = 0; r < rows; r += STRIP) {
          float* to = out + (n + r) * ld_out + k;
          float* next = r + STRIP < rows ? to + STRIP * ld_out : out + n * ld_out + k + Way::ACROSS;
          Way::multiply(to, next, ld_out, rows - r, wide, packed, r, filled, onto || m, past, ask);
        }
      }
    }
}

constexpr long PAST = 1 << 20;  // sums, twice what a core's second cache holds

static void weight_gradient(float* out, long ld_out, const Number* g, long ld_g, const Number* x, long ld_x, bool onto,
                            long M, long N, long K, int threads) {
  // The output is cut into a grid whose largest part is the least work: of products, and of packing.
  long parts = threads > 1 ? 2 * threads : 1, strips = (N + ROWS - 1) / ROWS, panels = (K + V - 1) / V;
  long across = 1, least = 0;
  for (long a = 1; a <= parts; a++) {
    long rows = (strips + parts / a - 1) / (parts / a) * ROWS, columns = (panels + a - 1) / a * V;
    long work = rows * columns + 6 * (rows + columns);
    if (parts % a == 0 && (a == 1 || work < least)) across = a, least = work;
  }
  long down = parts / across;
  // A large one is read again when all others have been made: it is written past the caches, without being fetched.
  bool past = N * K >= PAST && ld_out % V == 0 && (uintptr_t)out % 64 == 0;
#if HAS_TILES
  constexpr auto* some = gradient_part<std::conditional_t<Factor<Number>::tiles, ByTiles, ByVectors>>;
#else
  constexpr auto* some = gradient_part<ByVectors>;
#endif
  Tasks tasks(parts, threads);
#pragma omp parallel num_threads(threads) if (M * N * K > ALONE)
  tasks.work([&](long part) {
    long i = part / across, j = part % across;
    long n = strips * i / down * ROWS, n1 = std::min(N, strips * (i + 1) / down * ROWS);
    long k = panels * j / across * V, k1 = std::min(K, panels * (j + 1) / across * V);
    if (n < n1 && k < k1)
      some(out + n * ld_out + k, ld_out, g + n, ld_g, x + k, ld_x, onto, M, n1 - n, k1 - k, past);
    if (past) std::atomic_thread_fence(std::memory_order_seq_cst);  // such writes come in no order
  });
}
