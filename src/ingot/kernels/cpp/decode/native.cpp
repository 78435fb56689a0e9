// What decoding does on a CPU, as cpu_decode.py calls it.
#include "attention.h"
#include "calls.h"
#include "rows.h"

extern "C" {
#define FOR(name, T)                             \
  long pair_##name() { return Factor<T>::pair; } \
  long step_##name() { return STEP<T>; }         \
  long panel_##name() { return PANEL; }          \
  CALL(product_##name, product<T>)               \
  CALL(gated_##name, gated<T>)                   \
  CALL(gelu_##name, gelu_product<T>)             \
  CALL(layer_norm_##name, layer_norm<T>)         \
  CALL(rms_norm_##name, rms_norm<T>)             \
  CALL(argmax_##name, argmax<T>)                 \
  CALL(attend_##name, attend<T>)                 \
  CALL(attend_prompts_##name, attend_prompts<T>)
FOR(fp32, float)
FOR(bf16, bf16)
CALL(norm_heads, rms_norm_heads)
}
