// Weight gradients with matrix tiles.
#pragma once
#include "operands.h"

// Calls multiply(sums, stride) with the R x C sums in the output, or with a buffer if the output has fewer rows or
// columns or is streamed.
template <long R, long C, class Multiply>
static inline void with_sums(float* out, long ld, long rows, long columns, bool accumulate, bool stream,
                             Multiply multiply) {
  alignas(64) float buffer[R * C];
  bool full = rows >= R && columns >= C;
  if (full && !stream) return multiply(out, ld);
  auto each_of_buffer = [&](auto f) {
    for (long r = 0; r < std::min(rows, R); r++)
      for (long c = 0; c < std::min(columns, C); c++) f(out[r * ld + c], buffer[r * C + c]);
  };
  if (accumulate) each_of_buffer([](float& out, float& buffer) { buffer = out; });
  multiply(buffer, C);
  if (!full) return each_of_buffer([](float& out, float& buffer) { out = buffer; });
  for (long r = 0; r < R; r++)
    for (long c = 0; c < C; c += V) _mm512_stream_ps(out + r * ld + c, _mm512_load_ps(buffer + r * C + c));
}

// G is packed in strips of 16 columns: for each 32 tokens one row per column. X is packed as the columns of six tiles:
// pairs of tokens. Missing tokens at the end are zeros.
struct TileGradients {
  static constexpr long STRIP = 2 * TILE, GROUP = 512, STEP = TILE_K, TOKENS = 1024, PREFETCH_STEP = TILE_K;
  static constexpr long COLUMNS = 2 * NR;
  typedef TileConfig Setup;
  struct alignas(64) Packed {
    Number g[GROUP * TOKENS], x[COLUMNS * TOKENS];
  };

  // Pairs of tokens t and t + 1 of V columns.
  static inline Ints token_pairs(const Number* from, long ld, long t, long tokens, long columns) {
    if (t >= tokens) return Ints{};
    return load_pairs(from + t * ld, t + 1 < tokens ? from + (t + 1) * ld : nullptr, columns);
  }
  static inline void pack_g(Packed& to, const Number* from, long ld, long tokens, long columns) {
    for (long t = 0; t < tokens; t += TILE_K)
      for (long c = 0; c < columns; c += TILE) {
        Ints square[V];
        for (int i = 0; i < V; i++) square[i] = token_pairs(from + c, ld, t + 2 * i, tokens, columns - c);
        transpose(square);
        for (int i = 0; i < V; i++)
          store_ints(to.g + c * round_up(tokens, TILE_K) + t * TILE + i * TILE_K, square[i]);
      }
  }
  static inline void pack_x(Packed& to, const Number* from, long ld, long tokens, long columns) {
    for (long t = 0; t < round_up(tokens, TILE_K); t += 2)
      for (long c = 0; c < columns; c += V)
        store_ints(to.x + t * COLUMNS + 2 * c, token_pairs(from + c, ld, t, tokens, columns - c));
  }

  template <class Prefetch>
  static inline void multiply(float* out, float*, long ld, long rows, long columns, const Packed& packed, long r,
                              long tokens, bool accumulate, bool stream, Prefetch prefetch_next) {
    std::integral_constant<int, 1> one;
    std::integral_constant<int, 2> two;
    for (long c = 0; c < columns; c += 2 * V) {
      auto tiles = [&](auto D, auto J) {
        product<D.value, J.value>(out + c, ld, rows, columns - c, packed.g + r * tokens, packed.x + 2 * c, tokens,
                                  accumulate, stream, [&] { if (!c) prefetch_next(); });
      };
      auto row_tiles = [&](auto D) { columns - c > V ? tiles(D, two) : tiles(D, one); };
      rows > TILE ? row_tiles(two) : row_tiles(one);
    }
  }
  template <int D, int J, class Prefetch>
  static inline void product(float* out, long ld, long rows, long columns, const Number* g, const Number* x,
                             long tokens, bool accumulate, bool stream, Prefetch prefetch_next) {
    with_sums<D * TILE, J * V>(out, ld, rows, columns, accumulate, stream, [&](float* sums, long stride) {
      if (accumulate) load_tiles<D, J>(sums, sums + TILE * stride, stride * sizeof(float));
      else clear_tiles<D, J>();
      for (long t = 0; t < tokens; t += TILE_K) {
        prefetch_next();
        const Number* strip = g + t * TILE;
        accumulate_tiles<D, J>(strip, strip + tokens * TILE, TILE_BYTES,
                               {x + t * COLUMNS, COLUMNS * 2 * sizeof(Number)});
      }
      store_tiles<D, J>(sums, sums + TILE * stride, stride * sizeof(float));
    });
  }
};
