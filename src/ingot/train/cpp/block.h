// A block's forward and backward pass.
#pragma once
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

static void forward(const Where& at, const Weights<const float>& w, const Kept& kept, float* out) {
  long M = at.M(), W = at.W, D = at.D, F = at.F, Q = at.H * D, U = at.K * D;
  int threads = at.threads;
  rms_norm(kept.normed, kept.x, w.attention_norm, at.eps, M, W, threads);
  auto qkv = packed_outputs({{w.q, Q}, {w.k, U}, {w.v, U}}, W, threads);
  project(kept.qkv, kept.normed, qkv.get(), M, W, at.N() * D, threads);
  attention_forward(kept.mixed, kept.logs, kept.qkv, at.turn, at.turns, at.first, at.B, at.T, at.H, at.K, D, threads);
  auto o = packed_outputs({{w.o, W}}, Q, threads);
  add_product(kept.middle, kept.x, kept.mixed, o.get(), M, Q, W, threads);

  rms_norm(kept.middle_normed, kept.middle, w.ffn_norm, at.eps, M, W, threads);
  auto both = panels(2 * up(F, PANEL), W), product = memory(M * F);
  pack_outputs(both.get(), w.gate, F, W, 0, 2, 0, threads);
  pack_outputs(both.get(), w.up, F, W, 0, 2, 1, threads);
  gate(product.get(), kept.gates, kept.middle_normed, both.get(), M, W, F, threads);
  auto down = packed_outputs({{w.down, W}}, F, threads);
  add_product(out, kept.middle, product.get(), down.get(), M, F, W, threads);
}

static void backward(const Where& at, const Weights<const float>& w, const Kept& kept, const Weights<float>& of,
                     const Flow& flow) {
  long M = at.M(), W = at.W, D = at.D, F = at.F, Q = at.H * D, U = at.K * D, ND = at.N() * D;
  int threads = at.threads;
  auto product = memory(M * F), normed = memory(M * W);
  auto down = packed_inputs({{w.down, W}}, F, threads);
  gate_backward(product.get(), kept.gates, flow.rounded, down.get(), M, W, F, threads);
  weight_gradient(of.down, F, flow.rounded, W, product.get(), F, false, M, W, F, threads);
  weight_gradient(of.gate, W, kept.gates, 2 * F, kept.middle_normed, W, false, M, 2 * F, W, threads);
  auto both = packed_inputs({{w.gate, F}, {w.up, F}}, W, threads);
  project(normed.get(), kept.gates, both.get(), M, 2 * F, W, threads);
  rms_norm_backward(flow.exact, flow.rounded, of.ffn_norm, flow.exact, normed.get(), kept.middle, w.ffn_norm,
                    at.eps, M, W, threads);

  auto mixed = memory(M * Q), qkv = memory(M * ND);
  auto o = packed_inputs({{w.o, W}}, Q, threads);
  project(mixed.get(), flow.rounded, o.get(), M, W, Q, threads);
  weight_gradient(of.o, Q, flow.rounded, W, kept.mixed, Q, false, M, W, Q, threads);
  attention_backward(qkv.get(), mixed.get(), kept.mixed, kept.logs, kept.qkv, at.turn, at.turns, at.first, at.B, at.T,
                     at.H, at.K, D, threads);
  weight_gradient(of.q, W, qkv.get(), ND, kept.normed, W, false, M, ND, W, threads);
  auto three = packed_inputs({{w.q, Q}, {w.k, U}, {w.v, U}}, W, threads);
  project(normed.get(), qkv.get(), three.get(), M, ND, W, threads);
  rms_norm_backward(flow.exact, flow.rounded, of.attention_norm, flow.exact, normed.get(), kept.x,
                    w.attention_norm, at.eps, M, W, threads);
}
