// What cpu_blocks.py and cpu_head.py call, of one kind of numbers.
#include "block.h"
#include "calls.h"
#include "head.h"

namespace calls {
extern "C" {
void forward_block(const Where* at, const Weights<const float>* weights, const Kept* kept, float* out) {
  forward(*at, *weights, *kept, out);
}
void backward_block(const Where* at, const Weights<const float>* weights, const Kept* kept, const Weights<float>* of,
                    const Flow* flow) {
  backward(*at, *weights, *kept, *of, *flow);
}
CALL(rms_norm_last, rms_norm<float>)
CALL(rms_norm_last_backward, rms_norm_backward<float>)
CALL(head_costs, ::head_costs)
CALL(head_gradient, ::head_gradient)
CALL(head_weight_gradient, ::head_weight_gradient)
CALL(weight_gradient, ::weight_gradient)
CALL(attention_forward, ::attention_forward)
CALL(attention_backward, ::attention_backward)
}
}  // namespace calls
