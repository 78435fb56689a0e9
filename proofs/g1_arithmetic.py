"""G1: GRPO with a verifiable reward turns a model that is sometimes right into one that is mostly right.

The problems are sums of two numbers of up to two digits, written from the last digit to the first, so that each carry
is known before it is needed. Fine-tuning stops early; GRPO continues with groups of eight and a reward of 1 for the
right completion. Problems whose sum is divisible by seven are held out of both, which includes swapped operands.

Each problem has one right completion, so a forward pass gives its exact probability p. The expected fraction of groups
of size G with equal rewards, which give no gradient, is then p^G + (1 - p)^G.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from ingot.data.batches import IGNORE
from ingot.infer.generate import Completion, generate
from ingot.infer.sampling import Sampling
from ingot.model.transformer import Transformer
from ingot.objectives.grpo import GRPO
from ingot.objectives.lm import LanguageModel
from ingot.objectives.on_policy_settings import GRPOSettings
from ingot.objectives.rollout import Rollout
from proofs.figures import chart
from proofs.proof import Arm, Gate, Numbers, Proof
from proofs.worlds import Letters, engine, logits, model, prompts, rows

END, PLUS, EQUALS, DIGIT, V = 0, 1, 2, 3, 13
MAX_NEW = 6
SFT_ROWS, MAX_SFT_STEPS, SFT_TARGET = 256, 1000, 0.45
"""Fine-tuning: rows per step, most steps, and the mean probability of the right completion at which it stops."""
GROUP, PROBLEMS, STEPS = 8, 32, 300


def problems(n: int, held_out: bool, draw: np.random.Generator) -> np.ndarray:
    """n pairs of numbers, [n, 2]."""
    numbers = draw.integers(0, 100, (12 * n + 200, 2))
    return numbers[(numbers.sum(1) % 7 == 0) == held_out][:n]


def questions(numbers: np.ndarray) -> list[list[int]]:
    """`ab+cd=` as ids, each number's last digit first."""
    return [
        [DIGIT + a % 10, DIGIT + a // 10, PLUS, DIGIT + b % 10, DIGIT + b // 10, EQUALS] for a, b in numbers.tolist()
    ]


def answers(numbers: np.ndarray) -> list[list[int]]:
    """Three digits of each sum, the last digit first, and the end."""
    return [[*(DIGIT + total // 10**i % 10 for i in range(3)), END] for total in numbers.sum(1).tolist()]


def is_right(completions: Sequence[Completion], numbers: np.ndarray) -> np.ndarray:
    """Whether each of G samples of P problems is the answer, [P, G]."""
    samples = len(completions) // len(numbers)
    expected = [answer for answer in answers(numbers) for _ in range(samples)]
    right = [np.array_equal(c.ids, answer) for c, answer in zip(completions, expected, strict=True)]
    return np.array(right).reshape(-1, samples)


@torch.no_grad()
def probability(policy: Transformer, numbers: np.ndarray) -> np.ndarray:
    """Probability of the right completion of each problem, [P]."""
    batch = rows(questions(numbers), answers(numbers))
    labels_BT = torch.from_numpy(batch.labels_BT)
    logp_BT = logits(policy, batch).log_softmax(-1).gather(-1, labels_BT.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels_BT != IGNORE, logp_BT, 0.0).sum(1).exp().double().numpy()


def pass_rates(policy: Transformer, seed: int, n: int = 500) -> tuple[float, float]:
    """pass@1 and pass@8 on held-out problems, from 16 samples of each at temperature 1."""
    numbers = problems(n, True, np.random.default_rng(4321))
    sampling = Sampling(max_new=MAX_NEW, stop=frozenset({END}))
    right_PG = is_right(generate(policy, questions(numbers), sampling, samples=16, seed=seed), numbers)
    return float(right_PG.mean()), float(right_PG.reshape(-1, 8).any(1).mean())


@functools.cache
def _base(seed: int) -> Transformer:
    """A model that is fine-tuned until it is sometimes right. It is cached: copy it before training."""
    base = model(V, 16, seed, width=96)
    learner, draw = engine(base, LanguageModel(), MAX_SFT_STEPS, 3e-3, seed, warmup=20), np.random.default_rng(seed)
    for step in range(MAX_SFT_STEPS):
        numbers = problems(SFT_ROWS, False, draw)
        learner.step(rows(questions(numbers), answers(numbers)))
        if step % 2 and probability(base, problems(200, False, np.random.default_rng(1234))).mean() >= SFT_TARGET:
            break
    return base


def _reward(arm: str, draw: np.random.Generator) -> Callable[[Rollout, object], torch.Tensor]:
    """The reward of an arm: 1 for the right completion; its negative; or shuffled within each group."""

    def scorer(rollout: Rollout, ctx: object) -> torch.Tensor:
        digits = rollout.prompts.ids_BT[:, :6] - DIGIT
        numbers = np.stack([digits[:, 0] + 10 * digits[:, 1], digits[:, 3] + 10 * digits[:, 4]], 1)
        reward_PG = is_right(rollout.completions, numbers).astype(np.float32)
        if arm == "rewards shuffled":
            reward_PG = draw.permuted(reward_PG, axis=1)
        return torch.from_numpy(-reward_PG if arm == "sign flipped" else reward_PG).flatten()

    return scorer


def run(seed: int, arm: str, steps: int = STEPS) -> Numbers:
    steps = steps // 3 if arm == "sign flipped" else steps
    policy, draw = copy.deepcopy(_base(seed)), np.random.default_rng([seed, 1])
    pass1_before, pass8_before = pass_rates(policy, seed)
    objective = GRPO(GRPOSettings(reward="rm", max_new=MAX_NEW, group=GROUP, epochs=3, minibatches=4))
    objective.scorer = _reward(arm, np.random.default_rng([seed, 2]))  # pyright: ignore
    learner = engine(policy, objective, steps, 5e-4, seed, tokenizer=Letters(V), warmup=20)
    right, equal_groups, expected = [], [], []
    for _ in range(steps):
        numbers = problems(PROBLEMS, False, draw)
        p_P = probability(policy, numbers)
        expected.append(np.mean(p_P**GROUP + (1 - p_P) ** GROUP))
        metrics = learner.step(prompts(questions(numbers))).others
        right.append(abs(float(metrics["reward"])))
        equal_groups.append(float(metrics["groups_without_signal"]))
    pass1, pass8 = pass_rates(policy, seed + 1)
    return {
        "pass@1 before": pass1_before,
        "pass@1": pass1,
        "pass@8": pass8,
        "pass@8 lost": pass8_before - pass8,
        "groups alike": float(np.mean(equal_groups)),
        "off p^G + (1-p)^G": float(abs(np.mean(equal_groups) - np.mean(expected))),
        "right": [float(part.mean()) for part in np.array_split(right, 20)],
    }


def figure(by_arm: Mapping[str, Sequence[Numbers]]) -> str:
    """The fraction of right samples during training, averaged over seeds."""
    curves = {arm: np.mean([n["right"] for n in by_seed], 0).tolist() for arm, by_seed in by_arm.items()}
    steps = {arm: STEPS // 3 if arm == "sign flipped" else STEPS for arm in curves}
    points = {arm: [((i + 0.5) * steps[arm] / len(y), v) for i, v in enumerate(y)] for arm, y in curves.items()}
    return chart("Right sums during training", points, {}, "steps", "fraction of samples")


EQUAL_GROUPS = Gate("off p^G + (1-p)^G", high=0.05)
GATES = [Gate("pass@1 before", 0.3, 0.5), Gate("pass@1", low=0.85), Gate("pass@8 lost", high=0.03), EQUAL_GROUPS]
PROOF = Proof(
    "G1",
    "GRPO with a verifiable reward: a model with fewer than half of its sums right reaches 85 %",
    "pass@1 on held-out sums at least .85 in 300 steps, pass@8 at most 3 points lower; the fraction of groups with "
    "equal rewards is p^G + (1-p)^G, to .05; with the sign flipped p goes to 0",
    run,
    [
        Arm("reward", GATES),
        Arm("sign flipped", [Gate("pass@1", high=0.01), EQUAL_GROUPS]),
        Arm("rewards shuffled", GATES, control=True),
    ],
    note="A step trains on its 256 samples for three epochs of four minibatches, at 5e-4: twelve updates. From a start "
    "with pass@1 .42, seed 3 reached .71 with one update per step at 1e-3, .80 with four at 5e-4 and .90 with eight; "
    "from a start with .39, .8496 with eight and .88 with these twelve, with which seeds 4 and 5, not used for tuning, "
    "reach .91 and .92. With one update per step at 1e-3, seed 1 reached .88 from a model trained at 3e-3 with pass@1 "
    ".39, but only .69 (with a longer warmup) from one trained at 1e-3 with .47. The arm with the sign flipped has a "
    "third of the steps.",
    figure=figure,
)
