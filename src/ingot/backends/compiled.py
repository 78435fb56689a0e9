"""The backend `compiled`: blocks with `torch.compile`, for the shape of full micro-batches in training.

Other shapes (the rest of a batch, evaluations, rollouts) would need too many compilations and run on the underlying
backend. All blocks of a model are alike, so a deep model compiles one block and reuses it; a shallow model compiles all
blocks as one function, which saves Python calls, unless its activations are checkpointed. (`selective` changes nothing
here: torch.compile decides itself which cheap operations the backward pass computes again.)
"""

import contextlib
import os
import platform
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ingot.core.artifact import code_directory
from ingot.model.backend import Backend, Taps
from ingot.model.lm_head import LMHead
from ingot.model.rope import Rope
from ingot.model.transformer import Block, Transformer

_MAX_DEPTH = {"cpu": 8, "cuda": 24}
"""Up to this depth all blocks are compiled as one function."""


class CompiledBackend(Backend):
    """Blocks that are compiled for one shape.

    Args:
        base: backend of everything else, including blocks of other shapes.
        device: "cpu" or "cuda".
        depth: number of blocks of the model.
        shape: rows and tokens of the micro-batches to compile for.
        notify: receives a message if compilation fails, and `base` computes the blocks; without it the error is raised.
        segmented: whether segments of blocks are computed again in the backward pass.
    """

    name = "compiled"

    def __init__(
        self,
        base: Backend,
        device: str,
        depth: int,
        shape: tuple[int, int],
        notify: Callable[[str], None] | None = None,
        segmented: bool = False,
    ):
        self._base, self._device, self._shape, self._notify = base, device, shape, notify
        self._all_blocks = depth <= _MAX_DEPTH[device] and not segmented
        function: Any = Transformer.run_blocks if self._all_blocks else Block.forward
        self._compiled: Any = torch.compile(function, dynamic=False, options=_options(device))

    def supports(self, model: Any, ids_BT: Tensor, taps: Taps) -> bool:
        return self._base.supports(model, ids_BT, taps)

    def mask(self, model: Any, documents_BT: Tensor | None, T: int) -> Any:
        return self._base.mask(model, documents_BT, T)

    def blocks(
        self, model: Any, x_BTW: Tensor, rope: Rope | None, mask: Any, taps: Taps
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self._compiled is None or taps or not torch.is_grad_enabled() or x_BTW.shape[:2] != self._shape:
            return self._base.blocks(model, x_BTW, rope, mask, taps)
        try:
            return self._run(model, x_BTW, rope, mask)
        except RuntimeError as error:
            of_compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
            if self._notify is None or not of_compiler:
                raise
            self._notify(f"torch.compile failed ({str(error).strip().splitlines()[0]}); the run continues without it")
            self._compiled = None
            return self._base.blocks(model, x_BTW, rope, mask, taps)

    def _run(self, model: Any, x_BTW: Tensor, rope: Rope | None, mask: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with _cudnn_attention() if self._device == "cuda" else contextlib.nullcontext():
            if self._all_blocks:
                return self._compiled(model, x_BTW, rope, mask)
            checkpointing = "none" if model.checkpointing == "selective" else model.checkpointing
            return model.run_blocks(x_BTW, rope, mask, (), checkpointing, self._compiled)

    def lm_head(self, weight_VD: Tensor) -> LMHead:
        return self._base.lm_head(weight_VD)

    def decode_ops(self, device: torch.device, dtype: torch.dtype, stream: torch.dtype) -> Any:
        return self._base.decode_ops(device, dtype, stream)

    def recorder(self, update: Any) -> Any:
        return self._base.recorder(update)


def _options(device: str) -> dict[str, Any]:
    """Options of torch.compile."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # torch's default is a name in /tmp that others can create first
        directory = code_directory("inductor") or tempfile.mkdtemp(prefix="ingot-inductor-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
    if device == "cuda":
        return {"combo_kernels": True}  # independent small kernels are launched as one
    options: dict[str, Any] = {
        "fallback_random": True,  # dropout draws the same numbers as without compilation
        "cpp.use_decompose_tanh": True,  # tanh by exp vectorises: GELU takes half the time
    }
    if platform.machine().lower() in ("x86_64", "amd64") and "TORCHINDUCTOR_CPP_MARCH" not in os.environ:
        # GCC 12.2 vectorises a transpose of 32 x 32 bf16 numbers wrongly, which corrupted gradients on a Xeon. This is
        # the only option that accepts a compiler flag.
        options["cpp.march"] = "native -fno-tree-slp-vectorize"
    return options


def _cudnn_attention() -> contextlib.AbstractContextManager[Any]:
    """Prefer cuDNN's fused attention: it is faster, but builds a plan for every shape, so it is for one shape only."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)
