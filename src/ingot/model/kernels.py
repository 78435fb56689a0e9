"""Kernels for a GPU, in Triton; imported where one is used."""

# pyright: reportMissingImports=false, reportIndexIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from ingot.model.gelu import PART

_BLOCK = 4096
"""Logits of a row that are read at a time."""
_LOWEST = -3.0e38
"""Less than any logit, and finite: the difference of two is a number."""


def nll_(logits_nP: Tensor, labels_n: Tensor, vocab: int, keep: bool) -> Tensor:
    """-ln p(label), n in fp32; where `keep`, logits become p - 1(label) in place, and 0 past the vocabulary.

    A program has a row: it reads it once for the sum of exponentials (Milakov and Gimelshein 2018, arXiv:1805.02867)
    and once more to write. 16,384 x 50,304 in bf16 on an H100: 1.57 ms, where writing them anew takes 1.09 by itself;
    the best of blocks of 1,024 to 65,536 and 4 to 32 warps, and of a maximum for each lane or for all.
    """
    assert logits_nP.stride(1) == 1, "rows must be contiguous"
    n, padded = logits_nP.shape
    nll_n = torch.empty(n, dtype=torch.float32, device=logits_nP.device)
    if n:
        block = min(_BLOCK, triton.next_power_of_2(padded))
        arguments = (logits_nP, labels_n.contiguous(), nll_n, vocab, padded, logits_nP.stride(0), _LOWEST, keep, block)
        _nll_rows[(n,)](*arguments, num_warps=8)
    return nll_n


@triton.jit
def _nll_rows(
    logits, labels, nll, vocab, padded, stride, lowest, KEEP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    of_label = tl.load(logits + label).to(tl.float32)  # before any thread overwrites it
    lane = tl.arange(0, BLOCK)
    largest = lowest
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.exp(x - larger)
        largest = larger
    log_z = largest + tl.log(tl.sum(total, 0))
    tl.store(nll + row, log_z - of_label)
    if KEEP:
        for start in range(0, padded, BLOCK):
            at = start + lane
            x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            excess = tl.exp(x - log_z) - tl.where(at == label, 1.0, 0.0)
            tl.store(logits + at, excess.to(logits.dtype.element_ty), mask=at < padded)


_ROWS, _FEATURES, _WARPS = 2, 1024, 4
"""What a program of GELU's has at a time, and how many warps it is.

The best of eleven on an H200: 16,384 x 3,072 in bf16 take 52 us, as long as copying them, and with their gradients 86;
reading two such and writing one takes 72.
"""


def bias_gelu(z: Tensor, bias_N: Tensor, tanh: bool) -> Tensor:
    """GELU of z + bias, as `model/gelu.py` wants it; z is ... x N, in 16 bits."""
    z_nN = z.contiguous().view(-1, len(bias_N))
    out_nN = torch.empty_like(z_nN)
    n, N = z_nN.shape
    if n:
        grid = (triton.cdiv(n, _ROWS), triton.cdiv(N, _FEATURES))
        _gelu[grid](z_nN, bias_N, out_nN, n, N, tanh, _ROWS, _FEATURES, num_warps=_WARPS)
    return out_nN.view(z.shape)


def bias_gelu_backward(gradient: Tensor, z: Tensor, bias_N: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """The gradient of z, and of `PART` rows each its sum over them, P x N in fp32."""
    gradient_nN, z_nN = (x.contiguous().view(-1, len(bias_N)) for x in (gradient, z))
    out_nN = torch.empty_like(z_nN)
    n, N = z_nN.shape
    parts_PN = torch.empty(triton.cdiv(n, PART), N, dtype=torch.float32, device=z.device)
    if n:
        grid = (len(parts_PN), triton.cdiv(N, _FEATURES))
        arguments = (gradient_nN, z_nN, bias_N, out_nN, parts_PN, n, N, tanh, PART, _ROWS, _FEATURES)
        _gelu_backward[grid](*arguments, num_warps=_WARPS)
    return out_nN.view(z.shape), parts_PN


@triton.jit
def _gelu(z, bias, out, n, N, TANH: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROWS
    lane = tl.arange(0, ROWS)[:, None]
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)[None, :]
    inside, at = (first + lane < n) & (feature < N), lane * N + feature
    b = tl.load(bias + feature, mask=feature < N, other=0.0).to(tl.float32)
    x = tl.load(z + first * N + at, mask=inside, other=0.0).to(tl.float32) + b
    p, _ = _probability(x, TANH)
    tl.store(out + first * N + at, (x * p).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_backward(
    gradient, z, bias, out, parts, n, N,
    TANH: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    b = tl.load(bias + feature, mask=feature < N, other=0.0).to(tl.float32)[None, :]
    row = part * PART + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, ROWS)[:, None] * N + feature[None, :]
    gradient += part * PART * N
    z += part * PART * N
    out += part * PART * N
    total = tl.zeros((ROWS, FEATURES), tl.float32)
    for _ in range(PART // ROWS):
        inside = (row < n) & (feature < N)[None, :]
        x = tl.load(z + at, mask=inside, other=0.0).to(tl.float32) + b
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        p, slope = _probability(x, TANH)
        g *= p + x * slope
        tl.store(out + at, g.to(out.dtype.element_ty), mask=inside)
        total += g
        row += ROWS
        gradient += ROWS * N
        z += ROWS * N
        out += ROWS * N
    tl.store(parts + part * N + feature, tl.sum(total, 0), mask=feature < N)


@triton.jit
def _probability(x, TANH: tl.constexpr):
    """That a normal number is below x, and its density there; to 7.5e-8 (Abramowitz and Stegun 1964, 26.2.17).

    Or GPT-2's (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, and its slope.
    """
    if TANH:
        square = x * x
        p = _inverse(1 + _exp2(x * (-2.302208198 + -0.1029432407 * square)))
        slope = p * (1 - p) * (1.5957691216 + 0.2140644488 * square)
    else:
        t = _inverse(1 + 0.2316419 * tl.abs(x))
        slope = _exp2(x * x * -0.7213475204 - 1.325748064)
        tail = slope * (
            t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
        )
        p = tl.where(x < 0, tail, 1 - tail)
    return p, slope


# The hardware's own, to 2 units in the last place of fp32; Triton's are those and what numbers below 1e-38 need.
@triton.jit
def _exp2(x):
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _inverse(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
