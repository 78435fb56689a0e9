"""Causal self-attention: grouped keys and values, an optional sliding window, and documents isolated from each other.

Two implementations compute the same function. `sdpa` is PyTorch's fused kernel, whose memory grows with T instead of
T^2. `eager` materialises the scores and is the readable reference. The mask is built once per forward pass and shared
by all blocks. Plain causal attention needs no mask tensor, which lets the fused kernel skip half of the work.

Generation uses its own forward pass with a KV cache (`infer/decoder.py`).

Shapes: B rows, T queries, S keys, H query heads, K key heads, G = H / K, D features of a head, W width.
"""

from collections.abc import Collection
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
    """Which keys each query attends to, in the form that `impl` takes."""

    impl: AttentionImpl
    attn_mask_BTS: Tensor | None
    """(B or 1) x T x S. For `sdpa` boolean, True where a query attends to a key; for `eager` a term of the scores, 0 or
    -inf. None: causal."""


def make_mask(
    config: ModelConfig, documents_BT: Tensor | None, T: int, device: torch.device, dtype: torch.dtype, p: float
) -> Mask:
    """The mask of a forward pass.

    Args:
        documents_BT: document number of each token; None: each row is one document.
        dtype: of queries and keys.
        p: dropout probability of the attention probabilities.
    """
    impl = fastest_impl(device, dtype, T, p)
    window = None if config.window is None or config.window >= T else config.window
    if documents_BT is None and window is None and impl == "sdpa":
        return Mask(impl, None)
    mask_BTS = causal_mask(T, window, device)[None] if documents_BT is None else document_mask(documents_BT, window)
    return Mask(impl, additive(mask_BTS, dtype) if impl == "eager" else mask_BTS)


def fastest_impl(device: torch.device, dtype: torch.dtype, keys: int, p: float = 0.0) -> AttentionImpl:
    """The faster implementation for these inputs.

    On a CPU the fused kernel's backward pass is slow in bf16, and there is no fused kernel with dropout
    (docs/archive/2026-11.md).
    """
    return "eager" if device.type == "cpu" and (p or (dtype == torch.bfloat16 and keys <= EAGER_BF16_KEYS)) else "sdpa"


def causal_mask(T: int, window: int | None, device: torch.device | str) -> Tensor:
    """T x T, True where a query attends to a key: the key is not later, and less than `window` tokens earlier."""
    mask_TT = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    return mask_TT if window is None else mask_TT.triu(1 - window)


def document_mask(documents_BT: Tensor, window: int | None = None) -> Tensor:
    """B x T x T, True where a query attends to a key: same document, not later, within the window."""
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT & causal_mask(documents_BT.shape[1], window, documents_BT.device)


def additive(mask_BTS: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as a term of the scores: 0 where it is True, else -inf."""
    return torch.zeros(mask_BTS.shape, dtype=dtype, device=mask_BTS.device).masked_fill(~mask_BTS, -torch.inf)


def attend(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Mask, p: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(D) + mask) v, B x H x T x D.

    Args:
        p: dropout probability of the attention probabilities.
    """
    mask_BTS = mask.attn_mask_BTS
    assert mask_BTS is not None or q_BHTD.shape[2] == k_BKSD.shape[2], "causal attention needs as many keys as queries"
    if mask.impl == "eager":
        return attend_eager(q_BHTD, k_BKSD, v_BKSD, mask_BTS, p)[0]
    return F.scaled_dot_product_attention(
        q_BHTD,
        k_BKSD,
        v_BKSD,
        attn_mask=None if mask_BTS is None else mask_BTS[:, None],
        dropout_p=p,
        is_causal=mask_BTS is None,
        enable_gqa=q_BHTD.shape[1] != k_BKSD.shape[1],
    )


def attend_eager(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask_BTS: Tensor | None = None, p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The reference: outputs B x H x T x D, and the probabilities B x H x T x S before dropout.

    Args:
        mask_BTS: boolean, or a term of the scores; None: causal.
        p: dropout probability of the attention probabilities.
    """
    (B, H, T, D), (K, S) = q_BHTD.shape, k_BKSD.shape[1:3]
    if mask_BTS is None:
        mask_BTS = causal_mask(T, None, q_BHTD.device)[None]
    if mask_BTS.dtype == torch.bool:
        mask_BTS = additive(mask_BTS, q_BHTD.dtype)
    # The G query heads of a key head become rows of one matrix product: R = G T rows.
    q_BKRD = (q_BHTD * D**-0.5).reshape(B, K, H // K * T, D)
    scores_BKGTS = (q_BKRD @ k_BKSD.transpose(2, 3)).view(B, K, H // K, T, S)
    p_BKGTS = torch.softmax(scores_BKGTS + mask_BTS[:, None, None], dim=-1)
    dropped_BKRS = F.dropout(p_BKGTS, p).view(B, K, H // K * T, S)
    return (dropped_BKRS @ v_BKSD).view(B, H, T, D), p_BKGTS.view(B, H, T, S)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245). Parameters are named as in Llama: q, k, v, o."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_size = config.head_size
        self.dropout = config.dropout
        q_width, kv_width = config.heads * config.head_size, config.kv_heads * config.head_size
        bias = config.bias != "none"
        self.q = nn.Linear(config.width, q_width, bias=bias)
        self.k = nn.Linear(config.width, kv_width, bias=bias)
        self.v = nn.Linear(config.width, kv_width, bias=bias)
        self.o = nn.Linear(q_width, config.width, bias=config.bias == "all")
        self.q_norm = make_norm(config, config.head_size) if config.qk_norm else None
        self.k_norm = make_norm(config, config.head_size) if config.qk_norm else None

    def forward(
        self, x_BTW: Tensor, rope: Rope | None, mask: Mask, taps: Collection[str] = ()
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Output B x T x W, and the tensors of `taps` by name: "query" B x H x T x D, "key" and "value" B x K x S x D
        as attention reads them, "attention" (probabilities) B x H x T x S."""
        q_BTHD, k_BTKD, v_BTKD = (
            x.unflatten(-1, (-1, self.head_size)) for x in fused_linear(x_BTW, (self.q, self.k, self.v))
        )
        if self.q_norm is not None and self.k_norm is not None:  # cast back: under autocast a norm returns fp32
            q_BTHD = self.q_norm(q_BTHD).to(v_BTKD.dtype)
            k_BTKD = self.k_norm(k_BTKD).to(v_BTKD.dtype)
        if rope is not None:
            q_BTHD, k_BTKD = apply_rope(q_BTHD, rope), apply_rope(k_BTKD, rope)
        q_BHTD, k_BKSD, v_BKSD = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
        p = self.dropout if self.training else 0.0
        tapped = {"query": q_BHTD, "key": k_BKSD, "value": v_BKSD}
        if "attention" in taps:
            out_BHTD, tapped["attention"] = attend_eager(q_BHTD, k_BKSD, v_BKSD, mask.attn_mask_BTS, p)
        else:
            out_BHTD = attend(q_BHTD, k_BKSD, v_BKSD, mask, p)
        return self.o(out_BHTD.transpose(1, 2).flatten(2)), {name: tapped[name] for name in taps}
