"""A model's blocks by `torch.compile`, for the one shape of full micro-batches in training.

Other shapes (the rest of a batch, evaluations, rollouts) are too many to compile and run on the underlying backend.
Blocks are alike, so those of a deep model are compiled once for all; a shallow model is compiled as a whole, which
saves a few Python calls a block.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from ingot.model.backend import Backend, Taps
from ingot.model.lm_head import LMHead
from ingot.model.rope import Rope
from ingot.model.transformer import Block, Transformer

_MAX_DEPTH = {"cpu": 8, "cuda": 24}
"""Models of at most so many blocks are compiled as a whole."""


class CompiledBackend(Backend):
    """Blocks compiled for one shape.

    Args:
        base: computes all else, and blocks of other shapes.
        device: "cpu" or "cuda".
        depth: blocks of the model.
        shape: rows and tokens of the micro-batches that are compiled.
    """

    name = "compiled"

    def __init__(self, base: Backend, device: str, depth: int, shape: tuple[int, int]):
        self._base, self._device, self._shape = base, device, shape
        self._whole = depth <= _MAX_DEPTH[device]
        options: dict[str, Any] | None = {"combo_kernels": True} if device == "cuda" else None
        function: Any = Transformer.run_blocks if self._whole else Block.forward
        self._compiled: Any = torch.compile(function, dynamic=False, options=options)

    def supports(self, model: Any, ids_BT: Tensor, taps: Taps) -> bool:
        return self._base.supports(model, ids_BT, taps)

    def mask(self, model: Any, documents_BT: Tensor | None, T: int) -> Any:
        return self._base.mask(model, documents_BT, T)

    def blocks(
        self, model: Any, x_BTW: Tensor, rope: Rope | None, mask: Any, taps: Taps
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if taps or not torch.is_grad_enabled() or x_BTW.shape[:2] != self._shape:
            return self._base.blocks(model, x_BTW, rope, mask, taps)
        with _cudnn_attention() if self._device == "cuda" else contextlib.nullcontext():
            if self._whole:
                return self._compiled(model, x_BTW, rope, mask)
            for block in model.layers.values():
                x_BTW, _ = self._compiled(block, x_BTW, rope, mask)
            return model.norm(x_BTW), {}

    def lm_head(self, weight_VD: Tensor) -> LMHead:
        return self._base.lm_head(weight_VD)

    def decode_ops(self, device: torch.device, dtype: torch.dtype, stored: torch.dtype) -> Any:
        return self._base.decode_ops(device, dtype, stored)

    def recorder(self, update: Any) -> Any:
        return self._base.recorder(update)


def _cudnn_attention() -> contextlib.AbstractContextManager[Any]:
    """Try cuDNN's fused attention first. It is faster, but plans every shape anew, so it is for one shape only."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)
