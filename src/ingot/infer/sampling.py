"""Sampling: from logits B x V to the next tokens, as pure functions.

The order is that of transformers: repetition penalty on the logits, temperature, top-k, top-p, min-p. Each truncation
applies to the tokens that the previous ones kept, at the temperature, and always keeps the most likely token.

A token is drawn by inverting the cumulative distribution at a uniform number, which is a hash of (seed, step, row,
sample, position). So a draw depends only on its distribution and its key, up to the rounding of sums;
`torch.multinomial` would draw the batch from one generator. Cumulative sums are in fp64, so that a uniform number below
1 always selects a token of positive probability.

Of equally likely tokens the lower id comes first, where other packages depend on the order of their sort.

Sorting a large vocabulary takes almost as long as a small model's forward pass. So full rows are only read by sums and
`topk`: top-p searches among the most likely tokens first, and a draw finds its block of tokens first.

The log-probability of a token is the model's at the temperature, without penalty and truncation, because a later
forward pass of the policy gives the same number.

Shapes: B rows, V vocabulary, k tokens of it, N candidates, n blocks of P tokens.
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

_SMALL_VOCAB = 2048
"""Up to this vocabulary a shortlist and blocks are not faster."""
_SHORTLIST = 256
"""Number of most likely tokens among which top-p searches first."""
_MIN_TEMPERATURE = 1e-6
"""Lower temperatures are raised to this: they give the same tokens, and dividing by them may overflow in fp32."""
_BLOCK = 256
"""Tokens of a block when drawing."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. The defaults sample from the model's distribution."""

    max_new: int = 200
    """Largest number of new tokens."""
    temperature: float = 1.0
    """Divides the logits: below 1 sharpens, above 1 flattens, 0 is greedy."""
    top_k: int = 0
    """Keep this number of most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the largest probability; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of the prompt and the continuation less likely; 1 changes nothing."""
    stop: frozenset[int] = frozenset()
    """Ids that end a continuation, which includes the id."""
    vocab: int | None = None
    """Draw only ids below this: a model's embedding may be larger than its tokenizer's vocabulary. None: any id."""

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
    """Draw a token for each row, with its log-probability under the model at the temperature (1 if greedy).

    Args:
        u_B: a uniform number in [0, 1) for each row; not needed at temperature 0.
        seen_BV: True at the ids that a row contains; needed for a repetition penalty.
        greedy: implementation of greedy decoding (`TorchOps.argmax`); None: PyTorch.

    Returns:
        ids [B] int64 and log-probabilities [B], at least fp32; NaN if the logits are NaN.
    """
    if greedy is not None and sampling.temperature == 0 and sampling.repetition_penalty == 1:
        return greedy(logits_BV, min(sampling.vocab or logits_BV.shape[1], logits_BV.shape[1]))
    logits_BV = at_least_fp32(logits_BV)
    temperature = max(sampling.temperature, _MIN_TEMPERATURE) if sampling.temperature else 1.0
    scaled_BV = logits_BV if temperature == 1 else logits_BV / temperature
    logp_BV = torch.log_softmax(scaled_BV, dim=-1)
    if sampling.repetition_penalty != 1:
        assert seen_BV is not None, "a repetition penalty needs seen_BV"
        scaled_BV = penalise(logits_BV, seen_BV, sampling.repetition_penalty) / temperature
    scaled_BV = scaled_BV[:, : sampling.vocab]
    if sampling.temperature == 0:
        ids_B = argmax(scaled_BV)
    else:
        assert u_B is not None, "sampling at a temperature needs u_B"
        ids_B = truncate(scaled_BV, sampling).sample(u_B)
    return ids_B, logp_BV.gather(1, ids_B[:, None]).squeeze(1)


@dataclass(frozen=True)
class Candidates:
    """Tokens that may be drawn: the full vocabulary by id, or some tokens, the most likely first."""

    logits_BN: Tensor
    """-inf at excluded tokens."""
    ids_BN: Tensor | None = None
    """None: the full vocabulary."""

    def sample(self, u_B: Tensor) -> Tensor:
        """Draw an id per row, [B]; equal to `inverse_cdf_sample` over the full vocabulary with the others excluded."""
        if self.ids_BN is None:
            return inverse_cdf_sample(self.logits_BN, u_B)
        ids_BN, order_BN = self.ids_BN.sort(dim=-1)
        return ids_BN.gather(1, inverse_cdf_sample(self.logits_BN.gather(1, order_BN), u_B)[:, None]).squeeze(1)


