// Matrix products of rows and packed weights, with their epilogues: bias, GELU, SwiGLU.
#pragma once
#include "microkernel.h"
#if HAS_AMX
#include "gemm_amx.h"
#endif

// Rows times panels. Calls epilogue(row, output, sums, n) for each vector of n sums.
template <class T, class Epilogue>
static inline void gemm(const T* x, const T* panels, long M, long I, long O, int threads, Epilogue epilogue) {
#if HAS_AMX
  auto finish = [=](long row, long rows, long p, const float* sums) {
    for (long r = 0, o = p * NR; r < rows; r++)
      each_of_panel(O - o, [&](long at, auto n) { epilogue(row + r, o + at, load(sums + r * NR + at), n); });
  };
  if constexpr (Operand<T>::amx) return gemm_amx<1>(x, panels, M, I, O, threads, finish);
#endif
  gemm_blocks<1>(x, panels, M, I, (O + NR - 1) / NR, threads, [=](long row, long rows, long p, auto multiply) {
    long o = p * NR;
    std::integral_constant<long, V> full;
    if (o + NR <= O)
      return multiply(0, NR, [=](long r, long at, Floats sum) { epilogue(row + r, o + at, sum, full); });
    float sums[MR * NR];
    multiply(0, O - o, store_sums(sums));
    for (long r = 0; r < rows; r++)
      each(O - o, [&](long at, auto n) { epilogue(row + r, o + at, load(sums + r * NR + at), n); });
  });
}

// A linear layer with an optional bias; with `accumulate` added to the output.
template <class T>
static void linear(float* out, const T* x, const T* panels, const float* bias, bool accumulate, long M, long I, long O,
                   int threads) {
  gemm(x, panels, M, I, O, threads, [=](long m, long o, Floats sum, auto n) {
    float* to = out + m * O + o;
    if (bias) sum += load(bias + o, n);
    if (accumulate) sum += load(to, n);
    store(to, sum, n);
  });
}

// x times the standard normal distribution function of x, or GPT-2's approximation x (1 + tanh y) / 2 = x / (1 +
// e^-2y). The tail beyond |x| is formula 7.1.26 of Abramowitz and Stegun, with an error of 1e-7.
static inline Floats gelu(Floats x, bool tanh) {
  if (tanh) return x / (1.f + vec_exp(-1.5957691216f * (x + .044715f * x * x * x)));
  Floats size = x < Floats{} ? -x : x, t = 1.f / (1.f + .3275911f * .70710678f * size);
  Floats p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - .284496736f;
  p = p * t + .254829592f;
  Floats tail = .5f * p * t * vec_exp(-.5f * size * size);
  return x * (x < Floats{} ? tail : 1.f - tail);
}

static inline Floats silu(Floats x) { return x / (1.f + vec_exp(-x)); }

// GELU of a linear layer.
template <class T>
static void gelu_linear(T* out, const T* x, const T* panels, const float* bias, bool tanh, long M, long I, long F,
                        int threads) {
  gemm(x, panels, M, I, F, threads, [=](long m, long f, Floats sum, auto n) {
    if (bias) sum += load(bias + f, n);
    store(out + m * F + f, gelu(sum, tanh), n);
  });
}

// Rows times two matrices whose panels alternate. Calls epilogue(row, output, sums of the first, sums of the second,
// n).
template <class T, class Epilogue>
static inline void gemm_dual(const T* x, const T* panels, long M, long I, long O, int threads, Epilogue epilogue) {
  auto finish = [=](long row, long rows, long p, const float* first, const float* second) {
    for (long r = 0, o = p * NR; r < rows; r++)
      each_of_panel(O - o, [&](long at, auto n) {
        epilogue(row + r, o + at, load(first + r * NR + at), load(second + r * NR + at), n);
      });
  };
#if HAS_AMX
  auto finish_amx = [=](long row, long rows, long p, const float* sums) {
    finish(row, rows, p, sums, sums + BLOCK_ROWS * NR);
  };
  if constexpr (Operand<T>::amx) return gemm_amx<2>(x, panels, M, I, O, threads, finish_amx);
#endif
  gemm_blocks<2>(x, panels, M, I, (O + NR - 1) / NR, threads, [=](long row, long rows, long p, auto multiply) {
    float sums[2][MR * NR];
    for (int g = 0; g < 2; g++) multiply(g, O - p * NR, store_sums(sums[g]));
    finish(row, rows, p, sums[0], sums[1]);
  });
}

// SwiGLU: silu(gate) * up. The panels of gate and up alternate; `bias` has the biases of gate, then those of up.
template <class T>
static void swiglu(T* out, const T* x, const T* panels, const float* bias, long M, long I, long F, int threads) {
  gemm_dual(x, panels, M, I, F, threads, [=](long m, long f, Floats gate, Floats up, auto n) {
    if (bias) gate += load(bias + f, n), up += load(bias + F + f, n);
    store(out + m * F + f, silu(gate) * up, n);
  });
}
