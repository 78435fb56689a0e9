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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot.kernels.matmul import product
from ingot.kernels.operators import TRITON
from ingot.kernels.precision import autocast_dtype
from ingot.model.config import MAX_LOGITS

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

    def nll(self, hidden_ND: Tensor, labels_N: Tensor, max_logits: int | None = None) -> Tensor:
        """-ln p(label) of every position, N, in fp32 or better."""
        dtype = autocast_dtype(hidden_ND.device) or torch.promote_types(hidden_ND.dtype, self.weight.dtype)
        kept = torch.is_grad_enabled() and (hidden_ND.requires_grad or self.weight.requires_grad)
        size = chunk(len(self.weight), hidden_ND.device, max_logits, kept)
        return _NLL.apply(self, hidden_ND, self.weight, labels_N, dtype, size, kept)  # type: ignore[no-any-return]

    # What `nll` is made of, some positions at a time. How a matrix and an excess lie is the head's own business.

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The matrix as it is multiplied with, P x D."""
        return filled_up(self.weight.detach().to(dtype))

    def costs(self, x_nD: Tensor, matrix: Tensor, labels_n: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
        """-ln p(label), n, and where it is to be kept the excess, p - 1(label); else what is left of the logits."""
        logits_nP = product(x_nD, matrix.T)
        return nll_(logits_nP, labels_n, len(self.weight), keep), logits_nP

    def hidden_gradient(self, excess: Tensor, matrix: Tensor, grad_n: Tensor) -> Tensor:
        """Of the rows, n x D."""
        return product(excess, matrix) * grad_n[:, None]

    def weight_gradient(self, excess: Tensor, scaled_nD: Tensor, others_VD: Tensor | None) -> Tensor:
        """Of the matrix, V x D: from rows times their gradients, added to that of other positions."""
        found_VD = (excess.T @ scaled_nD)[: len(self.weight)]
        return found_VD.to(self.weight.dtype) if others_VD is None else others_VD.add_(found_VD)


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


class _NLL(torch.autograd.Function):
    """A head's `nll`, `size` positions at a time."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        head: Head,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        dtype: torch.dtype,
        size: int,
        kept: bool,
    ) -> Tensor:
        rounded_ND, matrix = hidden_ND.to(dtype), head.matrix(dtype)
        at_once = kept and len(labels_N) <= size
        found, saved = [], []
        for some_nD, labels_n in zip(rounded_ND.split(size), labels_N.split(size), strict=True):
            nll_n, excess = head.costs(some_nD, matrix, labels_n, at_once)
            found.append(nll_n)
            saved = [excess] if at_once else []
        if kept:
            ctx.save_for_backward(rounded_ND, matrix, labels_N, *saved)
            ctx.head, ctx.size, ctx.hidden_dtype = head, size, hidden_ND.dtype
        return torch.cat(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nll_grad_N: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rounded_ND, matrix, labels_N, *saved = ctx.saved_tensors
        _, of_hidden, of_weight, *_ = ctx.needs_input_grad
        head: Head = ctx.head
        hidden_grads: list[Tensor] = []
        weight_grad_VD = None
        chunks = (x.split(ctx.size) for x in (rounded_ND, labels_N, nll_grad_N))
        for some_nD, labels_n, grad_n in zip(*chunks, strict=True):
            excess = saved[0] if saved else head.costs(some_nD, matrix, labels_n, True)[1]
            if of_hidden:
                hidden_grads.append(head.hidden_gradient(excess, matrix, grad_n).to(ctx.hidden_dtype))
            if of_weight:
                scaled_nD = (some_nD * grad_n[:, None]).to(some_nD.dtype)
                weight_grad_VD = head.weight_gradient(excess, scaled_nD, weight_grad_VD)
        hidden_grad_ND = hidden_grads[0] if len(hidden_grads) == 1 else torch.cat(hidden_grads) if of_hidden else None
        return None, hidden_grad_ND, weight_grad_VD, *(None,) * 4


def nll_(logits_nP: Tensor, labels_n: Tensor, vocab: int, keep: bool) -> Tensor:
    """-ln p(label), n, in fp32 or better; where `keep`, logits become p - 1(label), and 0 past the vocabulary."""
    if logits_nP.is_cuda and logits_nP.dtype != torch.float64 and TRITON:
        from ingot.kernels.triton import nll_ as kernel

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
