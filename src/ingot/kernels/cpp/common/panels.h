// Panels of packed weights, and the microkernel that multiplies some rows with one.
#pragma once
#include "matrix_tiles.h"
#include "tasks.h"

constexpr int WIDE = 3;                // registers of weights that are multiplied with each number of a row at once
constexpr int PANEL = WIDE * V;        // outputs whose weights lie side by side
constexpr int ROWS = V == 16 ? 8 : 4;  // rows that are multiplied with them: their sums fill the registers
constexpr int CHUNK = 128;             // rows that pass a panel before the next one comes
constexpr long MOST_BYTES = 3072;      // of an output's weights that some rows pass: more, and rows' as many beside
                                       // them, are not all in the second cache when the next rows come

// What is multiplied at once: of each of V outputs `pair` weights, in bf16 two where the CPU can. Sums are floats, and
// so are the numbers of a row that is repeated where the CPU has no products in bf16.
template <class T>
struct Factor {
  static constexpr bool tiles = false;
  static constexpr long pair = 1;
  typedef float Number;
  typedef Floats Type;
  static inline Floats read(const T* p) {
    Floats x = load(p);
#if defined(__x86_64__)
    asm("" : "+v"(x));  // or GCC reads it anew for each row, of which a CPU with 16 registers does two at a time
#endif
    return x;
  }
  static inline Floats repeat(const float* p) { return *p - Floats{}; }
  static inline void add(Floats& sum, Floats x, Floats w) { sum += x * w; }
};
#if defined(__AVX512BF16__)
template <>
struct Factor<bf16> {
  static constexpr bool tiles = HAS_TILES;
  static constexpr long pair = 2;
  typedef bf16 Number;
  typedef __m512bh Type;
  static inline Type read(const bf16* p) { return (Type)_mm512_loadu_si512(p); }
  static inline Type repeat(const bf16* p) {
    int both;
    memcpy(&both, p, sizeof both);
    return (Type)_mm512_set1_epi32(both);
  }
  static inline void add(Floats& sum, Type x, Type w) { sum = _mm512_dpbf16_ps(sum, x, w); }
};
#endif

template <class T>
constexpr long STEP = Factor<T>::tiles ? DEEP : Factor<T>::pair;  // of inputs panels have a multiple, with zeros

// What is asked for of the next panel with register j of a step: nothing, or bytes of a part of it one after another,
// or lines from several places in turn. Where memory is waited for the latter is up to twice as fast: a Xeon asks for
// some lines ahead of each place by itself.
struct NoNext {
  void operator()(long, int) const {}
};
template <int N>  // requests of a step: more than it takes cost time
struct InOrder {
  const char* at;
  long bytes;  // from one to the next
  void operator()(long step, int j) const {
    if (j < N) fetch(at + (step * N + j) * bytes);
  }
};
struct InTurn {
  static constexpr long PLACES = 8, BLOCKS = HAS_TILES ? 3 : 0;  // of rows at most; with more it costs what it saves
  const char* at;
  long apart, lines;  // of a step
  void operator()(long step, int j) const {
    if (long n = step * lines + j; j < lines) fetch(at + n % PLACES * apart + n / PLACES * LINE);
  }
};

