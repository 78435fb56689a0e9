// Matrix products of rows and packed weights with matrix tiles, and deferred epilogues.
#pragma once
#include "microkernel.h"

constexpr long BLOCK_ROWS = 2 * TILE;  // rows of a block, which are multiplied by a panel at a time

// The rows of a chunk, and the weights of the panels that a chunk is multiplied by before the next one, fit L2. With
// several panels at a time, the outputs of a block of rows are contiguous.
static inline long rows_of_chunk(long I) { return std::clamp((1L << 18) / I, 64L, 512L); }
constexpr long NC_ELEMENTS = 3 << 17;

// Prefetches the part of the next panel that belongs to a step, in interleaved streams like `InterleavedPrefetch`, but
// as a loop that the compiler unrolls, which makes products of 64 and 128 rows 3 % faster.
struct PanelPrefetch {
  const char* at = nullptr;
  long stride;
  void operator()(long step) const {
    constexpr long STREAMS = InterleavedPrefetch::STREAMS, LINES = TILE_K * NR * sizeof(bf16) / TILE_BYTES / STREAMS;
    if (at)
      for (long n = step * LINES; n < (step + 1) * LINES; n++)
        for (long stream = 0; stream < STREAMS; stream++) prefetch(at + stream * stride + n * TILE_BYTES);
  }
};

// D x J tiles of sums over all inputs. The second row tile starts `second` rows after the first one; a single row tile
// has `rows` rows. Calls meanwhile() in each step.
template <int D, int J, class Function>
static inline void tile_product(float* sums, const bf16* x, long second, long I, long rows, const bf16* panel,
                                PanelPrefetch prefetch_next, Function meanwhile) {
  constexpr long STRIDE = NR * 2 * sizeof(bf16);
  long stride = I * sizeof(bf16), full = I / TILE_K * TILE_K;
  clear_tiles<D, J>();
  for (long i = 0; i < full; i += TILE_K) {
    accumulate_tiles<D, J>(x + i, x + second * I + i, stride, {panel + i * NR, STRIDE});
    prefetch_next(i / TILE_K);
    meanwhile();
  }
  if (long left = I - full) {  // copied with padding: after it the next row starts, which may have NaN times 0
    alignas(64) bf16 rest[D * TILE * TILE_K];
    for (long r = 0; r < (D > 1 ? D * TILE : rows); r++) {
      const bf16* from = x + (r < TILE ? r : r - TILE + second) * I + full;
      _mm512_store_si512(rest + r * TILE_K, _mm512_maskz_loadu_epi16((1u << left) - 1, from));
    }
    accumulate_tiles<D, J>(rest, rest + TILE * TILE_K, TILE_BYTES, {panel + full * NR, STRIDE});
  }
  store_tiles<D, J>(sums, sums + second * NR, NR * sizeof(float));
}

// The same for `outputs` outputs of a panel. Calls meanwhile() only for full blocks, which use all tiles.
template <class Function>
static inline void tile_product(float* sums, const bf16* x, long second, long I, long rows, const bf16* panel,
                                long outputs, PanelPrefetch prefetch_next, Function meanwhile) {
  auto product = [&](auto D, auto J, auto meanwhile) {
    tile_product<D.value, J.value>(sums, x, second, I, rows, panel, prefetch_next, meanwhile);
  };
  std::integral_constant<int, 1> one;
  std::integral_constant<int, 2> two;
  std::integral_constant<int, 3> three;
  auto nothing = [] {};
  if (second && outputs > 2 * V) return product(two, three, meanwhile);
  if (second && outputs > V) return product(two, two, nothing);
  if (second) return product(two, one, nothing);
  if (outputs > 2 * V) return product(one, three, nothing);
  if (outputs > V) return product(one, two, nothing);
  product(one, one, nothing);
}

// The sums of two adjacent panels in 2 x 2 tiles: their six column tiles are three pairs. Computes the pairs of the
// first `outputs` outputs. The sums of the second panel are stored BLOCK_ROWS x NR floats after those of the first.
template <class Function>
static inline void tile_product_of_two_panels(float* sums, const bf16* x, long second, long I, const bf16* panel,
                                              long outputs, Function meanwhile) {
  constexpr long STRIDE = NR * 2 * sizeof(bf16);
  for (long c = 0; c < 2 * NR_VECTORS && c * V < outputs; c += 2) {
    bool split = c == NR_VECTORS - 1;  // one tile of each panel
    const bf16* columns = panel + c / NR_VECTORS * NR * I + c % NR_VECTORS * 2 * V;
    float* to = sums + c / NR_VECTORS * BLOCK_ROWS * NR + c % NR_VECTORS * V;
    long next = split ? NR * I * sizeof(bf16) - 2 * TILE_BYTES : TILE_BYTES;
    clear_tiles<2, 2>();
    for (long i = 0; i < I; i += TILE_K) {
      accumulate_tiles<2, 2>(x + i, x + second * I + i, I * sizeof(bf16), {columns + i * NR, STRIDE, next});
      meanwhile();
    }
    store_tiles<2, 2>(to, to + second * NR, NR * sizeof(float), split ? BLOCK_ROWS * NR - 2 * V : V);
  }
}
// Up to this number of inputs pairs of panels are faster. They read rows and panels more often, which must fit L1. With
// G = 2 the epilogue is longer, and pairs leave more steps to run it in.
template <int G>
constexpr long MAX_PAIRED_INPUTS = G == 2 ? 512 : 192;

