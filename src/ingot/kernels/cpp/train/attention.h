// Causal self-attention for training: sums and softmax in fp32.
#pragma once
#include "heads.h"

namespace attention {

// Of each of 8 vectors, all its numbers together.
template <class Function>
static inline void together(float* out, const Floats* x, Function f) {
#if defined(__AVX512F__)
  auto four = [&](const Floats* x) {
    auto two = [&](Floats a, Floats b) { return (__m512d)f(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
    __m512d ab = two(x[0], x[1]), cd = two(x[2], x[3]);
    return f((Floats)_mm512_unpacklo_pd(ab, cd), (Floats)_mm512_unpackhi_pd(ab, cd));
  };
  Floats a = four(x), b = four(x + 4);  // 4 numbers each of 4 vectors
  Floats c = f(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  store(out, f(_mm512_shuffle_f32x4(c, c, 0x88), _mm512_shuffle_f32x4(c, c, 0xdd)), 8);
#else
  float across[V][8];
  for (int i = 0; i < V; i++)
    for (int r = 0; r < 8; r++) across[i][r] = x[r][i];
  for (int r = 0; r < 8; r += V) {
    Floats all = load(across[0] + r);
    for (int i = 1; i < V; i++) all = f(all, load(across[i] + r));
    store(out + r, all);
  }
#endif
}

// Queries that are computed together: by tiles as many as leave room for their scores in the first cache.
constexpr long MOST_QUERIES = 4 * SIDE;
template <int R>
static long queries_of(long P) {
  return Factor<Number>::tiles ? std::clamp(10240 / P / SIDE * SIDE, SIDE, MOST_QUERIES) : R;
}

struct ForwardRoom {  // of a thread
  Vector<Number> query, key, value, keys, values, weight;
  Vector<float> score, mixed;
  Sight sight;
  void fit(long P, long S, long rows) {
    for (auto* x : {&query, &key, &value, &keys, &values}) x->assign(P * S, 0);
    score.resize(rows * P);
    weight.resize(rows * P);
    mixed.resize(rows * S);
  }
};

// The softmax of R rows of scores, 8 at most, those of queries from q on, in a tile of queries that begins at `tile`:
// weights, their sums, and the largest scores.
template <int R>
static inline void softmax_rows(Number* weight, float* sum, float* top, float* score, long P, const Sight& sight,
                                long q, long tile, long from, long to, float c) {
  Floats tops[8], sums[8] = {};
  for (Floats& x : tops) x = Floats{} - INFINITY;
  for (long key = from; key < to; key += V) {
    float* at = score + key - from;
    if (!sight.whole(tile, key))
      for (int r = 0; r < R; r++) store(at + r * P, sight.seen(q + r, key, load(at + r * P), -INFINITY));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) tops[r] = larger(tops[r], load(at + r * P));
  }
  together(top, tops, larger);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) tops[r] = Floats{} + top[r] * c;
  for (long i = 0; i < to - from; i += V)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      Floats p = power(load(score + r * P + i) * c - tops[r]);
      sums[r] += p;
      store(weight + r * P + i, p);
    }
  together(sum, sums, [](Floats a, Floats b) { return a + b; });
}

// Some rows of output and the logarithms of the sums of their softmax.
template <class Size>
static inline void give(Number* out, long stride, float* lse, const float* mixed, const float* sum, const float* top,
                        long rows, float c, Size D) {
  each(rows, [&](long r, auto n) {
    store(lse + r, logarithm(load(sum + r, n)) + load(top + r, n) * c / LOG2E, n);
  });
  for (long r = 0; r < rows; r++)
    for (long d = 0; d < D; d += V) store(out + r * stride + d, load(mixed + r * D + d) * (1 / sum[r]));
}

// Some queries of a head, from q on: their output and the logarithms of the sums of their softmax.
template <int R, class Size>
static void forward_rows(Number* out, long stride, float* lse, ForwardRoom& room, long q, long rows, long P, Size D,
                         std::integral_constant<int, R>) {
  float c = LOG2E / std::sqrt(float(D)), *score = room.score.data(), *mixed = room.mixed.data(), sum[16], top[16];
  long from = room.sight.low[q], to = up(q + R, V);
  Rows queries = {&room.query[q * D], D}, weights = {room.weight.data(), P};
  multiply<R>(false, score, P, queries, Panels<Size>{&room.keys[from * D], D}, (to - from) / V, D / PAIR);
  softmax_rows<R>(room.weight.data(), sum, top, score, P, room.sight, q, q, from, to, c);
  multiply<R>(false, mixed, D, weights, Pairs<Size>{&room.values[from * D], D}, D / V, (q + R - from) / PAIR);
  give(out, stride, lse, mixed, sum, top, rows, c, D);
}

#if HAS_TILES
// The same by tiles of 16 queries, several at a time: what one step writes another one reads later, not at once.
template <class Size>
static void forward_rows(Number* out, long stride, float* lse, ForwardRoom& room, long q, long rows, long P, Size D,
                         std::integral_constant<int, SIDE>) {
  const Sight& sight = room.sight;
  auto S = filled(D);
  constexpr long size = sizeof(Number);
  float c = LOG2E / std::sqrt(float(D)), *score = room.score.data(), *mixed = room.mixed.data();
  float sum[MOST_QUERIES], top[MOST_QUERIES];
  Number* weight = room.weight.data();
  long end = q + up(rows, SIDE);
  for (long t = q; t < end; t += SIDE) {
    long from = sight.low[t];
    multiply_tiles<1>(false, score + (t - q) * P, P, &room.query[t * S], S,
                      {&room.keys[from * S], LINE, S * V * size}, (t + SIDE - from) / V, S);
  }
  for (long t = q; t < end; t += 8) {
    long at = t - q, tile = t / SIDE * SIDE, from = sight.low[tile], to = tile + SIDE;
    softmax_rows<8>(weight + at * P, sum + at, top + at, score + at * P, P, sight, t, tile, from, to, c);
    if ((to - from) % DEEP)
      for (int r = 0; r < 8; r++) store(weight + (at + r) * P + to - from, Floats{});
  }
  for (long t = q; t < end; t += SIDE) {
    long from = sight.low[t], keys = up(t + SIDE - from, DEEP);
    multiply_tiles<1>(false, mixed + (t - q) * D, D, weight + (t - q) * P, P, {&room.values[from * S], S * 2 * size},
                      D / V, keys);
  }
  give(out, stride, lse, mixed, sum, top, rows, c, D);
}
#endif

template <int R, class Size>
static void forward(Number* out, float* lse, Number* qkv, const float* turn, long turns, const int32_t* first, Shape s,
                    Size D, int threads) {
  long P = s.padded(), T = s.T, N = s.heads(), group = s.H / s.K;
  long queries = queries_of<R>(P);
  auto S = filled(D);
  Tasks tasks(s.B * s.K, threads);
#pragma omp parallel num_threads(threads)
  {
    ForwardRoom& room = own<ForwardRoom>();
    Tools tools(SIDE);
    room.fit(P, S, std::max(queries, 8L));
    tasks.work([&](long task) {
      long b = task / s.K, k = task % s.K;
      const float* angle = turn ? turn + (turns == 1 ? 0 : b) * T * D : nullptr;
      auto take = [=](Number* to, long head, bool rotates) {
        Number* x = qkv + (b * T * N + head) * D;
        for (long t = 0; t < T; t++, to += S, x += N * D) {
          if (rotates && angle) turned(x, x, angle + t * D, 1, 1, D);
          copy_features(to, x, D);
        }
      };
      room.sight.look<R>(first ? first + b * T : nullptr, T, P);
      take(room.key.data(), s.H + k, true);
      take(room.value.data(), s.H + s.K + k, false);
      put_panels(room.keys.data(), room.key.data(), T, S);
      put_pairs(room.values.data(), room.value.data(), T, S);
      for (long h = k * group; h < (k + 1) * group; h++) {
        take(room.query.data(), h, true);
        Soon soon(T, D);
        soon.next(qkv, b, h, s);
        for (long q = 0; q < T; q += queries) {
          soon.ask(q, std::min(queries, T - q));
          forward_rows(out + ((b * T + q) * s.H + h) * D, s.H * D, lse + (b * s.H + h) * T + q, room, q,
                       std::min(queries, T - q), P, D, std::integral_constant<int, R>());
        }
      }
    });
  }
}

}  // namespace attention

// Output, B x T x H D, and the logarithms of the sums of exponentials, B x H x T, of qkv, B x T x N x D, whose queries
// and keys are rotated in place where there is a turn, (B or 1) x T x D, cosines and then sines. Token t of a row sees
// those from first[t], which is t at most, to itself. D is a multiple of 16, 256 at most; H one of K.
static void attention_forward(Number* out, float* lse, Number* qkv, const float* turn, long turns, const int32_t* first,
                              long B, long T, long H, long K, long D, int threads) {
  attention::sized(D, [&](auto R, auto size) {
    attention::forward<R.value>(out, lse, qkv, turn, turns, first, {B, T, H, K, D}, size, threads);
  });
}
