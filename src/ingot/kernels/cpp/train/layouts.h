// Numbers side by side as they are multiplied: bf16 in pairs of 32 bits, whose products are added up at once, floats
// one by one. What is called a pair here is PAIR numbers, and V pairs fill a register.
#pragma once
#include "products.h"

typedef NUMBER Number;  // what is multiplied: float or bf16
constexpr long PAIR = Factor<Number>::pair;

// What a thread sets up before it multiplies.
struct Nothing {
  explicit Nothing(long) {}
};
#if HAS_TILES
typedef std::conditional_t<Factor<Number>::tiles, Tiles, Nothing> Tools;
#else
typedef Nothing Tools;
#endif

static inline Floats wide(const float* p) { return load(p); }
static inline void copy(float* to, const float* from) { store(to, load(from)); }  // V numbers

// V pairs: of numbers one after another, and of two rows' numbers in the same places. The rest after n numbers is 0,
// and so is a row that is null.
static inline Ints pairs(const float* p, long n) { return (Ints)(n >= V ? load(p) : load(p, n)); }
static inline Ints pairs(const float* one, const float*, long n) { return pairs(one, n); }

// The same of V floats in each of two places, rounded to what the first argument points to.
static inline Ints one_after_another(const float*, const float* one, const float*) { return (Ints)load(one); }
static inline Ints side_by_side(const float*, const float* one, const float*) { return (Ints)load(one); }

#if defined(__AVX512BF16__)
static inline __m256i halves(const bf16* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline void copy(bf16* to, const bf16* from) { _mm256_storeu_si256((__m256i*)to, halves(from)); }
// What load() does, which GCC 12 makes of two halves.
static inline Floats wide(const bf16* p) { return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(p)), 16); }

// V numbers of each of two rows, as pairs.
static inline Ints pair(__m256i a, __m256i b) {
  return (Ints)_mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}
// The same of a vector that holds one row after the other.
static inline Ints pair(__m512i x) {
  alignas(64) static const uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (Ints)_mm512_permutexvar_epi16(_mm512_load_si512(order), x);
}
static inline Ints pairs(const bf16* p, long n) {
  return (Ints)_mm512_maskz_loadu_epi16(n >= 2 * V ? ~0u : (1u << n) - 1, p);
}
static inline Ints pairs(const bf16* one, const bf16* two, long n) {
  __mmask16 some = n >= V ? 0xffff : (1u << n) - 1;
  return pair(_mm256_maskz_loadu_epi16(some, one), _mm256_maskz_loadu_epi16(two ? some : 0, two));
}
static inline __m512i rounded(Floats low, Floats high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
static inline Ints one_after_another(const bf16*, const float* one, const float* two) {
  return (Ints)rounded(load(one), load(two));
}
static inline Ints side_by_side(const bf16*, const float* one, const float* two) {
  return pair(rounded(load(one), load(two)));
}
#endif

template <class T>
static inline Floats wide(const T* p, long n) { return load(p, n); }
template <class T>
static inline Floats wide(const T* p, std::integral_constant<long, V>) { return wide(p); }
