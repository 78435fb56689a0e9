// The forward and backward pass of a block: norm, attention, norm, SwiGLU, with residual connections.
#pragma once
#include <array>
#include <numeric>

#include "attention.h"
#include "attention_backward.h"
#include "gradients.h"
#include "pack.h"
#include "rows.h"

// The structs below are arrays of 64-bit words, which backends/cpu_blocks.py fills in the same order.

// Arguments that all blocks share.
struct BlockArguments {
  const float* rope;  // rope_rows x T x D: cosines of D / 2 angles, then sines; or null
  long rope_rows;
  const int32_t* first;  // the first token that each token attends to, B x T; or null
  long B, T, W, H, K, D, F;
  double eps;
  long threads;
  long M() const { return B * T; }
  long N() const { return H + 2 * K; }
};

// Weights, or gradients: those of q, k and v are contiguous, and so are those of gate and up.
template <class Number>
struct Weights {
  Number *attention_norm, *q, *k, *v, *o, *ffn_norm, *gate, *up, *down;
};

// Activations that the forward pass saves for the backward pass.
struct Saved {
  const float* x;         // the residual stream before the block
  Number *normed, *qkv;   // queries and keys after rotation
  float* lse;             // log-sum-exp of attention's scores
  Number* attended;
  float* middle;          // the residual stream between attention and feed-forward
  Number *middle_normed, *gate_up;
};

// The gradient of the residual stream in fp32 and rounded to the operand type: after the block, and on return before
// it.
struct StreamGradient {
  float* exact;
  Number* rounded;
};

// Matrices with the same input, or whose input gradients are added.
struct Matrix {
  const float* weight;
  long outputs;
};
static long outputs_of(std::initializer_list<Matrix> matrices) {
  long all = 0;
  for (auto matrix : matrices) all += matrix.outputs;
  return all;
}
// Calls f(matrix, number of outputs before it).
template <class Function>
static void each_matrix(std::initializer_list<Matrix> matrices, Function f) {
  long first = 0;
  for (auto matrix : matrices) f(matrix, first), first += matrix.outputs;
}
static auto pack_forward(std::initializer_list<Matrix> matrices, long inputs, int threads) {
  auto packed = panel_buffer(outputs_of(matrices), inputs);
  each_matrix(matrices, [&](Matrix matrix, long first) {
    pack_weight(packed.get(), matrix.weight, matrix.outputs, inputs, first, 1, 0, threads);
  });
  return packed;
}
static auto pack_backward(std::initializer_list<Matrix> matrices, long inputs, int threads) {
  long all = outputs_of(matrices);
  auto packed = panel_buffer(inputs, all);
  each_matrix(matrices, [&](Matrix matrix, long first) {
    pack_transposed(packed.get(), matrix.weight, matrix.outputs, inputs, first, all, threads);
  });
  return packed;
}

// The arguments and activations of B rows, starting with row b, for one thread.
static BlockArguments slice(const BlockArguments& at, long b, long B) {
  BlockArguments part = at;
  part.B = B;
  part.threads = 1;
  if (at.rope && at.rope_rows > 1) part.rope += b * at.T * at.D, part.rope_rows = B;
  if (at.first) part.first += b * at.T;
  return part;
}
static Saved slice(const Saved& saved, const BlockArguments& at, long b) {
  long m = b * at.T, W = at.W;
  return {saved.x + m * W,
          saved.normed + m * W,
          saved.qkv + m * at.N() * at.D,
          saved.lse + b * at.H * at.T,
          saved.attended + m * at.H * at.D,
          saved.middle + m * W,
          saved.middle_normed + m * W,
          saved.gate_up + m * 2 * at.F};
}

