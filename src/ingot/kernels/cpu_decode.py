"""What decoding needs on a CPU, in C++ (`cpp/`), built once by the machine's own compiler in three seconds.

- Products. Weights lie in panels: of some outputs, three registers of them, all weights of the first input side by
  side, then those of the second. A number of a row, repeated over a register, meets three registers of weights; 8 rows
  and their 24 registers of sums are what a CPU with AVX-512 holds, 4 rows with AVX2. One row reads the same panels as
  fast as memory gives them (`product.py` has the figures). In GFLOP/s of 32 and of 2,048 rows in bf16, a Zen 4: 3
  registers x 8 rows 423 and 422, 2 x 12 405 and 384 (rows of 2,048 numbers keep each other from the first cache), 4 x 6
  413 and 418; with AVX2 in fp32 3 x 4 213 and 221, 2 x 6 187 and 206, oneDNN 150 and 211.
- Matrix tiles (AMX) read the same panels in bf16: see `product.py`. For them weights in fp32 lie in panels of 16
  outputs, as whole numbers of three digits of 8 bits (`products_by_digits.h`). Where a CPU has tiles and its compiler
  knows none, torch does all of it in bf16, with oneDNN's products.
- Attention of a new token over the cache and of prompts' tokens among themselves, rotation included, and norms: one
  call each in place of three to ten operations. SwiGLU and GELU are part of the product before them.

Without a compiler, in fp64 and on a GPU the same is done by torch's operations. Rejected: torch's compiler, which takes
half a minute where this takes three seconds.

Shapes: I inputs, O outputs, M rows, P panels of L outputs, W width, F features; B rows, or prompts of T tokens and R
rows, N = H + 2K heads: H of queries, K of keys, K of values; D features of a head, E = D / 2 pairs of them, S slots in
use of C.
"""

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.kernels import replay
from ingot.kernels.build import build, multiplies_bf16, word

_SOURCE = Path(__file__).parent / "cpp" / "decode" / "native.cpp"
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "digits"}
_MOST_INPUTS = 43_000
"""Of which sums of digits' products fit 32 bits."""


def available(device: torch.device, dtype: torch.dtype, stream: torch.dtype) -> bool:
    """Whether the functions below are there for such products and what is between them; the first call builds them."""
    wanted = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and stream == torch.float32
    return wanted and (library := _library()) is not None and (dtype != torch.bfloat16 or multiplies_bf16(library))


