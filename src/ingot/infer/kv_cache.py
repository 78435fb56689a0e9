"""The keys and values of all layers, by slots.

All rows write slot n at the same time, so a row whose prompt is shorter than the longest has a hole between prompt and
continuation, which its bias hides.

Shapes: L layers, B rows, K key heads, S slots in use, C slots, D features of a head.
"""

import torch
from torch import Tensor

from ingot.infer.ops import TorchOps
from ingot.model.config import ModelConfig


class KVCache:
    """Memory for all layers.

    Args:
        rows: of the batch.
        slots: tokens of a row at most.
        ops: who reads and writes it, in the dtypes that they choose.
    """

    def __init__(self, config: ModelConfig, rows: int, slots: int, ops: TorchOps, device: torch.device):
        shape = (config.depth, rows, config.kv_heads, slots, config.head_size)
        # Zeros, since recorded steps also read slots that are not written yet and hidden.
        self.keys_LBKCD = torch.zeros(shape, dtype=ops.key_dtype, device=device)
        self.values_LBKCD = torch.zeros(shape, dtype=ops.value_dtype, device=device)
        self.used = 0
        """Slots in use."""

    def layer(self, index: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, B x K x C x D."""
        return self.keys_LBKCD[index, rows], self.values_LBKCD[index, rows]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these: indices, ascending."""
        self.keys_LBKCD, self.values_LBKCD = (self._kept(x, rows) for x in (self.keys_LBKCD, self.values_LBKCD))

    def _kept(self, table_LBKCD: Tensor, rows: Tensor) -> Tensor:
        for table_BKCD in table_LBKCD:
            table_BKCD[: len(rows), :, : self.used] = table_BKCD[rows, :, : self.used]
        return table_LBKCD[:, : len(rows)]
