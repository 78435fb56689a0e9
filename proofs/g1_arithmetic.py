"""G1: a checkable reward turns a model that is sometimes right into one that mostly is.

Sums of two numbers of two digits, digits from the last to the first so that a carry is known when it is needed.
Fine-tuning is stopped early; GRPO goes on with groups of eight and a reward of 1 for the right answer. A seventh of the
problems, by their operands, is held out of both.
"""

import copy
import functools

import numpy as np
import torch

from ingot.infer.generate import generate
from ingot.infer.sampling import Sampling
from ingot.model.transformer import Transformer
from ingot.objectives.grpo import GRPO
from ingot.objectives.lm import LanguageModel
from ingot.objectives.rollout import Rollout
from proofs.proof import Arm, Gate, Numbers, Proof
from proofs.worlds import Letters, engine, model, prompts, rows

END, PLUS, EQUALS, DIGIT, V = 0, 1, 2, 3, 13
GROUP, PROBLEMS, STEPS = 8, 32, 300
WARM, ROWS, READY = 2000, 256, 0.35


def problems(n: int, held_out: bool, draw: np.random.Generator) -> np.ndarray:
    """n pairs of operands."""
    found = draw.integers(0, 100, (12 * n + 200, 2))
    out = (found[:, 0] * 31 + found[:, 1] * 17) % 7 == 0
    return found[out == held_out][:n]


def asked(numbers: np.ndarray) -> list[list[int]]:
    """AB + CD = as ids, digits reversed."""
    return [
        [DIGIT + a % 10, DIGIT + a // 10, PLUS, DIGIT + b % 10, DIGIT + b // 10, EQUALS] for a, b in numbers.tolist()
    ]


def answers(numbers: np.ndarray) -> list[list[int]]:
    return [[*(DIGIT + s // 10**i % 10 for i in range(3)), END] for s in numbers.sum(1).tolist()]


def sampled(policy: Transformer, seed: int, n: int = 500) -> tuple[float, float, float]:
    """pass@1 and pass@8 at temperature 1 on held-out problems, and the share of groups that are all alike less the
    share that is expected, problem by problem."""
    numbers = problems(n, True, np.random.default_rng(4321))
    found = generate(policy, asked(numbers), Sampling(max_new=6, stop=frozenset({END})), samples=16, seed=seed)
    right = [np.array_equal(c.ids, answer) for c, answer in _with(found, answers(numbers), 16)]
    right_PN = np.array(right).reshape(n, 16)
    first, second = right_PN[:, :GROUP], right_PN[:, GROUP:]
    alike = float((first.all(1) | (~first).all(1)).mean())
    return float(right_PN.mean()), float((first.any(1).mean() + second.any(1).mean()) / 2), alike


def _with(found, expected, samples: int):
    return zip(found, [a for a in expected for _ in range(samples)], strict=True)


@functools.cache
def _base(seed: int) -> Transformer:
    """A model that was fine-tuned until it is right in a third of its samples."""
    made = model(V, 16, seed, width=96)
    learner, draw = engine(made, LanguageModel(), WARM, 1e-3, seed, warmup=20), np.random.default_rng(seed)
    for step in range(WARM):
        numbers = problems(ROWS, False, draw)
        learner.step(rows(asked(numbers), answers(numbers)))
        if step % 25 == 24 and sampled(made, seed, 100)[0] >= READY:
            break
    return made


def run(seed: int, arm: str, steps: int = STEPS) -> Numbers:
    policy = copy.deepcopy(_base(seed))
    before, eight, alike = sampled(policy, seed)
    sign = -1.0 if arm == "sign flipped" else 1.0

    def scorer(played: Rollout, ctx: object) -> torch.Tensor:
        digits = [prompt[:6] - DIGIT for prompt in played.prompts.ids_BT]
        sums = [[d[0] + 10 * d[1], d[3] + 10 * d[4]] for d in digits]
        pairs = _with(played.completions, answers(np.array(sums)), played.samples)
        return torch.tensor([sign * np.array_equal(c.ids, answer) for c, answer in pairs])

    objective = GRPO(max_new=6, group=GROUP)
    objective.scorer = scorer  # pyright: ignore
    learner = engine(policy, objective, steps, 3e-4, seed, tokenizer=Letters(V))
    draw = np.random.default_rng(seed + 500)
    for _ in range(steps):
        learner.step(prompts(asked(problems(PROBLEMS, False, draw))))
    after, eight_after, _ = sampled(policy, seed + 1)
    return {
        "pass@1 before": before,
        "pass@1": after,
        "pass@8 before": eight,
        "pass@8 lost": eight - eight_after,
        "groups without signal before": alike,
    }


GATES = [Gate("pass@1 before", 0.2, 0.6), Gate("pass@1", low=0.85), Gate("pass@8 lost", high=0.03)]
PROOF = Proof(
    "G1",
    "GRPO with a checkable reward: a model that adds right in a third of its samples comes to 85 % on held-out sums",
    "pass@1 at temperature 1 at least .85, pass@8 no more than 3 points lower; with the sign flipped it falls",
    run,
    [Arm("reward", GATES), Arm("sign flipped", GATES, control=True)],
)
