// The kernels of training on a CPU for one element type, called by cpu_blocks.py, cpu_head.py and cpu_distill.py.
#include "block.h"
#include "calls.h"
#include "distill.h"
#include "head.h"

namespace calls {
extern "C" {
void forward_block(const BlockArguments* arguments, const Weights<const float>* weights, const Saved* saved,
                   float* out) {
  forward(*arguments, *weights, *saved, out);
}
void backward_block(const BlockArguments* arguments, const Weights<const float>* weights, const Saved* saved,
                    const Weights<float>* gradients, const StreamGradient* stream) {
  backward(*arguments, *weights, *saved, *gradients, *stream);
}
CALL(final_norm, rms_norm<float>)
CALL(final_norm_backward, rms_norm_backward<float>)
CALL(head_nll, ::head_nll)
CALL(head_logits, ::head_logits)
CALL(head_outcomes, ::head_outcomes)
CALL(head_outcome_gradient, ::head_outcome_gradient)
CALL(head_kl, ::head_kl)
CALL(head_hidden_grad, ::head_hidden_grad)
CALL(head_weight_grad, ::head_weight_grad)
CALL(weight_gradient, ::weight_gradient)
CALL(attention_forward, ::attention_forward)
CALL(attention_backward, ::attention_backward)
}
}  // namespace calls
