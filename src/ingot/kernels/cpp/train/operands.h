// Operands of matrix products in training. bf16 numbers are multiplied in pairs of 32 bits, whose products are added at
// once; floats one by one. A "pair" below is PAIR numbers, and V pairs fill a register.
#pragma once
#include "gemm.h"

typedef NUMBER Number;  // element type of matrix products: float or bf16
constexpr long PAIR = Operand<Number>::pair;

// What a thread sets up before it multiplies: tiles, or nothing.
struct NoSetup {
  explicit NoSetup(long) {}
};
#if HAS_AMX
typedef std::conditional_t<Operand<Number>::amx, TileConfig, NoSetup> ThreadSetup;
#else
typedef NoSetup ThreadSetup;
#endif

static inline Floats widen(const float* p) { return load(p); }
static inline void copy(float* to, const float* from) { store(to, load(from)); }  // V numbers

// V pairs of the first n consecutive numbers, and V pairs of the numbers of two rows; the rest is 0, and so is a row
// that is null.
static inline Ints load_pairs(const float* p, long n) { return (Ints)(n >= V ? load(p) : load(p, n)); }
static inline Ints load_pairs(const float* row0, const float*, long n) { return load_pairs(row0, n); }

// V pairs of floats from two places, rounded to the type of the first argument: consecutive, or interleaved.
static inline Ints round_consecutive(const float*, const float* p0, const float*) { return (Ints)load(p0); }
static inline Ints round_interleaved(const float*, const float* p0, const float*) { return (Ints)load(p0); }

#if defined(__AVX512BF16__)
static inline __m256i load_halves(const bf16* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline void copy(bf16* to, const bf16* from) { _mm256_storeu_si256((__m256i*)to, load_halves(from)); }
// As load(), which GCC 12 splits into two halves.
static inline Floats widen(const bf16* p) {
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(p)), 16);
}

// Interleaves V numbers of two rows to pairs.
static inline Ints interleave(__m256i a, __m256i b) {
  return (Ints)_mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}
// The same for a vector with both rows one after the other.
static inline Ints interleave(__m512i x) {
  alignas(64) static const uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (Ints)_mm512_permutexvar_epi16(_mm512_load_si512(order), x);
}
static inline Ints load_pairs(const bf16* p, long n) {
  return (Ints)_mm512_maskz_loadu_epi16(n >= 2 * V ? ~0u : (1u << n) - 1, p);
}
static inline Ints load_pairs(const bf16* row0, const bf16* row1, long n) {
  __mmask16 mask = n >= V ? 0xffff : (1u << n) - 1;
  return interleave(_mm256_maskz_loadu_epi16(mask, row0), _mm256_maskz_loadu_epi16(row1 ? mask : 0, row1));
}
static inline __m512i round_bf16(Floats low, Floats high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
static inline Ints round_consecutive(const bf16*, const float* p0, const float* p1) {
  return (Ints)round_bf16(load(p0), load(p1));
}
static inline Ints round_interleaved(const bf16*, const float* p0, const float* p1) {
  return interleave(round_bf16(load(p0), load(p1)));
}
#endif

template <class T>
static inline Floats widen(const T* p, long n) { return load(p, n); }
template <class T>
static inline Floats widen(const T* p, std::integral_constant<long, V>) { return widen(p); }
