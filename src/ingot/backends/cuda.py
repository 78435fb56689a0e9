"""A GPU: the head's loss in one Triton kernel, steps of decoding and whole updates as CUDA graphs."""

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
    """PyTorch's operations on a GPU, with kernels for the head and recordings."""

    def lm_head(self, weight_VD: Tensor) -> LMHead:
        return TritonHead(weight_VD) if _HAS_TRITON and weight_VD.is_cuda else LMHead(weight_VD)

    def decode_ops(self, device: torch.device, dtype: torch.dtype, stored: torch.dtype) -> CUDAOps:
        return CUDAOps(dtype, stored)

    def recorder(self, update: Callable[..., Any]) -> Recorder:
        return Recorder(update)


class TritonHead(LMHead):
    """The head with its softmax in one kernel, which reads and writes each logit once."""

    def nll_chunk(self, x_nD: Tensor, matrix_PD: Tensor, labels_n: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
        if x_nD.dtype == torch.float64:
            return super().nll_chunk(x_nD, matrix_PD, labels_n, keep)
        from ingot.kernels.triton import nll_

        logits_nP = x_nD @ matrix_PD.T
        return nll_(logits_nP, labels_n, len(self.weight), keep), logits_nP
