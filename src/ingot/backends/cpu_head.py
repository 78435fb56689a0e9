"""The head by functions of our own (`cpp/head.h`): the softmax of a row is made while its logits are in the cache, and
no copy of the matrix in bf16 is made or kept, nor one of its gradient.

Shapes: n positions, D features, V vocabulary.
"""

import torch
from torch import Tensor

from ingot.kernels.cpu_train import available, call
from ingot.model.config import LANES
from ingot.model.lm_head import Head


class NativeHead(Head):
    """Of a model in fp32 that trains in what `native.available`; its width is a multiple of `LANES`.

    An excess lies in pieces of the vocabulary (`cpp/head.h`).
    """

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """As it is: what is multiplied with is made anew for each product, V x D."""
        weight_VD = self.weight.detach()
        assert available(dtype), f"found {dtype}, expected what the functions multiply"
        assert weight_VD.dtype == torch.float32, f"found {weight_VD.dtype}, expected what the functions read"
        return weight_VD.contiguous()

    def costs(self, x_nD: Tensor, matrix: Tensor, labels_n: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
        """-ln p(label), n, and the excess."""
        if len(labels_n):
            low, high = map(int, labels_n.aminmax())
            assert 0 <= low <= high < len(matrix), f"found labels {low} to {high}, expected less than {len(matrix)}"
        filled_up = -(-len(matrix) // LANES) * LANES
        costs_n = torch.empty(len(x_nD), dtype=torch.float32)
        excess = torch.empty(len(x_nD) * filled_up, dtype=x_nD.dtype)
        given = (x_nD.contiguous(), matrix, labels_n.long().contiguous())
        call(x_nD.dtype, "head_costs", costs_n, excess, *given, keep, *self._sizes(x_nD))
        return costs_n, excess

    def hidden_gradient(self, excess: Tensor, matrix: Tensor, grad_n: Tensor) -> Tensor:
        """Of the rows, n x D."""
        out_nD = torch.empty(len(grad_n), matrix.shape[1], dtype=torch.float32)
        call(excess.dtype, "head_gradient", out_nD, excess, matrix, grad_n.float().contiguous(), *self._sizes(out_nD))
        return out_nD

    def weight_gradient(self, excess: Tensor, scaled_nD: Tensor, others_VD: Tensor | None) -> Tensor:
        """Of the matrix, V x D."""
        onto = others_VD is not None
        out_VD = torch.empty(self.weight.shape, dtype=torch.float32) if others_VD is None else others_VD
        given = (out_VD, excess, scaled_nD.contiguous(), onto)
        call(excess.dtype, "head_weight_gradient", *given, *self._sizes(scaled_nD))
        return out_VD

    def _sizes(self, x_nD: Tensor) -> tuple[int, ...]:
        return *x_nD.shape, len(self.weight), torch.get_num_threads()
