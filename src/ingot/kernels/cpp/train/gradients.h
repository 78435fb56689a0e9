// Weight gradients: dW [N, K] = G^T X for output gradients G [M, N] and inputs X [M, K] of M tokens. Sums are fp32, and
// are stored or accumulated.
//
// Both are packed: G in strips of some columns, of which a group stays in L2; X in panels, each of which is packed
// right before it is multiplied by the strips of the group. What is packed next is prefetched in the meantime.
#pragma once
#include <omp.h>
#include "operands.h"

// With vectors: pairs of tokens, G in strips of MR columns, X in strips of V columns, three of them in a panel.
struct VectorGradients {
  static constexpr long STRIP = MR, GROUP = 192;  // columns of G: with the prefetched ones they fill L2
  static constexpr long STEP = PAIR, TOKENS = 512 * PAIR;  // tokens that are packed at a time
  static constexpr long PREFETCH_STEP = 16 * PAIR;         // tokens between two prefetches
  static constexpr long COLUMNS = NR;                      // columns of X in a panel
  typedef NoSetup Setup;
  // Numbers between strips: 64 bytes more than necessary, else all strips would start in the same set of L1.
  template <int W>
  static constexpr long STRIDE = (TOKENS / PAIR * W + 16) * PAIR;
  struct alignas(64) Packed {
    Number g[GROUP / MR * STRIDE<MR>], x[NR_VECTORS * STRIDE<V>];
  };

  // A last odd token is paired with 0.
  template <int W>
  static inline void pack(Number* to, const Number* from, long ld, long tokens, long columns) {
    for (long t = 0; t < tokens; t += PAIR, from += PAIR * ld, to += PAIR * W)
      for (long c = 0; c < columns; c += V) {
        Ints pairs = load_pairs(from + c, t + 1 < tokens ? from + ld + c : nullptr, columns - c);
        Number* strip = to + c / W * STRIDE<W>;
        for (int i = 0; i < V / W; i++) memcpy(strip + i * STRIDE<W>, (int*)&pairs + i * W, W * sizeof(int));
      }
  }
  static inline void pack_g(Packed& to, const Number* from, long ld, long tokens, long columns) {
    pack<MR>(to.g, from, ld, tokens, columns);
  }
  static inline void pack_x(Packed& to, const Number* from, long ld, long tokens, long columns) {
    pack<V>(to.x, from, ld, tokens, columns);
  }

  // A strip of G, from column r on, times the panel of X. Stores the sums in `out`, or adds them, and prefetches
  // `next`, the output of the next strip.
  template <class Prefetch>
  static inline void multiply(float* out, float* next, long ld, long rows, long columns, const Packed& packed, long r,
                              long tokens, bool accumulate, bool, Prefetch prefetch_next) {
    if (columns > 2 * V) product<3>(out, next, ld, rows, columns, packed, r, tokens, accumulate, prefetch_next);
    else if (columns > V) product<2>(out, next, ld, rows, columns, packed, r, tokens, accumulate, prefetch_next);
    else product<1>(out, next, ld, rows, columns, packed, r, tokens, accumulate, prefetch_next);
  }
  template <int J, class Prefetch>
  static inline void product(float* out, float* next, long ld, long rows, long columns, const Packed& packed, long r,
                             long tokens, bool accumulate, Prefetch prefetch_next) {
    typedef Operand<Number> F;
    const Number *g = packed.g + r / MR * STRIDE<MR>, *x = packed.x;
    Floats sum[MR][J] = {};
    auto each_sum = [&](auto f) {
      for (int r = 0; r < MR; r++)
        for (int j = 0; j < J; j++)
          if (r < rows) f(sum[r][j], out + r * ld + j * V, j + 1 < J ? V : columns - j * V);
    };
    if (accumulate) each_sum([](Floats& s, float* p, long n) { s = n == V ? load(p) : load(p, n); });
    for (int r = 0; r < MR; r++)
      for (int j = 0; j < J; j++) __builtin_prefetch(next + r * ld + j * V, 1);
    for (long i = 0; i < tokens / PAIR; i++) {
      if (i % (PREFETCH_STEP / PAIR) == 0) prefetch_next();
      F::Vec w[J];
      for (int j = 0; j < J; j++) w[j] = F::read(x + i * V * PAIR + j * STRIDE<V>);
      for (int r = 0; r < MR; r++) {
        auto pair = F::broadcast(g + (i * MR + r) * PAIR);
        for (int j = 0; j < J; j++) F::multiply_add(sum[r][j], pair, w[j]);
      }
    }
    each_sum([](Floats& s, float* p, long n) { n == V ? store(p, s) : store(p, s, n); });
  }
};

// Prefetches the cache lines of a part of a matrix, evenly spread over a number of calls.
struct MatrixPrefetch {
  static constexpr long LINE = 64 / sizeof(Number);
  const Number* row;
  long ld, rows, columns, lines, at = 0;  // `lines` per call
  MatrixPrefetch(const Number* row, long ld, long rows, long columns, long calls)
      : row(row), ld(ld), rows(rows), columns(columns),
        lines((rows * round_up(columns, LINE) / LINE + calls - 1) / calls) {}
  inline void step() {
    for (long n = 0; n < lines && rows; n++) {
      prefetch(row + at);
      if ((at += LINE) >= columns) at = 0, row += ld, rows--;
    }
  }
};

