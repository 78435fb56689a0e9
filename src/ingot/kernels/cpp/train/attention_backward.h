// The gradient of causal self-attention.
//
// p: probabilities, ds: gradients of the scores before their scale, delta: dout . out of each query.
#pragma once
#include "heads.h"

namespace attention {

constexpr bool KEY_MAJOR = Operand<Number>::amx;  // whether blocks of probabilities have rows of keys, not of queries

// Buffers of a thread: the operands and gradients of a head, and a block of probabilities and score gradients. Score
// panels are packed keys and dprob panels packed values; if key-major, packed queries and output gradients.
struct BackwardBuffers {
  AlignedVector<Number> query, key, value, dout, score_panels, dprob_panels, key_pairs, query_pairs, dout_pairs;
  AlignedVector<Number> ds, ds_pairs, p;
  AlignedVector<float> lse, delta, dquery, dkey, dvalue, score, dprob;
  VisibleKeys visible;
  void resize(long P, long S, long D) {
    for (auto* x : {&query, &key, &value, &dout, &score_panels, &dprob_panels}) x->assign(P * S, 0);
    for (auto* x : {&key_pairs, &query_pairs, &dout_pairs}) x->assign(P * S, 0);
    for (auto* x : {&dquery, &dkey, &dvalue}) x->resize(P * D);
    lse.assign(P, 0);
    delta.assign(P, 0);
    for (auto* x : {&ds, &ds_pairs, &p}) x->resize(BLOCK * BLOCK);
    for (auto* x : {&score, &dprob}) x->resize((KEY_MAJOR ? TILE_K : 8) * BLOCK);
  }
};

// Store PAIR rows of V columns as pairs of the rows' numbers, as rows and as pairs, or as rows (returns the pairs).
static inline void store_pairs(float* to, const Floats* x) { store(to, *x); }
static inline void store_rows_and_pairs(float* rows, float* pairs, const Floats* x) {
  store(rows, *x), store(pairs, *x);
}
#if defined(__AVX512BF16__)
static inline void store_pairs(bf16* to, const Floats* x) { store_ints(to, interleave(round_bf16(x[0], x[1]))); }
static inline Ints store_rows(bf16* to, const Floats* x) {
  __m512i both = round_bf16(x[0], x[1]);
  _mm256_storeu_si256((__m256i*)to, _mm512_castsi512_si256(both));
  _mm256_storeu_si256((__m256i*)(to + BLOCK), _mm512_extracti64x4_epi64(both, 1));
  return interleave(both);
}
static inline void store_rows_and_pairs(bf16* rows, bf16* pairs, const Floats* x) {
  store_ints(pairs, store_rows(rows, x));
}
#endif
#if HAS_AMX
static inline Ints store_rows(float*, const Floats*) { return Ints{}; }  // never called: tiles are for bf16
static inline Ints load_ints(const int* p) { return (Ints)load((const float*)p); }
#endif

// Probabilities and score gradients of R queries, from q on, and the keys of a block. The block starts at (q0, k0).
// Also adds to the gradients of the queries.
template <int R, class Size>
static void score_gradient_rows(BackwardBuffers& buffers, long q, long q0, long k0, Size D) {
  const VisibleKeys& visible = buffers.visible;
  long from = std::max<long>(k0, visible.low[q]), to = std::min(k0 + BLOCK, round_up(q + R, V)), at = (q - q0) * BLOCK;
  Number *p_pairs = &buffers.p[at], *ds_pairs = &buffers.ds_pairs[at], *ds_rows = &buffers.ds[at];
  if (from > k0 || to < k0 + BLOCK)
    for (Number* x : {p_pairs, ds_pairs}) memset(x, 0, R * BLOCK * sizeof(Number));
  if (from >= to) return;
  auto dots = [&](AlignedVector<float>& out, const AlignedVector<Number>& rows, const AlignedVector<Number>& panels) {
    multiply<R>(false, out.data(), BLOCK, Rows{&rows[q * D], D}, Panels<Size>{&panels[from * D], D}, (to - from) / V,
                D / PAIR);
  };
  dots(buffers.score, buffers.query, buffers.score_panels);
  dots(buffers.dprob, buffers.dout, buffers.dprob_panels);
  float c = LOG2E / std::sqrt(float(D)), *lse = &buffers.lse[q], *delta = &buffers.delta[q];
  for (long key = from; key < to; key += V) {
    bool all_visible = visible.all_visible(q, key);
    const float *score = &buffers.score[key - from], *dprob = &buffers.dprob[key - from];
    long column = key - k0;
#pragma GCC unroll 8
    for (int r = 0; r < R; r += PAIR) {
      Floats p[PAIR], ds[PAIR];
#pragma GCC unroll 2
      for (int i = 0; i < PAIR; i++) {
        p[i] = vec_exp2(load(score + (r + i) * BLOCK) * c - lse[r + i]);
        if (!all_visible) p[i] = visible.mask(q + r + i, key, p[i], 0);
        ds[i] = p[i] * (load(dprob + (r + i) * BLOCK) - delta[r + i]);
      }
      store_pairs(p_pairs + r * BLOCK + column * PAIR, p);
      store_rows_and_pairs(ds_rows + r * BLOCK + column, ds_pairs + r * BLOCK + column * PAIR, ds);
    }
  }
  multiply<R>(from > visible.low[q], &buffers.dquery[q * D], D, Rows{ds_rows + from - k0, BLOCK},
              Pairs<Size>{&buffers.key_pairs[from * D], D}, D / V, (std::min(to, q + R) - from) / PAIR);
}

// The gradients of a head's queries, keys and values. With `add` those of keys and values are added to those of another
// query head.
template <int R, class Size>
static void backward_head(BackwardBuffers& buffers, bool add, const HeadPrefetch& ahead, long T, Size D,
                          std::integral_constant<int, R>) {
  const VisibleKeys& visible = buffers.visible;
  for (long k0 = 0; k0 < T; k0 += BLOCK)
    for (long q0 = k0; q0 < T; q0 += BLOCK) {
      long end = std::min(q0 + BLOCK, round_up(T, R));
      for (long q = q0; q < end; q += R) {
        if (q0 == k0) ahead.prefetch_rows(q, std::min<long>(R, T - q));
        score_gradient_rows<R>(buffers, q, q0, k0, D);
      }
      for (long key = k0; key < std::min(k0 + BLOCK, T); key += R) {
        long from = std::max(q0, key), to = end;
        while (to > from && visible.low[to - R] >= key + R) to -= R;
        if (from >= to) continue;
        long at = (from - q0) * BLOCK + (key - k0) * PAIR;
        auto sum_over_queries = [&](AlignedVector<float>& out, const AlignedVector<Number>& weights,
                                    const AlignedVector<Number>& pairs) {
          multiply<R>(add || q0 > k0, &out[key * D], D, Transposed{&weights[at]}, Pairs<Size>{&pairs[from * D], D},
                      D / V, (to - from) / PAIR);
        };
        sum_over_queries(buffers.dvalue, buffers.p, buffers.dout_pairs);
        sum_over_queries(buffers.dkey, buffers.ds_pairs, buffers.query_pairs);
      }
    }
}

#if HAS_AMX
// The same with matrix tiles. Scores are key-major, so probabilities and score gradients are rows of keys, as the
// gradients of keys and values read them; score gradients are transposed for the gradient of the queries. Each step
// runs for a complete block before the next one, because what tiles have just stored is slow to load.
template <class Size>
static void backward_head(BackwardBuffers& buffers, bool add, const HeadPrefetch& ahead, long T, Size D,
                          std::integral_constant<int, TILE>) {
  const VisibleKeys& visible = buffers.visible;
  auto S = padded_features(D);
  constexpr long size = sizeof(Number);
  float c = LOG2E / std::sqrt(float(D)), *score = buffers.score.data(), *dprob = buffers.dprob.data();
  for (long k0 = 0; k0 < T; k0 += TILE_K) {
    long end = round_up(T, TILE);
    while (end > k0 && visible.low[end - TILE] >= k0 + TILE_K) end -= TILE;
    for (long q0 = k0; q0 < end; q0 += BLOCK) {
      long to = std::min(q0 + BLOCK, end), queries = round_up(to - q0, TILE_K);
      auto dots = [&](float* out, const AlignedVector<Number>& rows, const AlignedVector<Number>& panels) {
        multiply_tiles<2>(false, out, BLOCK, &rows[k0 * S], S, {&panels[q0 * S], TILE_BYTES, S * V * size},
                          (to - q0) / V, S);
      };
      dots(score, buffers.key, buffers.score_panels);
      dots(dprob, buffers.value, buffers.dprob_panels);
      for (long q = q0; q < to; q += V) {
        if (k0 == 0) ahead.prefetch_rows(q, std::min(TILE, T - q));
        bool all_visible = visible.all_visible(q, k0 + TILE_K - V) && visible.high[q] <= k0;
        Floats lse = load(&buffers.lse[q]), delta = load(&buffers.delta[q]);
        Ints first = load_ints(&visible.first[q]), query = lane_index() + (int)q;
        Number *p_rows = &buffers.p[q - q0], *ds_rows = &buffers.ds[q - q0];
        Ints square[V];
#pragma GCC unroll 4
        for (int key = 0; key < TILE_K; key += 2) {
          Floats p[2], ds[2];
          for (int i = 0; i < 2; i++) {
            const long at = (key + i) * BLOCK + q - q0;
            p[i] = vec_exp2(load(score + at) * c - lse);
            if (!all_visible) {
              int position = k0 + key + i;
              p[i] = (first <= position) & (query >= position) ? p[i] : Floats{};
            }
            ds[i] = p[i] * (load(dprob + at) - delta);
          }
          store_rows(p_rows + key * BLOCK, p);
          square[key / 2] = store_rows(ds_rows + key * BLOCK, ds);
        }
        transpose(square);
        for (int i = 0; i < V; i++) store_ints(&buffers.ds_pairs[(q - q0 + i) * TILE_K], square[i]);
      }
      for (long q = to; q < q0 + queries; q += V)
        for (int key = 0; key < TILE_K; key++)
          for (auto* x : {&buffers.p, &buffers.ds}) store(&(*x)[key * BLOCK + q - q0], Floats{});
      for (long q = q0; q < to; q += V)
        multiply_tiles<1>(k0 > visible.low[q], &buffers.dquery[q * D], D, &buffers.ds_pairs[(q - q0) * TILE_K], TILE_K,
                          {&buffers.key_pairs[k0 * S], S * 2 * size}, D / V, TILE_K);
      auto sum_over_queries = [&](AlignedVector<float>& out, const AlignedVector<Number>& rows,
                                  const AlignedVector<Number>& pairs) {
        multiply_tiles<2>(add || q0 > k0, &out[k0 * D], D, &rows[0], BLOCK, {&pairs[q0 * S], S * 2 * size}, D / V,
                          queries);
      };
      sum_over_queries(buffers.dvalue, buffers.p, buffers.dout_pairs);
      sum_over_queries(buffers.dkey, buffers.ds, buffers.query_pairs);
    }
  }
}
#endif

template <int R, class Size>
static void backward(Number* dqkv, const Number* dout, const Number* out, const float* lse, const Number* qkv,
                     const float* rope, long rope_rows, const int32_t* first, Shape s, Size D, int threads) {
  long P = s.padded(), T = s.T, N = s.heads(), group = s.H / s.K;
  float scale = 1 / std::sqrt(float(D));
  auto S = padded_features(D);
  Tasks tasks(s.B * s.K, threads);
#pragma omp parallel num_threads(threads)
  {
    BackwardBuffers& buffers = thread_buffer<BackwardBuffers>();
    buffers.resize(P, S, D);
    ThreadSetup setup(TILE);
    tasks.run([&](long task) {
      long b = task / s.K, k = task % s.K;
      const float* angles = rope ? rope + (rope_rows == 1 ? 0 : b) * T * D : nullptr;
      auto copy_rows = [T, D, S](AlignedVector<Number>& buffer, const Number* from, long stride) {
        Number* to = buffer.data();
        for (long t = 0; t < T; t++) copy_features(to + t * S, from + t * stride, D);
      };
      auto copy_head = [&](AlignedVector<Number>& to, long head) {
        copy_rows(to, qkv + (b * T * N + head) * D, N * D);
      };
      auto write_gradient = [&](const AlignedVector<float>& from, long head, float scale, const float* angles) {
        for (long t = 0; t < T; t++)
          apply_rope(dqkv + ((b * T + t) * N + head) * D, &from[t * D], angles ? angles + t * D : nullptr, -1, scale,
                     D);
      };
      buffers.visible.set<R>(first ? first + b * T : nullptr, T, P);
      copy_head(buffers.key, s.H + k);
      copy_head(buffers.value, s.H + s.K + k);
      if (!KEY_MAJOR) {
        pack_panels(buffers.score_panels.data(), buffers.key.data(), T, S);
        pack_panels(buffers.dprob_panels.data(), buffers.value.data(), T, S);
      }
      pack_pairs(buffers.key_pairs.data(), buffers.key.data(), T, S);
      for (long h = k * group; h < (k + 1) * group; h++) {
        copy_head(buffers.query, h);
        copy_rows(buffers.dout, dout + (b * T * s.H + h) * D, s.H * D);
        if (KEY_MAJOR) {
          pack_panels(buffers.score_panels.data(), buffers.query.data(), T, S);
          pack_panels(buffers.dprob_panels.data(), buffers.dout.data(), T, S);
        }
        pack_pairs(buffers.query_pairs.data(), buffers.query.data(), T, S);
        pack_pairs(buffers.dout_pairs.data(), buffers.dout.data(), T, S);
        const Number *output = out + (b * T * s.H + h) * D, *gradient = buffers.dout.data();
        for (long t = 0; t < T; t += 4) {
          Floats sums[4] = {};
          for (long i = 0; i < std::min(4L, T - t); i++)
            for (long d = 0; d < D; d += V)
              sums[i] += widen(output + (t + i) * s.H * D + d) * widen(gradient + (t + i) * S + d);
          sum_lanes_of<4>(sums, &buffers.delta[t]);
        }
        for (long t = 0; t < T; t++) buffers.lse[t] = lse[(b * s.H + h) * T + t] * LOG2E;
        HeadPrefetch ahead(T, D);
        ahead.add_next_head(qkv, b, h, s);
        long last = b * s.H + h == s.B * s.H - 1, next = h + 1 < s.H || last ? h + 1 - last : T * s.H;
        for (const Number* x : {dout, out}) ahead.add(x + (b * T * s.H + next) * D, s.H * D);
        for (long head : {h, s.H + k, s.H + s.K + k}) ahead.add(dqkv + (b * T * N + head) * D, N * D);
        backward_head(buffers, h > k * group, ahead, T, D, std::integral_constant<int, R>());
        write_gradient(buffers.dquery, h, scale, angles);
      }
      write_gradient(buffers.dkey, s.H + k, scale, angles);
      write_gradient(buffers.dvalue, s.H + s.K + k, 1, nullptr);
    });
  }
}

}  // namespace attention

// The gradient of qkv before its rotation, from qkv after it, as `attention_forward` leaves it.
static void attention_backward(Number* dqkv, const Number* dout, const Number* out, const float* lse, const Number* qkv,
                               const float* rope, long rope_rows, const int32_t* first, long B, long T, long H, long K,
                               long D, int threads) {
  attention::dispatch_head_size(D, [&](auto R, auto size) {
    attention::backward<R.value>(dqkv, dout, out, lse, qkv, rope, rope_rows, first, {B, T, H, K, D}, size, threads);
  });
}
