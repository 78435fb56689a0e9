// Products of floats by matrix tiles. A float is the sum of three numbers in bf16, each of which has 8 of its 24 bits:
// a high, a middle and a low part. Of the nine products of two floats' parts the six largest are added up. What is left
// out is 2^-27.4 of the product (root mean square, of normal numbers; 2^-24.2 at most), where fp32 rounds it by 2^-25.2
// (2^-24). The idea is Henry's, Tang's and Heinecke's (2019, arXiv:1904.06376). Numbers above 3.39e38 count as
// infinite, and those below 1e-33 lose their low parts.
#pragma once
#include "products_by_tiles.h"

// Whether a product is so large in all three sizes that splitting costs less than it gains.
static inline bool worth_splitting(long M, long I, long O) { return std::min({M, I, O}) >= 256 && tiles(); }

constexpr int PARTS = 3;
constexpr long TILE = SIDE * DEEP;

// Parts of V floats and V others, as pairs; each part lies so many numbers behind the one before.
static inline void split(bf16* to, long apart, Floats one, Floats other) {
  constexpr uint32_t HALF = 0x8000, UPPER = 0xffff0000;
  for (int part = 0; part < PARTS; part++) {
    Bits a = (Bits)one, b = (Bits)other;
    if (part + 1 < PARTS) a += HALF, b += HALF;  // to the nearest; what is left at last has 8 bits
    _mm512_store_si512(to + part * apart, (__m512i)(a >> 16 | (b & UPPER)));
    one -= (Floats)(a & UPPER), other -= (Floats)(b & UPPER);
  }
}

// How what is multiplied at once lies: part after part, of each some tiles. A tile's number i is paired with i + 16.
struct Split {
  const bf16* at;
  long tiles;
  const bf16* operator()(int part, int tile) const { return at + (part * tiles + tile) * TILE; }
};

// Adds to tiles 0 to 3 what two tiles of rows and two of columns give. From one product to the next either rows or
// columns stay.
static inline void add_parts(Split rows, Split columns) {
#define ROWS_OF(part)                  \
  READ_TILE(4, rows(part, 0), LINE);   \
  READ_TILE(5, rows(part, 1), LINE);   \
  FOUR
#define COLUMNS_OF(part)               \
  READ_TILE(6, columns(part, 0), LINE); \
  READ_TILE(7, columns(part, 1), LINE); \
  FOUR
#define FOUR                \
  _tile_dpbf16ps(0, 4, 6);  \
  _tile_dpbf16ps(1, 4, 7);  \
  _tile_dpbf16ps(2, 5, 6);  \
  _tile_dpbf16ps(3, 5, 7);
  READ_TILE(6, columns(0, 0), LINE);
  READ_TILE(7, columns(0, 1), LINE);
  ROWS_OF(2)
  ROWS_OF(1)
  COLUMNS_OF(1)
  ROWS_OF(0)
  COLUMNS_OF(2)
  COLUMNS_OF(0)
#undef ROWS_OF
#undef COLUMNS_OF
#undef FOUR
}

// Two panels are split together: their six tiles of columns are three pairs.
constexpr long PANELS = 2, COLUMNS = PANELS * WIDE, OF_ROWS = PARTS * AT_ONCE * DEEP;
constexpr long OF_PANELS = PARTS * COLUMNS * TILE;

// Parts of AT_ONCE rows, of which some may be missing, step after step.
static inline void split_rows(bf16* to, const float* x, long I, long rows, long inputs) {
  for (long i = 0; i < inputs; i += DEEP, to += OF_ROWS)
    for (long r = 0; r < AT_ONCE; r++) {
      const float* from = x + r * I + i;
      Floats one = {}, other = {};
      if (r < rows && inputs - i >= DEEP)
        one = load(from), other = load(from + V);
      else if (r < rows)
        one = load(from, std::min<long>(V, inputs - i)), other = load(from + V, std::max<long>(0, inputs - i - V));
      split(to + r * DEEP, 2 * TILE, one, other);
    }
}
// Parts of one of two panels, step after step.
static inline void split_panel(bf16* to, const float* panel, long inputs) {
  for (long i = 0; i < inputs; i += DEEP, to += OF_PANELS)
    for (long k = i; k < i + V; k++)
      for (long o = 0; o < WIDE; o++) {
        const float* from = panel + k * PANEL + o * V;
        Floats one = k < inputs ? load(from) : Floats{}, other = k + V < inputs ? load(from + V * PANEL) : Floats{};
        split(to + o * TILE + (k - i) * DEEP, COLUMNS * TILE, one, other);
      }
}

