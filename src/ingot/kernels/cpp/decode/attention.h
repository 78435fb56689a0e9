// Attention over the cache, and of prompts among themselves.
#pragma once
#include "products.h"

// Slots are read from so many places in turn, at each in order: where a CPU asks for some lines ahead of each place by
// itself memory comes faster so, elsewhere as it lies.
constexpr long PLACES = HAS_TILES ? 8 : 1, EACH = 8 / PLACES;

// Dot products of a query and keys, of N slots at each of P places, whose lanes are added up at once. What is so many
// bytes ahead is asked for meanwhile.
template <int P, int N, class T>
static inline void dots(float* out, const T* query, const T* keys, long D, long apart, long ahead) {
  typedef Factor<T> F;
  constexpr long size = V * F::pair;
  Floats sum[P * N] = {};
  float scores[P * N];
  long whole = D - D % size;
  for (int n = 0; n < N; n++) {
    auto key = [&](int p) { return keys + (p * apart + n) * D; };
    for (long d = 0; d < whole; d += size)
      for (int p = 0; p < P; p++) {
        fetch((const char*)(key(p) + d) + ahead);
        F::add(sum[p * N + n], F::read(query + d), F::read(key(p) + d));
      }
    for (int p = 0; p < P; p++)
      each(D - whole, [&](long at, auto left) {
        sum[p * N + n] += load(query + whole + at, left) * load(key(p) + whole + at, left);
      });
  }
  totals<P * N>(sum, scores);
  for (int p = 0; p < P; p++) std::copy_n(scores + p * N, N, out + p * apart);
}
template <class T>
static inline void all_dots(float* out, const T* query, const T* keys, long D, long S, long ahead) {
  long apart = S / PLACES, whole = apart / EACH * EACH, s = 0;
  for (; s < whole; s += EACH) dots<PLACES, EACH>(out + s, query, keys + s * D, D, apart, ahead);
  for (; s < apart; s++) dots<PLACES, 1>(out + s, query, keys + s * D, D, apart, ahead);
  for (s = PLACES * apart; s < S; s++) dots<1, 1>(out + s, query, keys + s * D, D, 0, ahead);
}

// N vectors of a weighted sum of values, the last of them of `size` numbers.
template <int N, class T, class Size>
static inline void mix(T* out, const float* weight, float share, const T* values, long S, long D, Size size, const T* next) {
  Floats sum[N] = {};
  auto add = [&](long s) {
    for (int i = 0; i < N * V; i += 64 / sizeof(T)) fetch(next + s * D + i);
    for (int i = 0; i < N - 1; i++) sum[i] += weight[s] * load(values + s * D + i * V);
    sum[N - 1] += weight[s] * load(values + s * D + (N - 1) * V, size);
  };
  long apart = S / PLACES;
  for (long s = 0; s < apart; s++)
    for (long p = 0; p < PLACES; p++) add(p * apart + s);
  for (long s = PLACES * apart; s < S; s++) add(s);
  for (int i = 0; i < N - 1; i++) store(out + i * V, sum[i] * share);
  store(out + (N - 1) * V, sum[N - 1] * share, size);
}

// Weights of a softmax in place of scores; returns what they add up to.
static inline float weigh(float* score, const float* bias, long S) {
  Floats tops = Floats{} - INFINITY;
  float most = -INFINITY;
  each(S, [&](long s, auto n) {
    if (bias) store(score + s, load(score + s, n) + load(bias + s, n), n);
    if (n == V) {
      Floats here = load(score + s);
      tops = here > tops ? here : tops;
    } else {
      for (long i = s; i < s + n; i++) most = std::max(most, score[i]);
    }
  });
  for (int i = 0; i < V; i++) most = std::max(most, tops[i]);
  Floats sum = {};
  each(S, [&](long s, auto n) { store(score + s, exponential(load(score + s, n) - most), n); });
  each(S, [&](long s, auto n) { sum += load(score + s, n); });
  return total(sum);
}

// Pairs side by side times complex numbers of length 1.
static inline void rotate(float* out, const float* x, const float* turn, long D) {
  for (long d = 0; d < D; d += 2) {
    out[d] = x[d] * turn[d] - x[d + 1] * turn[d + 1];
    out[d + 1] = x[d] * turn[d + 1] + x[d + 1] * turn[d];
  }
}

// The features of a head, turned where it has something to be turned by.
static inline const float* turned(const float* x, const float* turn, float* room, long D) {
  if (!turn) return x;
  rotate(room, x, turn, D);
  return room;
}

