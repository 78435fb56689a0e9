// Products of floats by matrix tiles of whole numbers, which multiply 64 numbers of 8 bits in the time of 32 in bf16.
//
// A number is a sum of digits of 8 bits, -128 to 127, each of which counts 2^8 times as much as the next one. The
// highest counts a power of two such that the largest number of a row, or of an output's weights, is 63.5 to 127 of it.
// Rows have four digits, so numbers keep their 24 bits down to 2^-7 of the largest, and weights, which vary less,
// three. Of the twelve products of two numbers' digits the nine largest are added up, exactly: sums of up to 43,000
// inputs fit 32 bits. So a row gives the same numbers whatever rows are beside it. They are off by what weights lose,
// at most half of what their lowest digit counts: root mean square 2^-22.2 of |row| |weights| / sqrt(I) where weights
// are normal, their largest some 4 times their root mean square, and as many times more as it is more. oneDNN's in fp32
// are off by 2^-21.4, sums of one product after another by 2^-20.9 to 2^-19.9. The lowest digit counts 2^-126 at least,
// so numbers of an output or a row that are all below 1e-31 lose bits; where the largest of a row times that of an
// output's weights is 2^140, a sum may be infinite. This is the Ozaki scheme on an integer unit (Ootomo, Ozaki, Yokota
// 2023, arXiv:2306.11975), and takes 3 bytes a weight.
#pragma once
#include "products.h"

constexpr int DIGITS = 3, ROW_DIGITS = 4;       // of weights, and of rows
constexpr long DIGIT_STEP = LINE;               // inputs that are multiplied at once
constexpr long DIGIT_TILE = SIDE * DIGIT_STEP;  // one digit of those of 16 rows, or outputs

static inline long digit_steps(long I) { return (I + DIGIT_STEP - 1) / DIGIT_STEP; }
// Of 16 outputs the digits, step after step, the highest first, and behind all what the highest counts.
static inline long digit_panel(long I) { return digit_steps(I) * DIGITS * DIGIT_TILE + SIDE * (long)sizeof(float); }

// What the highest digit of some numbers counts, and what they are multiplied with to be counted in the lowest one.
// Where one of them is infinite or no number, all of their sums are no numbers.
struct Unit {
  float highest, lowest_per_one;
};
template <int D>
static inline Unit unit_of(const float* x, long size) {
  Ints most = {};
  each(size, [&](long i, auto n) {
    Ints bits = (Ints)load(x + i, n) & 0x7fffffff;
    most = bits > most ? bits : most;
  });
  // D digits do not reach 2^(8 D - 1), so what is nearly a power of two counts as one.
  constexpr int32_t INFINITE = 0x7f800000, NEARLY = 1 << 17, LEAST = 8 * (D - 1) + 7;
  int32_t largest = _mm512_reduce_max_epi32((__m512i)most);
  if (largest >= INFINITE) return {NAN, 0};
  int32_t exponent = std::max((largest + NEARLY) >> 23, LEAST) - 6;
  int32_t bits[2] = {exponent << 23, (254 - exponent + 8 * (D - 1)) << 23};
  Unit unit;
  memcpy(&unit, bits, sizeof unit);
  return unit;
}

// D digits of 64 numbers, each DIGIT_TILE behind the one before: 16, the next 16 and so on byte by byte in turn.
template <int D>
static inline void put_digits(int8_t* to, const __m512i (&numbers)[4]) {
  constexpr __mmask64 ODD = 0xaaaaaaaaaaaaaaaa;
  constexpr __mmask32 UPPER = 0xaaaaaaaa;
  auto bytes = [](__m512i a, __m512i b) { return _mm512_mask_blend_epi8(ODD, a, b); };
  auto words = [](__m512i a, __m512i b) { return _mm512_mask_blend_epi16(UPPER, a, b); };
  __m512i x[4], even[2], odd[2], half = _mm512_set1_epi32(D == 4 ? 0x80808080 : 0x808080);
  for (int i = 0; i < 4; i++) x[i] = _mm512_add_epi32(numbers[i], half);  // whose bytes are digits, and 128 more each
  for (int i = 0; i < 2; i++) {
    even[i] = bytes(x[2 * i], _mm512_slli_epi32(x[2 * i + 1], 8));
    odd[i] = bytes(_mm512_srli_epi32(x[2 * i], 8), x[2 * i + 1]);
  }
  __m512i lowest_first[4] = {
      words(even[0], _mm512_slli_epi32(even[1], 16)), words(odd[0], _mm512_slli_epi32(odd[1], 16)),
      words(_mm512_srli_epi32(even[0], 16), even[1]), words(_mm512_srli_epi32(odd[0], 16), odd[1])};
  for (int i = 0; i < D; i++)
    _mm512_store_si512(to + i * DIGIT_TILE, _mm512_xor_si512(lowest_first[D - 1 - i], _mm512_set1_epi8(-128)));
}

