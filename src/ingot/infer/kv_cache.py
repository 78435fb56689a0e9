"""The KV cache: keys and values of all layers in slots, one per token.

All rows write the same slot in a step. So a row whose prompt is shorter than the longest has unused slots between
prompt and continuation, which the attention bias masks.

Shapes: L layers, B rows, K key heads, S slots in use, C slots, D features of a head.
"""

import torch
from torch import Tensor

from ingot.infer.ops import TorchOps
from ingot.model.config import ModelConfig


class KVCache:
    """Keys and values of all layers.

    Args:
        rows: rows of the batch.
        slots: largest number of tokens of a row.
        ops: the operations that read and write the cache; they choose its dtypes.
    """

    def __init__(self, config: ModelConfig, rows: int, slots: int, ops: TorchOps, device: torch.device):
        shape = (config.depth, rows, config.kv_heads, slots, config.head_size)
        # Zeros, because recorded steps also read masked slots that are not written yet.
        self.keys_LBKCD = torch.zeros(shape, dtype=ops.key_dtype, device=device)
        self.values_LBKCD = torch.zeros(shape, dtype=ops.value_dtype, device=device)
        self.used = 0
        """Number of slots in use."""

    def layer(self, index: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, B x K x C x D."""
        return self.keys_LBKCD[index, rows], self.values_LBKCD[index, rows]

    def keep(self, rows: Tensor) -> None:
        """Remove all rows except these, in place.

        Args:
            rows: indices, ascending.
        """
        self.keys_LBKCD, self.values_LBKCD = (self._select(x, rows) for x in (self.keys_LBKCD, self.values_LBKCD))

    def _select(self, cache_LBKCD: Tensor, rows: Tensor) -> Tensor:
        for cache_BKCD in cache_LBKCD:
            cache_BKCD[: len(rows), :, : self.used] = cache_BKCD[rows, :, : self.used]
        return cache_LBKCD[:, : len(rows)]
