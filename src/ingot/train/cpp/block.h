// A block's forward and backward pass.
#pragma once
#include <array>

#include "attention.h"
#include "attention_backward.h"
#include "gradients.h"
#include "packing.h"
#include "rows.h"

// What is the same for all blocks. Words, as in what follows, which ../blocks.py writes down in this order.
struct Where {
  const float* turn;  // turns x T x D: cosines of D / 2 angles, then sines; or none
  long turns;
  const int32_t* first;  // the first slot that a token sees, B x T, or none
  long B, T, W, H, K, D, F;
  double eps;
  long threads;
  long M() const { return B * T; }
  long N() const { return H + 2 * K; }
};

// As gradients q, k and v lie one after another, and so do gate and up.
template <class Number>
struct Weights {
  Number *attention_norm, *q, *k, *v, *o, *ffn_norm, *gate, *up, *down;
};

// For the backward pass.
struct Kept {
  const float* x;          // the stream before the block
  Number *normed, *qkv;      // queries and keys turned
  float* logs;             // of the sums that attention divides by
  Number* mixed;
  float* middle;           // the stream between attention and feed-forward
  Number *middle_normed, *gates;
};

// The gradient of the stream, exact and as products read it: behind the block, and when all is done before it.
struct Flow {
  float* exact;
  Number* rounded;
};

// Matrices that read the same, or whose gradients are added up.
struct Part {
  const float* matrix;
  long outputs;
};
static long outputs_of(std::initializer_list<Part> parts) {
  long all = 0;
  for (auto part : parts) all += part.outputs;
  return all;
}
// Calls f(part, outputs before it).
template <class Function>
static void in_turn(std::initializer_list<Part> parts, Function f) {
  long first = 0;
  for (auto part : parts) f(part, first), first += part.outputs;
}
static auto packed_outputs(std::initializer_list<Part> parts, long inputs, int threads) {
  auto found = panels(outputs_of(parts), inputs);
  in_turn(parts, [&](Part part, long first) {
    pack_outputs(found.get(), part.matrix, part.outputs, inputs, first, 1, 0, threads);
  });
  return found;
}
static auto packed_inputs(std::initializer_list<Part> parts, long inputs, int threads) {
  long all = outputs_of(parts);
  auto found = panels(inputs, all);
  in_turn(parts, [&](Part part, long first) {
    pack_inputs(found.get(), part.matrix, part.outputs, inputs, first, all, threads);
  });
  return found;
}

// Of some rows, from b on: their part of all.
static Where part_of(const Where& at, long b, long B) {
  Where some = at;
  some.B = B;
  some.threads = 1;
  if (at.turn && at.turns > 1) some.turn += b * at.T * at.D, some.turns = B;
  if (at.first) some.first += b * at.T;
  return some;
}
static Kept part_of(const Kept& kept, const Where& at, long b) {
  long m = b * at.T, W = at.W;
  return {kept.x + m * W,          kept.normed + m * W, kept.qkv + m * at.N() * at.D,
          kept.logs + b * at.H * at.T, kept.mixed + m * at.H * at.D, kept.middle + m * W,
          kept.middle_normed + m * W, kept.gates + m * 2 * at.F};
}

// Rows that a thread takes through the block by itself, so that what one step writes is in its second cache when another
// one reads it; all of them where they are computed by all threads together, step by step.
static long rows_at_once(const Where& at) {
#ifndef PARTS
#define PARTS 512
#endif
  long weights = at.W * (at.N() * at.D + at.H * at.D + 3 * at.F);
  if (!Factor<Number>::tiles || weights > 1 << 18 || at.T > 2 * PARTS) return at.B;
  long each = (at.B + at.threads - 1) / at.threads, most = std::max(1L, PARTS / at.T), parts = (each + most - 1) / most;
  return (each + parts - 1) / parts;
}
template <class Function>
static void in_parts(const Where& at, Function f) {
  long some = rows_at_once(at);
  if (some >= at.B) return f(at, 0L);
#pragma omp parallel for num_threads(at.threads) schedule(static)
  for (long b = 0; b < at.B; b += some) f(part_of(at, b, std::min(some, at.B - b)), b);
}

static void forward(const Where& at, const Weights<const float>& w, const Kept& all, float* all_out) {
  long W = at.W, D = at.D, F = at.F, Q = at.H * D, U = at.K * D;
  int threads = at.threads;
  auto qkv = packed_outputs({{w.q, Q}, {w.k, U}, {w.v, U}}, W, threads), o = packed_outputs({{w.o, W}}, Q, threads);
  auto both = panels(2 * up(F, PANEL), W), down = packed_outputs({{w.down, W}}, F, threads);
  pack_outputs(both.get(), w.gate, F, W, 0, 2, 0, threads);
  pack_outputs(both.get(), w.up, F, W, 0, 2, 1, threads);
  in_parts(at, [&](const Where& at, long b) {
    Kept kept = part_of(all, at, b);
    long M = at.M();
    int threads = at.threads;
    rms_norm(kept.normed, kept.x, w.attention_norm, at.eps, M, W, threads);
    project(kept.qkv, kept.normed, qkv.get(), M, W, at.N() * D, threads);
    attention_forward(kept.mixed, kept.logs, kept.qkv, at.turn, at.turns, at.first, at.B, at.T, at.H, at.K, D, threads);
    add_product(kept.middle, kept.x, kept.mixed, o.get(), M, Q, W, threads);

    rms_norm(kept.middle_normed, kept.middle, w.ffn_norm, at.eps, M, W, threads);
    auto product = memory(M * F);
    gate(product.get(), kept.gates, kept.middle_normed, both.get(), M, W, F, threads);
    add_product(all_out + b * at.T * W, kept.middle, product.get(), down.get(), M, F, W, threads);
  });
}

