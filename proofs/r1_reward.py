"""R1 and R2: a reward model finds the reward that comparisons were drawn from, and no more than they hold.

Strings of 4 to 12 letters; the true reward is a weight for each letter and a price for each place, brought to a known
standard deviation. Of two strings the one that is chosen is drawn by Bradley and Terry's rule, so that no model can
predict more of the choices than Bayes' rule does.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ingot.objectives.reward import Reward
from ingot.objectives.settings import RewardSettings
from proofs.proof import Arm, Gate, Numbers, Proof
from proofs.worlds import chances, engine, model, rows

LETTERS, START, END = 16, 17, 0
PAIRS, STEPS, TEST = 20_000, 312, 5_000
LEAK = 18
"""An id that tells which side was chosen."""


@dataclass(frozen=True)
class World:
    """The true reward: weights of letters, price of a place, and what they are divided by."""

    weight: np.ndarray
    spread: float

    @classmethod
    def make(cls, seed: int, std: float) -> "World":
        draw = np.random.default_rng(seed)
        weight = draw.normal(0, 1, LETTERS + 1)
        plain = cls(weight, 1.0)
        return cls(weight, float(np.std(plain.rewards(strings(4096, draw)))) / std)

    def rewards(self, texts: list[np.ndarray]) -> np.ndarray:
        return np.array([self.weight[t].sum() - 0.1 * len(t) for t in texts]) / self.spread


def strings(n: int, draw: np.random.Generator) -> list[np.ndarray]:
    return [draw.integers(1, LETTERS + 1, draw.integers(4, 13)) for _ in range(n)]


def compared(world: World, pairs: int, draw: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """Strings, the chosen one of each pair first, and their true rewards."""
    texts = strings(2 * pairs, draw)
    reward = world.rewards(texts)
    first = chances(reward[0::2] - reward[1::2], draw)
    order = np.stack([np.where(first, 0, 1), np.where(first, 1, 0)], 1) + 2 * np.arange(pairs)[:, None]
    return [texts[i] for i in order.ravel()], reward[order.ravel()]


def batch(texts: list[np.ndarray], leak: bool = False):
    """Pairs of strings behind the same first id, each with its end; with a leak, the chosen one says so."""
    marks = [[LEAK, END] if leak and i % 2 == 0 else [END] for i in range(len(texts))]
    return rows([[START]] * len(texts), [[*t, *m] for t, m in zip(texts, marks, strict=True)], group=2)


def run(seed: int, arm: str, steps: int = STEPS) -> Numbers:
    std = 1.0 if arm in ("std 1", "a mark tells") else 2.0
    leak, shuffled = arm == "a mark tells", arm == "choices shuffled"
    world, draw = World.make(seed, std), np.random.default_rng(seed + 1000)
    made = engine(model(19, 24, seed), objective := Reward(RewardSettings(centering=0.0)), steps, 1e-3, seed, warmup=20)
    for _ in range(steps):
        texts, _ = compared(world, PAIRS // STEPS, draw)
        if shuffled:
            swap = np.repeat(draw.random(len(texts) // 2) < 0.5, 2)
            texts = [texts[i ^ 1] if s else texts[i] for i, s in enumerate(swap)]
        made.step(batch(texts, leak))
    return measured(made, objective, world, leak, np.random.default_rng(seed + 2000))


@torch.no_grad()
def measured(made, objective: Reward, world: World, leak: bool, draw: np.random.Generator) -> Numbers:
    texts, true = compared(world, TEST, draw)
    there = batch(texts, leak).to("cpu")
    parts = list(there.micro(1000))
    found = torch.cat([objective._head(made.model(p.ids_BT).hidden, p.columns["lengths_B"]) for p in parts])
    margin = found[0::2] - found[1::2]
    reward = found.double().numpy()
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
    "A reward model recovers the reward that 20,000 noisy choices were drawn from",
    "Bayes: accuracy .828, NLL .375 at a standard deviation of 2; the slope against the true reward is 1",
    run,
    [Arm("std 2", GATES), Arm("choices shuffled", GATES, control=True)],
)
