// What follows a product in training, and norms' gradients.
#pragma once
#include <omp.h>

#include "norms.h"
#include "power.h"

// As the next product reads it.
static void project(Number* out, const Number* x, const Number* panels, long M, long I, long O, int threads) {
  multiplied(x, panels, M, I, O, threads, [=](long m, long o, Floats sum, auto n) { store(out + m * O + o, sum, n); });
}

// The stream, and what a product adds to it.
static void add_product(float* out, const float* stream, const Number* x, const Number* panels, long M, long I, long O,
                        int threads) {
  multiplied(x, panels, M, I, O, threads, [=](long m, long o, Floats sum, auto n) {
    store(out + m * O + o, load(stream + m * O + o, n) + sum, n);
  });
}

// silu(gate) * up, and both, side by side in rows of 2F. Panels are those of gates and ups in turns.
static void gate(Number* out, Number* gates, const Number* x, const Number* panels, long M, long I, long F,
                 int threads) {
  multiplied_in_pairs(x, panels, M, I, F, threads, [=](long m, long f, Floats gate, Floats up, auto n) {
    Number* both = gates + m * 2 * F + f;
    store(both, gate, n);
    store(both + F, up, n);
    store(out + m * F + f, gate * sigmoid(gate) * up, n);
  });
}

// The gradients of gates and ups in their place, from the gradient of what leaves the layer, M x I, and the matrix that
// read the products of the two; these once more, for that matrix's gradient.
static void gate_backward(Number* out, Number* gates, const Number* gradient, const Number* panels, long M, long I,
                          long F, int threads) {
  multiplied(gradient, panels, M, I, F, threads, [=](long m, long f, Floats sum, auto n) {
    Number* both = gates + m * 2 * F + f;
    Floats gate = load(both, n), up = load(both + F, n), share = sigmoid(gate), silu = gate * share;
    store(both, sum * up * (share + silu - silu * share), n);
    store(both + F, sum * silu, n);
    store(out + m * F + f, silu * up, n);
  });
}

// The gradient of rows through RMSNorm, added to what reaches them beside it (or to nothing), exact and as products
// read it; the gain's, or what is added to that.
template <class T>
static void rms_norm_backward(float* out, Number* rounded, float* of_gain, bool onto, const float* beside,
                              const T* gradient, const float* x, const float* gain, float eps, long M, long W,
                              int threads) {
  if (!onto) std::fill(of_gain, of_gain + W, 0.f);
#pragma omp parallel num_threads(threads) if (M * W > ALONE)
  {
    long thread = omp_get_thread_num(), all = omp_get_num_threads();
    std::vector<float> sums(W);
    for (long m = M * thread / all; m < M * (thread + 1) / all; m++) {
      const float* row = x + m * W;
      const T* dy = gradient + m * W;
      Floats squares = {}, along = {};
      each(W, [&](long w, auto n) {
        Floats here = load(row + w, n);
        squares += here * here;
        along += here * load(dy + w, n) * load(gain + w, n);
      });
      float by = 1 / std::sqrt(total(squares) / W + eps), back = total(along) / W * by * by;
      each(W, [&](long w, auto n) {
        Floats here = load(row + w, n), slope = load(dy + w, n);
        store(&sums[w], load(&sums[w], n) + slope * here * by, n);
        Floats found = (slope * load(gain + w, n) - here * back) * by;
        if (beside) found += load(beside + m * W + w, n);
        store(out + m * W + w, found, n);
        if constexpr (PAIR == 2) store(rounded + m * W + w, found, n);
      });
    }
#pragma omp for ordered schedule(static)  // in the same order every time
    for (long t = 0; t < all; t++)
#pragma omp ordered
      for (long w = 0; w < W; w++) of_gain[w] += sums[w];
  }
}
