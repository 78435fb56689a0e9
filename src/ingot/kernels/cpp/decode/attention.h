// Attention of generation: of new tokens over the KV cache, and of prompts.
#pragma once
#include "gemm.h"

// Slots are read from STREAMS places of the cache in turn, SLOTS consecutive ones of each. On CPUs whose hardware
// prefetcher follows several streams this is faster; other CPUs read in order.
constexpr long STREAMS = HAS_AMX ? 8 : 1, SLOTS = 8 / STREAMS;

// Dot products of a query with the keys of N consecutive slots in each of P streams, `stride` slots apart. Prefetches
// the memory `ahead` bytes after each key.
template <int P, int N, class T>
static inline void dots(float* out, const T* query, const T* keys, long D, long stride, long ahead) {
  typedef Operand<T> F;
  constexpr long size = V * F::pair;
  Floats sum[P * N] = {};
  float scores[P * N];
  long full = D - D % size;
  for (int n = 0; n < N; n++) {
    auto key = [&](int p) { return keys + (p * stride + n) * D; };
    for (long d = 0; d < full; d += size)
      for (int p = 0; p < P; p++) {
        prefetch((const char*)(key(p) + d) + ahead);
        F::multiply_add(sum[p * N + n], F::read(query + d), F::read(key(p) + d));
      }
    for (int p = 0; p < P; p++)
      each(D - full, [&](long at, auto left) {
        sum[p * N + n] += load(query + full + at, left) * load(key(p) + full + at, left);
      });
  }
  sum_lanes_of<P * N>(sum, scores);
  for (int p = 0; p < P; p++) std::copy_n(scores + p * N, N, out + p * stride);
}
// Dot products of a query with S keys.
template <class T>
static inline void all_dots(float* out, const T* query, const T* keys, long D, long S, long ahead) {
  long stride = S / STREAMS, full = stride / SLOTS * SLOTS, s = 0;
  for (; s < full; s += SLOTS) dots<STREAMS, SLOTS>(out + s, query, keys + s * D, D, stride, ahead);
  for (; s < stride; s++) dots<STREAMS, 1>(out + s, query, keys + s * D, D, stride, ahead);
  for (s = STREAMS * stride; s < S; s++) dots<1, 1>(out + s, query, keys + s * D, D, 0, ahead);
}

// N vectors of a weighted sum of values, times `scale`; the last vector has `size` elements. Prefetches from `next`.
template <int N, class T, class Size>
static inline void weighted_sum(T* out, const float* weight, float scale, const T* values, long S, long D, Size size,
                                const T* next) {
  Floats sum[N] = {};
  auto add = [&](long s) {
    for (int i = 0; i < N * V; i += 64 / sizeof(T)) prefetch(next + s * D + i);
    for (int i = 0; i < N - 1; i++) sum[i] += weight[s] * load(values + s * D + i * V);
    sum[N - 1] += weight[s] * load(values + s * D + (N - 1) * V, size);
  };
  long stride = S / STREAMS;
  for (long s = 0; s < stride; s++)
    for (long p = 0; p < STREAMS; p++) add(p * stride + s);
  for (long s = STREAMS * stride; s < S; s++) add(s);
  for (int i = 0; i < N - 1; i++) store(out + i * V, sum[i] * scale);
  store(out + (N - 1) * V, sum[N - 1] * scale, size);
}

// Replaces scores by exp(score + bias - max) and returns the sum of these.
static inline float softmax_weights(float* score, const float* bias, long S) {
  Floats maxima = Floats{} - INFINITY;
  float max = -INFINITY;
  each(S, [&](long s, auto n) {
    if (bias) store(score + s, load(score + s, n) + load(bias + s, n), n);
    if (n == V) {
      Floats values = load(score + s);
      maxima = values > maxima ? values : maxima;
    } else {
      for (long i = s; i < s + n; i++) max = std::max(max, score[i]);
    }
  });
  for (int i = 0; i < V; i++) max = std::max(max, maxima[i]);
  Floats sum = {};
  each(S, [&](long s, auto n) { store(score + s, vec_exp(load(score + s, n) - max), n); });
  each(S, [&](long s, auto n) { sum += load(score + s, n); });
  return sum_lanes(sum);
}

// Rotates adjacent pairs of features: multiplies them by complex numbers of modulus 1.
static inline void rotate_pairs(float* out, const float* x, const float* rope, long D) {
  for (long d = 0; d < D; d += 2) {
    out[d] = x[d] * rope[d] - x[d + 1] * rope[d + 1];
    out[d + 1] = x[d] * rope[d + 1] + x[d + 1] * rope[d];
  }
}

// The features of a head, rotated into `buffer` if there is a rotation.
static inline const float* apply_rope(const float* x, const float* rope, float* buffer, long D) {
  if (!rope) return x;
  rotate_pairs(buffer, x, rope, D);
  return buffer;
}

