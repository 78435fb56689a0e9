// Causal self-attention for training. Sums and softmax are in fp32.
#pragma once
#include "heads.h"

namespace attention {

// Reduces each of 8 vectors to one number.
template <class Function>
static inline void reduce_8(float* out, const Floats* x, Function f) {
#if defined(__AVX512F__)
  auto reduce_4 = [&](const Floats* x) {
    auto two = [&](Floats a, Floats b) { return (__m512d)f(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
    __m512d ab = two(x[0], x[1]), cd = two(x[2], x[3]);
    return f((Floats)_mm512_unpacklo_pd(ab, cd), (Floats)_mm512_unpackhi_pd(ab, cd));
  };
  Floats a = reduce_4(x), b = reduce_4(x + 4);  // 4 numbers each of 4 vectors
  Floats c = f(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  store(out, f(_mm512_shuffle_f32x4(c, c, 0x88), _mm512_shuffle_f32x4(c, c, 0xdd)), 8);
#else
  float transposed[V][8];
  for (int i = 0; i < V; i++)
    for (int r = 0; r < 8; r++) transposed[i][r] = x[r][i];
  for (int r = 0; r < 8; r += V) {
    Floats all = load(transposed[0] + r);
    for (int i = 1; i < V; i++) all = f(all, load(transposed[i] + r));
    store(out + r, all);
  }
#endif
}

// Queries of a block: with matrix tiles as many as leave room for their scores in L1.
constexpr long MAX_QUERIES = 4 * TILE;
template <int R>
static long block_queries(long P) {
  return Operand<Number>::amx ? std::clamp(10240 / P / TILE * TILE, TILE, MAX_QUERIES) : R;
}

struct ForwardBuffers {  // of a thread
  AlignedVector<Number> query, key, value, keys, values, weight;  // `keys` and `values` are packed
  AlignedVector<float> score, output;
  VisibleKeys visible;
  void resize(long P, long S, long rows) {
    for (auto* x : {&query, &key, &value, &keys, &values}) x->assign(P * S, 0);
    score.resize(rows * P);
    weight.resize(rows * P);
    output.resize(rows * S);
  }
};

// The softmax of R <= 8 rows of scores of the queries from q on, which are part of the tile of queries at `tile`.
// Writes weights exp2(c (score - max)), their sums, and the largest scores. Keys are `from` to `to`.
template <int R>
static inline void softmax_rows(Number* weight, float* sum, float* max, float* score, long P,
                                const VisibleKeys& visible, long q, long tile, long from, long to, float c) {
  Floats maxima[8], sums[8] = {};
  for (Floats& x : maxima) x = Floats{} - INFINITY;
  for (long key = from; key < to; key += V) {
    float* at = score + key - from;
    if (!visible.all_visible(tile, key))
      for (int r = 0; r < R; r++) store(at + r * P, visible.mask(q + r, key, load(at + r * P), -INFINITY));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) maxima[r] = maximum(maxima[r], load(at + r * P));
  }
  reduce_8(max, maxima, maximum);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) maxima[r] = Floats{} + max[r] * c;
  for (long i = 0; i < to - from; i += V)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      Floats p = vec_exp2(load(score + r * P + i) * c - maxima[r]);
      sums[r] += p;
      store(weight + r * P + i, p);
    }
  reduce_8(sum, sums, [](Floats a, Floats b) { return a + b; });
}

// Writes rows of the output, divided by the sums of their weights, and the log-sum-exp of their scores.
template <class Size>
static inline void write_output(Number* out, long stride, float* lse, const float* output, const float* sum,
                                const float* max, long rows, float c, Size D) {
  each(rows, [&](long r, auto n) {
    store(lse + r, vec_log(load(sum + r, n)) + load(max + r, n) * c / LOG2E, n);
  });
  for (long r = 0; r < rows; r++)
    for (long d = 0; d < D; d += V) store(out + r * stride + d, load(output + r * D + d) * (1 / sum[r]));
}

// A block of queries of a head, from q on: output and log-sum-exp.
template <int R, class Size>
static void forward_rows(Number* out, long stride, float* lse, ForwardBuffers& buffers, long q, long rows, long P,
                         Size D, std::integral_constant<int, R>) {
  float c = LOG2E / std::sqrt(float(D)), *score = buffers.score.data(), *output = buffers.output.data();
  float sum[16], max[16];
  long from = buffers.visible.low[q], to = round_up(q + R, V);
  Rows queries = {&buffers.query[q * D], D}, weights = {buffers.weight.data(), P};
  multiply<R>(false, score, P, queries, Panels<Size>{&buffers.keys[from * D], D}, (to - from) / V, D / PAIR);
  softmax_rows<R>(buffers.weight.data(), sum, max, score, P, buffers.visible, q, q, from, to, c);
  multiply<R>(false, output, D, weights, Pairs<Size>{&buffers.values[from * D], D}, D / V, (q + R - from) / PAIR);
  write_output(out, stride, lse, output, sum, max, rows, c, D);
}

#if HAS_AMX
// The same with matrix tiles of 16 queries. Each step runs for the whole block of queries before the next one, because
// what tiles have just stored is slow to load.
template <class Size>
static void forward_rows(Number* out, long stride, float* lse, ForwardBuffers& buffers, long q, long rows, long P,
                         Size D, std::integral_constant<int, TILE>) {
  const VisibleKeys& visible = buffers.visible;
  auto S = padded_features(D);
  constexpr long size = sizeof(Number);
  float c = LOG2E / std::sqrt(float(D)), *score = buffers.score.data(), *output = buffers.output.data();
  float sum[MAX_QUERIES], max[MAX_QUERIES];
  Number* weight = buffers.weight.data();
  long end = q + round_up(rows, TILE);
  for (long t = q; t < end; t += TILE) {
    long from = visible.low[t];
    multiply_tiles<1>(false, score + (t - q) * P, P, &buffers.query[t * S], S,
                      {&buffers.keys[from * S], TILE_BYTES, S * V * size}, (t + TILE - from) / V, S);
  }
  for (long t = q; t < end; t += 8) {
    long at = t - q, tile = t / TILE * TILE, from = visible.low[tile], to = tile + TILE;
    softmax_rows<8>(weight + at * P, sum + at, max + at, score + at * P, P, visible, t, tile, from, to, c);
    if ((to - from) % TILE_K)
      for (int r = 0; r < 8; r++) store(weight + (at + r) * P + to - from, Floats{});
  }
  for (long t = q; t < end; t += TILE) {
    long from = visible.low[t], keys = round_up(t + TILE - from, TILE_K);
    multiply_tiles<1>(false, output + (t - q) * D, D, weight + (t - q) * P, P,
                      {&buffers.values[from * S], S * 2 * size}, D / V, keys);
  }
  write_output(out, stride, lse, output, sum, max, rows, c, D);
}
#endif

template <int R, class Size>
static void forward(Number* out, float* lse, Number* qkv, const float* rope, long rope_rows, const int32_t* first,
                    Shape s, Size D, int threads) {
  long P = s.padded(), T = s.T, N = s.heads(), group = s.H / s.K;
  long queries = block_queries<R>(P);
  auto S = padded_features(D);
  Tasks tasks(s.B * s.K, threads);
#pragma omp parallel num_threads(threads)
  {
    ForwardBuffers& buffers = thread_buffer<ForwardBuffers>();
    ThreadSetup setup(TILE);
    buffers.resize(P, S, std::max(queries, 8L));
    tasks.run([&](long task) {
      long b = task / s.K, k = task % s.K;
      const float* angles = rope ? rope + (rope_rows == 1 ? 0 : b) * T * D : nullptr;
      auto copy_head = [=](Number* to, long head, bool rotate) {
        Number* x = qkv + (b * T * N + head) * D;
        for (long t = 0; t < T; t++, to += S, x += N * D) {
          if (rotate && angles) apply_rope(x, x, angles + t * D, 1, 1, D);
          copy_features(to, x, D);
        }
      };
      buffers.visible.set<R>(first ? first + b * T : nullptr, T, P);
      copy_head(buffers.key.data(), s.H + k, true);
      copy_head(buffers.value.data(), s.H + s.K + k, false);
      pack_panels(buffers.keys.data(), buffers.key.data(), T, S);
      pack_pairs(buffers.values.data(), buffers.value.data(), T, S);
      for (long h = k * group; h < (k + 1) * group; h++) {
        copy_head(buffers.query.data(), h, true);
        HeadPrefetch ahead(T, D);
        ahead.add_next_head(qkv, b, h, s);
        for (long q = 0; q < T; q += queries) {
          ahead.prefetch_rows(q, std::min(queries, T - q));
          forward_rows(out + ((b * T + q) * s.H + h) * D, s.H * D, lse + (b * s.H + h) * T + q, buffers, q,
                       std::min(queries, T - q), P, D, std::integral_constant<int, R>());
        }
      }
    });
  }
}

}  // namespace attention

// Output, B x T x H D, and log-sum-exp of the scores, B x H x T, of qkv, B x T x N x D. Rotates queries and keys in
// place if there is a rope, (B or 1) x T x D, cosines and then sines. Token t attends to tokens first[t] to t. D is a
// multiple of 16, at most 256; H is a multiple of K.
static void attention_forward(Number* out, float* lse, Number* qkv, const float* rope, long rope_rows,
                              const int32_t* first, long B, long T, long H, long K, long D, int threads) {
  attention::dispatch_head_size(D, [&](auto R, auto size) {
    attention::forward<R.value>(out, lse, qkv, rope, rope_rows, first, {B, T, H, K, D}, size, threads);
  });
}