// Rows that a thread takes through the block by itself, so that each step finds the results of the previous one in L2;
// or all rows, if all threads compute each step together. Slices pay with matrix tiles, which are limited by memory, if
// weights and their gradients leave room in L2.
static long rows_of_slice(const BlockArguments& at) {
  constexpr long SLICE_TOKENS = 512, MAX_WEIGHTS = 1 << 18;
  long weights = at.W * (at.N() * at.D + at.H * at.D + 3 * at.F);
  long per_thread = (at.B + at.threads - 1) / at.threads;
  bool uneven = 10 * per_thread * at.threads > 11 * at.B;  // waiting threads would cost more than slices save
  if (!Operand<Number>::amx || weights > MAX_WEIGHTS || at.T > 2 * SLICE_TOKENS || uneven) return at.B;
  return equal_parts(per_thread, std::max(1L, SLICE_TOKENS / at.T), 1);
}
// Calls f(arguments of the slice, its first row, group) for all slices; those of a group one after another, by one
// thread.
constexpr long GROUPS = 2;  // per thread, at most
template <class Function>
static void each_slice(const BlockArguments& at, Function f) {
  long rows = rows_of_slice(at), slices = (at.B + rows - 1) / rows, groups = std::min(slices, GROUPS * at.threads);
  if (slices < 2) return f(at, 0L, 0L);
  Tasks tasks(groups, at.threads);
#pragma omp parallel num_threads(at.threads)
  tasks.run([&](long group) {
    for (long i = slices * group / groups; i < slices * (group + 1) / groups; i++)
      f(slice(at, i * rows, std::min(rows, at.B - i * rows)), i * rows, group);
  });
}

static void forward(const BlockArguments& at, const Weights<const float>& w, const Saved& all_saved, float* all_out) {
  long W = at.W, D = at.D, F = at.F, Q = at.H * D, U = at.K * D;
  int threads = at.threads;
  auto qkv = pack_forward({{w.q, Q}, {w.k, U}, {w.v, U}}, W, threads), o = pack_forward({{w.o, W}}, Q, threads);
  auto gate_up = panel_buffer(2 * round_up(F, NR), W), down = pack_forward({{w.down, W}}, F, threads);
  pack_weight(gate_up.get(), w.gate, F, W, 0, 2, 0, threads);
  pack_weight(gate_up.get(), w.up, F, W, 0, 2, 1, threads);
  each_slice(at, [&](const BlockArguments& at, long b, long) {
    Saved saved = slice(all_saved, at, b);
    long M = at.M();
    int threads = at.threads;
    rms_norm(saved.normed, saved.x, w.attention_norm, at.eps, M, W, threads);
    project(saved.qkv, saved.normed, qkv.get(), M, W, at.N() * D, threads);
    attention_forward(saved.attended, saved.lse, saved.qkv, at.rope, at.rope_rows, at.first, at.B, at.T, at.H, at.K, D,
                      threads);
    project_residual(saved.middle, saved.x, saved.attended, o.get(), M, Q, W, threads);

    rms_norm(saved.middle_normed, saved.middle, w.ffn_norm, at.eps, M, W, threads);
    auto product = aligned_buffer(M * F);
    swiglu(product.get(), saved.gate_up, saved.middle_normed, gate_up.get(), M, W, F, threads);
    project_residual(all_out + b * at.T * W, saved.middle, product.get(), down.get(), M, F, W, threads);
  });
}

// The gradient arrays: q, k and v are one, and so are gate and up.
typedef std::array<long, 6> Sizes;
static std::array<float**, 6> arrays(Weights<float>& gradients) {
  return {&gradients.attention_norm, &gradients.q,    &gradients.o,
          &gradients.ffn_norm,       &gradients.gate, &gradients.down};
}

// Weight gradients summed over the slices of a group. The first group sums in the output, the others in a buffer.
struct GradientSums {
  std::vector<float> buffer;
  Weights<float> gradients;
  bool started = false;
  void start(const Weights<float>& output, const Sizes& sizes, bool first) {
    started = true, gradients = output;
    if (first) return;
    buffer.resize(std::accumulate(sizes.begin(), sizes.end(), 0L));
    float* next = buffer.data();
    for (size_t i = 0; i < sizes.size(); i++) *arrays(gradients)[i] = next, next += sizes[i];
  }
};

