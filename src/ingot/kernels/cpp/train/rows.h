// Matrix products of training with their epilogues, and the gradient of RMSNorm.
#pragma once
#include <omp.h>

#include "exp2.h"
#include "norms.h"

// x w^T, as operand of the next product.
static void project(Number* out, const Number* x, const Number* panels, long M, long I, long O, int threads) {
  gemm(x, panels, M, I, O, threads, [=](long m, long o, Floats sum, auto n) { store(out + m * O + o, sum, n); });
}

// stream + x w^T, the residual connection.
static void project_residual(float* out, const float* stream, const Number* x, const Number* panels, long M, long I,
                             long O, int threads) {
  gemm(x, panels, M, I, O, threads, [=](long m, long o, Floats sum, auto n) {
    store(out + m * O + o, load(stream + m * O + o, n) + sum, n);
  });
}

// silu(gate) * up. Also writes gate and up side by side, M x 2F. The panels of gate and up alternate.
static void swiglu(Number* out, Number* gate_up, const Number* x, const Number* panels, long M, long I, long F,
                   int threads) {
  gemm_dual(x, panels, M, I, F, threads, [=](long m, long f, Floats gate, Floats up, auto n) {
    Number* row = gate_up + m * 2 * F + f;
    store(row, gate, n);
    store(row + F, up, n);
    store(out + m * F + f, gate * sigmoid(gate) * up, n);
  });
}

// Replaces gate and up by their gradients, given the gradient of the feed-forward's output, M x I, and the packed
// `down`. Also writes silu(gate) * up again, for the gradient of `down`.
static void swiglu_backward(Number* out, Number* gate_up, const Number* gradient, const Number* panels, long M, long I,
                            long F, int threads) {
  gemm(gradient, panels, M, I, F, threads, [=](long m, long f, Floats sum, auto n) {
    Number* row = gate_up + m * 2 * F + f;
    Floats gate = load(row, n), up = load(row + F, n), sigma = sigmoid(gate), silu = gate * sigma;
    store(row, sum * up * (sigma + silu - silu * sigma), n);
    store(row + F, sum * silu, n);
    store(out + m * F + f, silu * up, n);
  });
}

// The gradient of RMSNorm's input, plus `residual` if given, in fp32 and rounded to the operand type; and the gradient
// of its gain, which is stored or accumulated.
template <class T>
static void rms_norm_backward(float* out, Number* rounded, float* gain_gradient, bool accumulate,
                              const float* residual, const T* gradient, const float* x, const float* gain, float eps,
                              long M, long W, int threads) {
  if (!accumulate) std::fill(gain_gradient, gain_gradient + W, 0.f);
#pragma omp parallel num_threads(threads) if (M * W > MIN_PARALLEL)
  {
    long thread = omp_get_thread_num(), all = omp_get_num_threads();
    std::vector<float> sums(W);
    for (long m = M * thread / all; m < M * (thread + 1) / all; m++) {
      const float* row = x + m * W;
      const T* dy = gradient + m * W;
      Floats squares = {}, dots = {};
      each(W, [&](long w, auto n) {
        Floats value = load(row + w, n);
        squares += value * value;
        dots += value * load(dy + w, n) * load(gain + w, n);
      });
      float scale = 1 / std::sqrt(sum_lanes(squares) / W + eps), mean = sum_lanes(dots) / W * scale * scale;
      each(W, [&](long w, auto n) {
        Floats value = load(row + w, n), slope = load(dy + w, n);
        store(&sums[w], load(&sums[w], n) + slope * value * scale, n);
        Floats dx = (slope * load(gain + w, n) - value * mean) * scale;
        if (residual) dx += load(residual + m * W + w, n);
        store(out + m * W + w, dx, n);
        if constexpr (PAIR == 2) store(rounded + m * W + w, dx, n);
      });
    }
#pragma omp for ordered schedule(static)  // sums in the order of the threads, for reproducibility
    for (long t = 0; t < all; t++)
#pragma omp ordered
      for (long w = 0; w < W; w++) gain_gradient[w] += sums[w];
  }
}