// Gradients of a thread, added up over its rows.
struct Sums {
  std::vector<float> room;
  Weights<float> of;
  bool begun = false;
};

static void backward(const Where& at, const Weights<const float>& w, const Kept& all, const Weights<float>& of,
                     const Flow& all_flow) {
  long W = at.W, D = at.D, F = at.F, Q = at.H * D, U = at.K * D, ND = at.N() * D;
  int threads = at.threads;
  auto down = packed_inputs({{w.down, W}}, F, threads), both = packed_inputs({{w.gate, F}, {w.up, F}}, W, threads);
  auto o = packed_inputs({{w.o, W}}, Q, threads), three = packed_inputs({{w.q, Q}, {w.k, U}, {w.v, U}}, W, threads);
  static thread_local std::vector<Sums> kept_sums;
  auto& sums = kept_sums;
  sums.resize(std::max<size_t>(sums.size(), threads));
  const long sizes[] = {W, ND * W, W * Q, W, 2 * F * W, W * F};
  auto parts = [](const Weights<float>& of) { return std::array<float*, 6>{of.attention_norm, of.q, of.o, of.ffn_norm, of.gate, of.down}; };
  for (auto& some : sums) some.begun = false;
  in_parts(at, [&](const Where& at, long b) {
    Kept kept = part_of(all, at, b);
    Flow flow = {all_flow.exact + b * at.T * W, all_flow.rounded + b * at.T * W};
    long M = at.M();
    int threads = at.threads, t = omp_get_thread_num();
    Sums& mine = sums[t];
    bool onto = mine.begun;
    if (!onto) {
      mine.begun = true;
      mine.of = of;
      if (t) {
        long size = 0;
        for (long s : sizes) size += s;
        mine.room.resize(size);
        float* at = mine.room.data();
        float** places[] = {&mine.of.attention_norm, &mine.of.q, &mine.of.o, &mine.of.ffn_norm, &mine.of.gate, &mine.of.down};
        for (int i = 0; i < 6; i++) *places[i] = at, at += sizes[i];
      }
    }
    const Weights<float>& of = mine.of;
    std::vector<float> gain(W);
    auto add_gain = [&](float* to) {
      for (long i = 0; i < W; i++) to[i] = onto ? to[i] + gain[i] : gain[i];
    };
    auto product = memory(M * F), normed = memory(M * W);
    gate_backward(product.get(), kept.gates, flow.rounded, down.get(), M, W, F, threads);
    weight_gradient(of.down, F, flow.rounded, W, product.get(), F, onto, M, W, F, threads);
    weight_gradient(of.gate, W, kept.gates, 2 * F, kept.middle_normed, W, onto, M, 2 * F, W, threads);
    project(normed.get(), kept.gates, both.get(), M, 2 * F, W, threads);
    rms_norm_backward(flow.exact, flow.rounded, gain.data(), flow.exact, normed.get(), kept.middle, w.ffn_norm, at.eps, M,
                      W, threads);
    add_gain(of.ffn_norm);

    auto mixed = memory(M * Q), qkv = memory(M * ND);
    project(mixed.get(), flow.rounded, o.get(), M, W, Q, threads);
    weight_gradient(of.o, Q, flow.rounded, W, kept.mixed, Q, onto, M, W, Q, threads);
    attention_backward(qkv.get(), mixed.get(), kept.mixed, kept.logs, kept.qkv, at.turn, at.turns, at.first, at.B, at.T,
                       at.H, at.K, D, threads);
    weight_gradient(of.q, W, qkv.get(), ND, kept.normed, W, onto, M, ND, W, threads);
    project(normed.get(), qkv.get(), three.get(), M, ND, W, threads);
    rms_norm_backward(flow.exact, flow.rounded, gain.data(), flow.exact, normed.get(), kept.x, w.attention_norm, at.eps, M,
                      W, threads);
    add_gain(of.attention_norm);
  });
  for (int t = 1; t < threads; t++)
    if (sums[t].begun) {
      auto from = parts(sums[t].of), to = parts(of);
      for (int i = 0; i < 6; i++) {
#pragma omp parallel for num_threads(threads) schedule(static) if (sizes[i] > ALONE)
        for (long n = 0; n < sizes[i]; n++) to[i][n] += from[i][n];
      }
    }
}
