"""The LM head with C++ kernels: the softmax of a row runs while its logits are in the cache.

Shapes: n positions, D features, V vocabulary.
"""

import torch
from torch import Tensor

from ingot.kernels import LANES
from ingot.kernels.cpu_train import available, call
from ingot.model.lm_head import LMHead


class CPUHead(LMHead):
    """The head of an fp32 model whose width is a multiple of `LANES`. Logit gradients are flat, in its own layout."""

    def prepare(self, dtype: torch.dtype) -> Tensor:
        """The fp32 weight itself, V x D: each product converts what it reads, without a copy in bf16."""
        weight_VD = self.weight.detach()
        assert available(dtype), f"no kernels for {dtype}"
        assert weight_VD.dtype == torch.float32, f"found a weight in {weight_VD.dtype}, expected fp32"
        return weight_VD.contiguous()

    def nll_chunk(self, x_nD: Tensor, weight_PD: Tensor, labels_n: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor]:
        if len(labels_n):
            low, high = map(int, labels_n.aminmax())
            assert 0 <= low <= high < len(weight_PD), f"found labels {low} to {high}, expected 0 to {len(weight_PD)}"
        padded = -(-len(weight_PD) // LANES) * LANES
        nll_n = torch.empty(len(x_nD), dtype=torch.float32)
        logit_grad_nP = torch.empty(len(x_nD) * padded, dtype=x_nD.dtype)
        inputs = (x_nD.contiguous(), weight_PD, labels_n.long().contiguous())
        call(x_nD.dtype, "head_nll", nll_n, logit_grad_nP, *inputs, needs_grad, *self._sizes(x_nD))
        return nll_n, logit_grad_nP

    def hidden_grad(self, logit_grad_nP: Tensor, weight_PD: Tensor, grad_n: Tensor) -> Tensor:
        out_nD = torch.empty(len(grad_n), weight_PD.shape[1], dtype=torch.float32)
        inputs = (logit_grad_nP, weight_PD, grad_n.float().contiguous())
        call(logit_grad_nP.dtype, "head_hidden_grad", out_nD, *inputs, *self._sizes(out_nD))
        return out_nD

    def weight_grad(self, logit_grad_nP: Tensor, scaled_nD: Tensor, total_VD: Tensor | None) -> Tensor:
        accumulate = total_VD is not None
        out_VD = torch.empty(self.weight.shape, dtype=torch.float32) if total_VD is None else total_VD
        inputs = (out_VD, logit_grad_nP, scaled_nD.contiguous(), accumulate)
        call(logit_grad_nP.dtype, "head_weight_grad", *inputs, *self._sizes(scaled_nD))
        return out_VD

    def _sizes(self, x_nD: Tensor) -> tuple[int, ...]:
        return *x_nD.shape, len(self.weight), torch.get_num_threads()