// R rows, so many numbers apart, times J registers of a panel, from nothing or onto sums as `keep` leaves them:
// take(row, output, sums) for each. By itself it has all registers.
template <int R, int J = WIDE, class T, class X, class Next, class Take>
[[gnu::noinline]] static void block(const X* x, long apart, const T* panel, long I, const float* onto, Next next,
                                    Take take) {
  typedef Factor<T> F;
  Floats sum[R][J] = {};
  if (onto)
    for (int r = 0; r < R; r++)
      for (int j = 0; j < J; j++) sum[r][j] = load(onto + r * PANEL + j * V);
  for (long i = 0; i < I; i += F::pair, panel += PANEL * F::pair) {
    typename F::Type w[J];
    for (int j = 0; j < J; j++) {
      w[j] = F::read(panel + j * V * F::pair);
      next(i / F::pair, j);
    }
    for (int r = 0; r < R; r++) {
      auto one = F::repeat(x + r * apart + i);
      for (int j = 0; j < J; j++) F::add(sum[r][j], one, w[j]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < J; j++) take(r, j * V, sum[r][j]);
}
// Sums in memory, in rows of a panel.
static inline auto keep(float* sums) {
  return [=](long r, long o, Floats sum) { store(sums + r * PANEL + o, sum); };
}

// The same for any number of rows, left in memory.
template <int R = ROWS, class T, class X, class Next>
static void some_rows(long rows, float* sums, const X* x, long apart, const T* panel, long I, const float* onto,
                      Next next) {
  if (rows == R)
    block<R>(x, apart, panel, I, onto, next, keep(sums));
  else if constexpr (R > 1)
    some_rows<R - 1>(rows, sums, x, apart, panel, I, onto, next);
}

// Rows as they are multiplied: in floats where the CPU has no products in bf16.
template <class T>
static const T* ready(const T* x, long, std::vector<T>&, int) { return x; }
static inline const float* ready(const bf16* x, long size, std::vector<float>& room, int threads) {
  room.resize(size);
#pragma omp parallel for num_threads(threads) schedule(static) if (size > ALONE)
  for (long i = 0; i < size; i += V) {
    if (i + V <= size)
      store(&room[i], load(x + i));
    else
      store(&room[i], load(x + i, size - i), size - i);
  }
  return room.data();
}

// The product of some rows, of those that pass a panel the part b of so many, and a piece of the panel: see `pass`.
template <class T, class X, class Take>
static inline void piece_of(const X* row, long rows, long apart, const T* panel, long inputs, long outputs,
                            const float* onto, const T* next, long b, long blocks, Take take) {
  long bytes = inputs * PANEL * sizeof(T);  // of what comes next, at most
  const char* share = (const char*)next + bytes * b / blocks;
  long step = WIDE * V * sizeof(T) * Factor<T>::pair / blocks;
  if (rows == ROWS && blocks > std::max(1L, InTurn::BLOCKS)) {
    auto all = [&](auto in_order) {
      if (outputs > 2 * V) return block<ROWS>(row, apart, panel, inputs, onto, in_order, take);
      if (outputs > V) return block<ROWS, 2>(row, apart, panel, inputs, onto, in_order, take);
      return block<ROWS, 1>(row, apart, panel, inputs, onto, in_order, take);
    };
    return blocks < WIDE ? all(InOrder<WIDE>{share, step / WIDE}) : all(InOrder<1>{share, step});
  }
  float sums[ROWS * PANEL];
  auto some = [&](auto next) { some_rows(rows, sums, row, apart, panel, inputs, onto, next); };
  if (blocks <= InTurn::BLOCKS)
    some(InTurn{share, bytes / blocks / InTurn::PLACES, (WIDE + blocks - 1) / blocks});
  else if (blocks > 1)
    some(InOrder<WIDE>{share, step / WIDE});
  else  // a panel that is read once is a stream, which other CPUs fetch faster by themselves
    some(NoNext());
  for (long r = 0; r < rows; r++)
    for (long o = 0; o < PANEL; o += V) take(r, o, load(sums + r * PANEL + o));
}

// Calls f(first row, rows, panel, multiply) for all rows past all panels, or groups of G panels that lie together;
// multiply(which of a group, outputs, take) is the product of these rows: take(row, output, sums) for each vector of
// sums, which comes straight from its register where there are as many rows as fill them. I is a multiple of a pair.
template <int G, class T, class Function>
static inline void pass(const T* rows_in, const T* panels, long M, long I, long number, int threads, Function f) {
  std::vector<typename Factor<T>::Number> room;
  auto x = ready(rows_in, M * I, room, threads);
  long size = PANEL * up(I, STEP<T>);
  Tasks tasks((M + CHUNK - 1) / CHUNK * number, threads);
#pragma omp parallel num_threads(threads) if (M * G * number * size > ALONE)
  {
    alignas(64) float kept[CHUNK * G * PANEL];  // the sums of the inputs before
    tasks.work([&](long task) {
      long chunk = task / number * CHUNK, p = task % number;
      long rows = std::min<long>(CHUNK, M - chunk), blocks = (rows + ROWS - 1) / ROWS;
      long piece = blocks > std::max(1L, InTurn::BLOCKS) ? equal(I, MOST_BYTES / sizeof(T), Factor<T>::pair) : I;
      for (long i = 0; i < I; i += piece)
        for (long b = 0; b < blocks; b++) {
          long inputs = std::min(piece, I - i), from = rows * b / blocks, some = rows * (b + 1) / blocks - from;
          bool last = i + piece >= I;
          auto multiply = [&](long which, long outputs, auto take) {
            const T *panel = panels + (p * G + which) * size, *next = panel + (last ? G * size : (i + piece) * PANEL);
            const float* onto = i ? kept + (which * CHUNK + from) * PANEL : nullptr;
            piece_of(x + (chunk + from) * I + i, some, I, panel + i * PANEL, inputs, outputs, onto, next, b, blocks,
                     take);
          };
          if (last)
            f(chunk + from, some, p, multiply);
          else
            for (int which = 0; which < G; which++) multiply(which, PANEL, keep(kept + (which * CHUNK + from) * PANEL));
        }
    });
  }
}

// Calls f(at, n) for each vector of a panel, of which so many outputs are left.
template <class Function>
static inline void across(long left, Function f) {
  if (left < PANEL) return each(left, f);
#pragma GCC unroll 3
  for (long at = 0; at < PANEL; at += V) f(at, std::integral_constant<long, V>());
}
