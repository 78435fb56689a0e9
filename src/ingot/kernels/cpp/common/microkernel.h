// Panels of packed weights, and the microkernel that multiplies some rows by one panel.
//
// The names are those of BLIS: the microkernel computes MR x NR sums in registers. A thread multiplies MC rows by a
// panel of NR outputs before the next one, in pieces of KC inputs.
#pragma once
#include "amx.h"
#include "tasks.h"

constexpr int NR_VECTORS = 3;        // vector registers of weights that are multiplied by each element of a row
constexpr int NR = NR_VECTORS * V;   // outputs of a panel, whose weights are adjacent for each input
constexpr int MR = V == 16 ? 8 : 4;  // rows of the microkernel: MR x NR sums fill the registers
constexpr int MC = 128;              // rows that are multiplied by a panel before the next one
constexpr long KC_BYTES = 3072;      // bytes of the inputs of an output: more, with those of the rows, exceed L2

// The operands of one multiply-add of the microkernel: for each of V outputs `pair` weights, two in bf16 if the CPU has
// bf16 products. Sums are fp32. Without bf16 products the rows are converted to fp32.
template <class T>
struct Operand {
  static constexpr bool amx = false;
  static constexpr long pair = 1;
  typedef float Element;  // of a row
  typedef Floats Vec;
  static inline Floats read(const T* p) {
    Floats x = load(p);
#if defined(__x86_64__)
    asm("" : "+v"(x));  // else GCC, with 16 registers, loads it again for every second row
#endif
    return x;
  }
  static inline Floats broadcast(const float* p) { return *p - Floats{}; }
  static inline void multiply_add(Floats& sum, Floats x, Floats w) { sum += x * w; }
};
#if defined(__AVX512BF16__)
template <>
struct Operand<bf16> {
  static constexpr bool amx = HAS_AMX;
  static constexpr long pair = 2;
  typedef bf16 Element;
  typedef __m512bh Vec;
  static inline Vec read(const bf16* p) { return (Vec)_mm512_loadu_si512(p); }
  static inline Vec broadcast(const bf16* p) {
    int both;
    memcpy(&both, p, sizeof both);
    return (Vec)_mm512_set1_epi32(both);
  }
  static inline void multiply_add(Floats& sum, Vec x, Vec w) { sum = _mm512_dpbf16_ps(sum, x, w); }
};
#endif

template <class T>
constexpr long K_STEP = Operand<T>::amx ? TILE_K : Operand<T>::pair;  // the inputs of a panel are padded to a multiple

// Prefetchers of the next panel, called for vector j of step `step` of the microkernel: none, a part of the panel in
// order, or lines of several streams in turn. Interleaved streams are up to twice as fast if memory is the limit,
// because the hardware prefetcher of a Xeon follows each stream.
struct NoPrefetch {
  void operator()(long, int) const {}
};
template <int N>  // prefetches per step; more than necessary cost time
struct SequentialPrefetch {
  const char* at;
  long bytes;  // between two prefetches
  void operator()(long step, int j) const {
    if (j < N) prefetch(at + (step * N + j) * bytes);
  }
};
struct InterleavedPrefetch {
  static constexpr long STREAMS = 8, MAX_BLOCKS = HAS_AMX ? 3 : 0;  // with more blocks of rows it costs what it saves
  const char* at;
  long stride, lines;  // bytes between streams; prefetches per step
  void operator()(long step, int j) const {
    if (long n = step * lines + j; j < lines) prefetch(at + n % STREAMS * stride + n / STREAMS * TILE_BYTES);
  }
};

