"""The head by functions of our own (`cpp/head.h`): a softmax passes its logits once, and no copy of the matrix in bf16
is made or kept, nor one of its gradient.

Shapes: n positions, D features, V vocabulary.
"""

import torch
from torch import Tensor

from ingot.model.head import Head
from ingot.model.settings import LANES
from ingot.train.native import call


class NativeHead(Head):
    """Of a model in fp32 that trains in bf16 on a CPU where `native.here`; its width is a multiple of `LANES`."""

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """As it is: what is multiplied with is made anew for each product, V x D."""
        assert dtype == torch.bfloat16, f"found {dtype}, expected what the functions multiply"
        return self.weight.detach()

    def costs(self, x_nD: Tensor, matrix_PD: Tensor, labels_n: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
        """-ln p(label), n, and the excess in pieces of the vocabulary."""
        costs_n = torch.empty(len(x_nD))
        excess = torch.empty(len(x_nD) * -(-len(matrix_PD) // LANES * LANES), dtype=torch.bfloat16)
        labels_n = labels_n.contiguous()
        call("head_costs_bf16", costs_n, excess, x_nD.contiguous(), matrix_PD, labels_n, *self._sizes(x_nD))
        return costs_n, excess

    def hidden_gradient(self, excess_nP: Tensor, matrix_PD: Tensor, grad_n: Tensor) -> Tensor:
        """Of the rows, n x D."""
        out_nD = torch.empty(len(grad_n), matrix_PD.shape[1])
        call("head_gradient_bf16", out_nD, excess_nP, matrix_PD, grad_n.contiguous(), *self._sizes(out_nD))
        return out_nD

    def weight_gradient(self, excess_nP: Tensor, scaled_nD: Tensor, others_VD: Tensor | None) -> Tensor:
        """Of the matrix, V x D."""
        out_VD = torch.empty_like(self.weight) if others_VD is None else others_VD
        onto = others_VD is not None
        call("head_weight_gradient_bf16", out_VD, excess_nP, scaled_nD.contiguous(), onto, *self._sizes(scaled_nD))
        return out_VD

    def _sizes(self, x_nD: Tensor) -> tuple[int, ...]:
        return *x_nD.shape, len(self.weight), torch.get_num_threads()
