// Products of rows and packed weights with their epilogues: bias, GELU, SwiGLU.
#pragma once
#include "panels.h"
#if HAS_TILES
#include "products_by_tiles.h"
#endif

// Rows times panels: finish(row, output, sums, how many) for each vector of sums.
template <class T, class Finish>
static inline void multiplied(const T* x, const T* panels, long M, long I, long O, int threads, Finish finish) {
#if HAS_TILES
  auto all = [=](long row, long rows, long p, const float* sums) {
    for (long r = 0, o = p * PANEL; r < rows; r++)
      across(O - o, [&](long at, auto n) { finish(row + r, o + at, load(sums + r * PANEL + at), n); });
  };
  if constexpr (Factor<T>::tiles) return by_tiles<1>(x, panels, M, I, O, threads, all);
#endif
  pass<1>(x, panels, M, I, (O + PANEL - 1) / PANEL, threads, [=](long row, long rows, long p, auto multiply) {
    long o = p * PANEL;
    std::integral_constant<long, V> whole;
    if (o + PANEL <= O)
      return multiply(0, PANEL, [=](long r, long at, Floats sum) { finish(row + r, o + at, sum, whole); });
    float sums[ROWS * PANEL];
    multiply(0, O - o, keep(sums));
    for (long r = 0; r < rows; r++)
      each(O - o, [&](long at, auto n) { finish(row + r, o + at, load(sums + r * PANEL + at), n); });
  });
}

// Rows times panels, with a bias, or added to the output.
template <class T>
static void product(float* out, const T* x, const T* panels, const float* bias, bool onto, long M, long I, long O,
                    int threads) {
  multiplied(x, panels, M, I, O, threads, [=](long m, long o, Floats sum, auto n) {
    float* to = out + m * O + o;
    if (bias) sum += load(bias + o, n);
    if (onto) sum += load(to, n);
    store(to, sum, n);
  });
}

// x times the share of a standard normal distribution below x, or, as GPT-2 has it, x (1 + tanh y) / 2, which is
// x / (1 + e^-2y). The share beyond |x| is Abramowitz and Stegun's 7.1.26, to 1e-7.
static inline Floats gelu(Floats x, bool tanh) {
  if (tanh) return x / (1.f + exponential(-1.5957691216f * (x + .044715f * x * x * x)));
  Floats size = x < Floats{} ? -x : x, t = 1.f / (1.f + .3275911f * .70710678f * size);
  Floats p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - .284496736f;
  p = p * t + .254829592f;
  Floats beyond = .5f * p * t * exponential(-.5f * size * size);
  return x * (x < Floats{} ? beyond : 1.f - beyond);
}

static inline Floats silu(Floats x) { return x / (1.f + exponential(-x)); }

// GELU of a product.
template <class T>
static void gelu_product(T* out, const T* x, const T* panels, const float* bias, bool tanh, long M, long I, long F,
                         int threads) {
  multiplied(x, panels, M, I, F, threads, [=](long m, long f, Floats sum, auto n) {
    if (bias) sum += load(bias + f, n);
    store(out + m * F + f, gelu(sum, tanh), n);
  });
}

// Rows times panels in pairs: finish(row, output, sums, sums of the other panel, how many).
template <class T, class Finish>
static inline void multiplied_in_pairs(const T* x, const T* panels, long M, long I, long O, int threads,
                                       Finish finish) {
  auto all = [=](long row, long rows, long p, const float* one, const float* two) {
    for (long r = 0, o = p * PANEL; r < rows; r++)
      across(O - o, [&](long at, auto n) {
        finish(row + r, o + at, load(one + r * PANEL + at), load(two + r * PANEL + at), n);
      });
  };
#if HAS_TILES
  auto both = [=](long row, long rows, long p, const float* sums) { all(row, rows, p, sums, sums + AT_ONCE * PANEL); };
  if constexpr (Factor<T>::tiles) return by_tiles<2>(x, panels, M, I, O, threads, both);
#endif
  pass<2>(x, panels, M, I, (O + PANEL - 1) / PANEL, threads, [=](long row, long rows, long p, auto multiply) {
    float sums[2][ROWS * PANEL];
    for (int which = 0; which < 2; which++) multiply(which, O - p * PANEL, keep(sums[which]));
    all(row, rows, p, sums[0], sums[1]);
  });
}

// SwiGLU of a product: a panel of gates, then one of what they are multiplied with, and so on; the biases of all gates,
// then those of the others.
template <class T>
static void gated(T* out, const T* x, const T* panels, const float* bias, long M, long I, long F, int threads) {
  multiplied_in_pairs(x, panels, M, I, F, threads, [=](long m, long f, Floats gate, Floats up, auto n) {
    if (bias) gate += load(bias + f, n), up += load(bias + F + f, n);
    store(out + m * F + f, silu(gate) * up, n);
  });
}
