"""What objectives do with hidden states and a head: log-probabilities and cross-entropy, a chunk at a time.

Logits are the largest tensor of training (64 rows x 1,024 x 50,257 in fp32 are 13 GB), and only one number per position
is kept of them. So positions without a label are dropped first (they then contribute exactly nothing, to the loss or to
a gradient), the rest is cut into chunks of at most `MAX_LOGITS` elements, and where there is more than one chunk its
logits are computed again in the backward pass instead of kept. One chunk costs nothing extra.

What the loss of language models keeps of a chunk are its logits as the head gave them, in 16 bits under autocast. Both
passes work through them a few rows at a time, so that the wider copies which a softmax needs never leave a core's cache
(1,024 x 50,257 logits in bf16, one core, forward and backward: 132 ms; `F.cross_entropy` of an fp32 copy: 507).

Rejected: computing gradients in the forward pass (saves the recomputation, but asks of every loss that it be a fixed
multiple of these numbers), and masking instead of dropping (prompts and padding would pay for the head).

Shapes: B rows, T positions, N labelled positions, D features, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ingot.model.settings import MAX_LOGITS

IGNORE = -100
_UNKEPT = 1 << 20
"""Elements of logits held at once where none are kept for a backward pass: 4 MiB in fp32, which stay in a cache."""
_WIDENED = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Elements of logits that are widened at once: what a core's cache holds; what fills a GPU."""
_FEWEST = 256
"""Positions below which a matrix product of a large vocabulary would mostly wait for its weights."""
_SIZES = 16
"""In how many sizes labelled positions come."""

Head = Callable[[Tensor], Tensor]


def cross_entropy(
    hidden_BTD: Tensor, head: Head, labels_BT: Tensor, ignore: int = IGNORE, max_logits: int = MAX_LOGITS
) -> tuple[Tensor, Tensor]:
    """Sum over labelled positions of -ln p(label), in nats, and their number: never a mean, the engine divides.

    Args:
        hidden_BTD: hidden states, already aligned with the labels (the shift happens in `data`).
        head: ... x D to ... x V.
        labels_BT: ids, `ignore` where there is nothing to predict.

    Returns:
        The sum, fp32 (fp64 for an fp64 model; 0 with zero gradients where all is ignored), and the count, int64.
    """
    logp_BT = token_logps(hidden_BTD, head, labels_BT, ignore=ignore, max_logits=max_logits)
    return -logp_BT.sum(), (labels_BT != ignore).sum()


