// Exponentials and their like, as exactly as the numbers need them that are multiplied.
#pragma once
#include "layouts.h"

constexpr float LOG2E = 1.44269504f;

// 2^x, for x below 127, and 1e-30 for x below -100: nothing beside a sum of them, and times another number none that is
// denormal. What is no number stays so. To 3e-6 of it where it is rounded to bf16, else to 1e-7.
static inline Floats power(Floats x) {
  x = larger(Floats{} - 100.f, x);
  Floats n = x + 12582912.f, r = x - (n - 12582912.f), p;  // n ends in the nearest integer
  if constexpr (PAIR == 2) {
    p = r * 9.57009968e-3f + 5.59178658e-2f;
    p = p * r + 2.40247449e-1f;
    p = p * r + 6.93121814e-1f;
    p = p * r + 9.99999261e-1f;
  } else {
    p = r * 1.53458124e-4f + 1.33999309e-3f;
    p = p * r + 9.61848907e-3f;
    p = p * r + 5.55032864e-2f;
    p = p * r + 2.40226462e-1f;
    p = p * r + 6.93147182e-1f;
    p = p * r + 1.f;
  }
  return (Floats)((Ints)p + ((Ints)n << 23));
}

// 1 / x to 1e-7 of it: an estimate, made better once.
static inline Floats inverse(Floats x) {
#if defined(__AVX512F__)
  Floats part = _mm512_rcp14_ps(x);
  return part * (2.f - x * part);
#else
  return 1.f / x;
#endif
}

static inline Floats sigmoid(Floats x) { return inverse(1.f + power(-larger(Floats{} - 126.f, x * LOG2E))); }

// ln x to 1e-7 for x from 1e-38 on, from that of a power of 2 and of (m - 1) / (m + 1) of what is left, which is from
// 3/4 to 3/2. What is no number stays so.
static inline Floats logarithm(Floats x) {
  Ints n = (((Ints)x + 0x400000) >> 23) - 127;
  Floats m = (Floats)((Ints)x - (n << 23)), t = (m - 1.f) / (m + 1.f), u = t * t;
  Floats left = 2.f * t * (1.f + u * (1 / 3.f + u * (1 / 5.f + u * (1 / 7.f))));
  return x == x ? __builtin_convertvector(n, Floats) / LOG2E + left : x;
}
