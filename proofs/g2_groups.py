"""G2: the effect of a group baseline on the expected gradient, by enumeration of all groups.

A bandit with four arms and groups of three has 64 groups, each with its probability, its advantages and the gradient of
ingot's loss. The expected gradient is compared with the gradient of the expected reward.
"""

import itertools
from collections.abc import Mapping

import torch

from ingot.objectives.advantages import group_advantages
from ingot.objectives.policy import aggregate, policy_loss
from proofs.proof import Arm, Gate, Proof

ARMS, GROUP = 4, 3
SETTINGS: Mapping[str, tuple[str, bool]] = {
    "mean of the group": ("mean", False),
    "mean of the others": ("others", False),
    "divided by the spread": ("mean", True),
}


def run(seed: int, arm: str) -> dict[str, float]:
    baseline, standardise = SETTINGS[arm]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ARMS, generator=generator, dtype=torch.float64, requires_grad=True)
    reward = torch.randn(ARMS, generator=generator, dtype=torch.float64)
    true = torch.autograd.grad((logits.softmax(0) * reward).sum(), logits)[0]
    expected = torch.zeros_like(true)
    for group in itertools.product(range(ARMS), repeat=GROUP):
        actions = torch.tensor(group)
        logp_B1 = logits.log_softmax(0)[actions][:, None]
        advantages_B1 = group_advantages(reward[actions][None], baseline, standardise).T
        loss_B1 = policy_loss((logp_B1 - logp_B1.detach()).exp(), advantages_B1, 0.2, 0.2)
        term = aggregate(loss_B1, torch.ones_like(loss_B1, dtype=torch.bool), "token", 1)
        probability = logp_B1.detach().sum().exp()
        expected -= probability * torch.autograd.grad(term.sum / GROUP, logits)[0]
    factor = float(expected @ true / (true @ true))
    return {"factor": factor, "off the direction": float((expected - factor * true).norm() / expected.norm())}


PARALLEL = Gate("off the direction", high=1e-9)
GROUP_FACTOR = Gate("factor", (GROUP - 1) / GROUP - 1e-9, (GROUP - 1) / GROUP + 1e-9)
PROOF = Proof(
    "G2",
    "With the group's mean as baseline the gradient is the policy gradient times a known factor, with the mean of the "
    "others it is the policy gradient",
    "factor (G - 1) / G and 1, to 1e-9: enumeration of all groups (G = 3, four arms)",
    run,
    [
        Arm("mean of the group", [GROUP_FACTOR, PARALLEL]),
        Arm("mean of the others", [Gate("factor", 1 - 1e-9, 1 + 1e-9), PARALLEL]),
        Arm("divided by the spread", [GROUP_FACTOR, PARALLEL], control=True),
    ],
)
