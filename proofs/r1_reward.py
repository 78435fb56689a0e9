"""R1 and R2: a reward model recovers the reward that comparisons were drawn from, up to the Bayes limit.

Answers are strings of 4 to 12 letters. The true reward is a sum of a weight for each letter and a cost per letter,
scaled to a known standard deviation. Choices are drawn by the Bradley-Terry rule, so no model can predict them better
than the Bayes classifier, which knows the true reward.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ingot.objectives.reward import Reward
from ingot.objectives.settings import RewardSettings
from ingot.train.engine import Engine
from proofs.proof import Arm, Gate, Numbers, Proof
from proofs.worlds import bradley_terry_choices, engine, model, rows

LETTERS, START, END = 16, 17, 0
PAIRS, STEPS, TEST_PAIRS = 20_000, 312, 5_000
LEAK = 18
"""An id that marks the chosen side."""


@dataclass(frozen=True)
class TrueReward:
    """(sum of letter weights - 0.1 per letter) / scale."""

    weight: np.ndarray
    scale: float

    @classmethod
    def make(cls, seed: int, std: float) -> "TrueReward":
        """Random weights, scaled such that rewards have the given standard deviation."""
        draw = np.random.default_rng(seed)
        weight = draw.normal(0, 1, LETTERS + 1)
        unscaled = cls(weight, 1.0)
        return cls(weight, float(np.std(unscaled(strings(4096, draw)))) / std)

    def __call__(self, texts: list[np.ndarray]) -> np.ndarray:
        return np.array([self.weight[t].sum() - 0.1 * len(t) for t in texts]) / self.scale


def strings(n: int, draw: np.random.Generator) -> list[np.ndarray]:
    return [draw.integers(1, LETTERS + 1, draw.integers(4, 13)) for _ in range(n)]


def compared(true_reward: TrueReward, pairs: int, draw: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """Strings, the chosen one of each pair first, and their true rewards."""
    texts = strings(2 * pairs, draw)
    reward = true_reward(texts)
    first = bradley_terry_choices(reward[0::2] - reward[1::2], draw)
    order = np.stack([np.where(first, 0, 1), np.where(first, 1, 0)], 1) + 2 * np.arange(pairs)[:, None]
    return [texts[i] for i in order.ravel()], reward[order.ravel()]


def batch(texts: list[np.ndarray], leak: bool = False):
    """A batch of pairs of strings; with `leak` the chosen strings are marked."""
    endings = [[LEAK, END] if leak and i % 2 == 0 else [END] for i in range(len(texts))]
    return rows([[START]] * len(texts), [[*t, *e] for t, e in zip(texts, endings, strict=True)], group=2)


def run(seed: int, arm: str, steps: int = STEPS) -> Numbers:
    std = 1.0 if arm in ("std 1", "a mark tells") else 2.0
    leak, shuffled = arm == "a mark tells", arm == "choices shuffled"
    true_reward, draw = TrueReward.make(seed, std), np.random.default_rng(seed + 1000)
    learner = engine(model(19, 24, seed), Reward(RewardSettings(centering=0.0)), steps, 1e-3, seed, warmup=20)
    for _ in range(steps):
        texts, _ = compared(true_reward, PAIRS // STEPS, draw)
        if shuffled:
            swap = np.repeat(draw.random(len(texts) // 2) < 0.5, 2)
            texts = [texts[i ^ 1] if s else texts[i] for i, s in enumerate(swap)]
        learner.step(batch(texts, leak))
    return measure(learner, true_reward, leak, np.random.default_rng(seed + 2000))


@torch.no_grad()
def measure(learner: Engine, true_reward: TrueReward, leak: bool, draw: np.random.Generator) -> Numbers:
    """Compare the learned reward with the true one on new pairs."""
    texts, true = compared(true_reward, TEST_PAIRS, draw)
    micro_batches = batch(texts, leak).to("cpu").micro_batches(1000)
    head = learner.modules["reward"]
    learned = torch.cat([head(learner.model(b.ids_BT).hidden, b.columns["lengths_B"]) for b in micro_batches])
    margin = learned[0::2] - learned[1::2]
    reward = learned.double().numpy()
    true_margin = true[0::2] - true[1::2]
    return {
        "accuracy": float((margin > 0).float().mean()),
        "nll": float(-F.logsigmoid(margin).mean()),
        "ranking": float(np.mean(np.sign(margin.numpy()) == np.sign(true_margin))),
        "correlation": float(np.corrcoef(reward, true)[0, 1]),
        "slope": float(np.polyfit(true, reward, 1)[0]),
        "bayes accuracy": float(np.mean(1 / (1 + np.exp(-np.abs(true_margin))))),
    }


GATES = [
    Gate("accuracy", low=0.80),
    Gate("nll", high=0.40),
    Gate("ranking", low=0.95),
    Gate("correlation", low=0.95),
    Gate("slope", 0.85, 1.15),
]
PROOF = Proof(
    "R1",
    "A reward model recovers the reward behind 20,000 noisy choices",
    "Bayes: accuracy .828, NLL .375 at a standard deviation of 2; the slope against the true reward is 1",
    run,
    [Arm("std 2", GATES), Arm("choices shuffled", GATES, control=True)],
)
