// The kernels of generation on a CPU, called by cpu_decode.py.
#include "attention.h"
#include "calls.h"
#include "rows.h"

extern "C" {
#define KERNELS(name, T)                          \
  long pair_##name() { return Operand<T>::pair; } \
  long step_##name() { return K_STEP<T>; }        \
  long panel_##name() { return NR; }              \
  CALL(linear_##name, linear<T>)                  \
  CALL(swiglu_##name, swiglu<T>)                  \
  CALL(gelu_##name, gelu_linear<T>)               \
  CALL(layer_norm_##name, layer_norm<T>)          \
  CALL(rms_norm_##name, rms_norm<T>)              \
  CALL(argmax_##name, argmax<T>)                  \
  CALL(attend_##name, attend<T>)                  \
  CALL(attend_prompts_##name, attend_prompts<T>)
KERNELS(fp32, float)
KERNELS(bf16, bf16)
CALL(norm_heads, rms_norm_heads)
}
