// Packing of fp32 weights as operands of matrix products: panels of NR outputs, with inputs in pairs. Layers with the
// same input, or whose input gradients are added, share panels. All sizes are multiples of V, except the outputs of the
// LM head, which are padded with copies of the last one.
#pragma once
#include <memory>
#include <new>

#include "operands.h"

// Buffers aligned to a cache line: tiles whose rows cross lines take twice as long to load.
struct FreeAligned {
  void operator()(Number* p) const { ::operator delete(p, std::align_val_t(64)); }
};
static auto aligned_buffer(long size) {
  return std::unique_ptr<Number[], FreeAligned>((Number*)::operator new(size * sizeof(Number), std::align_val_t(64)));
}
static auto panel_buffer(long outputs, long inputs) {
  return aligned_buffer(round_up(outputs, NR) * round_up(inputs, K_STEP<Number>));
}
alignas(64) static const float ZEROS[V] = {};  // padding of the inputs of the last step

// Packs w, O x I, for x w^T. Its outputs start at output `first` of the panels. Of groups of `group` adjacent panels,
// such as gate and up, it fills panel `which`.
static void pack_weight(Number* panels, const float* w, long O, long I, long first, long group, long which,
                        int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (O * I > MIN_PARALLEL)
  for (long o = 0; o < O; o += V) {
    long panel = (first + o) / NR * group + which;
    Number* to = panels + panel * NR * round_up(I, K_STEP<Number>) + (first + o) % NR * PAIR;
    for (long i = 0; i < I; i += PAIR * V) {
      long pairs = std::min<long>(V, (round_up(I, K_STEP<Number>) - i) / PAIR);
      Ints square[V];
      for (int row = 0; row < V; row++) {
        const float* from = w + std::min(o + row, O - 1) * I + i;
        square[row] = round_consecutive(to, from, i + V < I ? from + V : ZEROS);
      }
      transpose(square);
      for (long pair = 0; pair < pairs; pair++) store_ints(to + (i + pair * PAIR) * NR, square[pair]);
    }
  }
}

// Packs w, O x I, for g w: its O rows are inputs `first` and following of `all` inputs.
static void pack_transposed(Number* panels, const float* w, long O, long I, long first, long all, int threads) {
  long padded = round_up(O, V), size = NR * round_up(all, K_STEP<Number>);
  long end = first + padded < all ? padded : size / NR - first;
#pragma omp parallel for num_threads(threads) schedule(static) if (O * I > MIN_PARALLEL)
  for (long o = 0; o < end; o += PAIR) {
    const float *row0 = w + std::min(o, O - 1) * I, *row1 = w + std::min(o + 1, O - 1) * I;
    for (long i = 0; i < I; i += V) {
      Number* to = panels + i / NR * size + (first + o) * NR + i % NR * PAIR;
      store_ints(to, o < padded ? round_interleaved(to, row0 + i, row1 + i) : Ints{});
    }
  }
}
