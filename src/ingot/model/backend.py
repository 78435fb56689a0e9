"""The backend interface: the seam between the model's mathematics and faster implementations of it.

Each forward pass asks `model.backend` once whether it supports the inputs, and uses the reference, `TORCH`, if not. A
backend stores nothing of a model, so models are copied, saved and sharded without regard to it. `backends/select.py`
chooses a backend where training builds a model and where a stage loads one.

Shapes: B rows, T positions, W width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ingot.model.attention import make_mask
from ingot.model.lm_head import LMHead
from ingot.model.precision import autocast_dtype
from ingot.model.rope import Rope

Taps = tuple[tuple[str, int], ...]
"""Intermediate tensors to return: pairs such as ("hidden", block) (`transformer.parse_taps`)."""


class Backend:
    """The reference: plain PyTorch operations. Subclasses override what they compute faster."""

    name = "torch"

    def supports(self, model: Any, ids_BT: Tensor, taps: Taps) -> bool:
        """Whether this backend can run the model on these inputs; called once per forward pass."""
        return True

    def mask(self, model: Any, documents_BT: Tensor | None, T: int) -> Any:
        """The attention mask, in the form that `blocks` takes."""
        device, dtype = model.norm.weight.device, model.norm.weight.dtype
        p = model.config.dropout if model.training else 0.0
        return make_mask(model.config, documents_BT, T, device, autocast_dtype(device) or dtype, p)

    def blocks(
        self, model: Any, x_BTW: Tensor, rope: Rope | None, mask: Any, taps: Taps
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All blocks and the final norm: hidden states B x T x W, and the tensors of `taps` by name."""
        return model.run_blocks(x_BTW, rope, mask, taps, model.checkpointing)

    def lm_head(self, weight_VD: Tensor) -> LMHead:
        """The LM head with that weight."""
        return LMHead(weight_VD)

    def decode_ops(self, device: torch.device, dtype: torch.dtype, stream: torch.dtype) -> Any:
        """The operations of generation (`infer/ops.py`); None: PyTorch's.

        Args:
            dtype: of matrix products.
            stream: dtype of the residual stream, norms and scores.
        """
        return None

    def recorder(self, update: Callable[..., Any]) -> Callable[..., Any] | None:
        """A wrapper of `update` that captures complete training updates as graphs and replays them; None: none."""
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Backend":
        return self

    def __reduce__(self) -> tuple[Callable[[], "Backend"], tuple[()]]:
        return _reference, ()  # a pickled model loads with the reference backend


TORCH = Backend()


def _reference() -> Backend:
    return TORCH
