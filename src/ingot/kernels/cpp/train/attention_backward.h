// The gradient of causal self-attention.
#pragma once
#include "heads.h"

namespace attention {

constexpr bool TURNED = Factor<Number>::tiles;  // probabilities are computed by key, not by query

// Of a thread: a head's numbers, its gradients, and what is between a block of queries and one of keys. Panels hold keys
// and values, or queries and the output's gradient where probabilities are computed by key.
struct BackwardRoom {
  Vector<Number> query, key, value, gradient, score_panels, slope_panels, key_pairs, query_pairs, gradient_pairs;
  Vector<Number> slopes, slope_pairs, weights;
  Vector<float> log, delta, dquery, dkey, dvalue, score, slope;
  Sight sight;
  void fit(long P, long S, long D) {
    for (auto* x : {&query, &key, &value, &gradient, &score_panels, &slope_panels}) x->assign(P * S, 0);
    for (auto* x : {&key_pairs, &query_pairs, &gradient_pairs}) x->assign(P * S, 0);
    for (auto* x : {&dquery, &dkey, &dvalue}) x->resize(P * D);
    log.assign(P, 0);
    delta.assign(P, 0);
    for (auto* x : {&slopes, &slope_pairs, &weights}) x->resize(BLOCK * BLOCK);
    for (auto* x : {&score, &slope}) x->resize((TURNED ? DEEP : 8) * BLOCK);
  }
};

// Numbers of PAIR rows and V columns as rows, as pairs of the rows' numbers, and as both.
static inline void put_pairs(float* to, const Floats* x) { store(to, *x); }
static inline void put_both(float* rows, float* pairs, const Floats* x) { store(rows, *x), store(pairs, *x); }
#if defined(__AVX512BF16__)
static inline void put_pairs(bf16* to, const Floats* x) { put(to, pair(rounded(x[0], x[1]))); }
static inline Ints put_rows(bf16* to, const Floats* x) {  // as pairs, too
  __m512i both = rounded(x[0], x[1]);
  _mm256_storeu_si256((__m256i*)to, _mm512_castsi512_si256(both));
  _mm256_storeu_si256((__m256i*)(to + BLOCK), _mm512_extracti64x4_epi64(both, 1));
  return pair(both);
}
static inline void put_both(bf16* rows, bf16* pairs, const Floats* x) { put(pairs, put_rows(rows, x)); }
#endif
#if HAS_TILES
static inline Ints put_rows(float*, const Floats*) { return Ints{}; }  // never called: tiles are bf16's
static inline Ints ints(const int* p) { return (Ints)load((const float*)p); }
#endif

// Probabilities and slopes of R queries, from q on, and the block's keys; q0 and k0 begin the block. A slope is the
// gradient of a score before its scale.
template <int R, class Size>
static void slope_rows(BackwardRoom& room, long q, long q0, long k0, Size D) {
  const Sight& sight = room.sight;
  long from = std::max<long>(k0, sight.low[q]), to = std::min(k0 + BLOCK, up(q + R, V)), at = (q - q0) * BLOCK;
  Number *weights = &room.weights[at], *pairs = &room.slope_pairs[at], *slopes = &room.slopes[at];
  if (from > k0 || to < k0 + BLOCK)
    for (Number* x : {weights, pairs}) memset(x, 0, R * BLOCK * sizeof(Number));
  if (from >= to) return;
  auto dots = [&](Vector<float>& out, const Vector<Number>& rows, const Vector<Number>& panels) {
    multiply<R>(false, out.data(), BLOCK, Rows{&rows[q * D], D}, Panels<Size>{&panels[from * D], D}, (to - from) / V,
                D / PAIR);
  };
  dots(room.score, room.query, room.score_panels);
  dots(room.slope, room.gradient, room.slope_panels);
  float c = LOG2E / std::sqrt(float(D)), *log = &room.log[q], *delta = &room.delta[q];
  for (long key = from; key < to; key += V) {
    bool whole = sight.whole(q, key);
    const float *score = &room.score[key - from], *slope = &room.slope[key - from];
    long column = key - k0;
#pragma GCC unroll 8
    for (int r = 0; r < R; r += PAIR) {
      Floats p[PAIR], ds[PAIR];
#pragma GCC unroll 2
      for (int i = 0; i < PAIR; i++) {
        p[i] = power(load(score + (r + i) * BLOCK) * c - log[r + i]);
        if (!whole) p[i] = sight.seen(q + r + i, key, p[i], 0);
        ds[i] = p[i] * (load(slope + (r + i) * BLOCK) - delta[r + i]);
      }
      put_pairs(weights + r * BLOCK + column * PAIR, p);
      put_both(slopes + r * BLOCK + column, pairs + r * BLOCK + column * PAIR, ds);
    }
  }
  multiply<R>(from > sight.low[q], &room.dquery[q * D], D, Rows{slopes + from - k0, BLOCK},
              Pairs<Size>{&room.key_pairs[from * D], D}, D / V, (std::min(to, q + R) - from) / PAIR);
}

// The gradients of a head's queries, and of its keys and values; these may be added to those of another head.
template <int R, class Size>
static void backward_head(BackwardRoom& room, bool add, const Soon& soon, long T, Size D,
                          std::integral_constant<int, R>) {
  const Sight& sight = room.sight;
  for (long k0 = 0; k0 < T; k0 += BLOCK)
    for (long q0 = k0; q0 < T; q0 += BLOCK) {
      long end = std::min(q0 + BLOCK, up(T, R));
      for (long q = q0; q < end; q += R) {
        if (q0 == k0) soon.ask(q, std::min<long>(R, T - q));
        slope_rows<R>(room, q, q0, k0, D);
      }
      for (long key = k0; key < std::min(k0 + BLOCK, T); key += R) {
        long from = std::max(q0, key), to = end;
        while (to > from && sight.low[to - R] >= key + R) to -= R;
        if (from >= to) continue;
        long at = (from - q0) * BLOCK + (key - k0) * PAIR;
        auto mix = [&](Vector<float>& out, const Vector<Number>& weights, const Vector<Number>& pairs) {
          multiply<R>(add || q0 > k0, &out[key * D], D, Transposed{&weights[at]}, Pairs<Size>{&pairs[from * D], D},
                      D / V, (to - from) / PAIR);
        };
        mix(room.dvalue, room.weights, room.gradient_pairs);
        mix(room.dkey, room.slope_pairs, room.query_pairs);
      }
    }
}

#if HAS_TILES
// The same by tiles. Scores are those of keys and queries, whose probabilities and slopes lie as rows of keys then, as
// the gradients of keys and values read them; slopes are turned for that of queries. What one step writes another one
// reads later, not at once.
template <class Size>
static void backward_head(BackwardRoom& room, bool add, const Soon& soon, long T, Size D,
                          std::integral_constant<int, SIDE>) {
  const Sight& sight = room.sight;
  auto S = filled(D);
  constexpr long size = sizeof(Number);
  float c = LOG2E / std::sqrt(float(D)), *score = room.score.data(), *slope = room.slope.data();
  for (long k0 = 0; k0 < T; k0 += DEEP) {
    long end = up(T, SIDE);
    while (end > k0 && sight.low[end - SIDE] >= k0 + DEEP) end -= SIDE;
    for (long q0 = k0; q0 < end; q0 += BLOCK) {
      long to = std::min(q0 + BLOCK, end), queries = up(to - q0, DEEP);
      auto dots = [&](float* out, const Vector<Number>& rows, const Vector<Number>& panels) {
        multiply_tiles<2>(false, out, BLOCK, &rows[k0 * S], S, {&panels[q0 * S], LINE, S * V * size}, (to - q0) / V, S);
      };
      dots(score, room.key, room.score_panels);
      dots(slope, room.value, room.slope_panels);
      for (long q = q0; q < to; q += V) {
        if (k0 == 0) soon.ask(q, std::min(SIDE, T - q));
        bool whole = sight.whole(q, k0 + DEEP - V) && sight.high[q] <= k0;
        Floats log = load(&room.log[q]), delta = load(&room.delta[q]);
        Ints first = ints(&sight.first[q]), own = lanes() + (int)q;
        Number *weights = &room.weights[q - q0], *slopes = &room.slopes[q - q0];
        Ints square[V];
#pragma GCC unroll 4
        for (int key = 0; key < DEEP; key += 2) {
          Floats p[2], ds[2];
          for (int i = 0; i < 2; i++) {
            const long at = (key + i) * BLOCK + q - q0;
            p[i] = power(load(score + at) * c - log);
            if (!whole) {
              int here = k0 + key + i;
              p[i] = (first <= here) & (own >= here) ? p[i] : Floats{};
            }
            ds[i] = p[i] * (load(slope + at) - delta);
          }
          put_rows(weights + key * BLOCK, p);
          square[key / 2] = put_rows(slopes + key * BLOCK, ds);
        }
        transpose(square);
        for (int i = 0; i < V; i++) put(&room.slope_pairs[(q - q0 + i) * DEEP], square[i]);
      }
      for (long q = to; q < q0 + queries; q += V)
        for (int key = 0; key < DEEP; key++)
          for (auto* x : {&room.weights, &room.slopes}) store(&(*x)[key * BLOCK + q - q0], Floats{});
      for (long q = q0; q < to; q += V)
        multiply_tiles<1>(k0 > sight.low[q], &room.dquery[q * D], D, &room.slope_pairs[(q - q0) * DEEP], DEEP,
                          {&room.key_pairs[k0 * S], S * 2 * size}, D / V, DEEP);
      auto mix = [&](Vector<float>& out, const Vector<Number>& rows, const Vector<Number>& pairs) {
        multiply_tiles<2>(add || q0 > k0, &out[k0 * D], D, &rows[0], BLOCK, {&pairs[q0 * S], S * 2 * size}, D / V,
                          queries);
      };
      mix(room.dvalue, room.weights, room.gradient_pairs);
      mix(room.dkey, room.slopes, room.query_pairs);
    }
  }
}
#endif

template <int R, class Size>
static void backward(Number* dqkv, const Number* dout, const Number* out, const float* lse, const Number* qkv,
                     const float* turn, long turns, const int32_t* first, Shape s, Size D, int threads) {
  long P = s.padded(), T = s.T, N = s.heads(), group = s.H / s.K;
  float scale = 1 / std::sqrt(float(D));
  auto S = filled(D);
  Tasks tasks(s.B * s.K, threads);
#pragma omp parallel num_threads(threads)
  {
    BackwardRoom& room = own<BackwardRoom>();
    room.fit(P, S, D);
    Tools tools(SIDE);
    tasks.work([&](long task) {
      long b = task / s.K, k = task % s.K;
      const float* angle = turn ? turn + (turns == 1 ? 0 : b) * T * D : nullptr;
      auto take = [T, D, S](Vector<Number>& room, const Number* from, long stride) {
        Number* to = room.data();
        for (long t = 0; t < T; t++) copy_features(to + t * S, from + t * stride, D);
      };
      auto take_head = [&](Vector<Number>& to, long head) { take(to, qkv + (b * T * N + head) * D, N * D); };
      auto give = [&](const Vector<float>& from, long head, float scale, const float* angle) {
        for (long t = 0; t < T; t++)
          turned(dqkv + ((b * T + t) * N + head) * D, &from[t * D], angle ? angle + t * D : nullptr, -1, scale, D);
      };
      room.sight.look<R>(first ? first + b * T : nullptr, T, P);
      take_head(room.key, s.H + k);
      take_head(room.value, s.H + s.K + k);
      if (!TURNED) {
        put_panels(room.score_panels.data(), room.key.data(), T, S);
        put_panels(room.slope_panels.data(), room.value.data(), T, S);
      }
      put_pairs(room.key_pairs.data(), room.key.data(), T, S);
      for (long h = k * group; h < (k + 1) * group; h++) {
        take_head(room.query, h);
        take(room.gradient, dout + (b * T * s.H + h) * D, s.H * D);
        if (TURNED) {
          put_panels(room.score_panels.data(), room.query.data(), T, S);
          put_panels(room.slope_panels.data(), room.gradient.data(), T, S);
        }
        put_pairs(room.query_pairs.data(), room.query.data(), T, S);
        put_pairs(room.gradient_pairs.data(), room.gradient.data(), T, S);
        const Number *mixed = out + (b * T * s.H + h) * D, *gradient = room.gradient.data();
        for (long t = 0; t < T; t += 4) {
          Floats sums[4] = {};
          for (long i = 0; i < std::min(4L, T - t); i++)
            for (long d = 0; d < D; d += V)
              sums[i] += wide(mixed + (t + i) * s.H * D + d) * wide(gradient + (t + i) * S + d);
          totals<4>(sums, &room.delta[t]);
        }
        for (long t = 0; t < T; t++) room.log[t] = lse[(b * s.H + h) * T + t] * LOG2E;
        Soon soon(T, D);
        soon.next(qkv, b, h, s);
        long last = b * s.H + h == s.B * s.H - 1, next = h + 1 < s.H || last ? h + 1 - last : T * s.H;
        for (const Number* x : {dout, out}) soon.add(x + (b * T * s.H + next) * D, s.H * D);
        for (long head : {h, s.H + k, s.H + s.K + k}) soon.add(dqkv + (b * T * N + head) * D, N * D);
        backward_head(room, h > k * group, soon, T, D, std::integral_constant<int, R>());
        give(room.dquery, h, scale, angle);
      }
      give(room.dkey, s.H + k, scale, angle);
      give(room.dvalue, s.H + s.K + k, 1, nullptr);
    });
  }
}

}  // namespace attention

// Gradients of qkv before its rotation, from qkv as the forward left it.
static void attention_backward(Number* dqkv, const Number* dout, const Number* out, const float* lse, const Number* qkv,
                               const float* turn, long turns, const int32_t* first, long B, long T, long H, long K,
                               long D, int threads) {
  attention::sized(D, [&](auto R, auto size) {
    attention::backward<R.value>(dqkv, dout, out, lse, qkv, turn, turns, first, {B, T, H, K, D}, size, threads);
  });
}