template <class T>
static void attend(T* out, const float* qkv, const float* turn, T* keys, T* values, const float* bias,
                   long bias_stride, long B, long H, long K, long D, long C, long S, int threads) {
  float scale = 1 / std::sqrt(float(D));
#pragma omp parallel num_threads(threads) if (B * H * D * S > ALONE)
  {
    std::vector<float> score(S), room(D);
    std::vector<T> query(D);
    auto head_of = [&](long b, long h) {  // queries, then keys, then values, which are not turned
      return turned(qkv + (b * (H + 2 * K) + h) * D, turn && h < H + K ? turn + b * D : nullptr, room.data(), D);
    };
    auto write = [&](long b, long k) {  // the newest slot
      long to = ((b * K + k) * C + S - 1) * D;
      const float* x = head_of(b, H + k);
      each(D, [&](long d, auto n) { store(keys + to + d, load(x + d, n), n); });
      x = head_of(b, H + K + k);
      each(D, [&](long d, auto n) { store(values + to + d, load(x + d, n), n); });
    };
    bool before = B * K % omp_get_num_threads();  // several read what one writes; else its reader does, which is faster
    if (before) {
#pragma omp for schedule(static)
      for (long head = 0; head < B * K; head++) write(head / K, head % K);
    }
#pragma omp for schedule(static)
    for (long head = 0; head < B * H; head++) {
      long b = head / H, h = head % H, k = h / (H / K), first = (b * K + k) * C * D, d = 0;
      if (!before && h % (H / K) == 0) write(b, k);
      const float* q = head_of(b, h);
      each(D, [&](long at, auto n) { store(&query[at], load(q + at, n) * scale, n); });
      all_dots(score.data(), query.data(), keys + first, D, S, (char*)values - (char*)keys);
      float share = 1 / weigh(score.data(), bias ? bias + b * bias_stride : nullptr, S);
      T* mixed = out + head * D;
      auto whole = std::integral_constant<long, V>();
      const T *from = values + first, *next = keys + first + (h % (H / K) == H / K - 1 ? C * D : 0);
      for (; d + 4 * V <= D; d += 4 * V) mix<4>(mixed + d, score.data(), share, from + d, S, D, whole, next + d);
      each(D - d, [&](long at, auto n) {
        mix<1>(mixed + d + at, score.data(), share, from + d + at, S, D, n, next + d + at);
      });
    }
  }
}

// Keys and values of one head of a prompt of L tokens, as panels whose outputs are slots, and features.
template <class T>
struct Panels {
  static constexpr long pair = Factor<T>::pair;
  long D, features, slots;  // the last two are multiples of a pair
  std::vector<T> keys, values;
  Panels(long D, long L)
      : D(D), features(D + D % pair), slots(L + L % pair), keys((L + PANEL - 1) / PANEL * PANEL * features),
        values((D + PANEL - 1) / PANEL * PANEL * slots) {}
  // A panel of slots, or fewer at the end: n x features, and n x D, which goes on with zeros.
  void put(long slot, long n, const T* key, const T* value) {
    constexpr long across = V * pair;
    constexpr bool words = pair * sizeof(T) == sizeof(int);  // squares of them are turned by registers
    long squares = n / V * V, whole = words ? features / across * across : 0;
    auto to_key = [&](long i, long s) { return &keys[slot * features + i * PANEL + s * pair]; };
    for (long s = 0; s < squares; s += V)
      for (long i = 0; i < whole; i += across) {
        Ints square[V];
        for (long row = 0; row < V; row++) memcpy(&square[row], key + (s + row) * features + i, sizeof square[row]);
        transpose(square);
        for (long row = 0; row < V; row++) ::put(to_key(i + row * pair, s), square[row]);
      }
    for (long i = 0; i < features; i += pair)
      for (long s = i < whole ? squares : 0; s < n; s++)
        memcpy(to_key(i, s), key + s * features + i, pair * sizeof(T));
    for (long p = 0; p < D; p += PANEL)
      for (long s = 0; s < n; s += pair) {
        T* to = &values[p * slots + (slot + s) * PANEL];
        const T* from = value + s * D + p;
        each(std::min<long>(PANEL, D - p), [&](long d, auto left) { side_by_side(to + d * pair, from + d, D, left); });
      }
  }
  // Of V values, or fewer, those of a slot and of the next one in turn, if they are multiplied in pairs.
  template <class Size>
  static void side_by_side(T* to, const T* from, long next, Size size) {
    if constexpr (pair == 1)
      std::copy_n(from, size, to);
    else
      for (long d = 0; d < size; d++) to[d * 2] = from[d], to[d * 2 + 1] = from[d + next];
  }
};

