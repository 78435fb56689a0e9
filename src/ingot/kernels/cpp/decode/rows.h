// Operations on single rows: norms and argmax.
#pragma once
#include "gemm.h"
#include "norms.h"

// RMSNorm of `heads` of the N heads, starting with `first`, in place.
static void rms_norm_heads(float* qkv, const float* gain, float eps, long M, long N, long first, long heads, long D,
                           int threads) {
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static) if (M * heads * D > MIN_PARALLEL)
  for (long m = 0; m < M; m++)
    for (long h = first; h < first + heads; h++) {
      float* x = qkv + (m * N + h) * D;
      rms_row(x, x, gain, eps, D);
    }
}

// LayerNorm with an optional bias.
template <class T>
static void layer_norm(T* out, const float* x, const float* gain, const float* bias, float eps, long M, long W,
                       int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (M * W > MIN_PARALLEL)
  for (long m = 0; m < M; m++) {
    const float* row = x + m * W;
    Floats sum = {}, squares = {};
    each(W, [&](long w, auto n) { sum += load(row + w, n); });
    float mean = sum_lanes(sum) / W;
    long full = W / V * V;
    each(full, [&](long w, auto n) { squares += (load(row + w, n) - mean) * (load(row + w, n) - mean); });
    float rest = 0;
    for (long w = full; w < W; w++) rest += (row[w] - mean) * (row[w] - mean);
    float scale = 1 / std::sqrt((sum_lanes(squares) + rest) / W + eps);
    each(W, [&](long w, auto n) {
      Floats normed = (load(row + w, n) - mean) * scale * load(gain + w, n);
      if (bias) normed += load(bias + w, n);
      store(out + m * W + w, normed, n);
    });
  }
}

// Index of the first maximum of `size` elements, and the maximum. Finds the block of 32 vectors first.
template <class T>
static inline long find_max(const T* x, long size, float& max) {
  Floats maxima = Floats{} - INFINITY;
  long index = 0;
  max = -INFINITY;
  for (long b = 0; b < size; b += 32 * V) {
    Floats before = maxima;
    each(std::min(32L * V, size - b), [&](long i, auto n) {
      Floats values = load(x + b + i, n);
      for (long lane = n; lane < V; lane++) values[lane] = -INFINITY;
      maxima = values > maxima ? values : maxima;
    });
    for (int i = 0; i < V; i++)
      if (maxima[i] > before[i] && maxima[i] > max) max = maxima[i], index = b;
  }
  while (index < size - 1 && load(x + index, 1)[0] != max) index++;
  return index;
}

// The argmax of the first `allowed` logits of each row, and its log-probability among all.
template <class T>
static void argmax(int64_t* ids, float* logps, const T* logits, long B, long vocab, long allowed, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (B > 1 && B * vocab > MIN_PARALLEL)
  for (long b = 0; b < B; b++) {
    const T* row = logits + b * vocab;
    float best, other;
    ids[b] = find_max(row, allowed, best);
    find_max(row + allowed, vocab - allowed, other);
    float max = std::max(best, other);
    Floats sum = {};
    each(vocab, [&](long i, auto n) {
      Floats weight = vec_exp(load(row + i, n) - max);
      for (long lane = n; lane < V; lane++) weight[lane] = 0;
      sum += weight;
    });
    logps[b] = best - max - std::log(sum_lanes(sum));
  }
}
