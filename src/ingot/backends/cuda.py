"""The backend of a GPU: the head's loss in a Triton kernel, decoding steps and training updates as CUDA graphs."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ingot.backends.cuda_decode import CUDAOps
from ingot.backends.cuda_graphs import Recorder
from ingot.model.backend import Backend
from ingot.model.lm_head import LMHead

_HAS_TRITON = find_spec("triton") is not None


class CUDABackend(Backend):
    """PyTorch, with a Triton kernel for the head and CUDA graphs."""

    def lm_head(self, weight_VD: Tensor) -> LMHead:
        return TritonHead(weight_VD) if _HAS_TRITON and weight_VD.is_cuda else LMHead(weight_VD)

    def decode_ops(self, device: torch.device, dtype: torch.dtype, stream: torch.dtype) -> CUDAOps:
        return CUDAOps(dtype, stream)

    def recorder(self, update: Callable[..., Any]) -> Recorder:
        return Recorder(update)


class TritonHead(LMHead):
    """The head with log-softmax and its gradient in one kernel."""

    def nll_chunk(self, x_nD: Tensor, weight_PD: Tensor, labels_n: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor]:
        if x_nD.dtype == torch.float64:
            return super().nll_chunk(x_nD, weight_PD, labels_n, needs_grad)
        from ingot.kernels.triton import nll_

        logits_nP = x_nD @ weight_PD.T
        return nll_(logits_nP, labels_n, len(self.weight), needs_grad), logits_nP
