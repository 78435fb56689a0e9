"""Kernels for a GPU, in Triton; imported where one is used."""

# pyright: reportMissingImports=false, reportIndexIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from ingot.kernels import bias_gelu as gelu
from ingot.kernels import joint_linear as joint
from ingot.model import norms

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
    """GELU of z + bias, as `kernels/bias_gelu.py` wants it; z is ... x N, in 16 bits."""
    z_nN = z.contiguous().view(-1, len(bias_N))
    out_nN = torch.empty_like(z_nN)
    n, N = z_nN.shape
    if n:
        grid = (triton.cdiv(n, _ROWS), triton.cdiv(N, _FEATURES))
        _gelu[grid](z_nN, bias_N, out_nN, n, N, tanh, _ROWS, _FEATURES, num_warps=_WARPS)
    return out_nN.view(z.shape)


def bias_gelu_backward(gradient: Tensor, z: Tensor, bias_N: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """The gradient of z, and of `gelu.PART` rows each its sum over them, P x N in fp32."""
    gradient_nN, z_nN = (x.contiguous().view(-1, len(bias_N)) for x in (gradient, z))
    out_nN = torch.empty_like(z_nN)
    n, N = z_nN.shape
    parts_PN = torch.empty(triton.cdiv(n, gelu.PART), N, dtype=torch.float32, device=z.device)
    if n:
        grid = (len(parts_PN), triton.cdiv(N, _FEATURES))
        arguments = (gradient_nN, z_nN, bias_N, out_nN, parts_PN, n, N, tanh, gelu.PART, _ROWS, _FEATURES)
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


_NORM = 2, 4, 3
"""Rows that a program of a norm's gradient has at a time, how many warps it is, and how often as many are under way.

The best of 28 on an H200: 32 us for 16,384 x 768 in bf16, 37 for 8,192 x 2,048, reading three such and writing one at
3.1 and 3.7 TB/s; where the next rows are not asked for ahead 39 and 47.
"""


def norm_backward(
    of_stream: Tensor, of_branch: Tensor, x: Tensor, gain_W: Tensor, eps: float, centred: bool, gains: int
) -> tuple[Tensor, Tensor]:
    """The gradient of x, which goes on and is normed for a branch, and parts of that of gain (and bias).

    Parts are sums over `norms.PART` rows, P x 1 or 2 x W in fp32.
    """
    of_stream_nW, of_branch_nW, x_nW = (y.contiguous().view(-1, len(gain_W)) for y in (of_stream, of_branch, x))
    out_nW = torch.empty_like(x_nW)
    n, W = x_nW.shape
    parts_PGW = torch.empty(triton.cdiv(n, norms.PART), gains, W, dtype=torch.float32, device=x.device)
    if n:
        rows, warps, stages = _NORM
        arguments = (of_stream_nW, of_branch_nW, x_nW, gain_W, out_nW, parts_PGW, n, W, eps)
        constants = (centred, gains, norms.PART, rows, stages, triton.next_power_of_2(W))
        _norm_backward[(len(parts_PGW),)](*arguments, *constants, num_warps=warps)
    return out_nW.view(x.shape), parts_PGW


@triton.jit
def _norm_backward(
    of_stream, of_branch, x, gain, out, parts, n, W, eps,
    CENTRED: tl.constexpr, GAINS: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    first = part * PART
    feature = tl.arange(0, WIDTH)
    gains = tl.load(gain + feature, mask=feature < W, other=0.0)[None, :]
    of_gain = tl.zeros((ROWS, WIDTH), tl.float32)
    of_bias = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in tl.range(0, PART, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (first + row < n) & (feature < W)[None, :]
        at = row * W + feature[None, :]
        y = tl.load(x + first * W + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(of_branch + first * W + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(of_stream + first * W + at, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            y = tl.where(inside, y - (tl.sum(y, 1) / W)[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(y * y, 1) / W + eps)[:, None]
        y *= scale
        of_gain += g * y
        of_bias += g
        g *= gains
        along = (tl.sum(g * y, 1) / W)[:, None]
        level = 0.0
        if CENTRED:
            level = (tl.sum(g, 1) / W)[:, None]
        of_x = s + (g - level - y * along) * scale
        tl.store(out + first * W + at, of_x.to(out.dtype.element_ty), mask=inside)
    parts += part * GAINS * W
    tl.store(parts + feature, tl.sum(of_gain, 0), mask=feature < W)
    if GAINS == 2:
        tl.store(parts + W + feature, tl.sum(of_bias, 0), mask=feature < W)


_JOINT = 8, 1
"""Rows that a program has at a time of what it puts side by side, and how many warps it is.

Among the best of 26 on an H200: 41.5 us for three of 16,384 x 768 in bf16, where copying takes 37 and reading them once
more for the sums 19.
"""


def joined(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Three matrices side by side, n x N, and sums over `joint.PART` rows each, P x N in fp32."""
    sizes = [x.shape[-1] for x in (a, b, c)]
    assert not any(size % joint.TILE for size in sizes), f"found {sizes}, expected multiples of {joint.TILE}"
    a, b, c = (x.contiguous() for x in (a, b, c))
    n, N = a.numel() // sizes[0], sum(sizes)
    out_nN = torch.empty(n, N, dtype=a.dtype, device=a.device)
    parts_PN = torch.empty(triton.cdiv(n, joint.PART), N, dtype=torch.float32, device=a.device)
    if n:
        rows, warps = _JOINT
        grid = (len(parts_PN), N // joint.TILE)
        _joined[grid](a, b, c, out_nN, parts_PN, n, *sizes, joint.PART, rows, joint.TILE, num_warps=warps)
    return out_nN, parts_PN


@triton.jit
def _joined(
    a, b, c, out, parts, n, A, B, C,
    PART: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    part, tile = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    first, N = part * PART, A + B + C
    if tile < A:
        source, width = a + tile, A
    elif tile < A + B:
        source, width = b + (tile - A), B
    else:
        source, width = c + (tile - A - B), C
    source += first * width
    out += first * N + tile
    feature = tl.arange(0, TILE)
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(0, PART, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        x = tl.load(source + row * width + feature[None, :], mask=first + row < n, other=0.0)
        tl.store(out + row * N + feature[None, :], x, mask=first + row < n)
        total += x.to(tl.float32)
    tl.store(parts + part * N + tile + feature, tl.sum(total, 0))