// Where the sums of two tiles' columns begin, and how many numbers lie between two rows.
struct Place {
  float *one, *two;
  long stride = PANEL;
};
// Two by two tiles, from nothing or onto sums that are there. Calls meanwhile() at each step.
template <class Function>
static inline void product_of_parts(Place to, const Place* onto, const bf16* rows, const bf16* columns, long steps,
                                    Function meanwhile) {
#define EACH_OF(at, DO)                                        \
  DO(0, at.one, at.stride * sizeof(float));                    \
  DO(1, at.two, at.stride * sizeof(float));                    \
  DO(2, at.one + SIDE * at.stride, at.stride * sizeof(float)); \
  DO(3, at.two + SIDE * at.stride, at.stride * sizeof(float));
  if (onto) {
    EACH_OF((*onto), READ_TILE)
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (long s = 0; s < steps; s++, rows += OF_ROWS, columns += OF_PANELS) {
    add_parts({rows, 2}, {columns, COLUMNS});
    meanwhile();
  }
  EACH_OF(to, WRITE_TILE)
#undef EACH_OF
}

// What a thread splits. Both at once, and sums, leave room in its second cache.
constexpr long MOST_ROWS = 256, MOST_INPUTS = 768, MOST_PANELS = 8;
struct Parts {
  Vector<bf16> rows, columns;
  Vector<float> sums;
  Parts& fit(long some_rows, long some_columns, long some_sums) {
    rows.resize(std::max<size_t>(rows.size(), some_rows));
    columns.resize(std::max<size_t>(columns.size(), some_columns));
    sums.resize(std::max<size_t>(sums.size(), some_sums));
    return *this;
  }
};

// AT_ONCE rows past one panel or two: sums, from nothing or onto those of other inputs; one panel's, then the other's.
template <class Function>
static inline void two_panels(float* to, const float* onto, long panels, const bf16* rows, const bf16* columns,
                              long steps, Function meanwhile) {
  for (long c = 0; c < panels * WIDE; c += 2) {
    auto place = [&](const float* sums) -> Place {
      auto at = [&](long c) { return (float*)sums + c / WIDE * AT_ONCE * PANEL + c % WIDE * V; };
      return {at(c), at(c + 1)};
    };
    Place before = place(onto);
    product_of_parts(place(to), onto ? &before : nullptr, rows, columns + c * TILE, steps, meanwhile);
  }
}

// What `by_tiles` does, of floats. A thread splits some rows, and panels by twos, which all of these pass; where there
// are many inputs a piece of them, after which sums are kept.
template <int G, class Function>
static inline void by_parts(const float* x, const float* panels, long M, long I, long O, int threads, Function finish) {
  long chunk = equal(M, MOST_ROWS, AT_ONCE), piece = equal(I, MOST_INPUTS, DEEP), number = (O + PANEL - 1) / PANEL * G;
  long together = equal(number, MOST_PANELS, PANELS), groups = (number + together - 1) / together;
  Tasks tasks((M + chunk - 1) / chunk * groups, threads);
#pragma omp parallel num_threads(threads)
  {
    Tiles tiles(SIDE);
    constexpr long ROOM = PANELS * AT_ONCE * PANEL;
    long most = piece / DEEP;  // steps
    Parts& room = own<Parts>().fit(chunk / AT_ONCE * most * OF_ROWS, most * OF_PANELS,
                                   piece < I ? chunk * together * PANEL : 0);
    bf16 *rows = room.rows.data(), *columns = room.columns.data();
    float* kept = room.sums.data();
    alignas(64) float sums[2][ROOM];
    Later<Function> later(finish);
    int now = 0;
    long there = -1;  // the first of the rows of which all inputs are split
    tasks.work([&](long task) {
      long m = task / groups * chunk, q = task % groups * together, end = std::min(q + together, number);
      long here = std::min(chunk, M - m), blocks = (here + AT_ONCE - 1) / AT_ONCE;
      for (long i = 0; i < I; i += piece) {
        long inputs = std::min(piece, I - i), steps = (inputs + DEEP - 1) / DEEP;
        for (long b = 0; b < blocks && there != m; b++)
          split_rows(rows + b * steps * OF_ROWS, x + (m + b * AT_ONCE) * I + i, I, here - b * AT_ONCE, inputs);
        there = piece < I ? -1 : m;
        for (long p = q; p < end; p += PANELS) {
          long some = std::min(PANELS, end - p), part = AT_ONCE / steps + 1;  // rows that are finished at each step
          for (long g = 0; g < some; g++)
            split_panel(columns + g * WIDE * TILE, panels + ((p + g) * I + i) * PANEL, inputs);
          for (long b = 0; b < blocks; b++) {
            float* before = kept + ((p - q) / PANELS * blocks + b) * ROOM;
            bool last = i + piece >= I;
            two_panels(last ? sums[now] : before, i ? before : nullptr, some, rows + b * steps * OF_ROWS, columns,
                       steps, [&] { later.some(part); });
            if (!last) continue;
            later.all();
            later.begin(m + b * AT_ONCE, std::min(AT_ONCE, here - b * AT_ONCE), p / G, some / G, sums[now]);
            now = 1 - now;
          }
        }
      }
    });
    later.all();
  }
}

// By tiles, where there are any for such numbers and they are the fastest; says whether it was done.
template <int G, class T, class Function>
static inline bool tiled(const T* x, const T* panels, long M, long I, long O, int threads, Function finish) {
  if constexpr (Factor<T>::tiles) {
    by_tiles<G>(x, panels, M, I, O, threads, finish);
    return true;
  } else if constexpr (std::is_same_v<T, float>) {
    if (!worth_splitting(M, I, O)) return false;
    by_parts<G>(x, panels, M, I, O, threads, finish);
    return true;
  }
  return false;
}
