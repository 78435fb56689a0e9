"""Keys and values of all layers, and attention of one new token a row over them.

The cache has slots: all rows write slot n at the same time, so a row whose prompt is shorter than the longest has a
hole between prompt and continuation, which its bias hides.

On a CPU scores and mixed values are weighted sums of rows that lie one after another, which `torch.embedding_bag` reads
at the memory's speed: of a head's slots for its values, and of its features for its scores. So keys lie transposed, in
blocks of `_BLOCK` slots, of which those past the newest slot are not read. One layer, 32 rows, 12 heads of 64, 100
slots, 2 cores of a Zen 5, in us, fp32 / bf16, a new slot written and the softmax included: so 430 / 325, as products of
keys and queries (fp32) 580 / 620, the other way round 750. The values alone: as bags 255 / 143, as a product 680 / 255;
both by `F.scaled_dot_product_attention` 800 / 1,950. With one row all are alike. Rejected besides: keys transposed over
all slots (as fast, where all are in use), and rows that write at their own positions (indexed writes, and a mask of
each row's own all the same).

The newest block's slots that nobody wrote are read too, for scores that are thrown away. They are zeros all the same,
for what freed memory holds is denormal numbers too, over which an Intel CPU stumbles: 32 rows of 124M took 45 ms a step
in place of 30.

Shapes: B rows, T positions, S slots in use, C slots, N blocks of P slots, n blocks in use, L layers, H query heads, K
key heads, G = H / K, R = B K, D features of a head.
"""

import torch
from torch import Tensor

from ingot.infer.product import weighed
from ingot.model.settings import ModelConfig

_BLOCK = 64
"""Slots of a block of keys: of 32 a weighted sum in bf16 takes 1.25 times as long."""


