"""Causal self-attention: grouped keys, a sliding window, documents kept apart.

Two ways to the same numbers. `plain` writes the scores out and is the readable reference; `sdpa` is PyTorch's fused
kernel, whose memory grows with T instead of T^2. A model takes the fused one except where the plain one is measurably
faster (`faster`). Masks are built once per forward and shared by all layers, as booleans or as what is added to scores;
no mask means plainly causal, which lets the fused kernel skip half of the work. A window that no row outgrows costs
nothing; a smaller one costs a mask of T x T bits.

Rejected: FlexAttention (compiles per shape, slow to start on a CPU; worth another look for long rows of many documents
and for windows on a GPU), and repeating the keys of a group (memory for nothing). Generation, with its cache of
keys and values, has a forward of its own (`infer/decoder.py`).

Shapes: B rows, T queries, S keys, H query heads, K key heads, G = H / K, D features of a head, E = D / 2, W = H D.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.kernels.joint_linear import products
from ingot.model.config import PLAIN_BF16_KEYS, ModelConfig
from ingot.model.dropout import dropout
from ingot.model.norms import make_norm
from ingot.model.rope import Rotation, rotate

Path = Literal["sdpa", "plain", "native"]
"""The last reads no mask but the first slot of every token (`backends/cpu_blocks.py`)."""


def causal_mask(T: int, window: int | None, device: torch.device | str) -> Tensor:
    """T x T, True where a query may see a key: not later, and not `window` or more tokens before."""
    mask_TT = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    return mask_TT if window is None else mask_TT.triu(1 - window)


def document_mask(documents_BT: Tensor, window: int | None = None) -> Tensor:
    """B x T x T, True where a query may see a key: same document, not later, within the window."""
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT & causal_mask(documents_BT.shape[1], window, documents_BT.device)


def first_seen(starts_BT: Tensor | None, T: int, window: int | None) -> Tensor | None:
    """The first slot that a token sees, (B or 1) x T int32; None where that is the row's first.

    Args:
        starts_BT: where the document of each token begins.
    """
    if window is None:
        return None if starts_BT is None else starts_BT.int()
    first_1T = (torch.arange(T) - window + 1).clamp(min=0)[None]
    return (first_1T if starts_BT is None else torch.maximum(first_1T, starts_BT)).int()


def bias(mask_BTS: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores: 0 where a query may see a key, else -inf.

    Addition costs the backward pass nothing, and a tensor made once is half the price of a compiled softmax that works
    the mask out for every score (64 x 4 x 64 x 64: 0.78 ms for 1.23).
    """
    if mask_BTS.dtype != torch.bool:
        return mask_BTS
    return torch.zeros(mask_BTS.shape, dtype=dtype, device=mask_BTS.device).masked_fill(~mask_BTS, -torch.inf)


def attend(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask_BTS: Tensor | None,
    path: Path,
    share: float = 0.0,
) -> Tensor:
    """Softmax(q k^T / sqrt(D)) v, B x H x T x D.

    Args:
        mask_BTS: True where a query may see a key, or its `bias`; every query must see one. None: causal, for which
            S = T.
        path: "sdpa" (fused) or "plain" (scores written out).
        share: of the probabilities, how many are left out, the others scaled up: dropout.
    """
    assert path != "native", "training's own functions attend by themselves"
    assert mask_BTS is not None or q_BHTD.shape[2] == k_BKSD.shape[2], "causal attention needs as many keys as queries"
    if path == "plain":
        return attend_plain(q_BHTD, k_BKSD, v_BKSD, mask_BTS, share)[0]
    return F.scaled_dot_product_attention(
        q_BHTD,
        k_BKSD,
        v_BKSD,
        attn_mask=None if mask_BTS is None else mask_BTS[:, None],
        dropout_p=share,
        is_causal=mask_BTS is None,
        enable_gqa=q_BHTD.shape[1] != k_BKSD.shape[1],
    )