// Some tokens of a prompt, from t on: what each mixes of the values up to its own, `window` of them at most.
template <class T, class X>
static void mix_rows(T* out, long stride, const X* query, const Panels<T>& table, long t, long rows, long window,
                     std::vector<float>& score, std::vector<X>& weight) {
  long first = std::max(0L, t + 1 - window) / PANEL * PANEL, seen = t + rows - first;
  long whole = (seen + V - 1) / V * V, width = seen + seen % table.pair;
  float sums[ROWS * PANEL], share[ROWS];
  score.resize(rows * whole);
  weight.resize(rows * width + V);
  for (long p = 0; p < seen; p += PANEL) {
    const T* panel = &table.keys[(first + p) * table.features];
    some_rows(rows, sums, query, table.features, panel, table.features, nullptr, NoNext());
    for (long r = 0; r < rows; r++) std::copy_n(sums + r * PANEL, std::min<long>(PANEL, whole - p), &score[r * whole + p]);
  }
  for (long r = 0; r < rows; r++) {
    float* row = &score[r * whole];
    long end = t + r + 1 - first;
    std::fill(row, row + std::max(0L, end - window), -INFINITY);
    std::fill(row + end, row + whole, -INFINITY);
    share[r] = 1 / weigh(row, nullptr, whole);
    for (long s = 0; s < whole; s += V) store(&weight[r * width + s], load(row + s));  // the next row goes over the rest
  }
  for (long p = 0; p < table.D; p += PANEL) {
    const T* panel = &table.values[p * table.slots + first * PANEL];
    some_rows(rows, sums, weight.data(), width, panel, width, nullptr, NoNext());
    for (long r = 0; r < rows; r++)
      each(std::min<long>(PANEL, table.D - p), [&](long at, auto n) {
        store(out + r * stride + p + at, load(sums + r * PANEL + at) * share[r], n);
      });
  }
}

// Prompts of L tokens. Where threads cannot share the heads of keys evenly, queries of one head are tasks of their own.
template <class T>
static void attend_prompts(T* out, const float* qkv, const float* turn, T* keys, T* values, long window, long copies,
                           long B, long L, long H, long K, long D, long C, int threads) {
  typedef typename Factor<T>::Number X;
  float scale = 1 / std::sqrt(float(D));
  long N = H + 2 * K, parts = B * K % threads ? H / K : 1;
  Tasks tasks(B * K * parts, threads);
#pragma omp parallel num_threads(threads) if (B * L * N * D > ALONE)
  {
    Panels<T> table(D, L);
    std::vector<float> room(D), score;
    std::vector<X> query(ROWS * table.features), weight;
    std::vector<T> key(PANEL * table.features), value((PANEL + 1) * D);
    tasks.work([&](long task) {
      long b = task / parts / K, k = task / parts % K, part = task % parts, group = H / K / parts;
      auto head_of = [&](long t, long h) {  // which is read with the next one's asked for
        const float* x = qkv + ((b * L + t) * N + h) * D;
        for (long d = D; d < 2 * D; d += V) fetch(x + d);
        return turned(x, turn && h < H + K ? turn + t * D : nullptr, room.data(), D);
      };
      for (long s = 0; s < L; s += PANEL) {
        long slots = std::min<long>(PANEL, L - s);
        for (long i = 0; i < slots; i++) {
          const float* x = head_of(s + i, H + k);
          each(D, [&](long d, auto n) { store(&key[i * table.features + d], load(x + d, n), n); });
          x = head_of(s + i, H + K + k);
          each(D, [&](long d, auto n) { store(&value[i * D + d], load(x + d, n), n); });
        }
        std::fill_n(&value[slots * D], D, T());
        table.put(s, slots, key.data(), value.data());
        for (long copy = 0; part == 0 && copy < copies; copy++) {
          long to = (((b * copies + copy) * K + k) * C + s) * D;
          for (long i = 0; i < slots; i++) std::copy_n(&key[i * table.features], D, keys + to + i * D);
          std::copy_n(value.data(), slots * D, values + to);
        }
      }
      for (long h = (k * parts + part) * group; h < (k * parts + part + 1) * group; h++)
        for (long t = 0; t < L; t += ROWS) {
          long rows = std::min<long>(ROWS, L - t);
          for (long r = 0; r < rows; r++) {
            const float* x = head_of(t + r, h);
            each(D, [&](long d, auto n) { store(&query[r * table.features + d], load(x + d, n) * scale, n); });
          }
          mix_rows(out + ((b * L + t) * H + h) * D, H * D, query.data(), table, t, rows, window, score, weight);
        }
    });
  }
}