// A decoding step: writes keys and values of the newest slot (S - 1), then attention over S slots.
template <class T>
static void attend(T* out, const float* qkv, const float* rope, T* keys, T* values, const float* bias,
                   long bias_stride, long B, long H, long K, long D, long C, long S, int threads) {
  float scale = 1 / std::sqrt(float(D));
#pragma omp parallel num_threads(threads) if (B * H * D * S > MIN_PARALLEL)
  {
    std::vector<float> score(S), buffer(D);
    std::vector<T> query(D);
    auto head_of = [&](long b, long h) {  // query heads, then key heads, then value heads, which are not rotated
      return apply_rope(qkv + (b * (H + 2 * K) + h) * D, rope && h < H + K ? rope + b * D : nullptr, buffer.data(), D);
    };
    auto write = [&](long b, long k) {
      long to = ((b * K + k) * C + S - 1) * D;
      const float* x = head_of(b, H + k);
      each(D, [&](long d, auto n) { store(keys + to + d, load(x + d, n), n); });
      x = head_of(b, H + K + k);
      each(D, [&](long d, auto n) { store(values + to + d, load(x + d, n), n); });
    };
    // If threads share a key head, all slots are written first; else each thread writes those it reads, which is
    // faster.
    bool write_first = B * K % omp_get_num_threads();
    if (write_first) {
#pragma omp for schedule(static)
      for (long head = 0; head < B * K; head++) write(head / K, head % K);
    }
#pragma omp for schedule(static)
    for (long head = 0; head < B * H; head++) {
      long b = head / H, h = head % H, k = h / (H / K), first = (b * K + k) * C * D, d = 0;
      if (!write_first && h % (H / K) == 0) write(b, k);
      const float* q = head_of(b, h);
      each(D, [&](long at, auto n) { store(&query[at], load(q + at, n) * scale, n); });
      all_dots(score.data(), query.data(), keys + first, D, S, (char*)values - (char*)keys);
      float inverse_sum = 1 / softmax_weights(score.data(), bias ? bias + b * bias_stride : nullptr, S);
      T* to = out + head * D;
      auto full = std::integral_constant<long, V>();
      const T *from = values + first, *next = keys + first + (h % (H / K) == H / K - 1 ? C * D : 0);
      for (; d + 4 * V <= D; d += 4 * V)
        weighted_sum<4>(to + d, score.data(), inverse_sum, from + d, S, D, full, next + d);
      each(D - d, [&](long at, auto n) {
        weighted_sum<1>(to + d + at, score.data(), inverse_sum, from + d + at, S, D, n, next + d + at);
      });
    }
  }
}

// Keys and values of one head of a prompt of L tokens, packed in panels: for scores the outputs are slots, for the
// weighted sum they are features.
template <class T>
struct PackedHead {
  static constexpr long pair = Operand<T>::pair;
  long D, features, slots;  // `features` and `slots` are D and L rounded up to multiples of a pair
  std::vector<T> keys, values;
  PackedHead(long D, long L)
      : D(D), features(D + D % pair), slots(L + L % pair), keys((L + NR - 1) / NR * NR * features),
        values((D + NR - 1) / NR * NR * slots) {}
  // Packs a panel of n slots, at most NR, from keys n x features and values n x D, which are followed by zeros.
  void pack(long slot, long n, const T* key, const T* value) {
    constexpr long block = V * pair;
    constexpr bool words = pair * sizeof(T) == sizeof(int);  // V x V blocks are transposed in registers
    long squares = n / V * V, full = words ? features / block * block : 0;
    auto to_key = [&](long i, long s) { return &keys[slot * features + i * NR + s * pair]; };
    for (long s = 0; s < squares; s += V)
      for (long i = 0; i < full; i += block) {
        Ints square[V];
        for (long row = 0; row < V; row++) memcpy(&square[row], key + (s + row) * features + i, sizeof square[row]);
        transpose(square);
        for (long row = 0; row < V; row++) store_ints(to_key(i + row * pair, s), square[row]);
      }
    for (long i = 0; i < features; i += pair)
      for (long s = i < full ? squares : 0; s < n; s++) memcpy(to_key(i, s), key + s * features + i, pair * sizeof(T));
    for (long p = 0; p < D; p += NR)
      for (long s = 0; s < n; s += pair) {
        T* to = &values[p * slots + (slot + s) * NR];
        const T* from = value + s * D + p;
        each(std::min<long>(NR, D - p), [&](long d, auto left) { interleave(to + d * pair, from + d, D, left); });
      }
  }
  // Up to V values of a slot, interleaved with those of the next slot if operands are pairs.
  template <class Size>
  static void interleave(T* to, const T* from, long next, Size size) {
    if constexpr (pair == 1)
      std::copy_n(from, size, to);
    else
      for (long d = 0; d < size; d++) to[d * 2] = from[d], to[d * 2 + 1] = from[d + next];
  }
};

