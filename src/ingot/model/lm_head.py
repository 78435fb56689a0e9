"""The language-model head: hidden states to logits, and the negative log-likelihood of labels in chunks.

A loss that depends on -ln p(label) alone needs one thing of a position's logits: p - 1(label), their gradient. The
forward pass turns logits into it in place, in the dtype of the product, and the backward pass is two matrix products
scaled by the incoming gradient. Where logits exceed a budget (`MAX_LOGITS`) they are computed a chunk at a time, and
again in the backward pass, so logits of B x T x V never exist at once.

A backend may override `prepare`, `nll_chunk`, `hidden_grad` and `weight_grad` with faster kernels of the same function.

Shapes: N positions, n positions of a chunk, D features, V vocabulary, P the vocabulary padded.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot.model.config import MAX_LOGITS
from ingot.model.precision import at_least_fp32, autocast_dtype

_WITHOUT_GRAD = 1 << 20
"""Elements of logits held at once where no backward pass follows: 4 MiB in fp32, which stay in a cache."""
_SOFTMAX_AT_ONCE = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Elements of logits that a softmax in fp32 handles at once: what a core's cache holds, what fills a GPU."""
_MIN_POSITIONS = 256
"""Positions below which a product with a large vocabulary would mostly wait for its weights."""
_CUDA_MULTIPLE = 64
"""Rows of the matrix are padded to a multiple of this on a GPU, which multiplies GPT-2's 50,257 rows at a sixth of its
rate otherwise."""


@dataclass(frozen=True)
class LMHead:
    """Hidden states ... x D to logits ... x V."""

    weight: Tensor
    """V x D."""

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, pad_to_multiple(self.weight))[..., : len(self.weight)]

    def nll(self, hidden_ND: Tensor, labels_N: Tensor, max_logits: int | None = None) -> Tensor:
        """-ln p(label) of every position, N, in fp32 or better.

        Args:
            max_logits: elements of logits held at once; None: the device's default.
        """
        dtype = autocast_dtype(hidden_ND.device) or torch.promote_types(hidden_ND.dtype, self.weight.dtype)
        needs_grad = torch.is_grad_enabled() and (hidden_ND.requires_grad or self.weight.requires_grad)
        size = chunk_size(len(self.weight), hidden_ND.device, max_logits, needs_grad)
        return _NLL.apply(self, hidden_ND, self.weight, labels_N, dtype, size, needs_grad)  # type: ignore[no-any-return]

    def prepare(self, dtype: torch.dtype) -> Tensor:
        """The matrix as it is multiplied, P x D."""
        return pad_to_multiple(self.weight.detach().to(dtype))

    def nll_chunk(self, x_nD: Tensor, matrix_PD: Tensor, labels_n: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
        """-ln p(label), n, and where `keep` the excess p - 1(label), n x P, for the backward pass."""
        logits_nP = x_nD @ matrix_PD.T
        return nll_(logits_nP, labels_n, len(self.weight), keep), logits_nP

    def hidden_grad(self, excess_nP: Tensor, matrix_PD: Tensor, grad_n: Tensor) -> Tensor:
        """The gradient of the hidden states, n x D."""
        return (excess_nP @ matrix_PD) * grad_n[:, None]

    def weight_grad(self, excess_nP: Tensor, scaled_nD: Tensor, total_VD: Tensor | None) -> Tensor:
        """The gradient of the matrix, V x D, added to that of earlier chunks.

        Args:
            scaled_nD: hidden states times their incoming gradient.
        """
        grad_VD = (excess_nP.T @ scaled_nD)[: len(self.weight)]
        return grad_VD.to(self.weight.dtype) if total_VD is None else total_VD.add_(grad_VD)


def chunk_size(vocab: int, device: torch.device, max_logits: int | None = None, needs_grad: bool = True) -> int:
    """Positions whose logits are held at once.

    Args:
        max_logits: elements of logits; None: the device's default.
        needs_grad: whether a backward pass follows; without one small chunks cost nothing, so they are taken.
    """
    size = max(1, (max_logits or MAX_LOGITS[device.type]) // vocab)
    return size if needs_grad or device.type == "cuda" else min(size, max(_MIN_POSITIONS, _WITHOUT_GRAD // vocab))


def pad_to_multiple(weight_VD: Tensor) -> Tensor:
    """The matrix with rows of zeros up to a multiple that a GPU multiplies fast; on a CPU as it is."""
    missing = -len(weight_VD) % _CUDA_MULTIPLE if weight_VD.device.type == "cuda" else 0
    return F.pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD


def nll_(logits_nP: Tensor, labels_n: Tensor, vocab: int, keep: bool) -> Tensor:
    """-ln p(label), n, in fp32 or better. Where `keep`, logits become p - 1(label) in place, and 0 in the padding."""
    at_once = max(1, _SOFTMAX_AT_ONCE[logits_nP.device.type] // vocab)
    nlls = []
    for part_nP, labels in zip(logits_nP.split(at_once), labels_n.split(at_once), strict=True):
        logp_nV = F.log_softmax(at_least_fp32(part_nP[:, :vocab]), dim=-1)
        nlls.append(-logp_nV.gather(1, labels[:, None])[:, 0])
        if keep:
            p_nV = logp_nV.exp_()
            part_nP[:, :vocab] = p_nV.scatter_add_(1, labels[:, None], p_nV.new_full((len(labels), 1), -1.0))
            part_nP[:, vocab:] = 0.0
    return torch.cat(nlls)


class _NLL(torch.autograd.Function):
    """`LMHead.nll`, `size` positions at a time."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        head: LMHead,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        dtype: torch.dtype,
        size: int,
        needs_grad: bool,
    ) -> Tensor:
        x_ND, matrix_PD = hidden_ND.to(dtype), head.prepare(dtype)
        one_chunk = needs_grad and len(labels_N) <= size
        nlls, saved = [], []
        for x_nD, labels_n in zip(x_ND.split(size), labels_N.split(size), strict=True):
            nll_n, excess_nP = head.nll_chunk(x_nD, matrix_PD, labels_n, one_chunk)
            nlls.append(nll_n)
            saved = [excess_nP] if one_chunk else []
        if needs_grad:
            ctx.save_for_backward(x_ND, matrix_PD, labels_N, *saved)
            ctx.head, ctx.size, ctx.hidden_dtype = head, size, hidden_ND.dtype
        return torch.cat(nlls)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nll_grad_N: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_ND, matrix_PD, labels_N, *saved = ctx.saved_tensors
        _, wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        head: LMHead = ctx.head
        hidden_grads: list[Tensor] = []
        weight_grad_VD = None
        chunks = (x.split(ctx.size) for x in (x_ND, labels_N, nll_grad_N))
        for x_nD, labels_n, grad_n in zip(*chunks, strict=True):
            excess_nP = saved[0] if saved else head.nll_chunk(x_nD, matrix_PD, labels_n, True)[1]
            if wants_hidden:
                hidden_grads.append(head.hidden_grad(excess_nP, matrix_PD, grad_n).to(ctx.hidden_dtype))
            if wants_weight:
                scaled_nD = (x_nD * grad_n[:, None]).to(x_nD.dtype)
                weight_grad_VD = head.weight_grad(excess_nP, scaled_nD, weight_grad_VD)
        hidden_grad_ND = None
        if wants_hidden:
            hidden_grad_ND = hidden_grads[0] if len(hidden_grads) == 1 else torch.cat(hidden_grads)
        return None, hidden_grad_ND, weight_grad_VD, *(None,) * 4
