"""From logits to the next token: what the sampling settings mean, as pure functions of B x V.

Order, as in transformers: repetition penalty on the logits, temperature, top-k, top-p, min-p. Each truncation sees what
the ones before it left and always leaves the likeliest token. The order matters: top-p counts probability among the
tokens that top-k kept, at the temperature.

A token is drawn with one uniform number by the inverse of the cumulative distribution, and that number is a hash of
(seed, step, row, sample, position). So a draw depends on nothing but its own distribution and key, up to the rounding
of sums. Cumulative sums are in fp64, so that a uniform below 1 always falls on a token that has weight.

What reads whole rows is kept to sums and `topk`. For 32 rows of 50,257, on two cores of a Zen 3 where a model of 124M
takes 100 ms a token, sorting takes 75 ms (in fp64 130), adding up token by token 10, and as much to tell equal tokens
at the border of top-k apart by counting. So a nucleus is looked for among the likeliest first, a token in its block.

Log-probabilities that come with a token are the model's own at the temperature: neither the penalty nor a truncation
enters them, since they are what a later forward of the policy gives again.

Rejected: `torch.multinomial` with a generator (one stream for the whole batch), and the other packages' treatment of
ties, which depends on how a sort happens to order equal numbers: here the lower id goes first, everywhere.

Shapes: B rows, V vocabulary, k of its tokens, N candidates or other weights, n blocks of P tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.core.errors import UserError
from ingot.data.sampler import keys_of
from ingot.infer.ops import argmax
from ingot.model.precision import at_least_fp32

_SMALL = 2048
"""Vocabulary up to which neither of the two below is worth its calls."""
_SHORTLIST = 256
"""Likeliest tokens among which a nucleus is looked for first."""
_COLDEST = 1e-6
"""Temperature below which none is told from another: fp32 logits hold no finer difference, and their quotient ends."""
_BLOCK = 256
"""Tokens that are added up at once."""


@dataclass(frozen=True)
class Sampling:
    """How continuations are drawn. Every field's default leaves the model's distribution as it is."""

    max_new: int = 200
    """Longest continuation in tokens."""
    temperature: float = 1.0
    """Divides the logits: below 1 sharpens, above 1 flattens, 0 takes the likeliest token each time."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens that holds this much probability; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that prompt or continuation already hold less likely; 1 changes nothing."""
    stop: frozenset[int] = frozenset()
    """Ids that end a continuation; the id itself is kept."""
    vocab: int | None = None
    """Draw ids below this only: a model's table may be longer than its tokenizer's vocabulary. None: any id."""

    def __post_init__(self) -> None:
        if self.max_new < 1:
            raise UserError(f"max_new: found {self.max_new}, expected at least 1")
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature: found {self.temperature}, expected 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise UserError(f"top_k: found {self.top_k}, expected 0 (keeps every token) or a positive number")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: found {self.top_p}, expected more than 0 and at most 1 (1 keeps every token)")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p: found {self.min_p}, expected 0 (keeps every token) to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise UserError(
                f"repetition_penalty: found {self.repetition_penalty}, expected a positive number (1 changes nothing)"
            )