def cross_entropy_parts(
    hidden_BTD: Tensor, head: Head, labels_BT: Tensor, ignore: int = IGNORE, max_logits: int = MAX_LOGITS
) -> tuple[Tensor, Tensor, Tensor]:
    """What regularised losses are made of, summed over labelled positions, from one pass over the logits.

    Returns:
        -ln p(label), equal to `cross_entropy`'s; the mean over the vocabulary of -ln p, which label smoothing mixes in
        (Szegedy et al. 2016, arXiv:1512.00567, section 7); and ln(Z)^2, Z the sum of exp(logits), whose penalty keeps
        logits from drifting (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 5).
    """

    def parts(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
        logits_nV = _wide(logits_nV)
        z_n = logits_nV.logsumexp(-1)
        return torch.stack([_nll(logits_nV, labels_n), z_n - logits_nV.mean(-1), z_n.square()], dim=-1)

    nll, uniform, z_squared = _where_labelled(parts, hidden_BTD, head, labels_BT, labels_BT, ignore, max_logits)
    return nll.sum(), uniform.sum(), z_squared.sum()


def token_logps(
    hidden_BTD: Tensor,
    head: Head,
    labels_BT: Tensor,
    *,
    temperature: float = 1.0,
    ignore: int = IGNORE,
    max_logits: int = MAX_LOGITS,
) -> Tensor:
    """ln p(label) at every position, B x T, 0 where the label is `ignore`; the softmax is in fp32 or better."""

    def logps(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
        return -_nll(_wide(logits_nV) / temperature if temperature != 1.0 else logits_nV, labels_n)[:, None]

    return _where_labelled(logps, hidden_BTD, head, labels_BT, labels_BT, ignore, max_logits)[0]


def divergences(
    hidden_BTD: Tensor,
    head: Head,
    reference_BTD: Tensor,
    reference_head: Head,
    labels_BT: Tensor,
    *,
    ignore: int = IGNORE,
    max_logits: int = MAX_LOGITS,
) -> Tensor:
    """KL(reference || model) of the next token at every labelled position, B x T in nats, 0 elsewhere.

    The whole vocabulary is summed, so it is exact, never negative, and smooth where the two agree; no gradient reaches
    the reference (hidden states ... x D', any width, of the same rows).
    """

    def divergence(logits_nV: Tensor, reference_nD: Tensor) -> Tensor:
        with torch.no_grad():
            expected_nV = _wide(reference_head(reference_nD)).log_softmax(-1)
        kl_nV = F.kl_div(_wide(logits_nV).log_softmax(-1), expected_nV, reduction="none", log_target=True)
        return kl_nV.sum(-1, keepdim=True)

    return _where_labelled(divergence, hidden_BTD, head, reference_BTD, labels_BT, ignore, max_logits)[0]


def token_logps_and_entropies(
    hidden_BTD: Tensor,
    head: Head,
    labels_BT: Tensor,
    *,
    temperature: float = 1.0,
    ignore: int = IGNORE,
    max_logits: int = MAX_LOGITS,
) -> tuple[Tensor, Tensor]:
    """`token_logps`, and the entropy in nats of the distribution that each label is drawn from, both B x T."""

    def measured(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
        logp_nV = F.log_softmax(_wide(logits_nV) / temperature, dim=-1)
        chosen_n1 = logp_nV.gather(1, labels_n[:, None])
        return torch.cat((chosen_n1, -(logp_nV.exp() * logp_nV).sum(1, keepdim=True)), dim=1)

    logp_BT, entropy_BT = _where_labelled(measured, hidden_BTD, head, labels_BT, labels_BT, ignore, max_logits)
    return logp_BT, entropy_BT


def random_scores(hidden_ND: Tensor, head: Head, key: int, max_logits: int = MAX_LOGITS) -> Tensor:
    """N numbers whose gradients in the logits are random, of mean zero and covariance diag(p) - p p'.

    That is the covariance of d ln p(y) for y drawn from p, so their squared gradients have the Fisher information for
    a mean; but every token has a part in each: s = sqrt(p) z - p (sqrt(p) . z) with random signs z, since with
    S = diag(sqrt p) (I - sqrt(p) sqrt(p)') diag(p) - p p' is S S'. The signs follow from `key`.
    """

    def scores(logits_nV: Tensor, place_n: Tensor) -> Tensor:
        logits_nV = _wide(logits_nV)
        with torch.no_grad():
            first = int(place_n[0]) if len(place_n) else 0
            generator = torch.Generator(logits_nV.device).manual_seed((key + first) % 2**63)
            signs_nV = torch.randint(2, logits_nV.shape, generator=generator, device=logits_nV.device) * 2 - 1
            p_nV = logits_nV.softmax(-1)
            root_nV = p_nV.sqrt() * signs_nV
            s_nV = root_nV - p_nV * root_nV.sum(-1, keepdim=True)
        return (logits_nV * s_nV).sum(-1)

    return _chunked(hidden_ND, head, torch.arange(len(hidden_ND), device=hidden_ND.device), scores, max_logits)


def _where_labelled(
    measure: Callable[[Tensor, Tensor], Tensor],
    hidden_BTD: Tensor,
    head: Head,
    beside_BT: Tensor,
    labels_BT: Tensor,
    ignore: int,
    max_logits: int,
) -> tuple[Tensor, ...]:
    """`measure` (see `_chunked`; it gives n x K numbers) at positions with a label, K tensors B x T, 0 elsewhere.

    Their number differs from batch to batch, and blocks of memory of ever-different sizes fill a heap with holes that
    the next one just misses. So positions are rounded up to a whole sixteenth of all, by measuring the last one again
    (peak of a fine-tuning run of 3M parameters: 1.15 GB, without it 1.25).
    """
    M = labels_BT.numel()
    hidden_MD, beside_M = hidden_BTD.reshape(M, -1), beside_BT.reshape(M, *beside_BT.shape[2:])
    index_N = (labels_BT.reshape(M) != ignore).nonzero().squeeze(1)
    N = len(index_N)
    if N == M:
        return _chunked(hidden_MD, head, beside_M, measure, max_logits).view(*labels_BT.shape, -1).unbind(-1)
    step = -(-M // _SIZES)
    some_P = torch.cat((index_N, index_N[-1:].expand(-N % step))) if N else index_N
    found_NK = _chunked(hidden_MD[some_P], head, beside_M[some_P], measure, max_logits)[:N]
    found_MK = found_NK.new_zeros(M, found_NK.shape[1]).index_put((index_N,), found_NK)
    return found_MK.view(*labels_BT.shape, -1).unbind(-1)


def _wide(x: Tensor) -> Tensor:
    """In fp32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _nll(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
    """-ln p(label), n, in fp32 or better."""
    return _NLL.apply(logits_nV, labels_n)  # type: ignore[no-any-return]


class _NLL(torch.autograd.Function):
    """Cross-entropy that keeps nothing but the logits; its gradient is p - 1(label), in the logits' own precision."""

    @staticmethod
    def forward(ctx: Any, logits_nV: Tensor, labels_n: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(logits_nV, labels_n)
        few = _few(logits_nV)
        parts = zip(logits_nV.split(few), labels_n.split(few), strict=True)
        return torch.cat([F.cross_entropy(_wide(some), labels, reduction="none") for some, labels in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nll_grad_n: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_nV, labels_n = ctx.saved_tensors
        found_nV, few = torch.empty_like(logits_nV), _few(logits_nV)
        rows = (x.split(few) for x in (logits_nV, labels_n[:, None], nll_grad_n[:, None], found_nV))
        for some, labels_n1, grad_n1, into in zip(*rows, strict=True):
            p_nV = torch.softmax(some, dim=-1, dtype=nll_grad_n.dtype)
            into.copy_(p_nV.mul_(grad_n1).scatter_add_(1, labels_n1, -grad_n1))
        return found_nV, None


def _few(logits_nV: Tensor) -> int:
    """Rows that are widened at once."""
    return max(1, _WIDENED.get(logits_nV.device.type, MAX_LOGITS) // logits_nV.shape[1])


def _chunked(
    hidden_ND: Tensor, head: Head, beside_N: Tensor, measure: Callable[[Tensor, Tensor], Tensor], max_logits: int
) -> Tensor:
    """`measure` at all positions, in chunks.

    Args:
        hidden_ND: hidden states.
        head: ... x D to ... x V.
        beside_N: what else is known of each position, N (x any): its label, or a reference's hidden state.
        measure: (logits n x V as the head gives them, n of `beside_N`) to n or n x K numbers.
        max_logits: elements of a chunk's logits.
    """

    def measured(hidden_nD: Tensor, beside_n: Tensor) -> Tensor:
        return measure(head(hidden_nD), beside_n)

    with torch.no_grad():
        vocab = head(hidden_ND[:0]).shape[-1]
    size = max(1, max_logits // vocab)
    if not torch.is_grad_enabled():  # nothing is kept and nothing computed twice, so small chunks are free
        size = min(size, max(_FEWEST, _UNKEPT // vocab))
    if len(beside_N) <= size:
        return measured(hidden_ND, beside_N)
    parts = []
    for h_nD, b_n in zip(hidden_ND.split(size), beside_N.split(size), strict=True):
        if torch.is_grad_enabled():
            # The head draws no random numbers, so none need to be replayed.
            parts.append(checkpoint(measured, h_nD, b_n, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(measured(h_nD, b_n))
    return torch.cat(parts)
