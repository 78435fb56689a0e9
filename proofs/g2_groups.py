"""G2: what a group as its own baseline does to the gradient, by going through every group there is.

A bandit with four arms and groups of three: 64 groups, each with its chance, its advantages and the gradient of the
product's loss. Their mean is compared with the gradient of the expected reward.
"""

import itertools
from collections.abc import Mapping

import torch

from ingot.objectives.advantages import group_advantages
from ingot.objectives.policy import aggregated, policy_loss
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
    found = torch.zeros_like(true)
    for group in itertools.product(range(ARMS), repeat=GROUP):
        chosen = torch.tensor(group)
        logp_B1 = logits.log_softmax(0)[chosen][:, None]
        advantages_B1 = group_advantages(reward[chosen][None], baseline, standardise).T
        loss_B1 = policy_loss((logp_B1 - logp_B1.detach()).exp(), advantages_B1, 0.2, 0.2)
        term = aggregated(loss_B1, torch.ones_like(loss_B1, dtype=torch.bool), "token", 1)
        chance = logp_B1.detach().sum().exp()
        found -= chance * torch.autograd.grad(term.sum / GROUP, logits)[0]
    factor = float(found @ true / (true @ true))
    return {"factor": factor, "off the direction": float((found - factor * true).norm() / found.norm())}


EXACT = Gate("off the direction", high=1e-9)
KEPT = Gate("factor", (GROUP - 1) / GROUP - 1e-9, (GROUP - 1) / GROUP + 1e-9)
PROOF = Proof(
    "G2",
    "A group's mean as baseline gives the policy gradient but for a known factor, the mean of the others gives it",
    "factor (G - 1) / G and 1, to 1e-9: enumeration of all groups (G = 3, four arms)",
    run,
    [
        Arm("mean of the group", [KEPT, EXACT]),
        Arm("mean of the others", [Gate("factor", 1 - 1e-9, 1 + 1e-9), EXACT]),
        Arm("divided by the spread", [KEPT, EXACT], control=True),
    ],
)