def truncate(logits_BV: Tensor, sampling: Sampling) -> Candidates:
    """The candidates after top-k, top-p and min-p, in this order."""
    candidates = top_k(logits_BV, sampling.top_k) if sampling.top_k else Candidates(logits_BV)
    if sampling.top_p < 1:
        candidates = top_p(candidates, sampling.top_p)
    if sampling.min_p:
        candidates = min_p(candidates, sampling.min_p)
    return candidates


def penalise(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Logits of the seen ids divided by the penalty where positive, multiplied where negative.

    The rule of CTRL (Keskar et al. 2019, arXiv:1909.05858, section 4.1) with the sign corrected as in transformers:
    dividing a negative logit would make its token more likely.
    """
    lowered_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, lowered_BV, logits_BV)


def top_k(logits_BV: Tensor, k: int) -> Candidates:
    """Keep the k most likely tokens (Fan et al. 2018, arXiv:1805.04833).

    Exactly k, or all if there are fewer. Of tokens that equal the k-th the lower ids stay, so k = 1 is greedy;
    transformers keeps all of them.
    """
    return Candidates(logits_BV) if k >= logits_BV.shape[-1] else _sorted_top_k(logits_BV, k)


def top_p(candidates: Candidates, p: float, shortlist: int = _SHORTLIST) -> Candidates:
    """Keep the fewest most likely tokens with a probability of at least p together.

    Nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751). A token stays if the tokens before it have less than p
    together; of equal tokens the lower id comes first.

    Args:
        shortlist: number of tokens to sort first, on a CPU; rows whose nucleus is larger try 16 times as many.
    """
    listed, size = candidates, candidates.logits_BN.shape[-1]
    if candidates.ids_BN is None:
        k = size if candidates.logits_BN.is_cuda or size <= _SMALL_VOCAB else min(shortlist, size)
        listed = _sorted_top_k(candidates.logits_BN, k)
    largest_B1 = listed.logits_BN[:, :1]
    weight_BN = (listed.logits_BN.double() - largest_B1).exp_()
    cumulative_BN = weight_BN.cumsum(dim=-1)
    if all_listed := weight_BN.shape[-1] == size:
        total_B1 = cumulative_BN[:, -1:]
    else:
        total_B1 = (candidates.logits_BN - largest_B1).exp_().sum(dim=-1, keepdim=True).double()
    logits_BN = listed.logits_BN.masked_fill(cumulative_BN - weight_BN >= p * total_B1, -torch.inf)
    incomplete_B = (cumulative_BN[:, -1:] < p * total_B1).squeeze(1)
    if all_listed or not incomplete_B.any():
        return replace(listed, logits_BN=logits_BN)
    longer = top_p(Candidates(candidates.logits_BN[incomplete_B]), p, 16 * shortlist)
    return _replace_rows(Candidates(logits_BN, listed.ids_BN), incomplete_B, longer)


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Keep tokens with at least p times the largest probability (Nguyen et al. 2024, arXiv:2407.01082).

    A ratio of probabilities is a difference of logits, so earlier truncations do not matter.
    """
    logits_BN = candidates.logits_BN
    threshold_B1 = logits_BN.amax(dim=-1, keepdim=True) + math.log(p)
    return replace(candidates, logits_BN=logits_BN.masked_fill(logits_BN < threshold_B1, -torch.inf))


def _replace_rows(candidates: Candidates, rows_B: Tensor, longer: Candidates) -> Candidates:
    """Replace the candidates of some rows by longer lists; the lists of the other rows are padded."""
    assert candidates.ids_BN is not None, "expected a list of candidates, found the full vocabulary"
    assert longer.ids_BN is not None, "expected a list of candidates, found the full vocabulary"
    width = max(candidates.ids_BN.shape[1], int((longer.logits_BN > -torch.inf).sum(dim=-1).max()))
    padding = (0, width - candidates.ids_BN.shape[1])
    logits_BN, ids_BN = F.pad(candidates.logits_BN, padding, value=-torch.inf), F.pad(candidates.ids_BN, padding)
    logits_BN[rows_B], ids_BN[rows_B] = longer.logits_BN[:, :width], longer.ids_BN[:, :width]
    return Candidates(logits_BN, ids_BN)