def pack(weight_OI: Tensor) -> Tensor:
    """Weights as `product` reads them: panels of outputs side by side, by input, bf16 in pairs of inputs, P x I x L.

    Zeros stand where a panel is not full, and for inputs that are missing of those that are multiplied at once. In
    digits: P x bytes.
    """
    library, dtype = _library(), _packed(weight_OI)
    assert library is not None
    (O, I), L = weight_OI.shape, _of("panel", dtype)  # noqa: E741
    if dtype == torch.int8:
        panels = torch.empty(-(-O // L), library.bytes_digits(I), dtype=torch.int8)
        _call("pack", [dtype], panels, weight_OI.contiguous(), O, I)
        return panels
    pair = _of("pair", dtype)
    whole_OI = F.pad(weight_OI, (0, -I % _of("step", dtype), 0, -O % L))
    I = whole_OI.shape[1]  # noqa: E741
    return whole_OI.view(-1, L, I // pair, pair).transpose(1, 2).contiguous().view(-1, I, L)


def pack_gated(gate_FI: Tensor, up_FI: Tensor) -> Tensor:
    """Weights as `gated` reads them: a panel of gates, then one of what they are multiplied with, and so on."""
    L = _of("panel", _packed(gate_FI))
    parts = [F.pad(part, (0, 0, 0, -len(part) % L)).view(-1, L, part.shape[1]) for part in (gate_FI, up_FI)]
    return pack(torch.stack(parts, dim=1).flatten(0, 2))


def _packed(x_I: Tensor) -> torch.dtype:
    """What weights are packed in, by their dtype and inputs, which rows that are multiplied with them have as well."""
    digits = x_I.dtype == torch.float32 and x_I.shape[-1] <= _MOST_INPUTS and _tiles()
    return torch.int8 if digits else x_I.dtype


def product(
    panels_PIL: Tensor, outputs: int, bias_O: Tensor | None, x_MI: Tensor, onto_MO: Tensor | None = None
) -> Tensor:
    """Rows times weights that are packed, M x O in fp32, or added to what is there.

    Args:
        bias_O: in fp32.
        onto_MO: in fp32, contiguous; it holds the sum then, and is what is returned.
    """
    x_MI = _pairs(x_MI, panels_PIL)
    M, I = x_MI.shape  # noqa: E741
    assert onto_MO is None or (onto_MO.shape == (M, outputs) and onto_MO.is_contiguous())
    out_MO = replay.room("product", (M, outputs), torch.float32) if onto_MO is None else onto_MO
    _call("product", [panels_PIL.dtype], out_MO, x_MI, panels_PIL, bias_O, onto_MO is not None, M, I, outputs)
    return out_MO


def gated(panels_PIL: Tensor, features: int, bias_2F: Tensor | None, x_MI: Tensor) -> Tensor:
    """silu(gate) * up of rows times weights that are packed so, M x F in the dtype of the rows.

    Args:
        bias_2F: of the gates, and of what they are multiplied with, in fp32.
    """
    x_MI = _pairs(x_MI, panels_PIL)
    M, I = x_MI.shape  # noqa: E741
    out_MF = replay.room("gated", (M, features), x_MI.dtype)
    _call("gated", [panels_PIL.dtype], out_MF, x_MI, panels_PIL, bias_2F, M, I, features)
    return out_MF


def gelu(panels_PIL: Tensor, features: int, bias_O: Tensor | None, tanh: bool, x_MI: Tensor) -> Tensor:
    """GELU of rows times weights that are packed, M x F in the dtype of the rows; by `tanh` as GPT-2 has it."""
    x_MI = _pairs(x_MI, panels_PIL)
    M, I = x_MI.shape  # noqa: E741
    out_MF = replay.room("gelu", (M, features), x_MI.dtype)
    _call("gelu", [panels_PIL.dtype], out_MF, x_MI, panels_PIL, bias_O, tanh, M, I, features)
    return out_MF


def rms_norm(gain_W: Tensor, eps: float, dtype: torch.dtype, x_MW: Tensor) -> Tensor:
    """RMSNorm of fp32, in the dtype of the products that read it."""
    x_MW = x_MW.contiguous()
    out_MW, W = replay.room("rms_norm", x_MW.shape, dtype), len(gain_W)
    _call("rms_norm", [dtype], out_MW, x_MW, gain_W, eps, x_MW.numel() // W, W)
    return out_MW


def norm_heads(gain_D: Tensor, eps: float, qkv_BTND: Tensor, heads: slice) -> None:
    """RMSNorm of some heads by themselves, in place, in fp32."""
    B, T, N, D = qkv_BTND.shape
    assert qkv_BTND.dtype == torch.float32
    assert qkv_BTND.is_contiguous()
    _call("norm_heads", [], qkv_BTND, gain_D, eps, B * T, N, heads.start, heads.stop - heads.start, D)


def layer_norm(gain_W: Tensor, bias_W: Tensor | None, eps: float, dtype: torch.dtype, x_MW: Tensor) -> Tensor:
    """LayerNorm of fp32, in the dtype of the products that read it."""
    x_MW = x_MW.contiguous()
    out_MW, W = replay.room("layer_norm", x_MW.shape, dtype), len(gain_W)
    _call("layer_norm", [dtype], out_MW, x_MW, gain_W, bias_W, eps, x_MW.numel() // W, W)
    return out_MW


def likeliest(logits_BV: Tensor, allowed: int) -> tuple[Tensor, Tensor]:
    """Ids [B] int64 of the greatest of the first logits, of equal ones the lowest, and log-probabilities [B] fp32."""
    (B, V), logits_BV = logits_BV.shape, logits_BV.contiguous()
    ids_B, logps_B = torch.empty(B, dtype=torch.long), torch.empty(B, dtype=torch.float32)
    _call("likeliest", [logits_BV.dtype], ids_B, logps_B, logits_BV, B, V, allowed)
    return ids_B, logps_B


def attend(
    qkv_BND: Tensor,
    turn_BE: Tensor | None,
    keys_BKCD: Tensor,
    values_BKCD: Tensor,
    bias_BS: Tensor | None,
    used: replay.Word,
) -> Tensor:
    """Write keys and values of the newest slot, and mix the values of all S: B x (H D) in the dtype of the cache.

    Args:
        qkv_BND: queries of H heads, keys and values of K, in fp32.
        turn_BE: what queries and keys are turned by, in complex fp32; None: by nothing.
        bias_BS: added to the scores, fp32.
        used: where S stands; it is read whenever the call is made, so it must live as long as a tape of it.
    """
    (B, N, D), (K, C) = qkv_BND.shape, keys_BKCD.shape[1:3]
    assert qkv_BND.dtype == torch.float32
    assert qkv_BND.is_contiguous()
    assert keys_BKCD.is_contiguous()
    assert values_BKCD.is_contiguous()
    assert turn_BE is None or (turn_BE.shape == (B, D // 2) and turn_BE.is_contiguous())
    H, bias_stride = N - 2 * K, 0 if bias_BS is None else bias_BS.stride(0)
    out_BV = replay.room("attend", (B, H * D), keys_BKCD.dtype)
    tensors = (out_BV, qkv_BND, turn_BE, keys_BKCD, values_BKCD, bias_BS)
    _call("attend", [keys_BKCD.dtype], *tensors, bias_stride, B, H, K, D, C, ctypes.addressof(used))
    return out_BV


def attend_prompts(
    qkv_BTND: Tensor, turn_TE: Tensor | None, keys_RKCD: Tensor, values_RKCD: Tensor, window: int | None, samples: int
) -> Tensor:
    """Write the keys and values of prompts' tokens, and mix for each token the values up to its own: B x T x (H D).

    Args:
        qkv_BTND: queries of H heads, keys and values of K, in fp32.
        turn_TE: what queries and keys are turned by, in complex fp32; None: by nothing.
        keys_RKCD, values_RKCD: of B x samples rows, the samples of a prompt side by side.
        window: slots that a token sees at most, its own included.
    """
    (B, T, N, D), (R, K, C) = qkv_BTND.shape, keys_RKCD.shape[:3]
    assert qkv_BTND.dtype == torch.float32
    assert qkv_BTND.is_contiguous()
    assert keys_RKCD.is_contiguous()
    assert values_RKCD.is_contiguous()
    assert B * samples == R
    assert turn_TE is None or (turn_TE.shape == (T, D // 2) and turn_TE.is_contiguous())
    H, tables = N - 2 * K, (keys_RKCD, values_RKCD)
    out_BTV = torch.empty(B, T, H * D, dtype=keys_RKCD.dtype)
    _call(
        "attend_prompts", [keys_RKCD.dtype], out_BTV, qkv_BTND, turn_TE, *tables, window or T, samples, B, T, H, K, D, C
    )
    return out_BTV


def recorded(*inputs: Tensor | None) -> AbstractContextManager[replay.Tape]:
    """What is called meanwhile, as a tape; what of it differs from time to time comes as inputs."""
    library = _library()
    assert library is not None
    return replay.record(library.play, inputs)


def _pairs(x_MI: Tensor, panels_PIL: Tensor) -> Tensor:
    """Rows of whole pairs."""
    assert panels_PIL.dtype == _packed(x_MI)
    odd = x_MI.shape[1] % _of("pair", panels_PIL.dtype)
    return F.pad(x_MI, (0, 1)) if odd else x_MI.contiguous()


def _call(name: str, dtypes: Sequence[torch.dtype], *arguments: Tensor | float | None) -> None:
    """Call a function, whose last argument is the number of threads."""
    words = [word(argument) for argument in arguments]
    replay.call(_function(name, *dtypes), *words, torch.get_num_threads())


@cache
def _function(name: str, *dtypes: torch.dtype) -> Any:
    function = getattr(_library(), "_".join((name, *(_NAMES[dtype] for dtype in dtypes))))
    function.argtypes, function.restype = [ctypes.c_void_p], None
    return function


@cache
def _of(what: str, dtype: torch.dtype) -> int:
    """A number of the library's: a `panel` has so many outputs, a `pair` of inputs lies together, and panels have a
    multiple of a `step` of them."""
    return getattr(_library(), f"{what}_{_NAMES[dtype]}")()


@cache
def _tiles() -> bool:
    library = _library()
    return library is not None and bool(library.tiles())


@cache
def _library() -> ctypes.CDLL | None:
    """The functions; None where they cannot be built."""
    if (library := build(_SOURCE)) is not None:
        library.play.argtypes, library.play.restype = [ctypes.c_void_p, ctypes.c_long], None
        if library.tiles():  # which asks the system for them
            library.bytes_digits.argtypes, library.bytes_digits.restype = [ctypes.c_long], ctypes.c_long
    return library
