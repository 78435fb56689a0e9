// What is done to each row by itself: norms, activation, the argmax token.
#pragma once
#include "norms.h"
#include "products.h"

// RMSNorm of `heads` of the N heads, from `first` on, in place.
static void rms_norm_heads(float* qkv, const float* gain, float eps, long M, long N, long first, long heads, long D,
                           int threads) {
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static) if (M * heads * D > ALONE)
  for (long m = 0; m < M; m++)
    for (long h = first; h < first + heads; h++) {
      float* x = qkv + (m * N + h) * D;
      rms_row(x, x, gain, eps, D);
    }
}

// LayerNorm, with a bias or none.
template <class T>
static void layer_norm(T* out, const float* x, const float* gain, const float* bias, float eps, long M, long W,
                       int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (M * W > ALONE)
  for (long m = 0; m < M; m++) {
    const float* row = x + m * W;
    Floats sum = {}, squares = {};
    each(W, [&](long w, auto n) { sum += load(row + w, n); });
    float mean = total(sum) / W;
    long whole = W / V * V;
    each(whole, [&](long w, auto n) { squares += (load(row + w, n) - mean) * (load(row + w, n) - mean); });
    float rest = 0;
    for (long w = whole; w < W; w++) rest += (row[w] - mean) * (row[w] - mean);
    float by = 1 / std::sqrt((total(squares) + rest) / W + eps);
    each(W, [&](long w, auto n) {
      Floats normed = (load(row + w, n) - mean) * by * load(gain + w, n);
      if (bias) normed += load(bias + w, n);
      store(out + m * W + w, normed, n);
    });
  }
}

// The first of the greatest of `size` numbers.
template <class T>
static inline long greatest(const T* x, long size, float& most) {
  Floats tops = Floats{} - INFINITY;
  long block = 0;
  most = -INFINITY;
  for (long b = 0; b < size; b += 32 * V) {
    Floats before = tops;
    each(std::min(32L * V, size - b), [&](long i, auto n) {
      Floats here = load(x + b + i, n);
      for (long lane = n; lane < V; lane++) here[lane] = -INFINITY;
      tops = here > tops ? here : tops;
    });
    for (int i = 0; i < V; i++)
      if (tops[i] > before[i] && tops[i] > most) most = tops[i], block = b;
  }
  while (block < size - 1 && load(x + block, 1)[0] != most) block++;
  return block;
}

// The argmax of the first `allowed` tokens of each row, and the logarithm of its probability among all.
template <class T>
static void argmax(int64_t* ids, float* logps, const T* logits, long B, long tokens, long allowed, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (B > 1 && B * tokens > ALONE)
  for (long b = 0; b < B; b++) {
    const T* row = logits + b * tokens;
    float best, other;
    ids[b] = greatest(row, allowed, best);
    greatest(row + allowed, tokens - allowed, other);
    float most = std::max(best, other);
    Floats sum = {};
    each(tokens, [&](long i, auto n) {
      Floats weight = exponential(load(row + i, n) - most);
      for (long lane = n; lane < V; lane++) weight[lane] = 0;
      sum += weight;
    });
    logps[b] = best - most - std::log(total(sum));
  }
}
