// What decoding does on a CPU: see native.py.
//
// Shapes: I inputs, O outputs, M rows, W width, F features; B rows, or prompts of L tokens, H query heads, K key heads, D
// features of a head, S slots in use of C.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int V = 16;  // floats of a register
#elif defined(__AVX2__)
constexpr int V = 8;
#else
constexpr int V = 4;
#endif
constexpr int WIDE = 3;               // registers of weights that are multiplied with each number of a row at once
constexpr int PANEL = WIDE * V;       // outputs whose weights lie side by side
constexpr int ROWS = V == 16 ? 8 : 4;  // rows that are multiplied with them: their sums fill the registers
constexpr int CHUNK = 128;            // rows that pass a panel before the next one comes
constexpr int TOGETHER = 8;      // dot products whose lanes are added up at once
constexpr long AHEAD = 12288;    // bytes of weights that are asked for before they are needed
constexpr long ALONE = 1 << 15;  // multiplications below which waking a thread costs more than it helps

typedef uint16_t bf16;
typedef float Floats __attribute__((vector_size(4 * V)));
typedef int32_t Ints __attribute__((vector_size(4 * V)));
typedef uint32_t Bits __attribute__((vector_size(4 * V)));
typedef uint16_t Halves __attribute__((vector_size(2 * V)));

// Asks for a line of memory. The first cache is left to what is read now: of keys and values it holds one head's, not
// the next one's as well.
static inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// A vector from anywhere in memory, as floats; and back, rounded to the nearest even bf16.
static inline Floats load(const float* p) {
  Floats x;
  memcpy(&x, p, sizeof x);
  return x;
}
static inline Floats load(const bf16* p) {
  Halves x;
  memcpy(&x, p, sizeof x);
  return (Floats)(__builtin_convertvector(x, Bits) << 16);
}
static inline void store(float* p, Floats x) { memcpy(p, &x, sizeof x); }
static inline void store(bf16* p, Floats x) {
#if defined(__AVX512BF16__)
  auto halves = _mm512_cvtneps_pbh(x);
#else
  Bits bits = (Bits)x, nan = (Bits)(x != x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  Halves halves = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), Halves);
#endif
  memcpy(p, &halves, sizeof halves);
}
// The first n numbers of a vector, the others 0.
template <class T>
static inline Floats load(const T* p, long n) {
  T some[V] = {};
  memcpy(some, p, n * sizeof(T));
  return load(some);
}
template <class T>
static inline void store(T* p, Floats x, long n) {
  T some[V];
  store(some, x);
  memcpy(p, some, n * sizeof(T));
}
// Calls f(at, n) for each vector of `size` numbers; n is V, and fewer for the last one.
template <class Function>
static inline void each(long size, Function f) {
  long at = 0;
  for (; at + V <= size; at += V) f(at, std::integral_constant<long, V>());
  if (at < size) f(at, size - at);
}
template <class T>
static inline Floats load(const T* p, std::integral_constant<long, V>) { return load(p); }
template <class T>
static inline void store(T* p, Floats x, std::integral_constant<long, V>) { store(p, x); }

