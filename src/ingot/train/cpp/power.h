// Exponentials and their like, as exactly as what is rounded to bf16 needs them.
#pragma once
#include "vectors.h"

constexpr float LOG2E = 1.44269504f;

// 2^x to 3e-6 of it, for x below 127; about 2^-126 below that, which is 0 in bf16. What is no number stays so.
static inline Floats power(Floats x) {
  x = _mm512_max_ps(Floats{} - 126.f, x);
  Floats n = x + 12582912.f, r = x - (n - 12582912.f);  // n ends in the nearest integer
  Floats p = r * 9.57009968e-3f + 5.59178658e-2f;
  p = p * r + 2.40247449e-1f;
  p = p * r + 6.93121814e-1f;
  p = p * r + 9.99999261e-1f;
  return (Floats)((Ints)p + ((Ints)n << 23));
}

// 1 / x to 1e-8 of it: an estimate, made better once.
static inline Floats inverse(Floats x) {
  Floats part = _mm512_rcp14_ps(x);
  return part * (2.f - x * part);
}

static inline Floats sigmoid(Floats x) { return inverse(1.f + power(_mm512_min_ps(Floats{} + 126.f, x * -LOG2E))); }

// ln x to 1e-7, from that of 2 powers and (m - 1) / (m + 1) of what is left, which is from 3/4 to 3/2.
static inline Floats logarithm(Floats x) {
  Floats m = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_zero), n = _mm512_getexp_ps(x / m);
  Floats t = (m - 1.f) / (m + 1.f), u = t * t;
  return n / LOG2E + 2.f * t * (1.f + u * (1 / 3.f + u * (1 / 5.f + u * (1 / 7.f))));
}
