"""I1: sample from the policy, have the samples labelled, learn the reward model anew, optimise; three times.

Answers are eight of twelve letters, all equally likely at the start. Each of the first three a's is worth 1.5 and each
further one costs as much; likewise b's, for 1. Almost no answer of the first policy has four of a letter, so the first
reward model believes that more is better; the policy goes where that is wrong, and what is learned from its samples
there says so.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from ingot.model.transformer import Transformer
from ingot.objectives.on_policy_settings import PPOSettings
from ingot.objectives.ppo import PPO
from ingot.objectives.reward import Reward, RewardModel
from ingot.objectives.rollout import roll_out
from ingot.objectives.settings import RewardSettings
from proofs.proof import Arm, Gate, Numbers, Proof
from proofs.worlds import Letters, chances, engine, frozen, model, prompts, rows

V, LENGTH, START, ROUNDS = 12, 8, 11, 3
WORTH, MOST, BETA = (1.5, 1.0), 3, 0.5
PAIRS, TEST, LEARN, OPTIMISE = 24576, 4096, 1200, 30


def gold(answers: np.ndarray) -> np.ndarray:
    """Of answers, B x LENGTH."""
    counts = [(answers == letter).sum(1) for letter in range(len(WORTH))]
    return sum((w * (MOST - np.abs(c - MOST)) for w, c in zip(WORTH, counts, strict=True)), np.zeros(len(answers)))


@dataclass(frozen=True)
class Pairs:
    """Answers, the chosen one of each pair first, and how often the better one was chosen in the long run."""

    answers: np.ndarray
    """2 P x LENGTH."""
    bayes: float

    @classmethod
    def of(cls, answers: np.ndarray, draw: np.random.Generator, shuffled: bool = False) -> "Pairs":
        margin = np.diff(-gold(answers).reshape(-1, 2)).ravel()
        first = chances(0 * margin if shuffled else margin, draw)
        order = (np.stack([~first, first], 1) + 2 * np.arange(len(first))[:, None]).ravel()
        return cls(answers[order], float(np.mean(1 / (1 + np.exp(-np.abs(margin))))))

    def batch(self, at: np.ndarray):
        """The pairs with these numbers."""
        chosen = self.answers.reshape(-1, 2, LENGTH)[at].reshape(-1, LENGTH)
        return rows([[START]] * len(chosen), list(chosen), group=2)


def sampled(policy: Transformer, n: int, seed: int) -> np.ndarray:
    """Answers of a policy, n x LENGTH."""
    asked, objective = prompts([[START]] * n), PPO(PPOSettings(reward="judge"))
    made = engine(policy, objective, 1, 0.0, seed, tokenizer=Letters(V, ends=False))
    played = roll_out(asked, made.context(10**6), samples=1, max_new=LENGTH, temperature=1.0)
    return np.stack([c.ids for c in played.completions])


def learned(known: list[Pairs], start: Transformer, seed: int) -> RewardModel:
    """A reward model of all comparisons so far, the last round's being half of what is read."""
    trained = frozen(start).requires_grad_(True)
    made = engine(trained, objective := Reward(RewardSettings(centering=0.0)), LEARN, 3e-3, seed, warmup=20)
    draw = np.random.default_rng([seed, len(known)])
    for _ in range(LEARN):
        last = draw.random() < 0.5 or len(known) == 1
        pairs = known[-1] if last else known[draw.integers(len(known) - 1)]
        made.step(pairs.batch(draw.integers(0, PAIRS, 128)))
    return RewardModel(trained, objective._head, 0.0, 1.0).eval().requires_grad_(False)


@torch.no_grad()
def accuracy(of: RewardModel, pairs: Pairs) -> float:
    """How often the chosen answer has the higher reward."""
    there = pairs.batch(np.arange(TEST)).to("cpu")
    found = of.scores(there.ids_BT, there.columns["lengths_B"])
    return float((found[0::2] > found[1::2]).float().mean())


def optimised(policy: Transformer, reference: Transformer, reward: RewardModel, seed: int) -> Transformer:
    """A round of PPO."""
    objective = PPO(
        PPOSettings(reward="judge", max_new=LENGTH, beta=BETA, lam=1.0, epochs=2, minibatches=4, whiten=False)
    )
    companions = {"reference": reference, "reward": reward}
    trained, letters = frozen(policy).requires_grad_(True), Letters(V, ends=False)
    made = engine(trained, objective, OPTIMISE, 3e-3, seed, companions=companions, tokenizer=letters)
    for _ in range(OPTIMISE):
        made.step(prompts([[START]] * 128))
    return frozen(trained)


def run(seed: int, arm: str, rounds: int = ROUNDS) -> Numbers:
    """Gold of the policy before the first round and after each, and what reward models say of its samples there."""
    draw = np.random.default_rng(seed)
    reference = policy = frozen(model(V, 12, seed, depth=1, width=32, uniform=True))
    known, models, golds = [], [], []
    found: dict[str, list[float]] = {"Bayes": [], "first": [], "refreshed": []}
    for number in range(rounds + 1):
        answers = sampled(policy, 2 * (PAIRS + TEST), 10 * seed + number)
        golds.append(float(gold(answers).mean()))
        test = Pairs.of(answers[: 2 * TEST], draw)
        if arm != "stale model kept" or not models:
            known.append(Pairs.of(answers[2 * TEST :], draw, arm == "labels shuffled"))
            start = models[-1].model if models else model(V, 12, seed, width=32)
            models.append(learned(known, start, seed + number))
        for name, at in (("first", 0), ("refreshed", -1)):
            found[name].append(accuracy(models[at], test))
        found["Bayes"].append(test.bayes)
        if number < rounds:
            policy = optimised(policy, reference, models[-1], 10 * seed + number)
    below = {n: [b - a for a, b in zip(found[n], found["Bayes"], strict=True)] for n in ("first", "refreshed")}
    return {
        "least rise of gold": min(b - a for a, b in itertools.pairwise(golds)),
        "first model below Bayes": below["first"][1],
        "refreshed below Bayes": max(below["refreshed"]),
        **{f"gold {i}": g for i, g in enumerate(golds)},
        **found,
    }


GATES = [
    Gate("least rise of gold", low=0.1),
    Gate("first model below Bayes", low=0.05),
    Gate("refreshed below Bayes", high=0.03),
]
PROOF = Proof(
    "I1",
    "Gold rises in each of three rounds; a reward model fails on what the policy made of it, and learns from samples",
    "Bayes' accuracy on the policy's samples: the refreshed model within .03 of it, the first one .05 or more below it",
    run,
    [
        Arm("three rounds", GATES),
        Arm("labels shuffled", GATES, control=True),
        Arm("stale model kept", GATES, control=True),
    ],
    note="The first model is asked of the samples of the first round, which was optimised against it.\n"
    "With eight letters, a quarter of the pairs and twice the steps of PPO a round, the third had little left to win\n"
    "(.002 with one seed), and one of three refreshed models stayed .033 below Bayes.",
)
