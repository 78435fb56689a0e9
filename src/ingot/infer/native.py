"""What one new token needs on a CPU, in C++ (`native.cpp`), built once by the machine's own compiler in two seconds.

- The product of one row: weights stay as the model has them, and are read one row after another. GB/s of weights of
  4,096 x 768 in bf16 / fp32, two cores of a Zen 4 whose memory a sum reads at 34: so 37 / 33, oneDNN's own layout 27 /
  29, and two to eight rows of weights at a time 24 to 26 / 25 to 32, whatever is fetched ahead.
- Attention over the cache, RMSNorm and SwiGLU: one call each in place of three to ten operations.

Without a compiler, in fp64 and on a GPU the same is done by torch's operations. Rejected: torch's compiler, which takes
half a minute where this takes two seconds, and a step as one call, which would be the architecture written twice.

Shapes: I inputs, O outputs, M rows, W width, F features; B rows, H query heads, K key heads, D features of a head, S
slots in use of C.
"""

import ctypes
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ingot.core import artifact

_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_PATIENCE = 120
"""Seconds that the compiler may take."""
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
_ARGUMENTS = {
    "linear": [_POINTER] * 3 + [_LONG] * 2 + [_INT],
    "rms_norm": [_POINTER] * 3 + [ctypes.c_float] + [_LONG] * 2 + [_INT],
    "swiglu": [_POINTER] * 2 + [_LONG] * 2 + [_INT],
    "likeliest": [_POINTER] * 3 + [_LONG] * 3 + [_INT],
    "attend": [_POINTER] * 4 + [_LONG] + [_POINTER] * 3 + [_LONG] * 7 + [_INT],
}


def able(device: torch.device, dtype: torch.dtype, stream: torch.dtype) -> bool:
    """Whether the functions below are there for such products and what is between them; the first call builds them."""
    wanted = device.type == "cpu" and dtype in _NAMES and stream == torch.float32
    return wanted and _library() is not None


def linear(x_1I: Tensor, weight_OI: Tensor) -> Tensor:
    """One row's product with weights in its dtype, 1 x O in fp32."""
    (O, I), x_1I = weight_OI.shape, x_1I.contiguous()  # noqa: E741
    out_1O = torch.empty(1, O, dtype=torch.float32)
    call = _function("linear", x_1I.dtype)
    call(out_1O.data_ptr(), x_1I.data_ptr(), weight_OI.data_ptr(), I, O, torch.get_num_threads())
    return out_1O


def rms_norm(gain_W: Tensor, eps: float, dtype: torch.dtype, x_MW: Tensor) -> Tensor:
    """RMSNorm of fp32, in the dtype of the products that read it."""
    x_MW = x_MW.contiguous()
    out_MW, W = torch.empty(x_MW.shape, dtype=dtype), len(gain_W)
    rows, call = x_MW.numel() // W, _function("rms_norm", dtype)
    call(out_MW.data_ptr(), x_MW.data_ptr(), gain_W.data_ptr(), eps, rows, W, torch.get_num_threads())
    return out_MW


def swiglu(dtype: torch.dtype, gate_and_up_MF: Tensor) -> Tensor:
    """silu(gate) * up, M x F, of fp32 or the dtype that is asked for."""
    gate_and_up_MF = gate_and_up_MF.contiguous()
    (M, both), given = gate_and_up_MF.shape, gate_and_up_MF.dtype
    out_MF = torch.empty(M, both // 2, dtype=dtype)
    call = _function("swiglu", *([dtype] if given == dtype else [given, dtype]))
    call(out_MF.data_ptr(), gate_and_up_MF.data_ptr(), M, both // 2, torch.get_num_threads())
    return out_MF


def likeliest(logits_BV: Tensor, allowed: int) -> tuple[Tensor, Tensor]:
    """Ids [B] int64 of the greatest of the first logits, of equal ones the lowest, and log-probabilities [B] fp32."""
    (B, V), logits_BV = logits_BV.shape, logits_BV.contiguous()
    ids_B, logps_B = torch.empty(B, dtype=torch.long), torch.empty(B, dtype=torch.float32)
    call = _function("likeliest", logits_BV.dtype)
    call(ids_B.data_ptr(), logps_B.data_ptr(), logits_BV.data_ptr(), B, V, allowed, torch.get_num_threads())
    return ids_B, logps_B


def attend(
    q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor, keys_BKCD: Tensor, values_BKCD: Tensor, bias_BS: Tensor | None, S: int
) -> Tensor:
    """Write keys and values of the newest slot, and mix the values of all S: B x (H D) in the dtype of the cache.

    Args:
        q_BHD, k_BKD, v_BKD: in fp32, as parts of one tensor of B rows.
        bias_BS: added to the scores, fp32.
    """
    (B, H, D), (K, C) = q_BHD.shape, keys_BKCD.shape[1:3]
    stride = q_BHD.stride(0)
    assert q_BHD.dtype == torch.float32
    assert keys_BKCD.is_contiguous()
    assert values_BKCD.is_contiguous()
    assert {x.stride() for x in (q_BHD, k_BKD, v_BKD)} == {(stride, D, 1)}
    out_BV = torch.empty(B, H * D, dtype=keys_BKCD.dtype)
    bias = (None, 0) if bias_BS is None else (bias_BS.data_ptr(), bias_BS.stride(0))
    pointers = (x.data_ptr() for x in (out_BV, q_BHD, k_BKD, v_BKD))
    tables = (keys_BKCD.data_ptr(), values_BKCD.data_ptr())
    call = _function("attend", keys_BKCD.dtype)
    call(*pointers, stride, *tables, *bias, B, H, K, D, C, S, torch.get_num_threads())
    return out_BV


@cache
def _function(name: str, *dtypes: torch.dtype) -> Callable[..., None]:
    function = getattr(_library(), "_".join((name, *(_NAMES[dtype] for dtype in dtypes))))
    function.argtypes, function.restype = _ARGUMENTS[name], None
    return function


@cache
def _library() -> ctypes.CDLL | None:
    """The functions, built if they are not on disk; None without a compiler or a place for what it makes."""
    compiler = os.environ.get("CXX") or "g++"
    about = (compiler, _FLAGS, platform.machine(), sorted(torch.cpu.get_capabilities().items()))
    name = artifact.digest_bytes(repr(about).encode() + _SOURCE.read_bytes())
    path = artifact.cache() / "native" / f"{name}.so"
    with suppress(OSError, subprocess.SubprocessError):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                made = Path(scratch, "made.so")
                command = [*compiler.split(), *_FLAGS, str(_SOURCE), "-o", str(made)]
                subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
                made.replace(path)  # whole, whoever else builds it
        return ctypes.CDLL(str(path))
    return None
