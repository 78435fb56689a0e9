// What decoding one token does on a CPU besides products of many rows: see native.py.
//
// Shapes: I inputs, O outputs, M rows, W width, F features; B rows, H query heads, K key heads, D features of a head,
// S slots in use of C.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int V = 16;  // floats of a register
#elif defined(__AVX2__)
constexpr int V = 8;
#else
constexpr int V = 4;
#endif
constexpr int TOGETHER = 8;      // dot products whose lanes are added up at once
constexpr long AHEAD = 12288;    // bytes of weights that are asked for before they are needed
constexpr long ALONE = 1 << 15;  // multiplications below which waking a thread costs more than it helps

typedef uint16_t bf16;
typedef float Floats __attribute__((vector_size(4 * V)));
typedef int32_t Ints __attribute__((vector_size(4 * V)));
typedef uint32_t Bits __attribute__((vector_size(4 * V)));
typedef uint16_t Halves __attribute__((vector_size(2 * V)));

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
  Bits bits = (Bits)x, nan = (Bits)(x != x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  Halves halves = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), Halves);
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

// What is multiplied at once; sums are floats. bf16 in pairs where the CPU can.
template <class T>
struct Factor {
  static constexpr long size = V;
  static inline void add(Floats& sum, const T* x, const T* w) { sum += load(x) * load(w); }
};
#if defined(__AVX512BF16__)
template <>
struct Factor<bf16> {
  static constexpr long size = 2 * V;
  static inline void add(Floats& sum, const bf16* x, const bf16* w) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x), (__m512bh)_mm512_loadu_si512(w));
  }
};
#endif

// N dot products of a row and rows of weights, one after another: memory is read fastest as it lies. What is so many
// bytes ahead is asked for meanwhile.
template <int N, class T>
static inline void dots(float* out, const T* x, const T* w, long I, long ahead) {
  Floats sum[N] = {};
  long whole = I - I % Factor<T>::size;
  for (int n = 0; n < N; n++) {
    const T* row = w + n * I;
    for (long i = 0; i < whole; i += Factor<T>::size) {
      __builtin_prefetch((const char*)(row + i) + ahead);
      Factor<T>::add(sum[n], x + i, row + i);
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

template <class T, class In>
static void swiglu(T* out, const In* gate_and_up, long M, long F, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (M * F > ALONE)
  for (long m = 0; m < M; m++)
    each(F, [&](long f, auto n) {
      const In* row = gate_and_up + 2 * m * F + f;
      Floats gate = load(row, n);
      store(out + m * F + f, gate / (1.f + exponential(-gate)) * load(row + F, n), n);
    });
}

// N vectors of a weighted sum of values, the last of them of `size` numbers.
template <int N, class T, class Size>
static inline void mix(T* out, const float* weight, float share, const T* values, long S, long D, Size size, const T* next) {
  Floats sum[N] = {};
  for (long s = 0; s < S; s++) {
    for (int i = 0; i < N * V; i += 64 / sizeof(T)) __builtin_prefetch(next + s * D + i);
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

template <class T>
static void attend(T* out, const float* q, const float* k, const float* v, long stride, T* keys, T* values,
                   const float* bias, long bias_stride, long B, long H, long K, long D, long C, long S, int threads) {
  float scale = 1 / std::sqrt(float(D));
#pragma omp parallel num_threads(threads) if (B * H * D * S > ALONE)
  {
    std::vector<float> score(S);
    std::vector<T> query(D);
#pragma omp for schedule(static)
    for (long head = 0; head < B * K; head++) {
      long from = head / K * stride + head % K * D, to = (head * C + S - 1) * D;
      each(D, [&](long d, auto n) {
        store(keys + to + d, load(k + from + d, n), n);
        store(values + to + d, load(v + from + d, n), n);
      });
    }
#pragma omp for schedule(static)
    for (long head = 0; head < B * H; head++) {
      long b = head / H, h = head % H, first = (b * K + h / (H / K)) * C * D, d = 0;
      each(D, [&](long at, auto n) { store(&query[at], load(q + b * stride + h * D + at, n) * scale, n); });
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

extern "C" {
#define FOR(name, T)                                                                                            \
  void linear_##name(float* out, const T* x, const T* w, long I, long O, int threads) {                         \
    linear(out, x, w, I, O, threads);                                                                           \
  }                                                                                                             \
  void rms_norm_##name(T* out, const float* x, const float* gain, float eps, long M, long W, int threads) {     \
    rms_norm(out, x, gain, eps, M, W, threads);                                                                 \
  }                                                                                                             \
  void swiglu_##name(T* out, const T* in, long M, long F, int threads) { swiglu(out, in, M, F, threads); }      \
  void likeliest_##name(int64_t* ids, float* logps, const T* logits, long B, long tokens, long allowed, int threads) { \
    likeliest(ids, logps, logits, B, tokens, allowed, threads);                                                 \
  }                                                                                                             \
  void attend_##name(T* out, const float* q, const float* k, const float* v, long stride, T* keys, T* values,   \
                     const float* bias, long bias_stride, long B, long H, long K, long D, long C, long S,       \
                     int threads) {                                                                             \
    attend(out, q, k, v, stride, keys, values, bias, bias_stride, B, H, K, D, C, S, threads);                   \
  }
FOR(fp32, float)
FOR(bf16, bf16)
void swiglu_fp32_bf16(bf16* out, const float* in, long M, long F, int threads) { swiglu(out, in, M, F, threads); }
}
