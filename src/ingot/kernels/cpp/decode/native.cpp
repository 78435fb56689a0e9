// What decoding does on a CPU, as native.py calls it.
#include "attention.h"
#include "calls.h"
#include "rows.h"

extern "C" {
#define PRODUCTS(name, ...)                  \
  CALL(product_##name, product<__VA_ARGS__>) \
  CALL(gated_##name, gated<__VA_ARGS__>)     \
  CALL(gelu_##name, gelu_product<__VA_ARGS__>)
#define FOR(name, T)                             \
  long pair_##name() { return Factor<T>::pair; } \
  long step_##name() { return STEP<T>; }         \
  long panel_##name() { return PANEL; }          \
  PRODUCTS(name, T)                              \
  CALL(layer_norm_##name, layer_norm<T>)         \
  CALL(rms_norm_##name, rms_norm<T>)             \
  CALL(likeliest_##name, likeliest<T>)           \
  CALL(attend_##name, attend<T>)                 \
  CALL(attend_prompts_##name, attend_prompts<T>)
FOR(fp32, float)
FOR(bf16, bf16)
#if HAS_TILES
PRODUCTS(digits, float, int8_t)
CALL(pack_digits, digit_panels)
long pair_digits() { return 1; }
long panel_digits() { return SIDE; }
long bytes_digits(long I) { return digit_panel(I); }
#endif
CALL(norm_heads, rms_norm_heads)
// Calls one after another: of each the function, how many words it takes, and these.
void play(const int64_t* words, long calls) {
  for (; calls; calls--, words += 2 + words[1]) ((void (*)(const int64_t*))words[0])(words + 2);
}
}
