// What blocks.py and head.py call.
#include "block.h"
#include "calls.h"
#include "head.h"

extern "C" {
void forward_block(const Where* at, const Weights<const float>* weights, const Kept* kept, float* out) {
  forward(*at, *weights, *kept, out);
}
void backward_block(const Where* at, const Weights<const float>* weights, const Kept* kept, const Weights<float>* of,
                    const Flow* after, const Flow* before) {
  backward(*at, *weights, *kept, *of, *after, *before);
}
CALL(rms_norm_last, rms_norm<float>)
CALL(rms_norm_last_backward, rms_norm_backward<float>)
CALL(head_costs_bf16, head_costs)
CALL(head_gradient_bf16, head_gradient)
CALL(head_weight_gradient_bf16, head_weight_gradient)
CALL(weight_gradient_bf16, weight_gradient)
CALL(attention_forward_bf16, attention_forward)
CALL(attention_backward_bf16, attention_backward)
}