// Runs the epilogue of a product row by row in the steps of the next product: the out-of-order window is only a few
// hundred instructions long, and sums that tiles have just stored are slow to load. Calls finish(first row, rows,
// panel, sums) for parts of `rows` rows of each of `panels` panels, whose sums are BLOCK_ROWS x NR floats apart.
template <class Function>
struct DeferredEpilogue {
  Function finish;
  long row, rows, panel, panels = 0, done;  // `done` rows of the first remaining panel are finished
  const float* sums;
  explicit DeferredEpilogue(Function finish) : finish(finish) {}
  void run(long count) {
    while (count && panels) {
      long now = std::min(count, rows - done);
      finish(row + done, now, panel, sums + done * NR);
      count -= now, done += now;
      if (done == rows) done = 0, panel++, panels--, sums += BLOCK_ROWS * NR;
    }
  }
  void run_all() { run(BLOCK_ROWS * panels); }
  void defer(long first_row, long row_count, long first_panel, long panel_count, const float* at) {
    row = first_row, rows = row_count, panel = first_panel, panels = panel_count, sums = at, done = 0;
  }
};

// All rows times all panels, or groups of G adjacent panels. Calls finish(first row, rows, group, sums); the sums of
// the panels of a group are BLOCK_ROWS x NR floats apart.
template <int G, class Function>
static inline void gemm_amx(const bf16* x, const bf16* panels, long M, long I, long O, int threads, Function finish) {
  if (!M) return;
  long size = NR * round_up(I, TILE_K), chunk = equal_parts(M, rows_of_chunk(I), BLOCK_ROWS);
  long groups = (O + NR - 1) / NR;
  long together = M >= threads * chunk ? equal_parts(groups, std::max(1L, NC_ELEMENTS / (G * size)), 1) : 1;
  long columns = (groups + together - 1) / together;  // of the grid of tasks
  Tasks tasks((M + chunk - 1) / chunk * columns, threads);
#pragma omp parallel num_threads(threads) if (M * G * groups * size > MIN_PARALLEL)
  {
    TileConfig tiles(M);
    constexpr long BUFFER = BLOCK_ROWS * NR;
    alignas(64) float sums[2][2 * BUFFER];
    DeferredEpilogue<Function> deferred(finish);
    bool pairs = together > 1 && I % TILE_K == 0 && I <= MAX_PAIRED_INPUTS<G>;
    long steps = pairs ? NR_VECTORS * I / TILE_K * G / 2 : G * I / TILE_K;  // of a group, at least
    long rows_per_step = (BLOCK_ROWS + steps - 1) / std::max(1L, steps), now = 0;
    tasks.run([&](long task) {
      long m = task / columns * chunk, q = task % columns * together;
      long chunk_rows = std::min(chunk, M - m), blocks = (chunk_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
      long end = std::min(q + together, groups);
      for (long b = 0; b < blocks; b++) {
        // Row tiles have 16 rows if M does: if fewer are left, they overlap the previous block.
        long row = m + chunk_rows * b / blocks, rows = m + chunk_rows * (b + 1) / blocks - row;
        long full = std::min(TILE, M), first = std::min(row, M - full), second = row + rows - first - full;
        for (long p = q, count; p < end; p += count, now = 1 - now) {
          const bf16 *at = x + first * I, *panel = panels + p * G * size;
          auto meanwhile = [&] { deferred.run(rows_per_step); };
          count = pairs && second ? std::min(2L / G, end - p) : 1;
          if (pairs && second && count * G == 2)
            tile_product_of_two_panels(sums[now], at, second, I, panel, G == 2 ? 2 * NR : O - p * NR, meanwhile);
          else
            for (long g = 0; g < G; g++, panel += size) {
              PanelPrefetch prefetch_next;
              if (!b && together == 1)
                prefetch_next = {(const char*)(panel + G * size),
                                 size * (long)sizeof(bf16) / InterleavedPrefetch::STREAMS};
              tile_product(sums[now] + g * BUFFER, at, second, I, full, panel, O - p * NR, prefetch_next, meanwhile);
            }
          deferred.run_all();
          deferred.defer(row, rows, p, count, sums[now] + (row - first) * NR);
        }
      }
    });
    deferred.run_all();
  }
}
