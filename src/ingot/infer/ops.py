"""The operations of generation: the seam between the decoder and faster implementations.

`TorchOps` is the reference in PyTorch. A backend may provide another set with the same methods
(`model/backend.py: decode_ops`), which may lay weights out differently or record a step and replay it. Generation uses
the same weights in every step, so they are prepared once, and layers with the same input become one matrix product.

Shapes: M rows, I inputs, O outputs, F features, W width; B rows or prompts, T tokens, R = B x samples rows of the
cache, N = H + 2K heads: H query heads, K key heads, K value heads; D features of a head, E = D / 2 pairs, S slots in
use, C slots of the cache, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.attention import causal_mask
from ingot.model.lora import FrozenLinear
from ingot.model.norms import LayerNorm, RMSNorm

Function = Callable[[Tensor], Tensor]


class Linear(Protocol):
    """A linear layer: M x I in the dtype of matrix products to M x O in that dtype or fp32."""

    def __call__(self, x_MI: Tensor, add_to_MO: Tensor | None = None) -> Tensor:
        """Apply the layer. With `add_to_MO`, add the output to that tensor in place and return it."""
        ...


class TorchOps:
    """The reference, in PyTorch.

    Args:
        dtype: of matrix products and cached values.
        stream: dtype of the residual stream, norms, cached keys and scores.
    """

    records = False
    """Whether `record` is supported."""

    def __init__(self, dtype: torch.dtype, stream: torch.dtype):
        self.dtype, self.stream = dtype, stream
        self.key_dtype, self.value_dtype = stream, dtype

    # -- layers: each method prepares the weights once and returns a function that applies them

    def fused_linear(self, layers: Sequence[nn.Linear], order_O: Tensor | None = None) -> Linear:
        """Several linear layers of the same input as one; outputs are concatenated.

        Args:
            order_O: permutation of the outputs; None: none.
        """
        order = slice(None) if order_O is None else order_O
        weight_OI = torch.cat([effective_weight(layer).to(self.dtype) for layer in layers])[order]
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers)), "layers with and without a bias cannot be fused"
        return self.linear(weight_OI, torch.cat(biases)[order] if biases else None)

    def linear(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        """A linear layer of this weight and bias."""
        weight_OI = weight_OI.to(self.dtype)
        bias_O = None if bias_O is None else bias_O.to(self.dtype)

        def linear(x_MI: Tensor, add_to_MO: Tensor | None = None) -> Tensor:
            out_MO = F.linear(x_MI, weight_OI, bias_O)
            return out_MO if add_to_MO is None else add_to_MO.add_(out_MO)

        return linear

    def swiglu(self, gate: nn.Linear, up: nn.Linear) -> Function:
        """silu(gate(x)) * up(x), M x I to M x F."""
        gate_up = self.fused_linear([gate, up])

        def swiglu(x_MI: Tensor) -> Tensor:
            gate_MF, up_MF = gate_up(x_MI).chunk(2, dim=-1)
            return F.silu(gate_MF).mul_(up_MF)

        return swiglu

    def gelu(self, up: nn.Linear, approximate: str) -> Function:
        """gelu(up(x)), exact (approximate = "none") or with GPT-2's approximation ("tanh")."""
        linear = self.fused_linear([up])
        return lambda x_MI: F.gelu(linear(x_MI), approximate=approximate)

    def norm(self, norm: RMSNorm | LayerNorm) -> Function:
        """A norm of the residual stream."""
        return self._norm(norm, slice(None))

    def head_norm(self, norm: RMSNorm | LayerNorm, order_D: Tensor) -> Callable[[Tensor, slice], None]:
        """A norm of a slice of the heads of queries, keys and values (B x T x N x D), in place.

        Args:
            order_D: permutation of the features of a head, applied to the norm's weights.
        """
        normed = self._norm(norm, order_D)

        def in_place(qkv_BTND: Tensor, heads: slice) -> None:
            qkv_BTND[:, :, heads] = normed(qkv_BTND[:, :, heads])

        return in_place

    def _norm(self, norm: RMSNorm | LayerNorm, order: Tensor | slice) -> Function:
        gain = norm.weight.detach().to(self.stream)[order]
        if isinstance(norm, LayerNorm):
            bias = None if norm.bias is None else norm.bias.detach().to(self.stream)[order]
            return lambda x: F.layer_norm(x, gain.shape, gain, bias, norm.eps)
        return lambda x: F.rms_norm(x, gain.shape, gain, norm.eps)

    # -- attention

    def attend_prompts(
        self,
        qkv_BTND: Tensor,
        rope_TE: Tensor | None,
        keys_RKCD: Tensor,
        values_RKCD: Tensor,
        window: int | None,
        samples: int,
    ) -> Tensor:
        """Prefill: write the keys and values of prompts into the cache, and compute causal attention, B x T x (H D).

        Args:
            qkv_BTND: queries, keys and values before rotation; overwritten.
            rope_TE: the rotations of T positions as complex numbers; None: none.
            keys_RKCD, values_RKCD: the cache of a layer; the samples of a prompt are adjacent rows.
            window: number of tokens that a token attends to, itself included; None: all earlier ones.
            samples: rows of the cache per prompt.
        """
        T, K = qkv_BTND.shape[1], keys_RKCD.shape[1]
        H = qkv_BTND.shape[2] - 2 * K
        if rope_TE is not None:
            rotate_pairs_(qkv_BTND[:, :, : H + K], rope_TE[:, None])
        q_BHTD, k_BKTD, v_BKTD = qkv_BTND.transpose(1, 2).split((H, K, K), dim=1)
        for cache_RKCD, new_BKTD in ((keys_RKCD, k_BKTD), (values_RKCD, v_BKTD)):
            cache_RKCD[:, :, :T] = new_BKTD.repeat_interleave(samples, dim=0)
        mask_TT = None if window is None or window >= T else causal_mask(T, window, qkv_BTND.device)
        out_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BKTD, v_BKTD, mask_TT, is_causal=mask_TT is None, enable_gqa=H != K
        )
        return out_BHTD.transpose(1, 2).flatten(2)

    def attend(
        self,
        qkv_BND: Tensor,
        rope_BE: Tensor | None,
        keys_BKCD: Tensor,
        values_BKCD: Tensor,
        bias_BS: Tensor | None,
        used: int,
        slot_1: Tensor | None = None,
    ) -> Tensor:
        """Decode: write the newest slot of the cache, and compute attention over all slots in use, B x (H D).

        Args:
            qkv_BND: queries, keys and values of the new tokens before rotation; overwritten.
            rope_BE: the rotation of each row's position as complex numbers; None: none.
            keys_BKCD, values_BKCD: the cache of a layer.
            bias_BS: added to the scores, -inf at masked slots; None: nothing is masked.
            used: slots in use; the last one is the newest.
            slot_1: index of the newest slot on the device, for recorded steps; the number of slots read is then that of
                the bias.
        """
        (B, N, D), K = qkv_BND.shape, keys_BKCD.shape[1]
        if rope_BE is not None:
            rotate_pairs_(qkv_BND[:, : N - K], rope_BE[:, None])
        q_BHD, k_BKD, v_BKD = qkv_BND.split((N - 2 * K, K, K), dim=1)
        if slot_1 is None:
            keys_BKCD[:, :, used - 1], values_BKCD[:, :, used - 1] = k_BKD, v_BKD
        else:
            assert bias_BS is not None
            used = bias_BS.shape[1]
            keys_BKCD.index_copy_(2, slot_1, k_BKD[:, :, None])
            values_BKCD.index_copy_(2, slot_1, v_BKD[:, :, None].to(values_BKCD.dtype))
        keys_BKSD, values_BKSD = keys_BKCD[:, :, :used], values_BKCD[:, :, :used]
        scores_BKGS = (q_BHD * D**-0.5).view(B, K, -1, D) @ keys_BKSD.transpose(2, 3)
        if bias_BS is not None:
            scores_BKGS.add_(bias_BS[:, None, None])
        return (scores_BKGS.softmax(-1).to(values_BKSD.dtype) @ values_BKSD).view(B, -1)

    # -- a step

    def argmax(self, logits_BV: Tensor, allowed: int) -> tuple[Tensor, Tensor]:
        """The id [B] with the largest of the first `allowed` logits, and its log-probability [B] among all.

        Of equal logits the lowest id on a CPU, any on a GPU. NaN logits give a NaN log-probability.
        """
        logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
        logp_BV = torch.log_softmax(logits_BV, dim=-1)
        ids_B = argmax(logits_BV[:, :allowed])
        return ids_B, logp_BV.gather(1, ids_B[:, None]).squeeze(1)

    def record(self, step: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[..., Tensor]:
        """A function that replays the recorded operations of `step`.

        Args:
            step: has run once with inputs of these shapes.
            inputs: tensors of the shapes of every later call.

        Raises:
            RuntimeError: the step cannot be recorded. It has not run.
        """
        raise RuntimeError("PyTorch's operations cannot be recorded")


def effective_weight(layer: nn.Linear) -> Tensor:
    """The weight that a layer multiplies by, its adapter included."""
    if isinstance(layer, FrozenLinear):
        return layer.effective_weight()
    assert type(layer) is nn.Linear, f"{type(layer).__name__} may compute more than its weight"
    return layer.weight


def rotate_pairs_(x: Tensor, rotation: Tensor) -> None:
    """Rotate adjacent pairs of features, ... x D, by complex numbers of modulus 1, ... x E, in place."""
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(rotation)


def argmax(logits_BV: Tensor) -> Tensor:
    """The id with the largest logit, [B] int64; of equal ones the lowest on a CPU, any on a GPU.

    On a CPU numpy is several times faster than torch.
    """
    if logits_BV.device.type != "cpu":
        return logits_BV.argmax(dim=-1)
    return torch.from_numpy(logits_BV.numpy().argmax(axis=-1))
