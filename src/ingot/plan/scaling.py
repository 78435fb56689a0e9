"""Scaling laws: the loss of a model by its parameters N and training tokens D, and the best N and D for a budget.

Losses are in nats per token of the text and the tokenizer that a law was fitted to, so only differences carry over to
others. Which parameters count as N differs too: Kaplan et al. leave embeddings out, the other laws count them. `fit`
in `plan/scaling_fit.py` fits a law to runs of one's own. No torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from ingot.core.errors import UserError
from ingot.plan.flops import FORWARD_FLOPS, training_flops

FLOPS = training_flops(1, 1)
"""FLOPs of training a parameter with a token: C = 6 N D."""
PETAFLOP_DAY = 1e15 * 86400
"""FLOPs in Kaplan et al.'s unit of compute."""
REPEATS, EXCESS = 15.387756, 5.309743
"""Repetitions of a text, and multiples of the parameters that a text is enough for, after which the value of more has
fallen by 1/e (Muennighoff et al. 2023, arXiv:2305.16264: R*_D and R*_N)."""
TOKENS_PER_PARAMETER = 20
"""Tokens that a parameter needs (Hoffmann et al. 2022, table A9)."""


@dataclass(frozen=True)
class Allocation:
    """A model and the length of its training, with the loss that a law predicts."""

    parameters: float
    tokens: float
    loss: float

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters

    @property
    def flops(self) -> float:
        """6 N D."""
        return FLOPS * self.parameters * self.tokens


class ScalingLaw(Protocol):
    """What a law answers."""

    def loss(self, parameters: float, tokens: float) -> float:
        """Nats per token of N parameters after D tokens."""
        ...

    def optimum(self, flops: float) -> Allocation:
        """The model with the lowest loss for 6 N D = `flops`."""
        ...


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv:2203.15556, equation 2)."""

    E: float
    """Loss of a perfect model: the entropy of the text."""
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def optimum(self, flops: float) -> Allocation:
        """In closed form (equation 4): N = G (C/6)^(beta / (alpha + beta)) and D = C / (6 N), with
        G^(alpha + beta) = alpha A / (beta B).
        """
        sum_ = self.alpha + self.beta
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / sum_)
        parameters = ratio * (flops / FLOPS) ** (self.beta / sum_)
        return self._at(parameters, flops / FLOPS / parameters)

    def tokens_for(self, loss: float, parameters: float) -> float:
        """Tokens after which N parameters reach a loss; infinite if they never do."""
        rest = loss - self.E - self.A / parameters**self.alpha
        return (self.B / rest) ** (1 / self.beta) if rest > 0 else math.inf

    def cheapest(self, loss: float, served: float) -> Allocation:
        """The model that reaches a loss with the least compute in all: 6 N D of training and 2 N of each served token.

        The more tokens are served, the smaller the model and the longer its training (Sardana et al. 2024,
        arXiv:2401.00448).

        Args:
            loss: nats per token.
            served: tokens that the model will read and write after training.

        Raises:
            UserError: no model reaches the loss.
        """
        if loss <= self.E:
            raise UserError(f"found a loss of {loss:g}, expected more than {self.E:g}, which no model is below")
        smallest = (self.A / (loss - self.E)) ** (1 / self.alpha)  # reaches the loss after infinitely many tokens

        def compute(parameters: float) -> float:
            return parameters * (FLOPS * self.tokens_for(loss, parameters) + FORWARD_FLOPS * served)

        parameters = minimum(compute, smallest * (1 + 1e-9), smallest * 1e6)
        return self._at(parameters, self.tokens_for(loss, parameters))

    def _at(self, parameters: float, tokens: float) -> Allocation:
        return Allocation(parameters, tokens, self.loss(parameters, tokens))


KAPLAN = {"parameters": (8.8e13, 0.076), "tokens": (5.4e13, 0.095), "flops": (3.1e8 * PETAFLOP_DAY, 0.050)}
"""L(X) = (Xc / X)^aX where X alone limits the loss, "flops" at their best use: Xc, aX (Kaplan et al. 2020,
arXiv:2001.08361, equations 1.1 to 1.3)."""


def limited_loss(by: str, amount: float) -> float:
    """Kaplan et al.'s loss where parameters (without embeddings), tokens or FLOPs alone limit it."""
    scale, exponent = KAPLAN[by]
    return (scale / amount) ** exponent


