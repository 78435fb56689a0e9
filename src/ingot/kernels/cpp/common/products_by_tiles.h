// Products of rows and panels by matrix tiles, with what follows them.
#pragma once
#include "panels.h"

constexpr long AT_ONCE = 2 * SIDE;  // rows that meet a panel at once

// What stays in the second cache: of many rows some, and of weights those panels that a block of rows passes before the
// next one comes, so that a block's outputs lie beside each other.
static inline long chunk_of(long I) { return std::clamp((1L << 18) / I, 64L, 512L); }
constexpr long PANELS_AT_ONCE = 3 << 17;

// Asks for a step's share of the next panel, from several places in turn as `InTurn` does, but in loops that the
// compiler unrolls: asked one by one 64 and 128 rows took 3 % longer.
struct NextPanel {
  const char* at = nullptr;
  long apart;
  void operator()(long step) const {
    constexpr long LINES = DEEP * PANEL * sizeof(bf16) / LINE / InTurn::PLACES;
    if (at)
      for (long n = step * LINES; n < (step + 1) * LINES; n++)
        for (long place = 0; place < InTurn::PLACES; place++) fetch(at + place * apart + n * LINE);
  }
};

// D x J tiles of sums; the second tile of rows begins `two` rows behind the first one, whose rows are so many if it is
// the only one. Calls meanwhile() at each step.
template <int D, int J, class Function>
static inline void tile_product(float* sums, const bf16* x, long two, long I, long rows, const bf16* panel,
                                NextPanel next, Function meanwhile) {
  constexpr long APART = PANEL * 2 * sizeof(bf16);
  long stride = I * sizeof(bf16), whole = I / DEEP * DEEP;
  clear_tiles<D, J>();
  for (long i = 0; i < whole; i += DEEP) {
    add_tiles<D, J>(x + i, x + two * I + i, stride, {panel + i * PANEL, APART});
    next(i / DEEP);
    meanwhile();
  }
  if (long left = I - whole) {  // behind it the next row begins, which is not to be multiplied even with zeros
    alignas(64) bf16 rest[D * SIDE * DEEP];
    for (long r = 0; r < (D > 1 ? D * SIDE : rows); r++) {
      const bf16* from = x + (r < SIDE ? r : r - SIDE + two) * I + whole;
      _mm512_store_si512(rest + r * DEEP, _mm512_maskz_loadu_epi16((1u << left) - 1, from));
    }
    add_tiles<D, J>(rest, rest + SIDE * DEEP, LINE, {panel + whole * PANEL, APART});
  }
  store_tiles<D, J>(sums, sums + two * PANEL, PANEL * sizeof(float));
}

// The same of so many outputs; only where all tiles are in use anything is done meanwhile.
template <class Function>
static inline void tile_product(float* sums, const bf16* x, long two, long I, long rows, const bf16* panel,
                                long outputs, NextPanel next, Function meanwhile) {
  auto product = [&](auto D, auto J, auto meanwhile) {
    tile_product<D.value, J.value>(sums, x, two, I, rows, panel, next, meanwhile);
  };
  std::integral_constant<int, 1> one;
  std::integral_constant<int, 2> both;
  std::integral_constant<int, 3> three;
  auto nothing = [] {};
  if (two && outputs > 2 * V) return product(both, three, meanwhile);
  if (two && outputs > V) return product(both, both, nothing);
  if (two) return product(both, one, nothing);
  if (outputs > 2 * V) return product(one, three, nothing);
  if (outputs > V) return product(one, both, nothing);
  product(one, one, nothing);
}

// Two by two tiles, of two panels together: their six tiles of columns are three pairs, of which so many are wanted. The
// other panel's sums lie AT_ONCE rows of a panel behind the first one's.
template <class Function>
static inline void product_of_two(float* sums, const bf16* x, long two, long I, const bf16* panel, long outputs,
                                  Function meanwhile) {
  constexpr long APART = PANEL * 2 * sizeof(bf16);
  for (long c = 0; c < 2 * WIDE && c * V < outputs; c += 2) {
    bool across = c == WIDE - 1;  // one tile of each panel
    const bf16* columns = panel + c / WIDE * PANEL * I + c % WIDE * 2 * V;
    float* to = sums + c / WIDE * AT_ONCE * PANEL + c % WIDE * V;
    long next = across ? PANEL * I * sizeof(bf16) - 2 * LINE : LINE;
    clear_tiles<2, 2>();
    for (long i = 0; i < I; i += DEEP) {
      add_tiles<2, 2>(x + i, x + two * I + i, I * sizeof(bf16), {columns + i * PANEL, APART, next});
      meanwhile();
    }
    store_tiles<2, 2>(to, to + two * PANEL, PANEL * sizeof(float), across ? AT_ONCE * PANEL - 2 * V : V);
  }
}
// Inputs of which it is faster: G = 1 asks that rows and panels fit the first cache, from which they are read more often
// so; G = 2 has more to finish, which three rounds leave more room for.
template <int G>
constexpr long IN_PAIRS = G == 2 ? 512 : 192;

