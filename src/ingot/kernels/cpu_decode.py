"""Kernels of generation on a CPU, in C++ (`cpp/decode/`): tensors in, tensors out.

- Linear layers. Weights are packed in panels: for each input, the weights of as many outputs as fill three registers.
  The microkernel computes up to 8 rows of a panel in registers; with bf16, matrix tiles (AMX) read the same panels.
  SwiGLU and GELU are epilogues of the matrix product.
- Attention of new tokens over the KV cache, and of prompts, including rotation and the writes to the cache.
- Norms, and argmax.

Shapes: I inputs, O outputs, M rows, P panels of L outputs, W width, F features; B rows or prompts, T tokens, R rows of
the cache; N = H + 2K heads: H query heads, K key heads, K value heads; D features of a head, E = D / 2 pairs, S slots
in use, C slots of the cache.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.kernels.build import build, has_fast_bf16, pack_arguments

_SOURCE = Path(__file__).parent / "cpp" / "decode" / "native.cpp"
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def available(
    device: torch.device, dtype: torch.dtype, stream: torch.dtype, notify: Callable[[str], None] | None = None
) -> bool:
    """Whether there are kernels for these dtypes on this machine. The first call builds them, which takes seconds.

    Args:
        dtype: of matrix products.
        stream: dtype of the residual stream.
        notify: receives a message when kernels are built or cannot be built.
    """
    if device.type != "cpu" or dtype not in _NAMES or stream != torch.float32:
        return False
    library = _library(notify)
    return library is not None and (dtype != torch.bfloat16 or has_fast_bf16(library))


def pack(weight_OI: Tensor) -> Tensor:
    """Pack a weight for `linear`, P x I x L: panels of L outputs, whose weights are adjacent for each input.

    In bf16 the weights of two inputs are interleaved. Outputs are padded with zeros to full panels, and inputs to a
    multiple of the depth of a multiplication.
    """
    O, L, pair = len(weight_OI), _constant("panel", weight_OI.dtype), _constant("pair", weight_OI.dtype)  # noqa: E741
    padded_OI = F.pad(weight_OI, (0, -weight_OI.shape[1] % _constant("step", weight_OI.dtype), 0, -O % L))
    I = padded_OI.shape[1]  # noqa: E741
    return padded_OI.view(-1, L, I // pair, pair).transpose(1, 2).contiguous().view(-1, I, L)


def pack_gated(gate_FI: Tensor, up_FI: Tensor) -> Tensor:
    """Pack two weights for `swiglu`: panels of gate and up alternate."""
    L = _constant("panel", gate_FI.dtype)
    panels = [F.pad(weight, (0, 0, 0, -len(weight) % L)).view(-1, L, weight.shape[1]) for weight in (gate_FI, up_FI)]
    return pack(torch.stack(panels, dim=1).flatten(0, 2))


def linear(
    panels_PIL: Tensor, outputs: int, bias_O: Tensor | None, x_MI: Tensor, add_to_MO: Tensor | None = None
) -> Tensor:
    """A linear layer, M x O in fp32. With `add_to_MO` the output is added to that tensor, which is returned.

    Args:
        panels_PIL: from `pack`.
        outputs: O.
        bias_O: fp32.
        add_to_MO: fp32, contiguous.
    """
    x_MI = _pad_pairs(x_MI, panels_PIL)
    M, I = x_MI.shape  # noqa: E741
    assert add_to_MO is None or (add_to_MO.shape == (M, outputs) and add_to_MO.is_contiguous())
    out_MO = torch.empty(M, outputs) if add_to_MO is None else add_to_MO
    _call("linear", [x_MI.dtype], out_MO, x_MI, panels_PIL, bias_O, add_to_MO is not None, M, I, outputs)
    return out_MO


def swiglu(panels_PIL: Tensor, features: int, bias_2F: Tensor | None, x_MI: Tensor) -> Tensor:
    """silu(gate(x)) * up(x), M x F in the dtype of x.

    Args:
        panels_PIL: from `pack_gated`.
        features: F.
        bias_2F: of gate, then of up, fp32.
    """
    x_MI = _pad_pairs(x_MI, panels_PIL)
    M, I = x_MI.shape  # noqa: E741
    out_MF = torch.empty(M, features, dtype=x_MI.dtype)
    _call("swiglu", [x_MI.dtype], out_MF, x_MI, panels_PIL, bias_2F, M, I, features)
    return out_MF


def gelu(panels_PIL: Tensor, features: int, bias_O: Tensor | None, tanh: bool, x_MI: Tensor) -> Tensor:
    """GELU of a linear layer, M x F in the dtype of x; with `tanh` GPT-2's approximation."""
    x_MI = _pad_pairs(x_MI, panels_PIL)
    M, I = x_MI.shape  # noqa: E741
    out_MF = torch.empty(M, features, dtype=x_MI.dtype)
    _call("gelu", [x_MI.dtype], out_MF, x_MI, panels_PIL, bias_O, tanh, M, I, features)
    return out_MF


