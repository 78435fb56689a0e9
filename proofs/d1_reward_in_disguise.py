"""D1: DPO's implicit reward, beta ln(policy / reference), has the same differences between answers as the true reward.

Answers are strings of eight letters, and the reference is exactly uniform. Choices are drawn by the Bradley-Terry rule
from a reward that is the sum of a weight for each letter (standard deviation 2).
"""

import itertools
import math

import numpy as np
import torch

from ingot.infer.generate import generate
from ingot.infer.sampling import Sampling
from ingot.objectives.preference import Preference
from ingot.objectives.settings import PreferenceSettings
from proofs.proof import Arm, Gate, Numbers, Proof
from proofs.worlds import bradley_terry_choices, engine, frozen, logits, model, rows

V, LENGTH, PAIRS, STEPS = 9, 8, 64, 600
START = 0
BETAS = (0.3, 1.0, 3.0)


def compared(weight: np.ndarray, n: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """n pairs of strings, the chosen one of each pair first, and their rewards; [2 n, LENGTH] and [2 n]."""
    texts = draw.integers(1, V, (2 * n, LENGTH))
    reward = weight[texts].sum(1)
    first = bradley_terry_choices(reward[0::2] - reward[1::2], draw)
    order = (np.stack([~first, first], 1) + 2 * np.arange(n)[:, None]).ravel()
    return texts[order], reward[order]


def train_dpo(seed: int, beta: float, shuffled: bool, steps: int) -> dict[str, float]:
    """Train with DPO and measure the implicit reward on new pairs.

    Args:
        shuffled: shuffle the answers of a step, so that choices carry no information.
    """
    draw = np.random.default_rng(seed)
    weight = draw.normal(0, 1, V)
    weight *= 2 / (weight[1:].std() * math.sqrt(LENGTH))
    policy = model(V, 12, seed, uniform=True)
    reference = frozen(policy)
    objective = Preference(PreferenceSettings(beta=beta))
    learner = engine(policy, objective, steps, 3e-3, seed, companions={"reference": reference}, warmup=20)
    first = math.nan
    for step in range(steps):
        texts, _ = compared(weight, PAIRS, draw)
        if shuffled:
            texts = draw.permutation(texts)
        loss = float(learner.step(rows([[START]] * len(texts), list(texts), group=2)).loss)
        first = loss if step == 0 else first
    texts, reward = compared(weight, 2000, draw)
    batch = rows([[START]] * len(texts), list(texts), group=2)
    logp_BTV = logits(policy, batch).log_softmax(-1)
    # The reference's head is 0, so each of the V ids has probability 1 / V.
    labels_BT1 = torch.from_numpy(batch.labels_BT[:, :LENGTH, None])
    ratio = logp_BTV[:, :LENGTH].gather(-1, labels_BT1).sum((1, 2)) + LENGTH * math.log(V)
    implicit = beta * (ratio[0::2] - ratio[1::2]).double().numpy()
    true = reward[0::2] - reward[1::2]
    samples = generate(policy, [[START]] * 512, Sampling(max_new=LENGTH), seed=seed)
    sample_logp_BTV = logits(policy, rows([[START]] * 512, [c.ids for c in samples]))[:, :LENGTH].log_softmax(-1)
    return {
        "first loss": first,
        "slope": float(np.polyfit(true, implicit, 1)[0]),
        "accuracy": float(np.mean(implicit > 0)),
        "kl": float((sample_logp_BTV.exp() * (sample_logp_BTV + math.log(V))).sum(-1).sum(1).mean()),
    }


def run(seed: int, arm: str, steps: int = STEPS) -> Numbers:
    by_beta = {beta: train_dpo(seed, beta, arm == "choices shuffled", steps) for beta in BETAS}
    kls = [by_beta[beta]["kl"] for beta in BETAS]
    return {
        "lowest slope": min(n["slope"] for n in by_beta.values()),
        "highest slope": max(n["slope"] for n in by_beta.values()),
        "accuracy": min(n["accuracy"] for n in by_beta.values()),
        "farthest first loss": max(abs(n["first loss"] - math.log(2)) for n in by_beta.values()),
        "least fall of KL": min(a - b for a, b in itertools.pairwise(kls)),
        **{f"kl at beta {beta:g}": kl for beta, kl in zip(BETAS, kls, strict=True)},
        **{f"slope at beta {beta:g}": by_beta[beta]["slope"] for beta in BETAS},
    }


GATES = [
    Gate("lowest slope", low=0.8),
    Gate("highest slope", high=1.2),
    Gate("accuracy", low=0.80),
    Gate("farthest first loss", high=1e-4),
    Gate("least fall of KL", low=0.0),
]
PROOF = Proof(
    "D1",
    "DPO's implicit reward equals the reward that the choices were drawn from; a larger beta stays closer",
    "slope 1 of beta h against the true difference; Bayes accuracy .828; first loss ln 2; KL falls with beta",
    run,
    [Arm("beta 0.3, 1, 3", GATES), Arm("choices shuffled", GATES, control=True)],
)
