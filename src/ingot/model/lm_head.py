"""The language-model head: hidden states to logits, and a fused, chunked negative log-likelihood of labels.

The gradient of -ln p(label) with respect to the logits is p - onehot(label). The forward pass overwrites the logits
with it, in the dtype of the matrix product; the backward pass is two matrix products, scaled by the incoming gradient.
If the logits of all positions exceed `MAX_LOGITS` elements, they are computed in chunks and recomputed in the backward
pass, so the B x T x V logits never exist at once.

Other losses with a gradient in closed form are computed alike (`LMHead.fused`).

A backend may override `prepare`, `nll_chunk`, `hidden_grad` and `weight_grad` with faster kernels, and offer one for
distillation (`distillation_chunk`).

Shapes: N positions, n positions of a chunk, D features, V vocabulary, P the padded vocabulary, K values of a position.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot.model.config import MAX_LOGITS, SOFTMAX_CHUNK
from ingot.model.precision import at_least_fp32, autocast_dtype

_MAX_LOGITS_NO_GRAD = 1 << 20
"""Elements of a chunk's logits on a CPU if no backward pass follows: 4 MiB in fp32, which fit a cache."""
_MIN_POSITIONS = 256
"""Positions of a chunk, at least: with fewer, reading the weight would take longer than multiplying it."""
_CUDA_MULTIPLE = 64
"""On a GPU the vocabulary is padded to a multiple of this: matrix products of odd sizes, such as GPT-2's 50,257, run at
a fraction of the rate."""


@dataclass(frozen=True)
class LMHead:
    """A linear map from hidden states ... x D to logits ... x V."""

    weight: Tensor
    """V x D."""

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, pad_to_multiple(self.weight))[..., : len(self.weight)]

    def nll(self, hidden_ND: Tensor, labels_N: Tensor, max_logits: int | None = None) -> Tensor:
        """-ln p(label) in nats of every position, N, at least fp32.

        Args:
            max_logits: elements of a chunk's logits; None: the device's default.
        """
        return self.fused(self.nll_chunk, hidden_ND, labels_N, max_logits=max_logits)

    def fused(self, chunk: Callable[..., Any], hidden_ND: Tensor, *aux_N: Tensor, max_logits: int | None) -> Tensor:
        """A loss of every position, N or N x K. Only the first of K values has a gradient, and only to hidden states
        and weight.

        Args:
            chunk: (x n x D, `prepare`d weight, auxiliary values n x ... each, needs_grad) to values, n or n x K, and
                with `needs_grad` the gradient of the first one by the logits, in the layout of `hidden_grad`.
            aux_N: auxiliary values of each position, N x ..., such as its label.
            max_logits: elements of a chunk's logits; None: the device's default.
        """
        dtype = autocast_dtype(hidden_ND.device) or torch.promote_types(hidden_ND.dtype, self.weight.dtype)
        needs_grad = torch.is_grad_enabled() and (hidden_ND.requires_grad or self.weight.requires_grad)
        size = chunk_size(len(self.weight), hidden_ND.device, max_logits, needs_grad)
        return _Fused.apply(self, chunk, hidden_ND, self.weight, dtype, size, needs_grad, *aux_N)  # type: ignore[no-any-return]

    def prepare(self, dtype: torch.dtype) -> Tensor:
        """The weight in the dtype of the matrix products, padded: P x D."""
        return pad_to_multiple(self.weight.detach().to(dtype))

    def nll_chunk(self, x_nD: Tensor, weight_PD: Tensor, labels_n: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor]:
        """-ln p(label), n, and with `needs_grad` its gradient p - onehot(label) by the logits, n x P."""
        logits_nP = x_nD @ weight_PD.T
        return nll_(logits_nP, labels_n, len(self.weight), needs_grad), logits_nP

    def distillation_chunk(self, teacher: Any, divergence: Any, alpha: float, vocab: int) -> Callable[..., Any] | None:
        """A faster `chunk` for `fused` than the one of `train/divergences.py`; None if there is none."""
        return None

    def hidden_grad(self, logit_grad_nP: Tensor, weight_PD: Tensor, grad_n: Tensor) -> Tensor:
        """The gradient of the hidden states, n x D.

        Args:
            grad_n: incoming gradient of each position's -ln p(label).
        """
        return (logit_grad_nP @ weight_PD) * grad_n[:, None]

    def weight_grad(self, logit_grad_nP: Tensor, scaled_nD: Tensor, total_VD: Tensor | None) -> Tensor:
        """The gradient of the weight, V x D, accumulated over chunks.

        Args:
            scaled_nD: hidden states times the incoming gradient of their position.
            total_VD: sum over the earlier chunks, updated in place; None for the first chunk.
        """
        grad_VD = (logit_grad_nP.T @ scaled_nD)[: len(self.weight)]
        return grad_VD.to(self.weight.dtype) if total_VD is None else total_VD.add_(grad_VD)


