// RMSNorm of rows of floats.
#pragma once
#include "vectors.h"

template <class T>
static inline void rms_row(T* out, const float* x, const float* gain, float eps, long W) {
  Floats squares = {};
  each(W, [&](long w, auto n) { squares += load(x + w, n) * load(x + w, n); });
  float scale = 1 / std::sqrt(sum_lanes(squares) / W + eps);
  each(W, [&](long w, auto n) { store(out + w, load(x + w, n) * scale * load(gain + w, n), n); });
}
template <class T>
static void rms_norm(T* out, const float* x, const float* gain, float eps, long M, long W, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (M * W > MIN_PARALLEL)
  for (long m = 0; m < M; m++) rms_row(out + m * W, x + m * W, gain, eps, W);
}