@dataclass(frozen=True)
class KaplanLaw:
    """L(N, D) = ((Nc / N)^(aN / aD) + Dc / D)^aD (Kaplan et al. 2020, equation 1.5 and table 2).

    N counts no embeddings. D is the size of a text that is trained on until the held-out loss is lowest. The optimum
    for a budget is a fit of its own, for one pass over a text without an end: N = 1.3e9 C^0.73, with C in PF-days
    (table 6).
    """

    exponents: tuple[float, float] = (0.076, 0.103)
    """aN, aD."""
    scales: tuple[float, float] = (6.4e13, 1.8e13)
    """Nc, Dc."""
    optimum_exponent: float = 0.73
    optimum_parameters: float = 1.3e9
    """Of the best model for a PF-day."""

    def loss(self, parameters: float, tokens: float) -> float:
        (size, text), (size_scale, text_scale) = self.exponents, self.scales
        return ((size_scale / parameters) ** (size / text) + text_scale / tokens) ** text

    def optimum(self, flops: float) -> Allocation:
        parameters = self.optimum_parameters * (flops / PETAFLOP_DAY) ** self.optimum_exponent
        return Allocation(parameters, flops / FLOPS / parameters, limited_loss("flops", flops))


LAWS: dict[str, ScalingLaw] = {
    "kaplan": KaplanLaw(),
    "hoffmann": Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28),
    "besiroglu": Law(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658),
}
"""Published laws. Besiroglu et al. 2024 (arXiv:2404.10102) fitted Hoffmann et al.'s runs (approach 3) again: the
published constants are rounded, come from an optimiser that stopped early, and contradict the paper's own 20 tokens a
parameter, which the second fit agrees with."""


def effective_tokens(tokens: float, unique: float) -> float:
    """Tokens of new text that are worth as much as `tokens` of a text of `unique` tokens, read again and again.

    D' = U + U R* (1 - exp(-R / R*)) with R = D / U - 1 repetitions: four passes are worth 3.7 new ones, and no number
    of them more than 16.4 (Muennighoff et al. 2023, equation 5).
    """
    return _decayed(tokens, unique, REPEATS)


def effective_parameters(parameters: float, unique: float) -> float:
    """Parameters that are worth as much where text is no limit as `parameters` are with `unique` tokens.

    U = `unique` / 20 parameters have text enough; those beyond lose their value like repeated text (equation 6).
    """
    return _decayed(parameters, unique / TOKENS_PER_PARAMETER, EXCESS)


def _decayed(amount: float, base: float, scale: float) -> float:
    excess = amount / base - 1
    return amount if excess <= 0 else base * (1 + scale * (1 - math.exp(-excess / scale)))


def seconds_at(measured: Mapping[float, float], work: float) -> float:
    """Seconds of some work, from measurements of more and of less.

    Between two measurements a power law goes through both. Beyond the largest, time grows like work, which larger
    matrices stay below; below the smallest it stays the same. More work never takes less time: where measurements say
    so, the machine was busy.

    Args:
        measured: work, in FLOPs or parameters -> seconds.
    """
    known, slowest = list[tuple[float, float]](), 0.0
    for x in sorted(measured):
        slowest = max(slowest, measured[x])
        known.append((x, slowest))
    if work <= known[0][0]:
        return known[0][1]
    for (x, low), (y, high) in pairwise(known):
        if work <= y:
            return low * (work / x) ** (math.log(high / low) / math.log(y / x))
    return known[-1][1] * work / known[-1][0]


def best_in_time(law: ScalingLaw, token_seconds: Mapping[float, float], seconds: float) -> Allocation:
    """The model with the lowest loss that a machine can train in some seconds, one pass over new text.

    Args:
        token_seconds: parameters -> seconds of a trained token, as measured.
    """

    def tokens(parameters: float) -> float:
        return seconds / seconds_at(token_seconds, parameters)

    parameters = minimum(lambda n: law.loss(n, tokens(n)), 1e3, 1e13)
    return Allocation(parameters, tokens(parameters), law.loss(parameters, tokens(parameters)))


def minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of a positive number with one minimum is lowest, by golden sections of the logarithm."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = math.log(low), math.log(high)
    while b - a > 1e-9:
        c, d = b - ratio * (b - a), a + ratio * (b - a)
        if function(math.exp(c)) < function(math.exp(d)):
            b = d
        else:
            a = c
    return math.exp((a + b) / 2)