// D digits of up to 16 rows, step after step, a row's 64 side by side. Calls meanwhile() for each.
template <int D, class Function>
static inline void digits_of(int8_t* to, float* highest, const float* x, long I, long rows, Function meanwhile) {
  for (long r = 0; r < rows; r++, x += I) {
    meanwhile();
    Unit unit = unit_of<D>(x, I);
    highest[r] = unit.highest;
    for (long i = 0; i < I; i += DIGIT_STEP) {
      __m512i numbers[4];
      for (long j = 0, at = i; j < 4; j++, at += V) {
        Floats some = I - at >= V ? load(x + at) : I > at ? load(x + at, I - at) : Floats{};
        numbers[j] = _mm512_cvtps_epi32((__m512)(some * unit.lowest_per_one));
      }
      put_digits<D>(to + i / DIGIT_STEP * D * DIGIT_TILE + r * DIGIT_STEP, numbers);
    }
  }
}

// Panels of 16 outputs' weights: digits as columns of tiles, whose numbers lie by fours.
static void digit_panels(int8_t* panels, const float* weights, long O, long I, int threads) {
  long size = digit_panel(I), digits = digit_steps(I) * DIGITS * DIGIT_TILE;
#pragma omp parallel for num_threads(threads)
  for (long o = 0; o < O; o += SIDE) {
    int8_t *panel = panels + o / SIDE * size, *end = panel + digits;
    memset(panel, 0, size);
    digits_of<DIGITS>(panel, (float*)end, weights + o * I, I, std::min(SIDE, O - o), [] {});
    for (; panel < end; panel += DIGIT_TILE) {
      Ints square[SIDE];
      memcpy(square, panel, sizeof square);
      transpose(square);
      memcpy(panel, square, sizeof square);
    }
  }
}

// Sums of 16 x 16 products of digits; those of an order count 2^8 times as much as those of the next one.
struct Orders {
  alignas(64) int32_t sums[4][SIDE * SIDE];
  // Of a row's 16 outputs, in what the highest digits count.
  Floats row(long r) const {
    Floats sum = {};
    for (int order = 3; order >= 0; order--) {
      Ints x;
      memcpy(&x, sums[order] + r * SIDE, sizeof x);
      sum = sum * 0x1p-8f + __builtin_convertvector(x, Floats);
    }
    return sum;
  }
};

// A tile of rows times a panel, each digit read once. Calls meanwhile(step) at each step.
template <class Function>
static inline void product_of_digits(Orders& to, const int8_t* rows, const int8_t* panel, long steps,
                                     Function meanwhile) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long s = 0; s < steps; s++, rows += ROW_DIGITS * DIGIT_TILE, panel += DIGITS * DIGIT_TILE) {
    READ_TILE(4, rows, LINE);
    READ_TILE(5, panel, LINE);
    READ_TILE(6, panel + DIGIT_TILE, LINE);
    READ_TILE(7, panel + 2 * DIGIT_TILE, LINE);
    _tile_dpbssd(2, 4, 7);
    _tile_dpbssd(1, 4, 6);
    _tile_dpbssd(0, 4, 5);
    READ_TILE(4, rows + DIGIT_TILE, LINE);
    _tile_dpbssd(2, 4, 6);
    _tile_dpbssd(3, 4, 7);
    _tile_dpbssd(1, 4, 5);
    READ_TILE(4, rows + 2 * DIGIT_TILE, LINE);
    _tile_dpbssd(2, 4, 5);
    _tile_dpbssd(3, 4, 6);
    READ_TILE(4, rows + 3 * DIGIT_TILE, LINE);
    _tile_dpbssd(3, 4, 5);
    meanwhile(s);
  }
  WRITE_TILE(0, to.sums[0], LINE);
  WRITE_TILE(1, to.sums[1], LINE);
  WRITE_TILE(2, to.sums[2], LINE);
  WRITE_TILE(3, to.sums[3], LINE);
}

// What follows a product is done row by row while the next one is computed, as in `Later`: finish(row, output, sums,
// how many), or with G = 2 finish(row, output, sums, sums of the other panel, how many).
template <int G, class Finish>
struct LaterOfDigits {
  Finish finish;
  long outputs;
  long row, rows = 0, done = 0, output;  // of the product that is left
  const Orders* orders;
  const float *of_row, *of_panel;  // what the highest digits count, of the other panel so much further on
  long apart;
  LaterOfDigits(Finish finish, long outputs, long apart) : finish(finish), outputs(outputs), apart(apart) {}
  void some(long count) {
    for (; count && done < rows; count--, done++) {
      auto sums = [&](int g) { return orders[g].row(done) * (load(of_panel + g * apart) * of_row[done]); };
      each(std::min(SIDE, outputs - output), [&](long, auto n) {
        if constexpr (G == 1)
          finish(row + done, output, sums(0), n);
        else
          finish(row + done, output, sums(0), sums(1), n);
      });
    }
  }
  void all() { some(SIDE); }
  void begin(long first_row, long of_rows, long first_output, const Orders* at, const float* row_s,
             const float* panel_s) {
    row = first_row, rows = of_rows, done = 0, output = first_output, orders = at, of_row = row_s, of_panel = panel_s;
  }
};