// Causal attention of `rows` tokens of a prompt, starting with token t; each attends to at most `window` tokens.
template <class T, class X>
static void attend_rows(T* out, long stride, const X* query, const PackedHead<T>& head, long t, long rows, long window,
                        std::vector<float>& score, std::vector<X>& weight) {
  long first = std::max(0L, t + 1 - window) / NR * NR, slots = t + rows - first;
  long padded = (slots + V - 1) / V * V, width = slots + slots % head.pair;
  float sums[MR * NR], inverse_sum[MR];
  score.resize(rows * padded);
  weight.resize(rows * width + V);
  for (long p = 0; p < slots; p += NR) {
    const T* panel = &head.keys[(first + p) * head.features];
    microkernel_rows(rows, sums, query, head.features, panel, head.features, nullptr, NoPrefetch());
    for (long r = 0; r < rows; r++)
      std::copy_n(sums + r * NR, std::min<long>(NR, padded - p), &score[r * padded + p]);
  }
  for (long r = 0; r < rows; r++) {
    float* row = &score[r * padded];
    long end = t + r + 1 - first;
    std::fill(row, row + std::max(0L, end - window), -INFINITY);
    std::fill(row + end, row + padded, -INFINITY);
    inverse_sum[r] = 1 / softmax_weights(row, nullptr, padded);
    // The next row overwrites what is stored after the end of this one.
    for (long s = 0; s < padded; s += V) store(&weight[r * width + s], load(row + s));
  }
  for (long p = 0; p < head.D; p += NR) {
    const T* panel = &head.values[p * head.slots + first * NR];
    microkernel_rows(rows, sums, weight.data(), width, panel, width, nullptr, NoPrefetch());
    for (long r = 0; r < rows; r++)
      each(std::min<long>(NR, head.D - p), [&](long at, auto n) {
        store(out + r * stride + p + at, load(sums + r * NR + at) * inverse_sum[r], n);
      });
  }
}

// Prefill of prompts of L tokens: writes keys and values of `copies` rows of the cache per prompt, and computes causal
// attention. If the key heads do not divide evenly over the threads, each query head is a task of its own.
template <class T>
static void attend_prompts(T* out, const float* qkv, const float* rope, T* keys, T* values, long window, long copies,
                           long B, long L, long H, long K, long D, long C, int threads) {
  typedef typename Operand<T>::Element X;
  float scale = 1 / std::sqrt(float(D));
  long N = H + 2 * K, parts = B * K % threads ? H / K : 1;
  Tasks tasks(B * K * parts, threads);
#pragma omp parallel num_threads(threads) if (B * L * N * D > MIN_PARALLEL)
  {
    PackedHead<T> packed(D, L);
    std::vector<float> buffer(D), score;
    std::vector<X> query(MR * packed.features), weight;
    std::vector<T> key(NR * packed.features), value((NR + 1) * D);
    tasks.run([&](long task) {
      long b = task / parts / K, k = task / parts % K, part = task % parts, group = H / K / parts;
      auto head_of = [&](long t, long h) {  // prefetches the following head
        const float* x = qkv + ((b * L + t) * N + h) * D;
        for (long d = D; d < 2 * D; d += V) prefetch(x + d);
        return apply_rope(x, rope && h < H + K ? rope + t * D : nullptr, buffer.data(), D);
      };
      for (long s = 0; s < L; s += NR) {
        long slots = std::min<long>(NR, L - s);
        for (long i = 0; i < slots; i++) {
          const float* x = head_of(s + i, H + k);
          each(D, [&](long d, auto n) { store(&key[i * packed.features + d], load(x + d, n), n); });
          x = head_of(s + i, H + K + k);
          each(D, [&](long d, auto n) { store(&value[i * D + d], load(x + d, n), n); });
        }
        std::fill_n(&value[slots * D], D, T());
        packed.pack(s, slots, key.data(), value.data());
        for (long copy = 0; part == 0 && copy < copies; copy++) {
          long to = (((b * copies + copy) * K + k) * C + s) * D;
          for (long i = 0; i < slots; i++) std::copy_n(&key[i * packed.features], D, keys + to + i * D);
          std::copy_n(value.data(), slots * D, values + to);
        }
      }
      for (long h = (k * parts + part) * group; h < (k * parts + part + 1) * group; h++)
        for (long t = 0; t < L; t += MR) {
          long rows = std::min<long>(MR, L - t);
          for (long r = 0; r < rows; r++) {
            const float* x = head_of(t + r, h);
            each(D, [&](long d, auto n) { store(&query[r * packed.features + d], load(x + d, n) * scale, n); });
          }
          attend_rows(out + ((b * L + t) * H + h) * D, H * D, query.data(), packed, t, rows, window, score, weight);
        }
    });
  }
}