def attend_plain(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask_BTS: Tensor | None = None, share: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The reference: outputs B x H x T x D, and the probabilities B x H x T x S that the fused kernel never holds.

    The probabilities are those before dropout.
    """
    (B, H, T, D), (K, S) = q_BHTD.shape, k_BKSD.shape[1:3]
    if mask_BTS is None:
        mask_BTS = causal_mask(T, None, q_BHTD.device)[None]
    bias_B11TS, scale = bias(mask_BTS, q_BHTD.dtype)[:, None, None], D**-0.5
    at_once = torch.compiler.is_compiling() and q_BHTD.dtype != torch.float16  # too narrow for what is not scaled yet
    q_BKRD = (q_BHTD if at_once else q_BHTD * scale).reshape(B, K, H // K * T, D)
    score_BKGTS = (q_BKRD @ k_BKSD.transpose(2, 3)).view(B, K, H // K, T, S)
    if at_once:
        p_BKGTS: Tensor = _Softmax.apply(score_BKGTS, bias_B11TS, scale)
    else:
        p_BKGTS = torch.softmax(score_BKGTS + bias_B11TS, dim=-1)
    out_BKRD = dropout(p_BKGTS, share).view(B, K, H // K * T, S) @ v_BKSD
    return out_BKRD.view(B, H, T, D), p_BKGTS.view(B, H, T, S)


class _Softmax(torch.autograd.Function):
    """softmax(scale * score + bias) as one loop of compiled code; a bias is 0 or -inf.

    torch's softmax becomes two loops there: one over queries, since the bias is a query's, for maxima and exponentials,
    and one over rows of all kinds for sums and quotients; all exponentials go through memory in fp32 between the two.
    Here the second half reads the bias as well, which changes nothing else: what is not seen has weight 0. 96 heads of
    256 x 256 in bf16, 2 cores with matrix tiles: 3.5 to 2.9 ms.
    """

    @staticmethod
    def forward(ctx: Any, score: Tensor, bias: Tensor, scale: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        seen = bias == 0
        wide = score.to(torch.promote_types(score.dtype, torch.float32)) * scale + bias
        weight = (wide - wide.amax(-1, keepdim=True)).exp()
        inverse = torch.where(seen, weight, 0.0).sum(-1, keepdim=True).reciprocal()
        p = torch.where(seen, weight * inverse, 0.0).to(score.dtype)
        ctx.save_for_backward(p)
        ctx.scale = scale
        return p

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (p,) = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradient, p, -1, p.dtype) * ctx.scale, None, None


def faster(device: torch.device, dtype: torch.dtype, keys: int, share: float = 0.0) -> Path:
    """In bfloat16 on a CPU the fused backward is slow; writing short rows' scores out beats it and fp32 kernels too.

    Forward + backward of one layer in ms, 2 cores with AVX-512 bf16, torch 2.13, with glibc returning pages / keeping
    them (`MALLOC_TRIM_THRESHOLD_` ...); heads of 32, 64, 64, 64 features:

        B x T x W, H        fused bf16      fused fp32      plain bf16      plain bf16, softmax cast to fp32
        64 x 64 x 128, 4    24.4 / 23.8      9.1 /  9.0      5.9 /  5.5       8.8 /  6.2
        16 x 256 x 384, 6   46.0 / 50.1     42.9 / 45.4     27.8 / 24.2      44.1 / 27.9
        8 x 512 x 256, 4    51.2 / 56.4     55.0 / 62.7     43.2 / 28.4      71.4 / 33.9
        4 x 1024 x 256, 4   64.2 / 64.2     80.1 / 78.4     99.5 / 54.0     208.4 / 66.5

    The bf16 softmax kernel computes in fp32 inside and rounds its result, so nothing is gained by the cast. In fp32
    the fused kernel wins at every length (9.1 against 14.7 ms in the first row), and past 512 keys its memory does.
    With dropout there is no fused kernel on a CPU: torch would write scores out by itself, and draw every coin anew.
    """
    if device.type != "cpu":
        return "sdpa"
    return "plain" if share or (dtype == torch.bfloat16 and keys <= PLAIN_BF16_KEYS) else "sdpa"


class Attention(nn.Module):
    """Grouped-query attention; the parameters are named as in Llama: q, k, v, o."""

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
        self,
        x_BTW: Tensor,
        turn: Rotation | None,
        mask_BTS: Tensor | None,
        path: Path,
        tapped: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Output B x T x W, and where they are tapped the probabilities B x H x T x S."""
        heads = (*x_BTW.shape[:2], -1, self.head_size)
        q_BTHD, k_BTKD, v_BTKD = (part.view(heads) for part in products(x_BTW, (self.q, self.k, self.v)))
        if self.q_norm is not None and self.k_norm is not None:  # under autocast a norm returns float32
            q_BTHD = self.q_norm(q_BTHD).to(v_BTKD.dtype)
            k_BTKD = self.k_norm(k_BTKD).to(v_BTKD.dtype)
        if turn is not None:
            by_head = tapped or path == "plain"
            q_BTHD, k_BTKD = rotate(q_BTHD, turn, by_head), rotate(k_BTKD, turn, by_head)
        k_BKSD, v_BKSD = k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2)
        q_BHTD, p_BHTS = q_BTHD.transpose(1, 2), None
        share = self.dropout if self.training else 0.0
        if tapped:
            out_BHTD, p_BHTS = attend_plain(q_BHTD, k_BKSD, v_BKSD, mask_BTS, share)
        else:
            out_BHTD = attend(q_BHTD, k_BKSD, v_BKSD, mask_BTS, path, share)
        return self.o(out_BHTD.transpose(1, 2).flatten(2)), p_BHTS