def draw(
    logits_BV: Tensor,
    sampling: Sampling,
    u_B: Tensor | None,
    seen_BV: Tensor | None = None,
    greedy: Callable[[Tensor, int], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """One token for each row, and its log-probability under the model at the temperature (1 if greedy).

    Args:
        u_B: one number in [0, 1) for each row; a greedy draw needs none.
        seen_BV: True at the ids that a row holds already; read where there is a repetition penalty.
        greedy: the operation that chooses greedily (`TorchOps.argmax`); None: computed here.

    Returns:
        ids [B] int64 and log-probabilities [B], at least fp32; NaN where the logits are not numbers.
    """
    if greedy is not None and sampling.temperature == 0 and sampling.repetition_penalty == 1:
        return greedy(logits_BV, min(sampling.vocab or logits_BV.shape[1], logits_BV.shape[1]))
    logits_BV = at_least_fp32(logits_BV)
    temperature = max(sampling.temperature, _COLDEST) if sampling.temperature else 1.0
    scaled_BV = logits_BV if temperature == 1 else logits_BV / temperature
    logp_BV = torch.log_softmax(scaled_BV, dim=-1)
    if sampling.repetition_penalty != 1:
        assert seen_BV is not None, "a repetition penalty needs to know the ids of each row"
        scaled_BV = penalise(logits_BV, seen_BV, sampling.repetition_penalty) / temperature
    scaled_BV = scaled_BV[:, : sampling.vocab]
    if sampling.temperature == 0:
        ids_B = argmax(scaled_BV)
    else:
        assert u_B is not None, "a draw that is not greedy needs a number for each row"
        ids_B = truncate(scaled_BV, sampling).pick(u_B)
    return ids_B, logp_BV.gather(1, ids_B[:, None]).squeeze(1)


@dataclass(frozen=True)
class Candidates:
    """Tokens that may be drawn: all of the vocabulary in its order, or some, the likeliest first."""

    logits_BN: Tensor
    """-inf where a token is excluded."""
    ids_BN: Tensor | None = None
    """None: all."""

    def pick(self, u_B: Tensor) -> Tensor:
        """As `pick` from the whole vocabulary, so candidates in its order."""
        if self.ids_BN is None:
            return pick(self.logits_BN, u_B)
        ids_BN, order_BN = self.ids_BN.sort(dim=-1)
        return ids_BN.gather(1, pick(self.logits_BN.gather(1, order_BN), u_B)[:, None]).squeeze(1)


def truncate(logits_BV: Tensor, sampling: Sampling) -> Candidates:
    """What top-k, then top-p, then min-p leave."""
    found = top_k(logits_BV, sampling.top_k) if sampling.top_k else Candidates(logits_BV)
    if sampling.top_p < 1:
        found = top_p(found, sampling.top_p)
    if sampling.min_p:
        found = min_p(found, sampling.min_p)
    return found


def penalise(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Logits of the seen ids divided by the penalty where positive, multiplied where negative.

    The rule of CTRL (Keskar et al. 2019, arXiv:1909.05858, 4.1) with the sign mended as in transformers: dividing a
    negative logit would make its token likelier.
    """
    lowered_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, lowered_BV, logits_BV)


def top_k(logits_BV: Tensor, k: int) -> Candidates:
    """Keep the k likeliest tokens (Fan et al. 2018, arXiv:1805.04833).

    Exactly k, or all if there are fewer: of equal ones at the border the lower ids stay, so k = 1 is greedy.
    transformers keeps every token that equals the k-th.
    """
    return Candidates(logits_BV) if k >= logits_BV.shape[-1] else _in_order(logits_BV, k)


def top_p(found: Candidates, p: float, shortlist: int = _SHORTLIST) -> Candidates:
    """Keep the fewest likeliest tokens that hold at least p of the probability.

    Nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751). A token stays if those before it hold less than p; of
    equal ones the lower id counts as the likelier.

    Args:
        shortlist: tokens to look among first, on a CPU; sorting all of them takes longest.
    """
    listed, size = found, found.logits_BN.shape[-1]
    if found.ids_BN is None:
        enough = size if found.logits_BN.is_cuda or size <= _SMALL else min(shortlist, size)
        listed = _in_order(found.logits_BN, enough)
    greatest_B1 = listed.logits_BN[:, :1]
    weight_BN = (listed.logits_BN.double() - greatest_B1).exp_()
    upto_BN = weight_BN.cumsum(dim=-1)
    if all_listed := weight_BN.shape[-1] == size:
        total_B1 = upto_BN[:, -1:]
    else:
        total_B1 = (found.logits_BN - greatest_B1).exp_().sum(dim=-1, keepdim=True).double()
    kept_BN = listed.logits_BN.masked_fill(upto_BN - weight_BN >= p * total_B1, -torch.inf)
    short_B = (upto_BN[:, -1:] < p * total_B1).squeeze(1)
    if all_listed or not short_B.any():
        return replace(listed, logits_BN=kept_BN)
    more = top_p(Candidates(found.logits_BN[short_B]), p, 16 * shortlist)
    return _replace_rows(Candidates(kept_BN, listed.ids_BN), short_B, more)


def min_p(found: Candidates, p: float) -> Candidates:
    """Keep tokens whose probability is at least p times the greatest one (Nguyen et al. 2024, arXiv:2407.01082).

    A ratio of probabilities is a difference of logits, so what was truncated before does not matter; equal ones stay
    or go together.
    """
    border_B1 = found.logits_BN.amax(dim=-1, keepdim=True) + math.log(p)
    return replace(found, logits_BN=found.logits_BN.masked_fill(found.logits_BN < border_B1, -torch.inf))


def _replace_rows(found: Candidates, rows_B: Tensor, others: Candidates) -> Candidates:
    """The candidates of these rows replaced by others, of which each row has more."""
    assert found.ids_BN is not None, "all of the vocabulary has no rows with more"
    assert others.ids_BN is not None, "nor is there a list with more than a whole vocabulary"
    width = max(found.ids_BN.shape[1], int((others.logits_BN > -torch.inf).sum(dim=-1).max()))
    wider = (0, width - found.ids_BN.shape[1])
    logits_BN, ids_BN = F.pad(found.logits_BN, wider, value=-torch.inf), F.pad(found.ids_BN, wider)
    logits_BN[rows_B], ids_BN[rows_B] = others.logits_BN[:, :width], others.ids_BN[:, :width]
    return Candidates(logits_BN, ids_BN)


def _in_order(logits_BV: Tensor, k: int) -> Candidates:
    """The k likeliest tokens, of equal ones the lower id first."""
    vocab = logits_BV.shape[-1]
    if k == vocab:
        return Candidates(*logits_BV.sort(dim=-1, descending=True, stable=True))
    values_Bk, ids_Bk = logits_BV.topk(k, dim=-1)
    border_B1 = values_Bk[:, -1:]  # of the tokens that equal it `topk` takes any
    ids_V = torch.arange(vocab, dtype=torch.int32, device=logits_BV.device)
    at_BV = torch.where(logits_BV == border_B1, ids_V, vocab - 1)
    at_Bk = at_BV.topk(k, dim=-1, largest=False).values.long()
    above_B1 = (values_Bk > border_B1).sum(dim=-1, keepdim=True)
    place_Bk = torch.arange(k, device=logits_BV.device) - above_B1
    ids_Bk = torch.where(place_Bk < 0, ids_Bk, at_Bk.gather(1, place_Bk.clamp(min=0))).sort(dim=-1).values
    values_Bk, order_Bk = logits_BV.gather(1, ids_Bk).sort(dim=-1, descending=True, stable=True)
    return Candidates(values_Bk, ids_Bk.gather(1, order_Bk))


def pick(logits_BV: Tensor, u_B: Tensor) -> Tensor:
    """The first token at which the cumulative distribution exceeds u, ids [B] int64."""
    weight_BV, vocab = torch.softmax(logits_BV, dim=-1), logits_BV.shape[-1]
    u_B1 = u_B.to(weight_BV.device, torch.double)[:, None]
    if vocab <= _SMALL:
        return _drawn(weight_BV.double(), u_B1)[0].squeeze(1)
    end = vocab - vocab % _BLOCK
    blocks_BnP, rest_BP = weight_BV[:, :end].unflatten(1, (-1, _BLOCK)), weight_BV[:, None, end:]
    sums_Bn = torch.cat((blocks_BnP.sum(dim=-1), rest_BP.sum(dim=-1)), dim=1)
    block_B1, u_B1 = _drawn(sums_Bn.double(), u_B1)
    ids_BP = block_B1 * _BLOCK + torch.arange(_BLOCK, device=weight_BV.device)
    weight_BP = weight_BV.gather(1, ids_BP.clamp(max=vocab - 1)).masked_fill_(ids_BP >= vocab, 0)
    return ids_BP.gather(1, _drawn(weight_BP.double(), u_B1)[0]).squeeze(1).clamp_(max=vocab - 1)


def _drawn(weight_BN: Tensor, u_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulative weight first exceeds u, and how far into that weight u fell: uniform again; both B x 1."""
    upto_BN = weight_BN.cumsum(dim=-1)
    aim_B1 = u_B1 * upto_BN[:, -1:]
    place_B1 = torch.searchsorted(upto_BN, aim_B1, right=True)
    place_B1.clamp_(max=weight_BN.shape[-1] - 1)  # NaN sorts last; its log-probability tells
    here_B1 = weight_BN.gather(1, place_B1)
    rest_B1 = (aim_B1 - (upto_BN.gather(1, place_B1) - here_B1)) / here_B1
    return place_B1, rest_B1.clamp_(0, 1 - 2**-52)


def uniforms(seed: int, step: int, keys_B2: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (row, sample) and position: 52 bits of a hash of all five."""
    rows_B, samples_B = keys_B2.T
    hashed_B = keys_of(seed, step, rows_B, samples_B, positions_B)
    return (hashed_B >> np.uint64(12)).astype(np.float64) * 2.0**-52