// The microkernel: R rows, `stride` elements apart, times J vectors of a panel. Starts from zeros, or from `initial`
// sums as `store_sums` writes them, and calls epilogue(row, output, sums) for each vector. Not inlined, so that it has
// all registers.
template <int R, int J = NR_VECTORS, class T, class X, class Prefetch, class Epilogue>
[[gnu::noinline]] static void microkernel(const X* x, long stride, const T* panel, long I, const float* initial,
                                          Prefetch prefetch_next, Epilogue epilogue) {
  typedef Operand<T> P;
  Floats sum[R][J] = {};
  if (initial)
    for (int r = 0; r < R; r++)
      for (int j = 0; j < J; j++) sum[r][j] = load(initial + r * NR + j * V);
  for (long i = 0; i < I; i += P::pair, panel += NR * P::pair) {
    typename P::Vec w[J];
    for (int j = 0; j < J; j++) {
      w[j] = P::read(panel + j * V * P::pair);
      prefetch_next(i / P::pair, j);
    }
    for (int r = 0; r < R; r++) {
      auto element = P::broadcast(x + r * stride + i);
      for (int j = 0; j < J; j++) P::multiply_add(sum[r][j], element, w[j]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < J; j++) epilogue(r, j * V, sum[r][j]);
}
// The epilogue that stores the sums, NR per row.
static inline auto store_sums(float* sums) {
  return [=](long r, long o, Floats sum) { store(sums + r * NR + o, sum); };
}

// The microkernel for any number of rows up to R; stores the sums.
template <int R = MR, class T, class X, class Prefetch>
static void microkernel_rows(long rows, float* sums, const X* x, long stride, const T* panel, long I,
                             const float* initial, Prefetch prefetch_next) {
  if (rows == R)
    microkernel<R>(x, stride, panel, I, initial, prefetch_next, store_sums(sums));
  else if constexpr (R > 1)
    microkernel_rows<R - 1>(rows, sums, x, stride, panel, I, initial, prefetch_next);
}

// Rows as the microkernel reads them: converted to fp32 if the CPU has no bf16 products.
template <class T>
static const T* as_operand(const T* x, long, std::vector<T>&, int) { return x; }
static inline const float* as_operand(const bf16* x, long size, std::vector<float>& buffer, int threads) {
  buffer.resize(size);
#pragma omp parallel for num_threads(threads) schedule(static) if (size > MIN_PARALLEL)
  for (long i = 0; i < size; i += V) {
    if (i + V <= size)
      store(&buffer[i], load(x + i));
    else
      store(&buffer[i], load(x + i, size - i), size - i);
  }
  return buffer.data();
}

// Block b of `blocks` blocks of up to MR rows, times a piece of a panel (see `gemm_blocks`). Prefetches its part of the
// next panel.
template <class T, class X, class Epilogue>
static inline void block_product(const X* row, long rows, long stride, const T* panel, long inputs, long outputs,
                                 const float* initial, const T* next, long b, long blocks, Epilogue epilogue) {
  long bytes = inputs * NR * sizeof(T);  // of the next piece, at most
  const char* part = (const char*)next + bytes * b / blocks;
  long step = NR_VECTORS * V * sizeof(T) * Operand<T>::pair / blocks;
  if (rows == MR && blocks > std::max(1L, InterleavedPrefetch::MAX_BLOCKS)) {
    auto full_block = [&](auto sequential) {
      if (outputs > 2 * V) return microkernel<MR>(row, stride, panel, inputs, initial, sequential, epilogue);
      if (outputs > V) return microkernel<MR, 2>(row, stride, panel, inputs, initial, sequential, epilogue);
      return microkernel<MR, 1>(row, stride, panel, inputs, initial, sequential, epilogue);
    };
    return blocks < NR_VECTORS ? full_block(SequentialPrefetch<NR_VECTORS>{part, step / NR_VECTORS})
                               : full_block(SequentialPrefetch<1>{part, step});
  }
  float sums[MR * NR];
  auto few_rows = [&](auto prefetch_next) {
    microkernel_rows(rows, sums, row, stride, panel, inputs, initial, prefetch_next);
  };
  if (blocks <= InterleavedPrefetch::MAX_BLOCKS)
    few_rows(InterleavedPrefetch{part, bytes / blocks / InterleavedPrefetch::STREAMS,
                                 (NR_VECTORS + blocks - 1) / blocks});
  else if (blocks > 1)
    few_rows(SequentialPrefetch<NR_VECTORS>{part, step / NR_VECTORS});
  else  // a panel that is read once is a stream, which other CPUs prefetch faster in hardware
    few_rows(NoPrefetch());
  for (long r = 0; r < rows; r++)
    for (long o = 0; o < NR; o += V) epilogue(r, o, load(sums + r * NR + o));
}

// The blocked loops: all rows times all panels, or groups of G adjacent panels. Calls f(first row, rows, group,
// multiply) for each block of rows and group; multiply(g, outputs, epilogue) computes the product with panel g of the
// group and calls epilogue(row, output, sums) for each vector of sums, directly from the register if the block is full.
// I is a multiple of a pair.
template <int G, class T, class Function>
static inline void gemm_blocks(const T* rows_in, const T* panels, long M, long I, long groups, int threads,
                               Function f) {
  std::vector<typename Operand<T>::Element> buffer;
  auto x = as_operand(rows_in, M * I, buffer, threads);
  long size = NR * round_up(I, K_STEP<T>);
  Tasks tasks((M + MC - 1) / MC * groups, threads);
#pragma omp parallel num_threads(threads) if (M * G * groups * size > MIN_PARALLEL)
  {
    alignas(64) float partial[MC * G * NR];  // sums over the previous pieces of inputs
    tasks.run([&](long task) {
      long chunk = task / groups * MC, p = task % groups;
      long rows = std::min<long>(MC, M - chunk), blocks = (rows + MR - 1) / MR;
      long piece = blocks > std::max(1L, InterleavedPrefetch::MAX_BLOCKS)
                       ? equal_parts(I, KC_BYTES / sizeof(T), Operand<T>::pair)
                       : I;
      for (long i = 0; i < I; i += piece)
        for (long b = 0; b < blocks; b++) {
          long inputs = std::min(piece, I - i), from = rows * b / blocks, count = rows * (b + 1) / blocks - from;
          bool last = i + piece >= I;
          auto multiply = [&](long g, long outputs, auto epilogue) {
            const T *panel = panels + (p * G + g) * size, *next = panel + (last ? G * size : (i + piece) * NR);
            const float* initial = i ? partial + (g * MC + from) * NR : nullptr;
            block_product(x + (chunk + from) * I + i, count, I, panel + i * NR, inputs, outputs, initial, next, b,
                          blocks, epilogue);
          };
          if (last)
            f(chunk + from, count, p, multiply);
          else
            for (int g = 0; g < G; g++) multiply(g, NR, store_sums(partial + (g * MC + from) * NR));
        }
    });
  }
}

// Calls f(start, n) for each vector of a panel of which `outputs` are left.
template <class Function>
static inline void each_of_panel(long outputs, Function f) {
  if (outputs < NR) return each(outputs, f);
#pragma GCC unroll 3
  for (long start = 0; start < NR; start += V) f(start, std::integral_constant<long, V>());
}
