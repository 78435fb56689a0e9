"""Matrix products that a CPU computes faster in another way than the one that torch takes.

- In fp32 by oneDNN: torch's fp32 products are MKL's, which keeps to AVX2 on CPUs that are not Intel's. oneDNN takes
  AVX-512 there, and with AVX2 alone it is no faster than MKL. GFLOP/s of MKL / oneDNN, 2 cores of a Zen 4, where both
  instruction sets have the same peak (219): 4,096 rows, 384 to 1,024 features, 173 / 203 with the weights of a forward
  pass, 186 / 215 with those of a backward pass; 4,096, 384 to 384, 182 / 204 and 182 / 208. On a Zen 5, whose AVX-512
  peak is twice the other, 190 / 330 to 430. The gradient of weights, whose first operand's rows lie as columns, which
  oneDNN copies, is MKL's on a Zen 4: 182 / 140. On a Zen 5 it is 194 / 354 (1,024 features to 384, 4,096 rows), and
  where the operand to be copied is the larger one, its transpose is computed: 384 to 1,024, 194 / 331 (235 as it is).
- In bf16 in two halves, where one of two threads would sit out: oneDNN 3.12, which torch 2.13 multiplies bf16 with,
  looks for the best way to cut a product for matrix tiles (AMX) with a model of the caches. Its table of what memory
  gives cores that read the same data has .9 for two of them, 2.28 for one and 2.39 for four (`bw_map_t`,
  amx_blocking_heuristics.hpp), so where there are just two threads it leaves nearly square products to one of them.
  Measured by the threads' own clocks, 2 cores of a Sapphire Rapids Xeon, for 128 to 8,192 rows, 128 to 3,072 columns
  and 256 to 50,257 in between, two threads share nearly all products but those in `_unshared`. With three, four and
  eight threads all of them work. Forward and backward of a 124M model, 1,024 tokens, compiled by block, three
  alternating pairs: 1.74 to 1.88 s in place of 1.98 to 2.32, 1.20 times as fast (1.08 to 1.34).

The head multiplies by `product`; layers of a compiled model do by a pass of the compiler's (`backends/aot_worker.py`).

Shapes: M rows, K inner, N columns.
"""

from functools import cache
from typing import Literal

import torch
from torch import Tensor

_WORTH_A_CALL = 1 << 23
"""M K N from which fp32 products are longer than what a call of oneDNN costs more than one of MKL."""
_WORTH_A_COPY = 1 << 24
"""The same where an operand is copied."""

Way = Literal["halves", "onednn"]


def way(a_MK: Tensor, b_KN: Tensor) -> Way | None:
    """How a @ b is computed faster than by torch's own way, if at all; of the operands only the layout is looked at."""
    if a_MK.device.type != "cpu" or 1 not in a_MK.stride():
        return None
    (rows, inner), columns, lying = a_MK.shape, b_KN.shape[1], a_MK.stride(1) != 1
    if a_MK.dtype == torch.bfloat16 and not lying and tiles_for_two() and _unshared(rows, inner, columns):
        return "halves"
    if a_MK.dtype == torch.float32 and mkl_keeps_to_avx2() and (not lying or avx512_is_whole()):
        return "onednn" if rows * inner * columns >= (_WORTH_A_COPY if lying else _WORTH_A_CALL) else None
    return None


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a @ b in the fastest way, M x N; not for autograd."""
    return a_MK @ b_KN if way(a_MK, b_KN) is None else torch.ops.ingot.product(a_MK, b_KN, None)


def concerned() -> bool:
    """Whether any product of the CPU's has a faster way, here and now."""
    return tiles_for_two() or mkl_keeps_to_avx2()


def tiles_for_two() -> bool:
    """Whether there are matrix tiles and just two threads."""
    return torch.get_num_threads() == 2 and torch.cpu._is_amx_tile_supported()


@cache
def mkl_keeps_to_avx2() -> bool:
    """Whether the CPU has AVX-512, but not Intel's name, which MKL looks at."""
    able = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    about = torch.cpu.get_capabilities() if able else {}
    return bool(about.get("avx512_f")) and about["cpu_name"].startswith("AMD")


@cache
def avx512_is_whole() -> bool:
    """Whether an AMD CPU computes 512 bits at once; a Zen 4 takes two steps, and has no AVX-VNNI as the Zen 5 has."""
    return bool(torch.cpu.get_capabilities().get("avx_vnni"))


def _unshared(rows: int, inner: int, columns: int) -> bool:
    """Whether a thread would sit out a product with matrix tiles."""
    return inner >= 512 and 384 <= columns <= 1024 and columns <= rows < 1.75 * columns


def _product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    """a @ b + bias in one of the faster ways."""
    if way(a_MK, b_KN) == "onednn":
        larger_is_copied = a_MK.stride(1) != 1 and len(a_MK) > b_KN.shape[1]
        if larger_is_copied and bias_N is None:
            return _linear(b_KN.t(), a_MK, None).t().contiguous()
        return _linear(a_MK, b_KN.t(), bias_N)
    out_MN = a_MK.new_empty(len(a_MK), b_KN.shape[1])
    for rows_mK, into_mN in zip(a_MK.chunk(2), out_MN.chunk(2), strict=True):
        if bias_N is None:
            torch.mm(rows_mK, b_KN, out=into_mN)
        else:
            torch.addmm(bias_N, rows_mK, b_KN, out=into_mN)
    return out_MN


def _linear(a_MK: Tensor, b_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """oneDNN's a @ b.T + bias."""
    return torch.ops.mkldnn._linear_pointwise.default(a_MK, b_NK, bias_N, "none", [], "")


# An operator, so that the compiler can be told to call it and does not look inside.
_library = torch.library.Library("ingot", "FRAGMENT")
_library.define("product(Tensor a, Tensor b, Tensor? bias) -> Tensor")
_library.impl("product", _product, "CPU")
torch.library.register_fake(
    "ingot::product", lambda a_MK, b_KN, bias_N: a_MK.new_empty(len(a_MK), b_KN.shape[1]), lib=_library
)
