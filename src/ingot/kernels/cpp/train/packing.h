// Weights in fp32 as products read them, in panels of outputs side by side, pairs of inputs after each other. Layers
// that read the same input, or whose gradients are added up, lie in the same panels. All sizes are multiples of V but
// outputs of a last layer, which is filled up with copies of its last one.
#pragma once
#include <memory>
#include <new>

#include "layouts.h"

// Memory that begins where a line of the cache does: a tile whose rows lie across lines takes twice as long to read.
struct Free {
  void operator()(Number* p) const { ::operator delete(p, std::align_val_t(64)); }
};
static auto memory(long size) {
  return std::unique_ptr<Number[], Free>((Number*)::operator new(size * sizeof(Number), std::align_val_t(64)));
}
static auto panels(long outputs, long inputs) { return memory(up(outputs, PANEL) * up(inputs, STEP<Number>)); }
alignas(64) static const float NONE[V] = {};  // what inputs of a last step are filled up with

// w, O x I, as weights of x w': its outputs come after the `first` of others. Of groups of panels, such as one of gates
// and one of what they are multiplied with, it has the one that is said.
static void pack_outputs(Number* panels, const float* w, long O, long I, long first, long group, long which,
                         int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (O * I > ALONE)
  for (long o = 0; o < O; o += V) {
    long panel = (first + o) / PANEL * group + which;
    Number* to = panels + panel * PANEL * up(I, STEP<Number>) + (first + o) % PANEL * PAIR;
    for (long i = 0; i < I; i += PAIR * V) {
      long some = std::min<long>(V, (up(I, STEP<Number>) - i) / PAIR);
      Ints square[V];
      for (int row = 0; row < V; row++) {
        const float* from = w + std::min(o + row, O - 1) * I + i;
        square[row] = one_after_another(to, from, i + V < I ? from + V : NONE);
      }
      transpose(square);
      for (long pair = 0; pair < some; pair++) put(to + (i + pair * PAIR) * PANEL, square[pair]);
    }
  }
}

// w, O x I, as weights of g w, whose inputs are O of `all`, from `first` on.
static void pack_inputs(Number* panels, const float* w, long O, long I, long first, long all, int threads) {
  long there = up(O, V), size = PANEL * up(all, STEP<Number>), end = first + there < all ? there : size / PANEL - first;
#pragma omp parallel for num_threads(threads) schedule(static) if (O * I > ALONE)
  for (long o = 0; o < end; o += PAIR) {
    const float *one = w + std::min(o, O - 1) * I, *two = w + std::min(o + 1, O - 1) * I;
    for (long i = 0; i < I; i += V) {
      Number* to = panels + i / PANEL * size + (first + o) * PANEL + i % PANEL * PAIR;
      put(to, o < there ? side_by_side(to, one + i, two + i) : Ints{});
    }
  }
}