static inline float total(Floats x) {
  float sum = 0;
  for (int i = 0; i < V; i++) sum += x[i];
  return sum;
}
// The totals of N vectors.
template <int N>
static inline void totals(const Floats* sums, float* out) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 4 <= N; i += 4) {
    __m512 a = sums[i], b = sums[i + 1], c = sums[i + 2], d = sums[i + 3];
    __m512d ab = (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    __m512d cd = (__m512d)(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    __m512 abcd = (__m512)_mm512_unpacklo_pd(ab, cd) + (__m512)_mm512_unpackhi_pd(ab, cd);
    __m256 half = _mm512_castps512_ps256(abcd) + (__m256)_mm512_extractf64x4_pd((__m512d)abcd, 1);
    _mm_storeu_ps(out + i, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
  }
#endif
  for (; i < N; i++) out[i] = total(sums[i]);
}

// What is multiplied at once: of each of V outputs `pair` weights, in bf16 two where the CPU can. Sums are floats, and so
// are the numbers of a row that is repeated where the CPU has no products in bf16.
template <class T>
struct Factor {
  static constexpr long pair = 1;
  typedef float Number;
  typedef Floats Type;
  static inline Floats read(const T* p) { return load(p); }
  static inline Floats repeat(const float* p) { return *p - Floats{}; }
  static inline void add(Floats& sum, Floats x, Floats w) { sum += x * w; }
};
#if defined(__AVX512BF16__)
template <>
struct Factor<bf16> {
  static constexpr long pair = 2;
  typedef bf16 Number;
  typedef __m512bh Type;
  static inline Type read(const bf16* p) { return (Type)_mm512_loadu_si512(p); }
  static inline Type repeat(const bf16* p) {
    int both;
    memcpy(&both, p, sizeof both);
    return (Type)_mm512_set1_epi32(both);
  }
  static inline void add(Floats& sum, Type x, Type w) { sum = _mm512_dpbf16_ps(sum, x, w); }
};
#endif

// N dot products of a row and rows of weights, one after another: memory is read fastest as it lies. What is so many
// bytes ahead is asked for meanwhile.
template <int N, class T>
static inline void dots(float* out, const T* x, const T* w, long I, long ahead) {
  typedef Factor<T> F;
  Floats sum[N] = {};
  constexpr long size = V * F::pair;
  long whole = I - I % size;
  for (int n = 0; n < N; n++) {
    const T* row = w + n * I;
    for (long i = 0; i < whole; i += size) {
      fetch((const char*)(row + i) + ahead);
      F::add(sum[n], F::read(x + i), F::read(row + i));
    }
    each(I - whole, [&](long i, auto size) { sum[n] += load(x + whole + i, size) * load(row + whole + i, size); });
  }
  totals<N>(sum, out);
}
template <class T>
static inline void all_dots(float* out, const T* x, const T* w, long I, long O, long ahead) {
  long o = 0;
  for (; o + TOGETHER <= O; o += TOGETHER) dots<TOGETHER>(out + o, x, w + o * I, I, ahead);
  for (; o < O; o++) dots<1>(out + o, x, w + o * I, I, ahead);
}

template <class T>
static void linear(float* out, const T* x, const T* w, long I, long O, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (I * O > ALONE)
  for (long o = 0; o < O; o += TOGETHER) all_dots(out + o, x, w + o * I, I, std::min<long>(TOGETHER, O - o), AHEAD);
}

// R rows times a panel: R x PANEL sums. The part that is given of the next panel is fetched meanwhile.
template <int R, class T, class X>
static inline void block(float* sums, const X* x, const T* panel, long I, const char* next, long part) {
  typedef Factor<T> F;
  Floats sum[R][WIDE] = {};
  for (long i = 0; i < I; i += F::pair, panel += PANEL * F::pair) {
    typename F::Type w[WIDE];
    for (int j = 0; j < WIDE; j++) {
      w[j] = F::read(panel + j * V * F::pair);
      fetch(next + (i * WIDE + j * F::pair) * part);
    }
    for (int r = 0; r < R; r++) {
      auto one = F::repeat(x + r * I + i);
      for (int j = 0; j < WIDE; j++) F::add(sum[r][j], one, w[j]);
    }
  }
  memcpy(sums, sum, sizeof sum);
}
template <class T, class X, int R = ROWS>
static void some_rows(long rows, float* sums, const X* x, const T* panel, long I, const char* next, long part) {
  if (rows == R)
    block<R>(sums, x, panel, I, next, part);
  else if constexpr (R > 1)
    some_rows<T, X, R - 1>(rows, sums, x, panel, I, next, part);
}

// Calls f(first row, rows, panel, multiply) for all rows past all panels, or groups of panels that lie together;
// multiply(which of a group, sums) is the product of these rows. I is a multiple of a pair.
template <class T, class X, class Function>
static inline void pass(const X* x, const T* panels, long group, long M, long I, long number, int threads, Function f) {
  long size = PANEL * I;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static) if (M * group * number * size > ALONE)
  for (long chunk = 0; chunk < M; chunk += CHUNK)
    for (long p = 0; p < number; p++) {
      long rows = std::min<long>(CHUNK, M - chunk), blocks = (rows + ROWS - 1) / ROWS;
      for (long b = 0; b < blocks; b++) {
        long from = rows * b / blocks, some = rows * (b + 1) / blocks - from;
        f(chunk + from, some, p, [&](long which, float* sums) {
          const T* panel = panels + (p * group + which) * size;
          const char* next = (const char*)(panel + group * size + size * b / blocks);
          some_rows(some, sums, x + (chunk + from) * I, panel, I, next, V * (long)sizeof(T) / blocks);
        });
      }
    }
}

// Rows as they are multiplied: in floats where the CPU has no products in bf16.
template <class T>
static const T* ready(const T* x, long, std::vector<T>&, int) { return x; }
static inline const float* ready(const bf16* x, long size, std::vector<float>& room, int threads) {
  room.resize(size);
#pragma omp parallel for num_threads(threads) schedule(static) if (size > ALONE)
  for (long i = 0; i < size; i += V) {
    if (i + V <= size)
      store(&room[i], load(x + i));
    else
      store(&room[i], load(x + i, size - i), size - i);
  }
  return room.data();
}

template <class T>
static void product(float* out, const T* rows_in, const T* panels, const float* bias, bool onto, long M, long I, long O,
                    int threads) {
  std::vector<typename Factor<T>::Number> room;
  auto x = ready(rows_in, M * I, room, threads);
  pass(x, panels, 1, M, I, (O + PANEL - 1) / PANEL, threads, [=](long row, long rows, long p, auto multiply) {
    float sums[ROWS * PANEL];
    multiply(0, sums);
    for (long r = 0, o = p * PANEL; r < rows; r++)
      each(std::min<long>(PANEL, O - o), [&](long at, auto n) {
        float* to = out + (row + r) * O + o + at;
        Floats sum = load(sums + r * PANEL + at);
        if (bias) sum += load(bias + o + at, n);
        if (onto) sum += load(to, n);
        store(to, sum, n);
      });
  });
}

// e^x to 2e-7 of it, 0 below -87 and infinite above 88; Cephes' polynomial (Moshier).
static inline Floats exponential(Floats x) {
  Floats zero = {};
  Ints under = x < zero - 87.f, over = x > zero + 88.f;
  x = under | over ? zero : x;
  Floats n = (x * 1.44269504f + 12582912.f) - 12582912.f;  // to the nearest integer
  Floats r = x - n * .693359375f + n * 2.12194440e-4f, p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  return under ? zero : over ? zero + INFINITY : p * (Floats)exponent;
}

template <class T>
static void rms_norm(T* out, const float* x, const float* gain, float eps, long M, long W, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (M * W > ALONE)
  for (long m = 0; m < M; m++) {
    const float* row = x + m * W;
    Floats squares = {};
    each(W, [&](long w, auto n) { squares += load(row + w, n) * load(row + w, n); });
    float by = 1 / std::sqrt(total(squares) / W + eps);
    each(W, [&](long w, auto n) { store(out + m * W + w, load(row + w, n) * by * load(gain + w, n), n); });
  }
}

static inline Floats silu(Floats x) { return x / (1.f + exponential(-x)); }

template <class T, class In>
static void swiglu(T* out, const In* gate_and_up, long M, long F, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (M * F > ALONE)
  for (long m = 0; m < M; m++)
    each(F, [&](long f, auto n) {
      const In* row = gate_and_up + 2 * m * F + f;
      store(out + m * F + f, silu(load(row, n)) * load(row + F, n), n);
    });
}

// The same of a product: a panel of gates, then one of what they are multiplied with, and so on; biases alike.
template <class T>
static void gated(T* out, const T* rows_in, const T* panels, const float* bias, long M, long I, long F, int threads) {
  std::vector<typename Factor<T>::Number> room;
  auto x = ready(rows_in, M * I, room, threads);
  pass(x, panels, 2, M, I, (F + PANEL - 1) / PANEL, threads, [=](long row, long rows, long p, auto multiply) {
    float gates[ROWS * PANEL], ups[ROWS * PANEL];
    multiply(0, gates);
    multiply(1, ups);
    for (long r = 0, f = p * PANEL; r < rows; r++)
      each(std::min<long>(PANEL, F - f), [&](long at, auto n) {
        Floats gate = load(gates + r * PANEL + at), up = load(ups + r * PANEL + at);
        if (bias) gate += load(bias + 2 * f + at), up += load(bias + 2 * f + PANEL + at);
        store(out + (row + r) * F + f + at, silu(gate) * up, n);
      });
  });
}

// N vectors of a weighted sum of values, the last of them of `size` numbers.
template <int N, class T, class Size>
static inline void mix(T* out, const float* weight, float share, const T* values, long S, long D, Size size, const T* next) {
  Floats sum[N] = {};
  for (long s = 0; s < S; s++) {
    for (int i = 0; i < N * V; i += 64 / sizeof(T)) fetch(next + s * D + i);
    for (int i = 0; i < N - 1; i++) sum[i] += weight[s] * load(values + s * D + i * V);
    sum[N - 1] += weight[s] * load(values + s * D + (N - 1) * V, size);
  }
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

// The first of the greatest of `size` numbers.
template <class T>
static inline long greatest(const T* x, long size, float& most) {
  Floats tops = Floats{} - INFINITY;
  long block = 0;
  most = -INFINITY;
  for (long b = 0; b < size; b += 32 * V) {
    Floats before = tops;
    each(std::min(32L * V, size - b), [&](long i, auto n) {
      Floats here = load(x + b + i, n);
      for (long lane = n; lane < V; lane++) here[lane] = -INFINITY;
      tops = here > tops ? here : tops;
    });
    for (int i = 0; i < V; i++)
      if (tops[i] > before[i] && tops[i] > most) most = tops[i], block = b;
  }
  while (block < size - 1 && load(x + block, 1)[0] != most) block++;
  return block;
}

// The likeliest of the first `allowed` tokens of each row, and the logarithm of its probability among all.
template <class T>
static void likeliest(int64_t* ids, float* logps, const T* logits, long B, long tokens, long allowed, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (B > 1 && B * tokens > ALONE)
  for (long b = 0; b < B; b++) {
    const T* row = logits + b * tokens;
    float best, other;
    ids[b] = greatest(row, allowed, best);
    greatest(row + allowed, tokens - allowed, other);
    float most = std::max(best, other);
    Floats sum = {};
    each(tokens, [&](long i, auto n) {
      Floats weight = exponential(load(row + i, n) - most);
      for (long lane = n; lane < V; lane++) weight[lane] = 0;
      sum += weight;
    });
    logps[b] = best - most - std::log(total(sum));
  }
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
                   long bias_stride, long B, long H, long K, long D, long C, const int64_t* slots, int threads) {
  long S = *slots;
  float scale = 1 / std::sqrt(float(D));
#pragma omp parallel num_threads(threads) if (B * H * D * S > ALONE)
  {
    std::vector<float> score(S), room(D);
    std::vector<T> query(D);
    auto head_of = [&](long b, long h) {  // queries, then keys, then values, which are not turned
      return turned(qkv + (b * (H + 2 * K) + h) * D, turn && h < H + K ? turn + b * D : nullptr, room.data(), D);
    };
#pragma omp for schedule(static)
    for (long head = 0; head < B * K; head++) {
      long b = head / K, h = H + head % K, to = (head * C + S - 1) * D;
      const float* k = head_of(b, h);
      each(D, [&](long d, auto n) { store(keys + to + d, load(k + d, n), n); });
      const float* v = head_of(b, h + K);
      each(D, [&](long d, auto n) { store(values + to + d, load(v + d, n), n); });
    }
#pragma omp for schedule(static)
    for (long head = 0; head < B * H; head++) {
      long b = head / H, h = head % H, first = (b * K + h / (H / K)) * C * D, d = 0;
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
    T* to = &keys[slot * features];
    for (long i = 0; i < features; i += pair)
      for (long s = 0; s < n; s++) memcpy(to + i * PANEL + s * pair, key + s * features + i, pair * sizeof(T));
    for (long p = 0; p < D; p += PANEL)
      for (long s = 0; s < n; s += pair) {
        to = &values[p * slots + (slot + s) * PANEL];
        const T* from = value + s * D + p;
        for (long d = 0; d < std::min<long>(PANEL, D - p); d++)
          for (long i = 0; i < pair; i++) to[d * pair + i] = from[d + i * D];
      }
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
    some_rows(rows, sums, query, panel, table.features, (const char*)panel, 0);
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
    some_rows(rows, sums, weight.data(), panel, width, (const char*)panel, 0);
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
#pragma omp parallel num_threads(threads) if (B * L * N * D > ALONE)
  {
    Panels<T> table(D, L);
    std::vector<float> room(D), score;
    std::vector<X> query(ROWS * table.features), weight;
    std::vector<T> key(PANEL * table.features), value((PANEL + 1) * D);
#pragma omp for schedule(static)
    for (long task = 0; task < B * K * parts; task++) {
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
    }
  }
}

// A function's arguments, of which each is the first bytes of a word.
template <class... A, size_t... I>
static void apply(void (*f)(A...), const int64_t* words, std::index_sequence<I...>) {
  auto as = [&](auto x, size_t i) {
    memcpy(&x, words + i, sizeof x);
    return x;
  };
  f(as(A(), I)...);
}
template <class... A>
static void apply(void (*f)(A...), const int64_t* words) {
  apply(f, words, std::index_sequence_for<A...>());
}

extern "C" {
#define CALL(name, ...) \
  void name(const int64_t* words) { apply(__VA_ARGS__, words); }
#define FOR(name, T)                                  \
  long pair_##name() { return Factor<T>::pair; }      \
  CALL(product_##name, product<T>) \
  CALL(gated_##name, gated<T>)     \
  CALL(linear_##name, linear<T>)                      \
  CALL(rms_norm_##name, rms_norm<T>)                  \
  CALL(swiglu_##name, swiglu<T, T>)                   \
  CALL(likeliest_##name, likeliest<T>)                \
  CALL(attend_##name, attend<T>)                      \
  CALL(attend_prompts_##name, attend_prompts<T>)
FOR(fp32, float)
FOR(bf16, bf16)
CALL(swiglu_fp32_bf16, swiglu<bf16, float>)
long panel() { return PANEL; }
// Calls one after another: of each the function, how many words it takes, and these.
void play(const int64_t* words, long calls) {
  for (; calls; calls--, words += 2 + words[1]) ((void (*)(const int64_t*))words[0])(words + 2);
}
}