def rms_norm(gain_W: Tensor, eps: float, dtype: torch.dtype, x_MW: Tensor) -> Tensor:
    """RMSNorm of fp32 rows, rounded to `dtype`."""
    x_MW = x_MW.contiguous()
    out_MW, W = torch.empty(x_MW.shape, dtype=dtype), len(gain_W)
    _call("rms_norm", [dtype], out_MW, x_MW, gain_W, eps, x_MW.numel() // W, W)
    return out_MW


def layer_norm(gain_W: Tensor, bias_W: Tensor | None, eps: float, dtype: torch.dtype, x_MW: Tensor) -> Tensor:
    """LayerNorm of fp32 rows, rounded to `dtype`."""
    x_MW = x_MW.contiguous()
    out_MW, W = torch.empty(x_MW.shape, dtype=dtype), len(gain_W)
    _call("layer_norm", [dtype], out_MW, x_MW, gain_W, bias_W, eps, x_MW.numel() // W, W)
    return out_MW


def norm_heads(gain_D: Tensor, eps: float, qkv_BTND: Tensor, heads: slice) -> None:
    """RMSNorm of each of a slice of heads, in place, fp32."""
    B, T, N, D = qkv_BTND.shape
    assert qkv_BTND.dtype == torch.float32
    assert qkv_BTND.is_contiguous()
    _call("norm_heads", [], qkv_BTND, gain_D, eps, B * T, N, heads.start, heads.stop - heads.start, D)


def argmax(logits_BV: Tensor, allowed: int) -> tuple[Tensor, Tensor]:
    """The lowest id [B] int64 with the largest of the first `allowed` logits, and its log-probability [B] fp32."""
    (B, V), logits_BV = logits_BV.shape, logits_BV.contiguous()
    ids_B, logps_B = torch.empty(B, dtype=torch.long), torch.empty(B, dtype=torch.float32)
    _call("argmax", [logits_BV.dtype], ids_B, logps_B, logits_BV, B, V, allowed)
    return ids_B, logps_B


def attend(
    qkv_BND: Tensor,
    rope_BE: Tensor | None,
    keys_BKCD: Tensor,
    values_BKCD: Tensor,
    bias_BS: Tensor | None,
    used: int,
) -> Tensor:
    """Write keys and values of the newest slot, then attention over all slots in use: B x (H D) in the cache's dtype.

    Args:
        qkv_BND: queries, keys and values before rotation, fp32.
        rope_BE: rotations as complex fp32; None: none.
        bias_BS: added to the scores, fp32; None: none.
        used: S; the newest slot is the last one.
    """
    (B, N, D), (K, C) = qkv_BND.shape, keys_BKCD.shape[1:3]
    assert qkv_BND.dtype == torch.float32
    assert qkv_BND.is_contiguous()
    assert keys_BKCD.is_contiguous()
    assert values_BKCD.is_contiguous()
    assert rope_BE is None or (rope_BE.shape == (B, D // 2) and rope_BE.is_contiguous())
    H, bias_stride = N - 2 * K, 0 if bias_BS is None else bias_BS.stride(0)
    out_BV = torch.empty(B, H * D, dtype=keys_BKCD.dtype)
    tensors = (out_BV, qkv_BND, rope_BE, keys_BKCD, values_BKCD, bias_BS)
    _call("attend", [keys_BKCD.dtype], *tensors, bias_stride, B, H, K, D, C, used)
    return out_BV


def attend_prompts(
    qkv_BTND: Tensor, rope_TE: Tensor | None, keys_RKCD: Tensor, values_RKCD: Tensor, window: int | None, samples: int
) -> Tensor:
    """Write keys and values of prompts, then causal attention: B x T x (H D) in the cache's dtype.

    Args:
        qkv_BTND: queries, keys and values before rotation, fp32.
        rope_TE: rotations as complex fp32; None: none.
        keys_RKCD, values_RKCD: the cache of R = B x samples rows; the samples of a prompt are adjacent.
        window: number of tokens that a token attends to, itself included; None: all earlier ones.
    """
    (B, T, N, D), (R, K, C) = qkv_BTND.shape, keys_RKCD.shape[:3]
    assert qkv_BTND.dtype == torch.float32
    assert qkv_BTND.is_contiguous()
    assert keys_RKCD.is_contiguous()
    assert values_RKCD.is_contiguous()
    assert B * samples == R
    assert rope_TE is None or (rope_TE.shape == (T, D // 2) and rope_TE.is_contiguous())
    H = N - 2 * K
    out_BTV = torch.empty(B, T, H * D, dtype=keys_RKCD.dtype)
    tensors = (out_BTV, qkv_BTND, rope_TE, keys_RKCD, values_RKCD)
    _call("attend_prompts", [keys_RKCD.dtype], *tensors, window or T, samples, B, T, H, K, D, C)
    return out_BTV


def _pad_pairs(x_MI: Tensor, panels_PIL: Tensor) -> Tensor:
    """Rows padded to a multiple of the inputs that are multiplied as a pair."""
    assert panels_PIL.dtype == x_MI.dtype
    odd = x_MI.shape[1] % _constant("pair", x_MI.dtype)
    return F.pad(x_MI, (0, 1)) if odd else x_MI.contiguous()


def _call(name: str, dtypes: Sequence[torch.dtype], *arguments: Tensor | float | None) -> None:
    """Call a kernel, whose last argument is the number of threads."""
    _function(name, *dtypes)(pack_arguments(*arguments, torch.get_num_threads()))


@cache
def _function(name: str, *dtypes: torch.dtype) -> Any:
    function = getattr(_library(), "_".join((name, *(_NAMES[dtype] for dtype in dtypes))))
    function.argtypes, function.restype = [ctypes.c_void_p], None
    return function


@cache
def _constant(name: str, dtype: torch.dtype) -> int:
    """Outputs of a `panel`, inputs of a `pair`, or the `step` to whose multiple inputs are padded."""
    return getattr(_library(), f"{name}_{_NAMES[dtype]}")()


_built: list[ctypes.CDLL | None] = []


def _library(notify: Callable[[str], None] | None = None) -> ctypes.CDLL | None:
    """The library; None if it cannot be built."""
    if not _built:
        _built.append(build(_SOURCE, notify))
    return _built[0]
