// The LM head in training: negative log-likelihoods of labels, and gradients. The vocabulary is processed in chunks
// whose weights fit the caches. The logits of a chunk are contiguous, M rows padded to full registers.
#pragma once
#include "gradients.h"
#include "pack.h"
#include "rows.h"

constexpr long VOCAB_CHUNK = 32 * NR;

// Calls f(first token, tokens, padded tokens, logits of the first row) for each chunk of the vocabulary.
template <class T, class Function>
static void vocab_chunks(T* logits, long M, long vocab, Function f) {
  for (long first = 0; first < vocab; first += VOCAB_CHUNK) {
    long tokens = std::min(VOCAB_CHUNK, vocab - first);
    f(first, tokens, round_up(tokens, V), logits + M * first);
  }
}

// -ln p(label) of a row. With `needs_grad` replaces its logits by p - onehot(label), and 0 in the padding. `buffer`
// holds a row of floats.
static float row_nll(Number* logits, float* buffer, bool needs_grad, long m, long M, long vocab, long label) {
  auto each_vector = [&](auto f) {
    vocab_chunks(logits, M, vocab, [&](long first, long tokens, long padded, Number* at) {
      for (long v = 0; v < padded; v += V) f(at + m * padded + v, buffer + first + v, tokens - v);
    });
  };
  long first = label / VOCAB_CHUNK * VOCAB_CHUNK;
  Number* at_label = logits + M * first + m * round_up(std::min(VOCAB_CHUNK, vocab - first), V) + label - first;
  float logit = load(at_label, 1)[0], max = -INFINITY;
  Floats maxima = Floats{} + max, sums = {};
  each_vector([&](Number* at, float*, long) { maxima = maximum(widen(at), maxima); });  // the padding has copies
  for (int i = 0; i < V; i++) max = std::max(max, maxima[i]);
  each_vector([&](Number* at, float* p, long left) {
    Floats weight = vec_exp2((widen(at) - max) * LOG2E);
    if (left < V) weight = lane_index() < (int)left ? weight : Floats{};
    store(p, weight);
    sums += weight;
  });
  float sum = sum_lanes(sums), nll = std::log(sum) + (max - logit);
  if (nll < 0) nll = 0;  // the sum was rounded to less than 1; NaN stays NaN
  if (!needs_grad) return nll;
  each_vector([&](Number* at, float* p, long) { store(at, load(p) * (1 / sum)); });
  store(at_label, Floats{} + std::expm1(-nll), 1);
  return nll;
}

// The logits of M rows x, M x W, in M times the padded vocabulary.
static void head_logits(Number* logits, const Number* x, const float* weight, long M, long W, long vocab, int threads) {
  auto packed = panel_buffer(VOCAB_CHUNK, W);
  vocab_chunks(logits, M, vocab, [&](long first, long tokens, long padded, Number* at) {
    pack_weight(packed.get(), weight + first * W, tokens, W, 0, 1, 0, threads);
    project(at, x, packed.get(), M, W, padded, threads);
  });
}

// -ln p(label) of M rows x, M x W. The logits, M times the padded vocabulary, become its gradients if `needs_grad`.
static void head_nll(float* nlls, Number* logits, const Number* x, const float* weight, const int64_t* labels,
                     bool needs_grad, long M, long W, long vocab, int threads) {
  head_logits(logits, x, weight, M, W, vocab, threads);
#pragma omp parallel num_threads(threads) if (M * vocab > MIN_PARALLEL)
  {
    std::vector<float> buffer(round_up(vocab, V));
#pragma omp for schedule(static)
    for (long m = 0; m < M; m++) nlls[m] = row_nll(logits, buffer.data(), needs_grad, m, M, vocab, labels[m]);
  }
}

// The gradient of the hidden states, M x W, each times the incoming gradient of its row.
static void head_hidden_grad(float* out, const Number* logit_grad, const float* weight, const float* nll_grad, long M,
                             long W, long vocab, int threads) {
  auto packed = panel_buffer(W, VOCAB_CHUNK);
  vocab_chunks(logit_grad, M, vocab, [&](long first, long tokens, long padded, const Number* at) {
    pack_transposed(packed.get(), weight + first * W, tokens, W, 0, padded, threads);
    bool last = first + tokens == vocab;
    gemm(at, packed.get(), M, padded, W, threads, [=](long m, long w, Floats sum, auto n) {
      float* to = out + m * W + w;
      if (first) sum += load(to, n);
      store(to, last ? sum * nll_grad[m] : sum, n);
    });
  });
}

// The gradient of the weight, vocab x W, stored or accumulated. `x` are hidden states times the incoming gradient of
// their row.
static void head_weight_grad(float* out, const Number* logit_grad, const Number* x, bool accumulate, long M, long W,
                             long vocab, int threads) {
  if (!M && !accumulate) std::fill(out, out + vocab * W, 0.f);
  vocab_chunks(logit_grad, M, vocab, [&](long first, long tokens, long padded, const Number* at) {
    weight_gradient(out + first * W, W, at, padded, x, W, accumulate, M, tokens, W, threads);
  });
}