def chunk_size(vocab: int, device: torch.device, max_logits: int | None = None, needs_grad: bool = True) -> int:
    """Positions of a chunk.

    Args:
        max_logits: elements of a chunk's logits; None: the device's default.
        needs_grad: whether a backward pass follows. Without one nothing is recomputed, so chunks are small enough for a
            CPU's cache.
    """
    size = max(1, (max_logits or MAX_LOGITS[device.type]) // vocab)
    return size if needs_grad or device.type == "cuda" else min(size, max(_MIN_POSITIONS, _MAX_LOGITS_NO_GRAD // vocab))


def pad_to_multiple(weight_VD: Tensor) -> Tensor:
    """The weight, on a GPU padded with rows of zeros to a multiple of `_CUDA_MULTIPLE`."""
    padding = -len(weight_VD) % _CUDA_MULTIPLE if weight_VD.device.type == "cuda" else 0
    return F.pad(weight_VD, (0, 0, 0, padding)) if padding else weight_VD


def nll_(logits_nP: Tensor, labels_n: Tensor, vocab: int, needs_grad: bool) -> Tensor:
    """-ln p(label), n, at least fp32.

    With `needs_grad` the logits are overwritten with the gradient p - onehot(label), and 0 in the padding.
    """
    rows = max(1, SOFTMAX_CHUNK[logits_nP.device.type] // vocab)
    nlls = []
    for chunk_nP, labels in zip(logits_nP.split(rows), labels_n.split(rows), strict=True):
        logp_nV = F.log_softmax(at_least_fp32(chunk_nP[:, :vocab]), dim=-1)
        nlls.append(-logp_nV.gather(1, labels[:, None])[:, 0])
        if needs_grad:
            p_nV = logp_nV.exp_()
            chunk_nP[:, :vocab] = p_nV.scatter_add_(1, labels[:, None], p_nV.new_full((len(labels), 1), -1.0))
            chunk_nP[:, vocab:] = 0.0
    return torch.cat(nlls)


class _Fused(torch.autograd.Function):
    """`LMHead.fused`, `size` positions at a time."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        head: LMHead,
        chunk: Callable[..., Any],
        hidden_ND: Tensor,
        weight_VD: Tensor,
        dtype: torch.dtype,
        size: int,
        needs_grad: bool,
        *aux_N: Tensor,
    ) -> Tensor:
        x_ND, weight_PD = hidden_ND.to(dtype), head.prepare(dtype)
        one_chunk = needs_grad and len(x_ND) <= size  # its gradient is saved, not recomputed
        values, saved = [], []
        for x_nD, *aux_n in zip(*(x.split(size) for x in (x_ND, *aux_N)), strict=True):
            values_n, logit_grad_nP = chunk(x_nD, weight_PD, *aux_n, one_chunk)
            values.append(values_n)
            saved = [logit_grad_nP] if one_chunk else []
        if needs_grad:
            ctx.save_for_backward(x_ND, weight_PD, *aux_N, *saved)
            ctx.head, ctx.chunk, ctx.size, ctx.hidden_dtype, ctx.aux = head, chunk, size, hidden_ND.dtype, len(aux_N)
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_ND, weight_PD, *rest = ctx.saved_tensors
        aux_N, saved = rest[: ctx.aux], rest[ctx.aux :]
        _, _, needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        head: LMHead = ctx.head
        hidden_grads: list[Tensor] = []
        weight_grad_VD = None
        grad_N = grad_N if grad_N.dim() == 1 else grad_N[:, 0].contiguous()
        for x_nD, grad_n, *aux_n in zip(*(x.split(ctx.size) for x in (x_ND, grad_N, *aux_N)), strict=True):
            logit_grad_nP = saved[0] if saved else ctx.chunk(x_nD, weight_PD, *aux_n, True)[1]
            if needs_hidden:
                hidden_grads.append(head.hidden_grad(logit_grad_nP, weight_PD, grad_n).to(ctx.hidden_dtype))
            if needs_weight:
                scaled_nD = (x_nD * grad_n[:, None]).to(x_nD.dtype)
                weight_grad_VD = head.weight_grad(logit_grad_nP, scaled_nD, weight_grad_VD)
        hidden_grad_ND = None
        if needs_hidden:
            hidden_grad_ND = hidden_grads[0] if len(hidden_grads) == 1 else torch.cat(hidden_grads)
        return None, None, hidden_grad_ND, weight_grad_VD, *(None,) * (3 + ctx.aux)
