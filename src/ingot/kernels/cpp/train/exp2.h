// Vectorised exponentials and logarithms, as accurate as the element type of matrix products requires.
#pragma once
#include "operands.h"

constexpr float LOG2E = 1.44269504f;

// 2^x for x below 127. For x below -100 it is 1e-30, which is negligible in a sum and gives no denormal products. NaN
// stays NaN. The relative error is 3e-6 for bf16, 1e-7 for fp32.
static inline Floats vec_exp2(Floats x) {
  x = maximum(Floats{} - 100.f, x);
  Floats n = x + 12582912.f, r = x - (n - 12582912.f), p;  // the low bits of n are the nearest integer
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

// 1 / x with a relative error of 1e-7: an estimate and one Newton step.
static inline Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
  Floats estimate = _mm512_rcp14_ps(x);
  return estimate * (2.f - x * estimate);
#else
  return 1.f / x;
#endif
}

static inline Floats sigmoid(Floats x) { return reciprocal(1.f + vec_exp2(-maximum(Floats{} - 126.f, x * LOG2E))); }

// ln x with an error of 1e-7 for x above 1e-38: x = 2^n m with m from 3/4 to 3/2, and ln m is a series in
// t = (m - 1) / (m + 1). NaN stays NaN.
static inline Floats vec_log(Floats x) {
  Ints n = (((Ints)x + 0x400000) >> 23) - 127;
  Floats m = (Floats)((Ints)x - (n << 23)), t = (m - 1.f) / (m + 1.f), u = t * t;
  Floats log_m = 2.f * t * (1.f + u * (1 / 3.f + u * (1 / 5.f + u * (1 / 7.f))));
  return x == x ? __builtin_convertvector(n, Floats) / LOG2E + log_m : x;
}
