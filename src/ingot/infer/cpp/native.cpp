// What decoding does on a CPU, as native.py calls it.
#include "attention.h"
#include "rows.h"

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
  CALL(product_##name, product<T>)                    \
  CALL(gated_##name, gated<T>)                        \
  CALL(gelu_##name, gelu_product<T>)                  \
  CALL(layer_norm_##name, layer_norm<T>)              \
  CALL(linear_##name, linear<T>)                      \
  CALL(rms_norm_##name, rms_norm<T>)                  \
  CALL(swiglu_##name, swiglu<T, T>)                   \
  CALL(likeliest_##name, likeliest<T>)                \
  CALL(attend_##name, attend<T>)                      \
  CALL(attend_prompts_##name, attend_prompts<T>)
FOR(fp32, float)
FOR(bf16, bf16)
CALL(norm_heads, rms_norm_heads)
CALL(swiglu_fp32_bf16, swiglu<bf16, float>)
long panel() { return PANEL; }
// Calls one after another: of each the function, how many words it takes, and these.
void play(const int64_t* words, long calls) {
  for (; calls; calls--, words += 2 + words[1]) ((void (*)(const int64_t*))words[0])(words + 2);
}
}