static void backward(const BlockArguments& at, const Weights<const float>& w, const Saved& all_saved,
                     const Weights<float>& output, const StreamGradient& all_stream) {
  long W = at.W, D = at.D, F = at.F, Q = at.H * D, U = at.K * D, ND = at.N() * D;
  int threads = at.threads;
  auto down = pack_backward({{w.down, W}}, F, threads), gate_up = pack_backward({{w.gate, F}, {w.up, F}}, W, threads);
  auto o = pack_backward({{w.o, W}}, Q, threads), qkv = pack_backward({{w.q, Q}, {w.k, U}, {w.v, U}}, W, threads);
  const Sizes sizes = {W, ND * W, W * Q, W, 2 * F * W, W * F};
  auto& group_sums = thread_buffer<std::vector<GradientSums>>();
  group_sums.resize(std::max<size_t>(group_sums.size(), GROUPS * threads));
  for (GradientSums& sums : group_sums) sums.started = false;
  each_slice(at, [&](const BlockArguments& at, long b, long group) {
    GradientSums& sums = group_sums[group];
    bool accumulate = sums.started;
    if (!accumulate) sums.start(output, sizes, &sums == &group_sums[0]);
    const Weights<float>& grad = sums.gradients;
    Saved saved = slice(all_saved, at, b);
    StreamGradient stream = {all_stream.exact + b * at.T * W, all_stream.rounded + b * at.T * W};
    long M = at.M();
    int threads = at.threads;
    auto product = aligned_buffer(M * F), normed = aligned_buffer(M * W);
    swiglu_backward(product.get(), saved.gate_up, stream.rounded, down.get(), M, W, F, threads);
    weight_gradient(grad.down, F, stream.rounded, W, product.get(), F, accumulate, M, W, F, threads);
    weight_gradient(grad.gate, W, saved.gate_up, 2 * F, saved.middle_normed, W, accumulate, M, 2 * F, W, threads);
    project(normed.get(), saved.gate_up, gate_up.get(), M, 2 * F, W, threads);
    rms_norm_backward(stream.exact, stream.rounded, grad.ffn_norm, accumulate, stream.exact, normed.get(),
                      saved.middle, w.ffn_norm, at.eps, M, W, threads);

    auto attended = aligned_buffer(M * Q), qkv_grad = aligned_buffer(M * ND);
    project(attended.get(), stream.rounded, o.get(), M, W, Q, threads);
    weight_gradient(grad.o, Q, stream.rounded, W, saved.attended, Q, accumulate, M, W, Q, threads);
    attention_backward(qkv_grad.get(), attended.get(), saved.attended, saved.lse, saved.qkv, at.rope, at.rope_rows,
                       at.first, at.B, at.T, at.H, at.K, D, threads);
    weight_gradient(grad.q, W, qkv_grad.get(), ND, saved.normed, W, accumulate, M, ND, W, threads);
    project(normed.get(), qkv_grad.get(), qkv.get(), M, ND, W, threads);
    rms_norm_backward(stream.exact, stream.rounded, grad.attention_norm, accumulate, stream.exact, normed.get(),
                      saved.x, w.attention_norm, at.eps, M, W, threads);
  });
  for (size_t i = 0; i < sizes.size(); i++) {
    std::vector<float*> addends;
    for (GradientSums& sums : group_sums)
      if (sums.started) addends.push_back(*arrays(sums.gradients)[i]);
    if (addends.size() < 2) return;
#pragma omp parallel for num_threads(threads) schedule(static) if (sizes[i] > MIN_PARALLEL)
    for (long n = 0; n < sizes[i]; n += V) {
      Floats sum = {};
      for (float* addend : addends) sum += load(addend + n);
      store(addends[0] + n, sum);
    }
  }
}
