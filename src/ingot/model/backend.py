"""Who computes a model: the seam between the mathematics in this package and faster ways to the same numbers.

A model has one `backend` and asks it once in each forward pass whether it supports the inputs; where it does not, the
reference `TORCH` computes. A backend holds no model, so a model can be copied, saved and sharded as if it had none.
`backends/select.py` chooses one where training builds a model and where a stage loads one.

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
"""What a forward pass returns besides hidden states: ("hidden", block) or ("attention", block)."""


class Backend:
    """The reference: PyTorch's operations one by one. Subclasses override what they compute faster."""

    name = "torch"

    def supports(self, model: Any, ids_BT: Tensor, taps: Taps) -> bool:
        """Whether this backend computes that model for these inputs; asked once in each forward pass."""
        return True

    def mask(self, model: Any, documents_BT: Tensor | None, T: int) -> Any:
        """Which keys each token may see, in the form that `blocks` reads."""
        device, stored = model.norm.weight.device, model.norm.weight.dtype
        p = model.config.dropout if model.training else 0.0
        return make_mask(model.config, documents_BT, T, device, autocast_dtype(device) or stored, p)

    def blocks(
        self, model: Any, x_BTW: Tensor, rope: Rope | None, mask: Any, taps: Taps
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All blocks and the last norm: hidden states B x T x W, and the tensors that `taps` ask for."""
        return model.run_blocks(x_BTW, rope, mask, taps)

    def lm_head(self, weight_VD: Tensor) -> LMHead:
        """The head over that matrix."""
        return LMHead(weight_VD)

    def decode_ops(self, device: torch.device, dtype: torch.dtype, stored: torch.dtype) -> Any:
        """The operations of generation (`infer/ops.py`) for products in `dtype`; None: PyTorch's."""
        return None

    def recorder(self, update: Callable[..., Any]) -> Callable[..., Any] | None:
        """A function that records whole training updates and replays them; None: nothing is recorded."""
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Backend":
        return self

    def __reduce__(self) -> tuple[Callable[[], "Backend"], tuple[()]]:
        return _reference, ()  # a pickled model is read with the reference


TORCH = Backend()


def _reference() -> Backend:
    return TORCH
