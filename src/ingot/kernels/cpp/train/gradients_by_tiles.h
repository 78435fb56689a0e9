// Gradients of weights by matrix tiles.
#pragma once
#include "layouts.h"

// Calls multiply(sums, how many there are from one row to the next) with the place of R x C sums, or with a room for
// those that are not all the output's, or are written past the caches.
template <long R, long C, class Multiply>
static inline void in_place(float* out, long ld, long rows, long columns, bool onto, bool past, Multiply multiply) {
  alignas(64) float room[R * C];
  bool whole = rows >= R && columns >= C;
  if (whole && !past) return multiply(out, ld);
  auto each_of_room = [&](auto f) {
    for (long r = 0; r < std::min(rows, R); r++)
      for (long c = 0; c < std::min(columns, C); c++) f(out[r * ld + c], room[r * C + c]);
  };
  if (onto) each_of_room([](float& out, float& room) { room = out; });
  multiply(room, C);
  if (!whole) return each_of_room([](float& out, float& room) { out = room; });
  for (long r = 0; r < R; r++)
    for (long c = 0; c < C; c += V) _mm512_stream_ps(out + r * ld + c, _mm512_load_ps(room + r * C + c));
}

// G lies in strips of 16 columns: of 32 tokens each column has a row of its own, then come the next 32. X lies in six
// tiles' columns, pairs of tokens after each other. Tokens that are missing at the end are zeros.
struct ByTiles {
  static constexpr long STRIP = 2 * SIDE, GROUP = 512, STEP = DEEP, TOKENS = 1024, EVERY = DEEP, ACROSS = 2 * PANEL;
  typedef Tiles Tools;
  struct alignas(64) Packed {
    Number g[GROUP * TOKENS], x[ACROSS * TOKENS];
  };

  // Pairs of tokens t and t + 1 of V columns.
  static inline Ints pairs_of(const Number* from, long ld, long t, long tokens, long columns) {
    if (t >= tokens) return Ints{};
    return pairs(from + t * ld, t + 1 < tokens ? from + (t + 1) * ld : nullptr, columns);
  }
  static inline void pack_g(Packed& to, const Number* from, long ld, long tokens, long columns) {
    for (long t = 0; t < tokens; t += DEEP)
      for (long c = 0; c < columns; c += SIDE) {
        Ints square[V];
        for (int i = 0; i < V; i++) square[i] = pairs_of(from + c, ld, t + 2 * i, tokens, columns - c);
        transpose(square);
        for (int i = 0; i < V; i++) put(to.g + c * up(tokens, DEEP) + t * SIDE + i * DEEP, square[i]);
      }
  }
  static inline void pack_x(Packed& to, const Number* from, long ld, long tokens, long columns) {
    for (long t = 0; t < up(tokens, DEEP); t += 2)
      for (long c = 0; c < columns; c += V)
        put(to.x + t * ACROSS + 2 * c, pairs_of(from + c, ld, t, tokens, columns - c));
  }

  template <class Ask>
  static inline void multiply(float* out, float*, long ld, long rows, long columns, const Packed& packed, long r,
                              long tokens, bool onto, bool past, Ask ask) {
    std::integral_constant<int, 1> one;
    std::integral_constant<int, 2> two;
    for (long c = 0; c < columns; c += 2 * V) {
      auto product = [&](auto D, auto J) {
        some<D.value, J.value>(out + c, ld, rows, columns - c, packed.g + r * tokens, packed.x + 2 * c, tokens, onto,
                               past, [&] { if (!c) ask(); });
      };
      auto of_rows = [&](auto D) { columns - c > V ? product(D, two) : product(D, one); };
      rows > SIDE ? of_rows(two) : of_rows(one);
    }
  }
  template <int D, int J, class Ask>
  static inline void some(float* out, long ld, long rows, long columns, const Number* g, const Number* x, long tokens,
                          bool onto, bool past, Ask ask) {
    in_place<D * SIDE, J * V>(out, ld, rows, columns, onto, past, [&](float* sums, long stride) {
      if (onto) load_tiles<D, J>(sums, sums + SIDE * stride, stride * sizeof(float));
      else clear_tiles<D, J>();
      for (long t = 0; t < tokens; t += DEEP) {
        ask();
        const Number* strip = g + t * SIDE;
        add_tiles<D, J>(strip, strip + tokens * SIDE, LINE, {x + t * ACROSS, ACROSS * 2 * sizeof(Number)});
      }
      store_tiles<D, J>(sums, sums + SIDE * stride, stride * sizeof(float));
    });
  }
};
