// A block's forward and backward pass.
#pragma once
#include <array>
#include <numeric>

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

// B sequences, from b on, for one thread.
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
  return {kept.x + m * W,
          kept.normed + m * W,
          kept.qkv + m * at.N() * at.D,
          kept.logs + b * at.H * at.T,
          kept.mixed + m * at.H * at.D,
          kept.middle + m * W,
          kept.middle_normed + m * W,
          kept.gates + m * 2 * at.F};
}

// Sequences that a thread takes through the block by itself, so that what one step writes is in its second cache when
// another one reads it; all of them where all threads compute them together, step by step. Tiles compute so fast that
// memory is what is waited for, and parts pay where weights and their gradients leave room for them in that cache.
static long sequences_at_once(const Where& at) {
  constexpr long TOKENS_OF_A_PART = 512, MOST_WEIGHTS = 1 << 18;
  long weights = at.W * (at.N() * at.D + at.H * at.D + 3 * at.F);
  long share = (at.B + at.threads - 1) / at.threads;
  bool uneven = 10 * share * at.threads > 11 * at.B;  // threads that wait would lose more than parts win
  if (!Factor<Number>::tiles || weights > MOST_WEIGHTS || at.T > 2 * TOKENS_OF_A_PART || uneven) return at.B;
  return equal(share, std::max(1L, TOKENS_OF_A_PART / at.T), 1);
}
// Calls f(part, its first sequence, group) for all parts; those of a group one after another, by one thread.
constexpr long GROUPS = 2;  // for each thread, at most
template <class Function>
static void in_parts(const Where& at, Function f) {
  long some = sequences_at_once(at), parts = (at.B + some - 1) / some, groups = std::min(parts, GROUPS * at.threads);
  if (parts < 2) return f(at, 0L, 0L);
  Tasks tasks(groups, at.threads);
#pragma omp parallel num_threads(at.threads)
  tasks.work([&](long group) {
    for (long part = parts * group / groups; part < parts * (group + 1) / groups; part++)
      f(part_of(at, part * some, std::min(some, at.B - part * some)), part * some, group);
  });
}

static void forward(const Where& at, const Weights<const float>& w, const Kept& all, float* all_out) {
  long W = at.W, D = at.D, F = at.F, Q = at.H * D, U = at.K * D;
  int threads = at.threads;
  auto qkv = packed_outputs({{w.q, Q}, {w.k, U}, {w.v, U}}, W, threads), o = packed_outputs({{w.o, W}}, Q, threads);
  auto both = panels(2 * up(F, PANEL), W), down = packed_outputs({{w.down, W}}, F, threads);
  pack_outputs(both.get(), w.gate, F, W, 0, 2, 0, threads);
  pack_outputs(both.get(), w.up, F, W, 0, 2, 1, threads);
  in_parts(at, [&](const Where& at, long b, long) {
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

// The arrays of gradients: as q, k and v lie one after another they are one, and so are gate and up.
typedef std::array<long, 6> Sizes;
static std::array<float**, 6> arrays(Weights<float>& of) {
  return {&of.attention_norm, &of.q, &of.o, &of.ffn_norm, &of.gate, &of.down};
}

// Where a thread adds up gradients of its parts; the first one does where their sum is to be.
struct Sums {
  std::vector<float> room;
  Weights<float> of;
  bool begun = false;
  void begin(const Weights<float>& all, const Sizes& sizes, bool first) {
    begun = true, of = all;
    if (first) return;
    room.resize(std::accumulate(sizes.begin(), sizes.end(), 0L));
    float* next = room.data();
    for (size_t i = 0; i < sizes.size(); i++) *arrays(of)[i] = next, next += sizes[i];
  }
};

static void backward(const Where& at, const Weights<const float>& w, const Kept& all, const Weights<float>& all_of,
                     const Flow& all_flow) {
  long W = at.W, D = at.D, F = at.F, Q = at.H * D, U = at.K * D, ND = at.N() * D;
  int threads = at.threads;
  auto down = packed_inputs({{w.down, W}}, F, threads), both = packed_inputs({{w.gate, F}, {w.up, F}}, W, threads);
  auto o = packed_inputs({{w.o, W}}, Q, threads), qkv = packed_inputs({{w.q, Q}, {w.k, U}, {w.v, U}}, W, threads);
  const Sizes sizes = {W, ND * W, W * Q, W, 2 * F * W, W * F};
  auto& sums = own<std::vector<Sums>>();
  sums.resize(std::max<size_t>(sums.size(), GROUPS * threads));
  for (Sums& some : sums) some.begun = false;
  in_parts(at, [&](const Where& at, long b, long group) {
    Sums& mine = sums[group];
    bool onto = mine.begun;
    if (!onto) mine.begin(all_of, sizes, &mine == &sums[0]);
    const Weights<float>& of = mine.of;
    Kept kept = part_of(all, at, b);
    Flow flow = {all_flow.exact + b * at.T * W, all_flow.rounded + b * at.T * W};
    long M = at.M();
    int threads = at.threads;
    auto product = memory(M * F), normed = memory(M * W);
    gate_backward(product.get(), kept.gates, flow.rounded, down.get(), M, W, F, threads);
    weight_gradient(of.down, F, flow.rounded, W, product.get(), F, onto, M, W, F, threads);
    weight_gradient(of.gate, W, kept.gates, 2 * F, kept.middle_normed, W, onto, M, 2 * F, W, threads);
    project(normed.get(), kept.gates, both.get(), M, 2 * F, W, threads);
    rms_norm_backward(flow.exact, flow.rounded, of.ffn_norm, onto, flow.exact, normed.get(), kept.middle, w.ffn_norm,
                      at.eps, M, W, threads);

    auto mixed = memory(M * Q), of_qkv = memory(M * ND);
    project(mixed.get(), flow.rounded, o.get(), M, W, Q, threads);
    weight_gradient(of.o, Q, flow.rounded, W, kept.mixed, Q, onto, M, W, Q, threads);
    attention_backward(of_qkv.get(), mixed.get(), kept.mixed, kept.logs, kept.qkv, at.turn, at.turns, at.first, at.B,
                       at.T, at.H, at.K, D, threads);
    weight_gradient(of.q, W, of_qkv.get(), ND, kept.normed, W, onto, M, ND, W, threads);
    project(normed.get(), of_qkv.get(), qkv.get(), M, ND, W, threads);
    rms_norm_backward(flow.exact, flow.rounded, of.attention_norm, onto, flow.exact, normed.get(), kept.x,
                      w.attention_norm, at.eps, M, W, threads);
  });
  for (size_t i = 0; i < sizes.size(); i++) {
    std::vector<float*> all;
    for (Sums& some : sums)
      if (some.begun) all.push_back(*arrays(some.of)[i]);
    if (all.size() < 2) return;
#pragma omp parallel for num_threads(threads) schedule(static) if (sizes[i] > ALONE)
    for (long n = 0; n < sizes[i]; n += V) {
      Floats sum = {};
      for (float* some : all) sum += load(some + n);
      store(all[0] + n, sum);
    }
  }
}
