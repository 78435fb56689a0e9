"""Keys and values of all layers, and attention over them: of prompts' tokens, and of one new token a row.

The cache has slots: all rows write slot n at the same time, so a row whose prompt is shorter than the longest has a
hole between prompt and continuation, which its bias hides. Nothing is read that nobody wrote: what freed memory holds
is denormal numbers too, over which an Intel CPU stumbles.

On a CPU with a compiler attention is a function of our own (`native.py`). One layer, 12 heads of 64, 100 slots, 2 cores
of a Zen 4, us, fp32 / bf16: one row so 19 / 21, in torch's operations 80 / 100; 32 rows so 520 / 260, which is what
reading keys and values takes, as weighted sums of their rows (`torch.embedding_bag`) 790 / 470, as products of keys and
queries twice that. Prompts, ms, in torch's operations and so: 32 of 64 tokens 6.3 and 4.5 / 6.7 and 3.1, one of 4,096
189 and 179 / 186 and 107. Rejected besides: rows that write at their own positions (indexed writes, and a mask of each
row's own all the same).

Shapes: B rows, or prompts of R rows, T positions, S slots in use, C slots, L layers, N = H + 2K heads: H of queries, K
of keys, K of values; D features of a head, E = D / 2 pairs of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.kernels import cpu_decode
from ingot.kernels.replay import Word
from ingot.model.config import ModelConfig


class Cache:
    """Room for all layers.

    Args:
        rows: of the batch.
        slots: tokens of a row at most.
        wide: what scores are computed in.
        dtype: what values are stored and weighted in.
    """

    def __init__(
        self, config: ModelConfig, rows: int, slots: int, wide: torch.dtype, dtype: torch.dtype, device: torch.device
    ):
        self.wide, self.scale, self.window = wide, config.head_size**-0.5, config.window
        self.used_word = Word(0)  # where a call that is made again finds it
        self.native = cpu_decode.available(device, dtype, wide)
        shape = (config.depth, rows, config.kv_heads, slots, config.head_size)
        made = torch.empty if self.native else torch.zeros  # recorded steps read slots that nobody wrote yet, hidden
        self.values_LBKCD = made(shape, dtype=dtype, device=device)
        self.keys_LBKCD = made(shape, dtype=dtype if self.native else wide, device=device)

    def read(
        self,
        layer: int,
        rows: slice,
        qkv_BTND: Tensor,
        turn_TE: Tensor | None,
        samples: int = 1,
        mask_TT: Tensor | None = None,
    ) -> Tensor:
        """Write the first slots of some rows, which are in use then, and mix for each token of their prompts the
        values up to its own: B x T x (H D).

        Args:
            rows: the samples of a prompt side by side.
            turn_TE: what queries and keys are still to be turned by; None: by nothing.
            mask_TT: who sees whom, for torch's operations where the window is shorter than the prompts; None: all
                before. Our own functions know the window.
        """
        keys_RKCD, values_RKCD = self.keys_LBKCD[layer, rows], self.values_LBKCD[layer, rows]
        T = qkv_BTND.shape[1]
        self.grow(T)
        if self.native:
            return cpu_decode.attend_prompts(qkv_BTND, turn_TE, keys_RKCD, values_RKCD, self.window, samples)
        K = keys_RKCD.shape[1]
        H = qkv_BTND.shape[2] - 2 * K
        if turn_TE is not None:
            turn(qkv_BTND[:, :, : H + K], turn_TE[:, None])
        q_BHTD, k_BKTD, v_BKTD = qkv_BTND.transpose(1, 2).split((H, K, K), dim=1)
        for table_RKCD, new_BKTD in ((keys_RKCD, k_BKTD), (values_RKCD, v_BKTD)):
            table_RKCD[:, :, :T] = new_BKTD.repeat_interleave(samples, dim=0)
        mixed_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BKTD, v_BKTD, mask_TT, is_causal=mask_TT is None, enable_gqa=H != K
        )
        return mixed_BHTD.transpose(1, 2).flatten(2)

    @property
    def used(self) -> int:
        """Slots in use."""
        return self.used_word.value

    def grow(self, used: int) -> None:
        """Let every row use so many slots from now on; all layers write the last of them."""
        self.used_word.value = used

    def attend(
        self,
        layer: int,
        qkv_BND: Tensor,
        turn_BE: Tensor | None,
        bias_BS: Tensor | None,
        slot_1: Tensor | None = None,
    ) -> Tensor:
        """Write the newest slot and mix the values of all that are in use: B x (H D), in the dtype of the values.

        Args:
            turn_BE: what queries and keys are still to be turned by; None: by nothing.
            bias_BS: in `wide`, -inf at slots that a row may not see; None: it may see all.
            slot_1: where the newest slot's number is, for torch's operations; what is read are the slots that have a
                bias then. None: the last in use.
        """
        keys_BKCD, values_BKCD = self.keys_LBKCD[layer], self.values_LBKCD[layer]
        if self.native:
            return cpu_decode.attend(qkv_BND, turn_BE, keys_BKCD, values_BKCD, bias_BS, self.used_word)
        (B, N, _), K = qkv_BND.shape, keys_BKCD.shape[1]
        if turn_BE is not None:
            turn(qkv_BND[:, : N - K], turn_BE[:, None])
        q_BHD, k_BKD, v_BKD = qkv_BND.split((N - 2 * K, K, K), dim=1)
        read = self.used
        if slot_1 is None:
            keys_BKCD[:, :, read - 1], values_BKCD[:, :, read - 1] = k_BKD, v_BKD
        else:
            assert bias_BS is not None
            read = bias_BS.shape[1]
            keys_BKCD.index_copy_(2, slot_1, k_BKD[:, :, None])
            values_BKCD.index_copy_(2, slot_1, v_BKD[:, :, None].to(values_BKCD.dtype))
        keys_BKSD, values_BKSD = keys_BKCD[:, :, :read], values_BKCD[:, :, :read]
        score_BKGS = torch.matmul((q_BHD * self.scale).view(B, K, -1, q_BHD.shape[-1]), keys_BKSD.transpose(2, 3))
        if bias_BS is not None:
            score_BKGS.add_(bias_BS[:, None, None])
        return torch.matmul(score_BKGS.softmax(-1).to(values_BKSD.dtype), values_BKSD).view(B, -1)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these: indices, ascending."""
        self.keys_LBKCD, self.values_LBKCD = (self._kept(x, rows) for x in (self.keys_LBKCD, self.values_LBKCD))

    def _kept(self, table_LBKCD: Tensor, rows: Tensor) -> Tensor:
        """These rows alone, moved to the front."""
        for kept_BKCD in table_LBKCD:
            kept_BKCD[: len(rows), :, : self.used] = kept_BKCD[rows, :, : self.used]
        return table_LBKCD[:, : len(rows)]


def turn(x: Tensor, by: Tensor) -> None:
    """Turn pairs that lie side by side, ... x D, by complex numbers of length 1, ... x E."""
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(by)
