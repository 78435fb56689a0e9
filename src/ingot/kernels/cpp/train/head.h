// The head in training: what labels cost, and gradients. The vocabulary is taken a piece of columns at a time, whose
// weights fit the caches; a piece's logits lie one row after another, filled up to whole registers.
#pragma once
#include "gradients.h"
#include "packing.h"
#include "rows.h"

constexpr long PIECE = 32 * PANEL;

// Calls f(first, columns, columns filled up, place of the first row's logits) for each piece of a vocabulary.
template <class T, class Function>
static void pieces(T* logits, long M, long V_, Function f) {
  for (long first = 0; first < V_; first += PIECE) {
    long some = std::min(PIECE, V_ - first);
    f(first, some, up(some, V), logits + M * first);
  }
}

// -ln p(label) of a row of logits, which become p - 1(label), and 0 past the vocabulary, where they are to be kept;
// `room` for a row of floats.
static float row_cost(Number* logits, float* room, bool keep, long m, long M, long V_, long label) {
  auto vectors = [&](auto f) {
    pieces(logits, M, V_, [&](long first, long some, long filled, Number* at) {
      for (long v = 0; v < filled; v += V) f(at + m * filled + v, room + first + v, some - v);
    });
  };
  long first = label / PIECE * PIECE;
  Number* own = logits + M * first + m * up(std::min(PIECE, V_ - first), V) + label - first;
  float logit = load(own, 1)[0], top = -INFINITY;
  Floats tops = Floats{} + top, sums = {};
  vectors([&](Number* at, float*, long) { tops = larger(wide(at), tops); });  // past the vocabulary are copies
  for (int i = 0; i < V; i++) top = std::max(top, tops[i]);
  vectors([&](Number* at, float* p, long there) {
    Floats part = power((wide(at) - top) * LOG2E);
    if (there < V) part = lanes() < (int)there ? part : Floats{};
    store(p, part);
    sums += part;
  });
  float sum = total(sums), cost = std::log(sum) + (top - logit);
  if (cost < 0) cost = 0;  // a sum that is rounded down to less than 1; what is no number stays so
  if (!keep) return cost;
  vectors([&](Number* at, float* p, long) { store(at, load(p) * (1 / sum)); });
  store(own, Floats{} + std::expm1(-cost), 1);
  return cost;
}

// Costs of M rows x, M x W. Their logits, M times the vocabulary filled up, become gradients of the costs if kept.
static void head_costs(float* costs, Number* logits, const Number* x, const float* weight, const int64_t* labels,
                       bool keep, long M, long W, long V_, int threads) {
  auto packed = panels(PIECE, W);
  pieces(logits, M, V_, [&](long first, long some, long filled, Number* at) {
    pack_outputs(packed.get(), weight + first * W, some, W, 0, 1, 0, threads);
    project(at, x, packed.get(), M, W, filled, threads);
  });
#pragma omp parallel num_threads(threads) if (M * V_ > ALONE)
  {
    std::vector<float> room(up(V_, V));
#pragma omp for schedule(static)
    for (long m = 0; m < M; m++) costs[m] = row_cost(logits, room.data(), keep, m, M, V_, labels[m]);
  }
}

// Gradients of rows, M x W, each times its cost's own gradient.
static void head_gradient(float* out, const Number* excess, const float* weight, const float* of_costs, long M, long W,
                          long V_, int threads) {
  auto packed = panels(W, PIECE);
  pieces(excess, M, V_, [&](long first, long some, long filled, const Number* at) {
    pack_inputs(packed.get(), weight + first * W, some, W, 0, filled, threads);
    bool last = first + some == V_;
    multiplied(at, packed.get(), M, filled, W, threads, [=](long m, long w, Floats sum, auto n) {
      float* to = out + m * W + w;
      if (first) sum += load(to, n);
      store(to, last ? sum * of_costs[m] : sum, n);
    });
  });
}

// The gradient of the matrix, V x W, from rows times their costs' gradients; or what it adds to that of others.
static void head_weight_gradient(float* out, const Number* excess, const Number* x, bool onto, long M, long W, long V_,
                                 int threads) {
  if (!M && !onto) std::fill(out, out + V_ * W, 0.f);
  pieces(excess, M, V_, [&](long first, long some, long filled, const Number* at) {
    weight_gradient(out + first * W, W, at, filled, x, W, onto, M, some, W, threads);
  });
}
