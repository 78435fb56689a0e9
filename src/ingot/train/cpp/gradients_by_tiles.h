// Gradients of weights by matrix tiles.
#pragma once
#include "layouts.h"

// G lies in strips of 16 columns: of 32 tokens each column has a row of its own, then come the next 32. X lies in a
// panel, pairs of tokens after each other. Tokens that are missing at the end are zeros.
struct ByTiles {
  static constexpr long STRIP = 2 * SIDE, GROUP = 512, STEP = DEEP, TOKENS = 1024, EVERY = DEEP;
  struct alignas(64) Packed {
    Number g[GROUP * TOKENS], x[PANEL * TOKENS];
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
        put(to.x + t * PANEL + 2 * c, pairs_of(from + c, ld, t, tokens, columns - c));
  }

  template <int J, class Ask>
  static inline void multiply(float* out, float*, long ld, long rows, long columns, const Packed& packed, long r,
                              long tokens, bool onto, bool past, Ask ask) {
    if (rows > SIDE) some<2, J>(out, ld, rows, columns, packed, r, tokens, onto, past, ask);
    else some<1, J>(out, ld, rows, columns, packed, r, tokens, onto, past, ask);
  }
  template <int D, int J, class Ask>
  static inline void some(float* out, long ld, long rows, long columns, const Packed& packed, long r, long tokens,
                          bool onto, bool past, Ask ask) {
    alignas(64) float room[D * SIDE * J * V];  // for sums that are not all of the output's, or written past the caches
    bool whole = rows >= D * SIDE && columns >= J * V, direct = whole && !past;
    float* sums = direct ? out : room;
    long stride = direct ? ld : J * V;
    auto each_of_room = [&](auto f) {
      for (long r = 0; r < std::min(rows, D * SIDE); r++)
        for (long c = 0; c < std::min<long>(columns, J * V); c++) f(out[r * ld + c], room[r * J * V + c]);
    };
    if (onto) {
      if (!direct) each_of_room([](float& out, float& room) { room = out; });
      load_tiles<D, J>(sums, sums + SIDE * stride, stride * sizeof(float));
    } else {
      clear_tiles<D, J>();
    }
    const Number *one = packed.g + r * tokens, *two = one + tokens * SIDE;
    for (long t = 0; t < tokens; t += DEEP) {
      ask();
      add_tiles<D, J>(one + t * SIDE, two + t * SIDE, LINE, {packed.x + t * PANEL, PANEL * 2 * sizeof(Number)});
    }
    store_tiles<D, J>(sums, sums + SIDE * stride, stride * sizeof(float));
    if (!whole) return each_of_room([](float& out, float& room) { out = room; });
    for (long r = 0; past && r < D * SIDE; r++)
      for (long c = 0; c < J * V; c += V) _mm512_stream_ps(out + r * ld + c, _mm512_load_ps(room + r * J * V + c));
  }
};