// What follows a product is done bit by bit while the next one is computed: a CPU looks no further ahead than some
// hundred instructions, and what tiles write is read back late. Of some rows and of so many panels, whose sums lie
// AT_ONCE rows of a panel behind those of the one before, finish(first row, rows, panel, sums) does a part.
template <class Function>
struct Later {
  Function finish;
  long row, rows, panel, panels = 0, done;  // rows of the first of the panels that are left
  const float* sums;
  explicit Later(Function finish) : finish(finish) {}
  void some(long count) {
    while (count && panels) {
      long now = std::min(count, rows - done);
      finish(row + done, now, panel, sums + done * PANEL);
      count -= now, done += now;
      if (done == rows) done = 0, panel++, panels--, sums += AT_ONCE * PANEL;
    }
  }
  void all() { some(AT_ONCE * panels); }
  void begin(long first_row, long of_rows, long first_panel, long of_panels, const float* at) {
    row = first_row, rows = of_rows, panel = first_panel, panels = of_panels, sums = at, done = 0;
  }
};

// Calls finish(first row, rows, panel, sums) for all rows past all panels, or groups of G panels that lie together; of
// each the sums lie AT_ONCE rows of a panel behind those of the one before.
template <int G, class Function>
static inline void by_tiles(const bf16* x, const bf16* panels, long M, long I, long O, int threads, Function finish) {
  if (!M) return;
  long size = PANEL * up(I, DEEP), chunk = equal(M, chunk_of(I), AT_ONCE), number = (O + PANEL - 1) / PANEL;
  long together = M >= threads * chunk ? equal(number, std::max(1L, PANELS_AT_ONCE / (G * size)), 1) : 1;
  long groups = (number + together - 1) / together;
  Tasks tasks((M + chunk - 1) / chunk * groups, threads);
#pragma omp parallel num_threads(threads) if (M * G * number * size > ALONE)
  {
    Tiles tiles(M);
    constexpr long ROOM = AT_ONCE * PANEL;
    alignas(64) float sums[2][2 * ROOM];
    Later<Function> later(finish);
    bool pairs = together > 1 && I % DEEP == 0 && I <= IN_PAIRS<G>;
    long steps = pairs ? WIDE * I / DEEP * G / 2 : G * I / DEEP;     // of a group, at least
    long part = (AT_ONCE + steps - 1) / std::max(1L, steps), now = 0;  // rows that are finished at each step
    tasks.work([&](long task) {
      long m = task / groups * chunk, q = task % groups * together;
      long here = std::min(chunk, M - m), blocks = (here + AT_ONCE - 1) / AT_ONCE, end = std::min(q + together, number);
      for (long b = 0; b < blocks; b++) {
        // Tiles have 16 rows, where there are so many: where none is left for them they begin before the block.
        long row = m + here * b / blocks, rows = m + here * (b + 1) / blocks - row, full = std::min(SIDE, M);
        long first = std::min(row, M - full), two = row + rows - first - full;
        for (long p = q, some; p < end; p += some, now = 1 - now) {
          const bf16 *at = x + first * I, *panel = panels + p * G * size;
          auto meanwhile = [&] { later.some(part); };
          some = pairs && two ? std::min(2L / G, end - p) : 1;
          if (pairs && two && some * G == 2)
            product_of_two(sums[now], at, two, I, panel, G == 2 ? 2 * PANEL : O - p * PANEL, meanwhile);
          else
            for (long g = 0; g < G; g++, panel += size) {
              NextPanel next;
              if (!b && together == 1)
                next = {(const char*)(panel + G * size), size * (long)sizeof(bf16) / InTurn::PLACES};
              tile_product(sums[now] + g * ROOM, at, two, I, full, panel, O - p * PANEL, next, meanwhile);
            }
          later.all();
          later.begin(row, rows, p, some, sums[now] + (row - first) * PANEL);
        }
      }
    });
    later.all();
  }
}