// Of a thread's rows the digits, and what the highest ones count.
struct Counted {
  Vector<int8_t> digits;
  Vector<float> highest;
  Counted& fit(long some_digits, long some_rows) {
    digits.resize(std::max<size_t>(digits.size(), some_digits));
    highest.resize(std::max<size_t>(highest.size(), some_rows));
    return *this;
  }
};
// Bytes that stay in the second cache: of many rows' digits; and of panels that a tile of rows passes before the next
// tile comes, so that outputs lie beside each other (2,048 rows of 2,304 outputs take a third less time).
constexpr long MOST_DIGITS = 800 << 10, MOST_BESIDE = 160 << 10;

// All rows past all panels, or groups of G of them that lie together.
template <int G, class Finish>
static inline void by_digits(const float* x, const int8_t* panels, long M, long I, long O, int threads, Finish finish) {
  if (!M) return;
  long steps = digit_steps(I), size = digit_panel(I), group = G * size;                          // bytes
  long number = (O + SIDE - 1) / SIDE, high = equal(M, SIDE, 1), tiles = (M + high - 1) / high;  // of `high` rows each
  long of_tile = steps * ROW_DIGITS * DIGIT_TILE, together = equal(tiles, std::max(2L, MOST_DIGITS / of_tile), 1);
  constexpr long PLACES = InTurn::PLACES, LINES = DIGITS * DIGIT_TILE / LINE / PLACES;  // asked for at each step
  long beside = tiles > LINES ? std::clamp(MOST_BESIDE / group, 1L, 4L) : 1, shares = (number + beside - 1) / beside;
  Tasks tasks((tiles + together - 1) / together * shares, threads);
#pragma omp parallel num_threads(threads) if (M * number * group > ALONE)
  {
    Tiles configured(high, 5);
    Counted& rows = own<Counted>().fit(together * of_tile, together * SIDE);
    Orders orders[2][G];
    LaterOfDigits<G, Finish> later(finish, O, size / sizeof(float));
    long now = 0, there = -1, part = (high + G * steps - 1) / (G * steps);  // rows that are finished at each step
    tasks.work([&](long task) {
      long first = task / shares * together, here = std::min(together, tiles - first), p = task % shares * beside;
      auto row = [&](long b) { return (first + b) * high; };
      auto rows_of = [&](long b) { return std::min(high, M - row(b)); };
      if (there != first) {
        later.all();
        const int8_t *asked = panels + p * group, *end = asked;  // of the first panel, which nobody asked for
        auto ask = [&] {
          if (there < 0) end += group / (here * high) + LINE;
          for (; asked < end; asked += LINE) fetch(asked);
        };
        for (long b = 0; b < here; b++)
          digits_of<ROW_DIGITS>(&rows.digits[b * of_tile], &rows.highest[b * SIDE], x + row(b) * I, I, rows_of(b), ask);
        there = first;
      }
      long apart = size / LINE / PLACES * LINE, lines = (LINES + here - 1) / here;
      for (long b = 0; b < here; b++)
        for (long q = p, to = std::min(p + beside, number); q < to; q++, now = 1 - now) {
          const int8_t *panel = panels + q * group, *next = panel + beside * group + b * steps * lines * LINE;
          bool ask = b * lines < LINES;
          for (int g = 0; g < G; g++)
            product_of_digits(orders[now][g], &rows.digits[b * of_tile], panel + g * size, steps, [&](long step) {
              for (long n = step * lines; ask && n < (step + 1) * lines; n++)
                for (long place = 0; place < PLACES; place++) fetch(next + g * size + place * apart + n * LINE);
              later.some(part);
            });
          later.all();
          later.begin(row(b), rows_of(b), q * SIDE, orders[now], &rows.highest[b * SIDE],
                      (const float*)(panel + size) - SIDE);
        }
    });
    later.all();
  }
}

// What `multiplied` and `multiplied_in_pairs` do, of panels of digits.
template <class Finish>
static inline void multiplied(const float* x, const int8_t* panels, long M, long I, long O, int threads,
                              Finish finish) {
  by_digits<1>(x, panels, M, I, O, threads, finish);
}
template <class Finish>
static inline void multiplied_in_pairs(const float* x, const int8_t* panels, long M, long I, long O, int threads,
                                       Finish finish) {
  by_digits<2>(x, panels, M, I, O, threads, finish);
}
