// Weights in fp32 as products read them: bf16, in panels of outputs side by side, pairs of inputs after each other.
// Layers that read the same input, or whose gradients are added up, lie in the same panels. All sizes are multiples of
// V but outputs of a last layer, which is filled up with copies of its last one.
#pragma once
#include <memory>

#include "layouts.h"
#include "products.h"

static auto memory(long size) { return std::unique_ptr<bf16[]>(new bf16[size]); }
static auto panels(long outputs, long inputs) { return memory(up(outputs, PANEL) * inputs); }

static inline __m512i rounded(const float* low, const float* high) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(high), _mm512_loadu_ps(low));
}

// w, O x I, as weights of x w': its outputs come after the `first` of others. Of groups of panels, such as one of gates
// and one of what they are multiplied with, it has the one that is said.
static void pack_outputs(bf16* panels, const float* w, long O, long I, long first, long group, long which,
                         int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (O * I > ALONE)
  for (long o = 0; o < O; o += V) {
    long panel = (first + o) / PANEL * group + which;
    int* to = (int*)(panels + panel * PANEL * I) + (first + o) % PANEL;
    for (long i = 0; i < I; i += 2 * V) {
      bool whole = i + V < I;
      __m512i pairs[V];
      for (int row = 0; row < V; row++) {
        const float* from = w + std::min(o + row, O - 1) * I + i;
        pairs[row] = rounded(from, whole ? from + V : from);
      }
      transpose(pairs);
      for (long pair = 0; pair < (whole ? V : V / 2); pair++)
        _mm512_storeu_si512(to + (i / 2 + pair) * PANEL, pairs[pair]);
    }
  }
}

// w, O x I, as weights of g w, whose inputs are O of `all`, from `first` on.
static void pack_inputs(bf16* panels, const float* w, long O, long I, long first, long all, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (O * I > ALONE)
  for (long o = 0; o < up(O, V); o += 2) {
    const float *one = w + std::min(o, O - 1) * I, *two = w + std::min(o + 1, O - 1) * I;
    for (long i = 0; i < I; i += V) {
      int* to = (int*)(panels + i / PANEL * PANEL * all) + (first + o) / 2 * PANEL + i % PANEL;
      _mm512_storeu_si512(to, pair(rounded(one + i, two + i)));
    }
  }
}
