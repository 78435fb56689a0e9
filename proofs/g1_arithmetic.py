"""G1: a reward that can be checked turns a model that is sometimes right into one that mostly is.

Sums of two numbers of up to two digits, all digits from the last to the first so that a carry is known when it is
needed. Fine-tuning is stopped early; GRPO goes on with groups of eight and a reward of 1 for the right completion. Sums
that are divisible by seven are held out of both, so neither such a problem nor its mirror image was ever seen.

There is one right completion, so the chance p of it is known exactly from a forward pass, and with it how many groups
of G should be all alike and teach nothing: p^G + (1 - p)^G.
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
LONGEST = 6
ROWS, WARM, READY = 256, 1000, 0.45
"""Of fine-tuning: rows of a step, steps at most, and the chance of the right completion at which it stops."""
GROUP, PROBLEMS, STEPS = 8, 32, 300


def problems(n: int, held_out: bool, draw: np.random.Generator) -> np.ndarray:
    """n pairs of numbers, n x 2."""
    found = draw.integers(0, 100, (12 * n + 200, 2))
    return found[(found.sum(1) % 7 == 0) == held_out][:n]


def asked(numbers: np.ndarray) -> list[list[int]]:
    """`ab+cd=` as ids, each number's last digit first."""
    return [
        [DIGIT + a % 10, DIGIT + a // 10, PLUS, DIGIT + b % 10, DIGIT + b // 10, EQUALS] for a, b in numbers.tolist()
    ]


def answers(numbers: np.ndarray) -> list[list[int]]:
    """Three digits, the last first, and the end."""
    return [[*(DIGIT + total // 10**i % 10 for i in range(3)), END] for total in numbers.sum(1).tolist()]


def right(found: Sequence[Completion], numbers: np.ndarray) -> np.ndarray:
    """Whether each of G samples of P problems is the answer, P x G."""
    samples = len(found) // len(numbers)
    expected = [answer for answer in answers(numbers) for _ in range(samples)]
    every = [np.array_equal(c.ids, answer) for c, answer in zip(found, expected, strict=True)]
    return np.array(every).reshape(-1, samples)


@torch.no_grad()
def chance(policy: Transformer, numbers: np.ndarray) -> np.ndarray:
    """Of the right completion, by problem."""
    batch = rows(asked(numbers), answers(numbers))
    labels_BT = torch.from_numpy(batch.labels_BT)
    logp_BT = logits(policy, batch).log_softmax(-1).gather(-1, labels_BT.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels_BT != IGNORE, logp_BT, 0.0).sum(1).exp().double().numpy()


def sampled(policy: Transformer, seed: int, n: int = 500) -> tuple[float, float]:
    """pass@1 and pass@8 on held-out problems, from 16 samples of each at temperature 1."""
    numbers = problems(n, True, np.random.default_rng(4321))
    found = generate(policy, asked(numbers), Sampling(max_new=LONGEST, stop=frozenset({END})), samples=16, seed=seed)
    right_PG = right(found, numbers)
    return float(right_PG.mean()), float(right_PG.reshape(-1, 8).any(1).mean())


@functools.cache
def _base(seed: int) -> Transformer:
    """A model that was fine-tuned until it is sometimes right; not to be trained further, but copied."""
    made = model(V, 16, seed, width=96)
    learner, draw = engine(made, LanguageModel(), WARM, 3e-3, seed, warmup=20), np.random.default_rng(seed)
    for step in range(WARM):
        numbers = problems(ROWS, False, draw)
        learner.step(rows(asked(numbers), answers(numbers)))
        if step % 2 and chance(made, problems(200, False, np.random.default_rng(1234))).mean() >= READY:
            break
    return made


def _checked(arm: str, draw: np.random.Generator) -> Callable[[Rollout, object], torch.Tensor]:
    """The reward: 1 for the right completion; its negative; or that of another sample, drawn by chance."""

    def scorer(played: Rollout, ctx: object) -> torch.Tensor:
        digits = played.prompts.ids_BT[:, :6] - DIGIT
        numbers = np.stack([digits[:, 0] + 10 * digits[:, 1], digits[:, 3] + 10 * digits[:, 4]], 1)
        reward_PG = right(played.completions, numbers).astype(np.float32)
        if arm == "rewards shuffled":
            reward_PG = draw.permuted(reward_PG, axis=1)
        return torch.from_numpy(-reward_PG if arm == "sign flipped" else reward_PG).flatten()

    return scorer


def run(seed: int, arm: str, steps: int = STEPS) -> Numbers:
    steps = steps // 3 if arm == "sign flipped" else steps
    policy, draw = copy.deepcopy(_base(seed)), np.random.default_rng([seed, 1])
    before, eight = sampled(policy, seed)
    objective = GRPO(GRPOSettings(reward="judge", max_new=LONGEST, group=GROUP, epochs=3, minibatches=4))
    objective.scorer = _checked(arm, np.random.default_rng([seed, 2]))  # pyright: ignore
    learner = engine(policy, objective, steps, 5e-4, seed, tokenizer=Letters(V), warmup=20)
    share, alike, expected = [], [], []
    for _ in range(steps):
        numbers = problems(PROBLEMS, False, draw)
        chance_P = chance(policy, numbers)
        expected.append(np.mean(chance_P**GROUP + (1 - chance_P) ** GROUP))
        seen = learner.step(prompts(asked(numbers))).others
        share.append(abs(float(seen["reward"])))
        alike.append(float(seen["groups_without_signal"]))
    after, eight_after = sampled(policy, seed + 1)
    return {
        "pass@1 before": before,
        "pass@1": after,
        "pass@8": eight_after,
        "pass@8 lost": eight - eight_after,
        "groups alike": float(np.mean(alike)),
        "off p^G + (1-p)^G": float(abs(np.mean(alike) - np.mean(expected))),
        "right": [float(part.mean()) for part in np.array_split(share, 20)],
    }


def figure(found: Mapping[str, Sequence[Numbers]]) -> str:
    """The share of right samples while they are learned from, mean of the seeds."""
    curves = {arm: np.mean([n["right"] for n in seeds], 0).tolist() for arm, seeds in found.items()}
    steps = {arm: STEPS // 3 if arm == "sign flipped" else STEPS for arm in curves}
    points = {arm: [((i + 0.5) * steps[arm] / len(y), v) for i, v in enumerate(y)] for arm, y in curves.items()}
    return chart("Sums that are right", points, {}, "steps", "share of the samples")


ALIKE = Gate("off p^G + (1-p)^G", high=0.05)
GATES = [Gate("pass@1 before", 0.3, 0.5), Gate("pass@1", low=0.85), Gate("pass@8 lost", high=0.03), ALIKE]
PROOF = Proof(
    "G1",
    "GRPO with a reward that is checked: a model that adds right in fewer than half of its samples comes to 85 %",
    "pass@1 on held-out sums at least .85 in 300 steps, pass@8 at most 3 points lower; groups that are all alike as "
    "often as p^G + (1-p)^G says, to .05; with the sign flipped p goes to 0",
    run,
    [
        Arm("reward", GATES),
        Arm("sign flipped", [Gate("pass@1", high=0.01), ALIKE]),
        Arm("rewards shuffled", GATES, control=True),
    ],
    note="Each step's 256 samples are learned from three times, in four parts, at 5e-4. From one start, right in .42 "
    "of its samples, seed 3 came to .71 with one update a step at 1e-3, to .80 with four at 5e-4 and to .90 with "
    "eight; from another, right in .39, to .8496 with eight and to .88 with these twelve, with which seeds 4 and "
    "5, never used to choose, come to .91 and .92. With one update a step at 1e-3, seed 1 came to .88 from a "
    "model trained at 3e-3 and right in .39, but only to .69 (with a longer warmup) from one of 1e-3, right in "
    ".47. With the sign flipped there are a third of the steps.",
    figure=figure,
)
