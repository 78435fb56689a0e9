"""Causal self-attention with grouped keys and values, a sliding window, and documents that do not see each other.

There are two implementations of the same numbers: `sdpa` is PyTorch's fused kernel, whose memory grows with T instead
of T^2; `eager` writes the scores out and is the readable reference. A mask is built once per forward pass and shared by
all blocks. No mask means causal, which lets the fused kernel skip half of the work.

Generation has a forward pass of its own with a cache of keys and values (`infer/decoder.py`).

Shapes: B rows, T queries, S keys, H query heads, K key heads, G = H / K, D features of a head, W width.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.config import EAGER_BF16_KEYS, ModelConfig
from ingot.model.linear import fused_linear
from ingot.model.norms import make_norm
from ingot.model.rope import Rope, apply_rope

AttentionImpl = Literal["sdpa", "eager"]


class Mask(NamedTuple):
    """Which keys each query may see, in the form that the implementation reads."""

    impl: AttentionImpl
    allowed_BTS: Tensor | None
    """(B or 1) x T x S: for `sdpa` True where a query may see a key, for `eager` what is added to scores (0 or -inf).
    None: causal."""


def make_mask(
    config: ModelConfig, documents_BT: Tensor | None, T: int, device: torch.device, dtype: torch.dtype, p: float
) -> Mask:
    """The mask of a forward pass.

    Args:
        documents_BT: the document of each token; None where a row is one document.
        dtype: that of queries and keys.
        p: dropout of attention.
    """
    impl = fastest_impl(device, dtype, T, p)
    window = None if config.window is None or config.window >= T else config.window
    if documents_BT is None and window is None and impl == "sdpa":
        return Mask(impl, None)
    allowed_BTS = causal_mask(T, window, device)[None] if documents_BT is None else document_mask(documents_BT, window)
    return Mask(impl, additive(allowed_BTS, dtype) if impl == "eager" else allowed_BTS)


def fastest_impl(device: torch.device, dtype: torch.dtype, keys: int, p: float = 0.0) -> AttentionImpl:
    """The faster implementation on this device.

    On a CPU the backward pass of the fused kernel is slow in bf16, and there is no fused kernel with dropout (figures:
    docs/archive/2026-11.md).
    """
    return "eager" if device.type == "cpu" and (p or (dtype == torch.bfloat16 and keys <= EAGER_BF16_KEYS)) else "sdpa"


def causal_mask(T: int, window: int | None, device: torch.device | str) -> Tensor:
    """T x T, True where a query may see a key: not later, and less than `window` tokens before."""
    mask_TT = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    return mask_TT if window is None else mask_TT.triu(1 - window)


def document_mask(documents_BT: Tensor, window: int | None = None) -> Tensor:
    """B x T x T, True where a query may see a key: same document, not later, within the window."""
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT & causal_mask(documents_BT.shape[1], window, documents_BT.device)


def additive(mask_BTS: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as a term of the scores: 0 where a query may see a key, else -inf."""
    return torch.zeros(mask_BTS.shape, dtype=dtype, device=mask_BTS.device).masked_fill(~mask_BTS, -torch.inf)


def attend(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Mask, p: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, B x H x T x D.

    Args:
        p: dropout of the probabilities.
    """
    allowed_BTS = mask.allowed_BTS
    assert allowed_BTS is not None or q_BHTD.shape[2] == k_BKSD.shape[2], "causal attention needs equal lengths"
    if mask.impl == "eager":
        return attend_eager(q_BHTD, k_BKSD, v_BKSD, allowed_BTS, p)[0]
    return F.scaled_dot_product_attention(
        q_BHTD,
        k_BKSD,
        v_BKSD,
        attn_mask=None if allowed_BTS is None else allowed_BTS[:, None],
        dropout_p=p,
        is_causal=allowed_BTS is None,
        enable_gqa=q_BHTD.shape[1] != k_BKSD.shape[1],
    )


def attend_eager(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, bias_BTS: Tensor | None = None, p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The reference: outputs B x H x T x D and the probabilities B x H x T x S before dropout.

    Args:
        bias_BTS: added to the scores, or a boolean mask; None: causal.
    """
    (B, H, T, D), (K, S) = q_BHTD.shape, k_BKSD.shape[1:3]
    if bias_BTS is None:
        bias_BTS = causal_mask(T, None, q_BHTD.device)[None]
    if bias_BTS.dtype == torch.bool:
        bias_BTS = additive(bias_BTS, q_BHTD.dtype)
    q_BKRD = (q_BHTD * D**-0.5).reshape(B, K, H // K * T, D)
    scores_BKGTS = (q_BKRD @ k_BKSD.transpose(2, 3)).view(B, K, H // K, T, S)
    p_BKGTS = torch.softmax(scores_BKGTS + bias_BTS[:, None, None], dim=-1)
    dropped_BKRS = F.dropout(p_BKGTS, p).view(B, K, H // K * T, S)
    return (dropped_BKRS @ v_BKSD).view(B, H, T, D), p_BKGTS.view(B, H, T, S)


class Attention(nn.Module):
    """Grouped-query attention. Parameters are named as in Llama: q, k, v, o."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_size = config.head_size
        self.dropout = config.dropout
        width, kv_width = config.heads * config.head_size, config.kv_heads * config.head_size
        bias = config.bias != "none"
        self.q = nn.Linear(config.width, width, bias=bias)
        self.k = nn.Linear(config.width, kv_width, bias=bias)
        self.v = nn.Linear(config.width, kv_width, bias=bias)
        self.o = nn.Linear(width, config.width, bias=config.bias == "all")
        self.q_norm = make_norm(config, config.head_size) if config.qk_norm else None
        self.k_norm = make_norm(config, config.head_size) if config.qk_norm else None

    def forward(
        self, x_BTW: Tensor, rope: Rope | None, mask: Mask, tapped: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Output B x T x W, and where `tapped` the probabilities B x H x T x S, else None."""
        q_BTHD, k_BTKD, v_BTKD = (
            part.unflatten(-1, (-1, self.head_size)) for part in fused_linear(x_BTW, (self.q, self.k, self.v))
        )
        if self.q_norm is not None and self.k_norm is not None:  # under autocast a norm returns fp32
            q_BTHD = self.q_norm(q_BTHD).to(v_BTKD.dtype)
            k_BTKD = self.k_norm(k_BTKD).to(v_BTKD.dtype)
        if rope is not None:
            q_BTHD, k_BTKD = apply_rope(q_BTHD, rope), apply_rope(k_BTKD, rope)
        q_BHTD, k_BKSD, v_BKSD = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
        p = self.dropout if self.training else 0.0
        if tapped:
            out_BHTD, p_BHTS = attend_eager(q_BHTD, k_BKSD, v_BKSD, mask.allowed_BTS, p)
        else:
            out_BHTD, p_BHTS = attend(q_BHTD, k_BKSD, v_BKSD, mask, p), None
        return self.o(out_BHTD.transpose(1, 2).flatten(2)), p_BHTS