class Cache:
    """For matrix products of queries, keys and values.

    Args:
        rows: of the batch.
        slots: tokens of a row at most.
        wide: what scores are computed in.
        dtype: what values are stored and weighted in.
    """

    def __init__(
        self, config: ModelConfig, rows: int, slots: int, wide: torch.dtype, dtype: torch.dtype, device: torch.device
    ):
        self.wide, self.scale, self.used, self.query_heads = wide, config.head_size**-0.5, 0, config.heads
        shape = (config.depth, rows, config.kv_heads, slots, config.head_size)
        self.values_LBKCD = torch.empty(shape, dtype=dtype, device=device)
        self._make_keys()

    def read(self, layer: int, rows: slice, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """Write the first slots of some rows; they are in use then."""
        self.used = v_BKTD.shape[2]
        self.values_LBKCD[layer, rows, :, : v_BKTD.shape[2]] = v_BKTD
        self._read_keys(layer, rows, k_BKTD)

    def grow(self, used: int) -> None:
        """Let every row use so many slots from now on; all layers write the last of them."""
        self.used = used

    def attend(self, layer: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor, bias_BS: Tensor | None) -> Tensor:
        """Write the newest slot and mix the values of all that are in use: B x (H D), in the dtype of the values.

        Args:
            bias_BS: -inf at slots that a row may not see, in the dtype of the scores; None: it may see all.
        """
        self.values_LBKCD[layer, :, :, self.used - 1] = v_BKD
        score_BHS = self._scores(layer, q_BHD * self.scale, k_BKD)
        if bias_BS is not None:
            score_BHS.add_(bias_BS[:, None])
        return self._mixed(layer, score_BHS.softmax(-1).to(self.values_LBKCD.dtype)).view(len(q_BHD), -1)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these: indices, ascending."""
        self.values_LBKCD = _kept(self.values_LBKCD, rows, self.used)
        self._keep_keys(rows)

    @property
    def score_dtype(self) -> torch.dtype:
        return self.wide

    def _make_keys(self) -> None:
        self.keys_LBKCD = torch.empty_like(self.values_LBKCD, dtype=self.wide)

    def _read_keys(self, layer: int, rows: slice, k_BKTD: Tensor) -> None:
        self.keys_LBKCD[layer, rows, :, : k_BKTD.shape[2]] = k_BKTD

    def _keep_keys(self, rows: Tensor) -> None:
        self.keys_LBKCD = _kept(self.keys_LBKCD, rows, self.used)

    def _scores(self, layer: int, q_BHD: Tensor, k_BKD: Tensor) -> Tensor:
        keys_BKCD = self.keys_LBKCD[layer]
        keys_BKCD[:, :, self.used - 1] = k_BKD
        (B, K, _, D), S = keys_BKCD.shape, self.used
        return torch.matmul(q_BHD.view(B, K, -1, D), keys_BKCD[:, :, :S].transpose(2, 3)).view(B, -1, S)

    def _mixed(self, layer: int, p_BHS: Tensor) -> Tensor:
        B, K, _, _ = self.values_LBKCD[layer].shape
        return torch.matmul(p_BHS.view(B, K, -1, self.used), self.values_LBKCD[layer, :, :, : self.used])


class BagCache(Cache):
    """For weighted sums on a CPU; keys and scores are in the dtype of the values."""

    @property
    def score_dtype(self) -> torch.dtype:
        return self.values_LBKCD.dtype

    def grow(self, used: int) -> None:
        super().grow(used)
        _, B, K, N, D, _ = self.keys_LBKNDP.shape
        if used % _BLOCK == 1:
            self.keys_LBKNDP[:, :, :, used // _BLOCK] = 0
        self.of_values = self._bags(B * K, self.values_LBKCD.shape[3], used, 1)
        if self.bagged != (B, n := -(-used // _BLOCK)):
            self.bagged, self.of_keys = (B, n), self._bags(B * K, N * D, D, n)

    def _bags(self, heads: int, stride: int, size: int, each: int) -> tuple[Tensor, Tensor]:
        """Rows of a layer's table: for every query head `each` bags of `size` rows, from its key head's first on.

        Args:
            heads: key heads of all rows.
            stride: rows of the table from one key head's to the next one's.

        Returns:
            The rows, and where each bag begins among them, int32.
        """
        first_R = torch.arange(0, heads * stride, stride, dtype=torch.int32)
        first_R = first_R.repeat_interleave(self.query_heads // self.values_LBKCD.shape[2])
        places = (first_R[:, None] + torch.arange(each * size, dtype=torch.int32)).view(-1)
        return places, torch.arange(0, len(places), size, dtype=torch.int32)

    def _make_keys(self) -> None:
        L, B, K, C, D = self.values_LBKCD.shape
        self.keys_LBKNDP = self.values_LBKCD.new_empty(L, B, K, -(-C // _BLOCK), D, _BLOCK)
        self.bagged = (0, 0)
        """Rows and blocks that the bags of keys are of."""

    def _read_keys(self, layer: int, rows: slice, k_BKTD: Tensor) -> None:
        for block, some_BKtD in enumerate(k_BKTD.split(_BLOCK, dim=2)):
            size = some_BKtD.shape[2]
            self.keys_LBKNDP[layer, rows, :, block, :, :size] = some_BKtD.transpose(2, 3)
            self.keys_LBKNDP[layer, rows, :, block, :, size:] = 0

    def _keep_keys(self, rows: Tensor) -> None:
        self.keys_LBKNDP = _kept(self.keys_LBKNDP, rows, -(-self.used // _BLOCK))

    def _scores(self, layer: int, q_BHD: Tensor, k_BKD: Tensor) -> Tensor:
        keys_BKNDP, (B, H, _) = self.keys_LBKNDP[layer], q_BHD.shape
        block, place = divmod(self.used - 1, _BLOCK)
        keys_BKNDP[:, :, block, :, place] = k_BKD
        q_BHnD = q_BHD.to(keys_BKNDP.dtype)[:, :, None].expand(-1, -1, block + 1, -1)
        score_BHS = weighed(keys_BKNDP.view(-1, _BLOCK), *self.of_keys, q_BHnD.reshape(-1)).view(B, H, -1)
        return score_BHS[..., : self.used]

    def _mixed(self, layer: int, p_BHS: Tensor) -> Tensor:
        return weighed(self.values_LBKCD[layer].view(-1, self.values_LBKCD.shape[-1]), *self.of_values, p_BHS.view(-1))


def _kept(table_LBKX: Tensor, rows: Tensor, used: int) -> Tensor:
    """A table with these rows alone, moved to the front; of its slots or blocks those in use."""
    for kept_BKX in table_LBKX:
        kept_BKX[: len(rows), :, :used] = kept_BKX[rows, :, :used]
    return table_LBKX[:, : len(rows)]
