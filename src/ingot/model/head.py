"""The head: hidden states to logits, and what a label costs without its logits being kept beside their gradient.

A loss that is a function of -ln p(label) alone needs nothing of a position's logits but p - 1(label), the gradient of
that number. So the forward pass turns logits into it where they lie, in the precision that the head multiplies in, and
the backward pass is two matrix products: how much each position counts scales their small operands. Where logits
exceed a budget, they are computed again in the backward pass, a chunk at a time, and the matrix's gradient is added up
in its own precision. On a GPU one kernel reads and writes them once (`kernels.py`); elsewhere a few rows are widened at
a time, so that what a softmax needs never leaves a core's cache.

GPUs multiply by a vocabulary that is no multiple of 8 at a sixth of their rate (GPT-2's 50,257 columns, bf16, H100: 97
TFLOP/s, 50,304 columns: 634), so there the matrix is filled up with rows of zeros, whose logits nobody reads.

Rejected: gradients of hidden states and matrix in the forward pass (Liger's way: saves the second product of a chunk,
but a position must count the same whatever the rest of the loss says).

Shapes: N positions, D features, V vocabulary, P the same filled up, n positions of a chunk.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot.model.multiply import product
from ingot.model.precision import autocast_dtype
from ingot.model.settings import MAX_LOGITS

_UNKEPT = 1 << 20
"""Elements of logits held at once where none are kept for a backward pass: 4 MiB in fp32, which stay in a cache."""
_WIDENED = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Elements of logits that are widened at once: what a core's cache holds; what fills a GPU."""
_FEWEST = 256
"""Positions below which a matrix product of a large vocabulary would mostly wait for its weights."""
_ALIGNED = 64
"""What a GPU's vocabulary is filled up to a multiple of."""


@dataclass(frozen=True)
class Head:
    """Hidden states ... x D to logits ... x V; losses may also read its matrix."""

    weight: Tensor
    """V x D."""

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, filled_up(self.weight))[..., : len(self.weight)]


def chunk(vocab: int, device: torch.device, max_logits: int | None = None, kept: bool = True) -> int:
    """Positions whose logits are held at once.

    Args:
        max_logits: elements of logits; None: what suits the device.
        kept: whether a backward pass follows; where none does nothing is computed twice, so small chunks are free.
    """
    size = max(1, (max_logits or MAX_LOGITS[device.type]) // vocab)
    return size if kept or device.type == "cuda" else min(size, max(_FEWEST, _UNKEPT // vocab))


def filled_up(weight_VD: Tensor) -> Tensor:
    """The matrix as its device multiplies it fast."""
    missing = -len(weight_VD) % _ALIGNED if weight_VD.device.type == "cuda" else 0
    return F.pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD


def wide(x: Tensor) -> Tensor:
    """In fp32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def nll(hidden_ND: Tensor, head: Head, labels_N: Tensor, max_logits: int | None = None) -> Tensor:
    """-ln p(label) of every position, N, in fp32 or better."""
    dtype = autocast_dtype(hidden_ND.device) or torch.promote_types(hidden_ND.dtype, head.weight.dtype)
    kept = torch.is_grad_enabled() and (hidden_ND.requires_grad or head.weight.requires_grad)
    size = chunk(len(head.weight), hidden_ND.device, max_logits, kept)
    return _NLL.apply(hidden_ND, head.weight, labels_N, dtype, size, kept)  # type: ignore[no-any-return]


class _NLL(torch.autograd.Function):
    """`nll`, `size` positions at a time."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, dtype: torch.dtype, size: int, kept: bool
    ) -> Tensor:
        rounded_ND, matrix_PD = hidden_ND.to(dtype), filled_up(weight_VD.to(dtype))
        at_once = kept and len(labels_N) <= size
        found, saved = [], []
        for some_nD, labels_n in zip(rounded_ND.split(size), labels_N.split(size), strict=True):
            logits_nP = product(some_nD, matrix_PD.T)
            found.append(nll_(logits_nP, labels_n, len(weight_VD), at_once))
            saved = [logits_nP] if at_once else []
        if kept:
            ctx.save_for_backward(rounded_ND, matrix_PD, labels_N, *saved)
            ctx.size, ctx.vocab, ctx.dtypes = size, len(weight_VD), (hidden_ND.dtype, weight_VD.dtype)
        return torch.cat(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nll_grad_N: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rounded_ND, matrix_PD, labels_N, *saved = ctx.saved_tensors
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        hidden_dtype, weight_dtype = ctx.dtypes
        hidden_grads: list[Tensor] = []
        weight_grad_PD = None
        chunks = (x.split(ctx.size) for x in (rounded_ND, labels_N, nll_grad_N))
        for some_nD, labels_n, grad_n in zip(*chunks, strict=True):
            excess_nP = saved[0] if saved else product(some_nD, matrix_PD.T)
            if not saved:
                nll_(excess_nP, labels_n, ctx.vocab, True)
            if of_hidden:
                hidden_grads.append((product(excess_nP, matrix_PD) * grad_n[:, None]).to(hidden_dtype))
            if of_weight:
                found_PD = excess_nP.T @ (some_nD * grad_n[:, None]).to(some_nD.dtype)
                weight_grad_PD = found_PD.to(weight_dtype) if weight_grad_PD is None else weight_grad_PD.add_(found_PD)
        return (
            torch.cat(hidden_grads) if of_hidden else None,
            None if weight_grad_PD is None else weight_grad_PD[: ctx.vocab],
            *(None,) * 4,
        )


def nll_(logits_nP: Tensor, labels_n: Tensor, vocab: int, keep: bool) -> Tensor:
    """-ln p(label), n, in fp32 or better; where `keep`, logits become p - 1(label), and 0 past the vocabulary."""
    if logits_nP.is_cuda and logits_nP.dtype != torch.float64 and (kernel := _kernel()):
        return kernel(logits_nP, labels_n, vocab, keep)
    few = max(1, _WIDENED[logits_nP.device.type] // vocab)
    found = []
    for some_nP, labels in zip(logits_nP.split(few), labels_n.split(few), strict=True):
        logp_nV = F.log_softmax(wide(some_nP[:, :vocab]), dim=-1)
        found.append(-logp_nV.gather(1, labels[:, None])[:, 0])
        if keep:
            p_nV = logp_nV.exp_()
            some_nP[:, :vocab] = p_nV.scatter_add_(1, labels[:, None], p_nV.new_full((len(labels), 1), -1.0))
            some_nP[:, vocab:] = 0.0
    return torch.cat(found)


@cache
def _kernel() -> Any:
    """The GPU's own way; None where Triton, which comes with torch for Linux, is not installed."""
    try:
        from ingot.model.kernels import nll_ as kernel
    except ImportError:
        return None
    return kernel
