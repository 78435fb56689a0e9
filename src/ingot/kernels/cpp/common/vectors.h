// Vectors of V floats, loaded from fp32 or bf16 and stored as either.
//
// Shapes in all headers: M rows, I inputs, O outputs, W width, F features of the feed-forward; B rows or prompts, T or
// L tokens; N = H + 2K heads: H query heads, K key heads, K value heads; D features of a head; S slots in use of C.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int V = 16;  // floats of a vector register
#elif defined(__AVX2__)
constexpr int V = 8;
#else
constexpr int V = 4;
#endif
constexpr long MIN_PARALLEL = 1 << 15;  // multiplications below which a second thread does not pay

typedef uint16_t bf16;
typedef float Floats __attribute__((vector_size(4 * V)));
typedef int32_t Ints __attribute__((vector_size(4 * V)));
typedef uint32_t Bits __attribute__((vector_size(4 * V)));
typedef uint16_t Halves __attribute__((vector_size(2 * V)));

static inline long round_up(long x, long multiple) { return (x + multiple - 1) / multiple * multiple; }

// The size of equal parts of `size` elements: at most `max_part`, then rounded up to a multiple of `unit`.
static inline long equal_parts(long size, long max_part, long unit) {
  long parts = std::max(1L, (size + max_part - 1) / max_part);
  return round_up((size + parts - 1) / parts, unit);
}

// Prefetches a cache line into L2. L1 holds the keys and values of one head, not those of the next one as well.
static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Unaligned load as floats, and store, which rounds to the nearest even bf16.
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
// Load and store the first n elements; the others are 0.
template <class T>
static inline Floats load(const T* p, long n) {
  T buffer[V] = {};
  memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <class T>
static inline void store(T* p, Floats x, long n) {
  T buffer[V];
  store(buffer, x);
  memcpy(p, buffer, n * sizeof(T));
}
// Calls f(start, n) for each vector of `size` elements; n is V, a compile-time constant, or less for the last one.
template <class Function>
static inline void each(long size, Function f) {
  long start = 0;
  for (; start + V <= size; start += V) f(start, std::integral_constant<long, V>());
  if (start < size) f(start, size - start);
}
template <class T>
static inline Floats load(const T* p, std::integral_constant<long, V>) { return load(p); }
template <class T>
static inline void store(T* p, Floats x, std::integral_constant<long, V>) { store(p, x); }

static inline void store_ints(void* p, Ints x) { memcpy(p, &x, sizeof x); }

// Transposes a V x V matrix of 32-bit elements: floats or pairs of bf16.
static inline void transpose(Ints (&square)[V]) {
#if defined(__AVX512F__)
  __m512i x[V], y[V];
  for (int i = 0; i < V; i++) x[i] = (__m512i)square[i];
  for (int i = 0; i < V; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < V; i += 4)
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  for (int i = 0; i < V; i += 8)
    for (int j = 0; j < 4; j++) {
      y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
      y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
    }
  for (int i = 0; i < V / 2; i++) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
  }
  for (int i = 0; i < V; i++) square[i] = (Ints)x[i];
#else
  int transposed[V][V];
  for (int i = 0; i < V; i++)
    for (int j = 0; j < V; j++) transposed[j][i] = square[i][j];
  memcpy(square, transposed, sizeof transposed);
#endif
}

// 0, 1, 2, ...
static inline Ints lane_index() {
  Ints x;
  for (int i = 0; i < V; i++) x[i] = i;
  return x;
}
// The elementwise maximum; b if either is NaN.
static inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

static inline float sum_lanes(Floats x) {
  float sum = 0;
  for (int i = 0; i < V; i++) sum += x[i];
  return sum;
}
// Sums of the lanes of N vectors.
template <int N>
static inline void sum_lanes_of(const Floats* sums, float* out) {
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
  for (; i < N; i++) out[i] = sum_lanes(sums[i]);
}

// e^x with a relative error of 2e-7, 0 below -87 and infinity above 88; the polynomial of Cephes (Moshier).
static inline Floats vec_exp(Floats x) {
  Floats zero = {};
  Ints under = x < zero - 87.f, over = x > zero + 88.f;
  x = under | over ? zero : x;
  Floats n = (x * 1.44269504f + 12582912.f) - 12582912.f;  // rounds to the nearest integer
  Floats r = x - n * .693359375f + n * 2.12194440e-4f, p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  return under ? zero : over ? zero + INFINITY : p * (Floats)exponent;
}