#if HAS_AMX
#include "gradients_amx.h"
#endif

// The work of one task: all tokens, some rows and columns of the output. With `stream` full tiles are written with
// non-temporal stores.
template <class Kernel>
static void gradient_part(float* out, long ld_out, const Number* g, long ld_g, const Number* x, long ld_x,
                          bool accumulate, long M, long N, long K, bool stream) {
  static thread_local typename Kernel::Packed packed;
  typename Kernel::Setup setup(TILE);
  constexpr long STRIP = Kernel::STRIP;
  long group = equal_parts(N, Kernel::GROUP, STRIP), tokens = equal_parts(M, Kernel::TOKENS, Kernel::STEP);
  stream = stream && tokens >= M && !accumulate;  // nothing is added to the output later
  for (long n = 0; n < N; n += group)
    for (long m = 0; m < M; m += tokens) {
      bool same_group = m + tokens < M;  // in the next iteration
      long next_n = same_group ? n : n + group, next_m = same_group ? m + tokens : 0;
      long next_tokens = std::min(tokens, M - next_m);
      if (next_n >= N) next_tokens = 0;
      long count = std::min(tokens, M - m), padded = round_up(count, Kernel::STEP), rows = std::min(group, N - n);
      long calls = (rows + STRIP - 1) / STRIP * ((padded + Kernel::PREFETCH_STEP - 1) / Kernel::PREFETCH_STEP);
      MatrixPrefetch next_g(g + next_m * ld_g + next_n, ld_g, next_tokens, std::min(group, N - next_n),
                            calls * ((K - 1) / Kernel::COLUMNS + 1));
      Kernel::pack_g(packed, g + m * ld_g + n, ld_g, count, rows);
      for (long k = 0; k < K; k += Kernel::COLUMNS) {
        bool last = k + Kernel::COLUMNS >= K;
        long columns = std::min<long>(Kernel::COLUMNS, K - k);
        MatrixPrefetch next_x(x + (last ? next_m * ld_x : m * ld_x + k + Kernel::COLUMNS), ld_x,
                              last ? next_tokens : count, Kernel::COLUMNS, calls);
        auto prefetch_next = [&] { next_x.step(), next_g.step(); };
        Kernel::pack_x(packed, x + m * ld_x + k, ld_x, count, columns);
        for (long r = 0; r < rows; r += STRIP) {
          float* to = out + (n + r) * ld_out + k;
          float* next = r + STRIP < rows ? to + STRIP * ld_out : out + n * ld_out + k + Kernel::COLUMNS;
          Kernel::multiply(to, next, ld_out, rows - r, columns, packed, r, padded, accumulate || m, stream,
                           prefetch_next);
        }
      }
    }
}

constexpr long MIN_STREAM = 1 << 20;  // elements of an output that is streamed: twice as many as L2 holds

static void weight_gradient(float* out, long ld_out, const Number* g, long ld_g, const Number* x, long ld_x,
                            bool accumulate, long M, long N, long K, int threads) {
  // The output is divided into a grid, `across` parts of columns, that minimises the products and packing of a part.
  long parts = threads > 1 ? 2 * threads : 1, strips = (N + MR - 1) / MR, panels = (K + V - 1) / V;
  long across = 1, min_work = 0;
  for (long a = 1; a <= parts; a++) {
    long rows = (strips + parts / a - 1) / (parts / a) * MR, columns = (panels + a - 1) / a * V;
    long work = rows * columns + 6 * (rows + columns);
    if (parts % a == 0 && (a == 1 || work < min_work)) across = a, min_work = work;
  }
  long down = parts / across;
  // A large output is not read again before it leaves the caches, so it bypasses them.
  bool stream = N * K >= MIN_STREAM && ld_out % V == 0 && (uintptr_t)out % 64 == 0;
#if HAS_AMX
  constexpr auto* part = gradient_part<std::conditional_t<Operand<Number>::amx, TileGradients, VectorGradients>>;
#else
  constexpr auto* part = gradient_part<VectorGradients>;
#endif
  Tasks tasks(parts, threads);
#pragma omp parallel num_threads(threads) if (M * N * K > MIN_PARALLEL)
  tasks.run([&](long task) {
    long i = task / across, j = task % across;
    long n = strips * i / down * MR, n1 = std::min(N, strips * (i + 1) / down * MR);
    long k = panels * j / across * V, k1 = std::min(K, panels * (j + 1) / across * V);
    if (n < n1 && k < k1)
      part(out + n * ld_out + k, ld_out, g + n, ld_g, x + k, ld_x, accumulate, M, n1 - n, k1 - k, stream);
    if (stream) std::atomic_thread_fence(std::memory_order_seq_cst);  // non-temporal stores are not ordered
  });
}
