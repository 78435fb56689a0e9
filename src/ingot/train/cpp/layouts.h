// Numbers in bf16 side by side as they are multiplied: a pair is two of them in 32 bits, whose products are added up at
// once.
#pragma once
#include "vectors.h"

static inline __m256i halves(const bf16* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline void put(bf16* p, __m256i x) { _mm256_storeu_si256((__m256i*)p, x); }
// What load() does, which GCC 12 makes of two halves.
static inline Floats wide(const bf16* p) { return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(p)), 16); }
static inline Floats wide(const float* p) { return load(p); }

static inline long up(long x, long to) { return (x + to - 1) / to * to; }

// V numbers of each of two rows, as pairs.
static inline __m512i pair(__m256i a, __m256i b) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}
// The same of a vector that holds one row after the other.
static inline __m512i pair(__m512i x) {
  alignas(64) static const uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), x);
}

// Columns of a square of pairs as its rows.
static inline void transpose(__m512i (&x)[V]) {
  __m512i y[V];
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
}
