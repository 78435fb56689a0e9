"""The head by C++ kernels: softmax while a row's logits are in the cache, and no copy of the matrix in bf16.

Shapes: n positions, D features, V vocabulary.
"""

import torch
from torch import Tensor

from ingot.kernels import LANES
from ingot.kernels.cpu_train import available, call
from ingot.model.lm_head import LMHead


class CPUHead(LMHead):
    """The head of a model in fp32 whose width is a multiple of `LANES`; an excess is flat, in the kernels' layout."""

    def prepare(self, dtype: torch.dtype) -> Tensor:
        """The fp32 matrix as it is, V x D: each product converts what it reads."""
        weight_VD = self.weight.detach()
        assert available(dtype), f"no kernels for {dtype}"
        assert weight_VD.dtype == torch.float32, f"found a matrix in {weight_VD.dtype}, expected fp32"
        return weight_VD.contiguous()

    def nll_chunk(self, x_nD: Tensor, matrix_PD: Tensor, labels_n: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
        if len(labels_n):
            low, high = map(int, labels_n.aminmax())
            assert 0 <= low <= high < len(matrix_PD), f"found labels {low} to {high}, expected 0 to {len(matrix_PD)}"
        padded = -(-len(matrix_PD) // LANES) * LANES
        nll_n = torch.empty(len(x_nD), dtype=torch.float32)
        excess_nP = torch.empty(len(x_nD) * padded, dtype=x_nD.dtype)
        inputs = (x_nD.contiguous(), matrix_PD, labels_n.long().contiguous())
        call(x_nD.dtype, "head_costs", nll_n, excess_nP, *inputs, keep, *self._sizes(x_nD))
        return nll_n, excess_nP

    def hidden_grad(self, excess_nP: Tensor, matrix_PD: Tensor, grad_n: Tensor) -> Tensor:
        out_nD = torch.empty(len(grad_n), matrix_PD.shape[1], dtype=torch.float32)
        inputs = (excess_nP, matrix_PD, grad_n.float().contiguous())
        call(excess_nP.dtype, "head_gradient", out_nD, *inputs, *self._sizes(out_nD))
        return out_nD

    def weight_grad(self, excess_nP: Tensor, scaled_nD: Tensor, total_VD: Tensor | None) -> Tensor:
        add = total_VD is not None
        out_VD = torch.empty(self.weight.shape, dtype=torch.float32) if total_VD is None else total_VD
        inputs = (out_VD, excess_nP, scaled_nD.contiguous(), add)
        call(excess_nP.dtype, "head_weight_gradient", *inputs, *self._sizes(scaled_nD))
        return out_VD

    def _sizes(self, x_nD: Tensor) -> tuple[int, ...]:
        return *x_nD.shape, len(self.weight), torch.get_num_threads()