def _sorted_top_k(logits_BV: Tensor, k: int) -> Candidates:
    """The k most likely tokens, sorted; of equal ones the lower id first."""
    vocab = logits_BV.shape[-1]
    if k == vocab:
        return Candidates(*logits_BV.sort(dim=-1, descending=True, stable=True))
    values_Bk, ids_Bk = logits_BV.topk(k, dim=-1)
    # Of the tokens that equal the k-th, `topk` returns any: replace them by those with the lowest ids.
    kth_B1 = values_Bk[:, -1:]
    ids_V = torch.arange(vocab, dtype=torch.int32, device=logits_BV.device)
    tied_BV = torch.where(logits_BV == kth_B1, ids_V, vocab - 1)
    tied_Bk = tied_BV.topk(k, dim=-1, largest=False).values.long()
    above_B1 = (values_Bk > kth_B1).sum(dim=-1, keepdim=True)
    tie_index_Bk = torch.arange(k, device=logits_BV.device) - above_B1
    ids_Bk = torch.where(tie_index_Bk < 0, ids_Bk, tied_Bk.gather(1, tie_index_Bk.clamp(min=0))).sort(dim=-1).values
    values_Bk, order_Bk = logits_BV.gather(1, ids_Bk).sort(dim=-1, descending=True, stable=True)
    return Candidates(values_Bk, ids_Bk.gather(1, order_Bk))


def inverse_cdf_sample(logits_BV: Tensor, u_B: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds u, ids [B] int64. Large vocabularies in blocks."""
    weight_BV, vocab = torch.softmax(logits_BV, dim=-1), logits_BV.shape[-1]
    u_B1 = u_B.to(weight_BV.device, torch.double)[:, None]
    if vocab <= _SMALL_VOCAB:
        return _search(weight_BV.double(), u_B1)[0].squeeze(1)
    end = vocab - vocab % _BLOCK
    blocks_BnP, rest_BP = weight_BV[:, :end].unflatten(1, (-1, _BLOCK)), weight_BV[:, None, end:]
    sums_Bn = torch.cat((blocks_BnP.sum(dim=-1), rest_BP.sum(dim=-1)), dim=1)
    block_B1, u_B1 = _search(sums_Bn.double(), u_B1)
    ids_BP = block_B1 * _BLOCK + torch.arange(_BLOCK, device=weight_BV.device)
    weight_BP = weight_BV.gather(1, ids_BP.clamp(max=vocab - 1)).masked_fill_(ids_BP >= vocab, 0)
    return ids_BP.gather(1, _search(weight_BP.double(), u_B1)[0]).squeeze(1).clamp_(max=vocab - 1)


def _search(weight_BN: Tensor, u_B1: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose cumulative weight exceeds u, and the position of u within its weight; both B x 1.

    The position is uniform in [0, 1) again, so it can draw within the block of that index.
    """
    cumulative_BN = weight_BN.cumsum(dim=-1)
    target_B1 = u_B1 * cumulative_BN[:, -1:]
    index_B1 = torch.searchsorted(cumulative_BN, target_B1, right=True)
    index_B1.clamp_(max=weight_BN.shape[-1] - 1)  # NaN sorts last; callers see its NaN log-probability
    weight_B1 = weight_BN.gather(1, index_B1)
    position_B1 = (target_B1 - (cumulative_BN.gather(1, index_B1) - weight_B1)) / weight_B1
    return index_B1, position_B1.clamp_(0, 1 - 2**-52)


def uniforms(seed: int, step: int, keys_B2: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), [B]: 52 bits of a hash of (seed, step, row, sample, position).

    Args:
        keys_B2: (row, sample) of each row.
    """
    rows_B, samples_B = keys_B2.T
    hash_B = keys_of(seed, step, rows_B, samples_B, positions_B)
    return (hash_B >> np.uint64(12)).astype(np.float64) * 2.0**-52
