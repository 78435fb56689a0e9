"""P1: PPO with an exactly uniform reference, for which the optimal policy is known in closed form.

The vocabulary has eight tokens, a completion has eight tokens and no stop, and the reward is the number of a's. The
optimal policy for a KL weight beta samples an a with probability e^(1/beta) / (e^(1/beta) + 7) at every position.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from ingot.objectives.on_policy_settings import PPOSettings
from ingot.objectives.ppo import PPO
from ingot.objectives.rollout import Rollout, roll_out
from proofs.figures import chart
from proofs.proof import Arm, Gate, Numbers, Proof
from proofs.worlds import Letters, engine, frozen, logits, model, prompts

V, LENGTH, STEPS = 8, 8, 150
PROMPTS = prompts([[7]] * 128)
BETAS = (1.0, 0.5, 0.35, 0.25)


def closed_form(beta: float) -> tuple[float, float]:
    """Reward and KL in nats of the optimal policy."""
    a = math.exp(1 / beta) / (math.exp(1 / beta) + V - 1)
    other = (1 - a) / (V - 1)
    return LENGTH * a, LENGTH * (a * math.log(V * a) + (V - 1) * other * math.log(V * other))


def best_reward(kl: float) -> float:
    """The highest reward of a policy with that KL, by bisection over 1 / beta."""
    low, high = 1e-3, 1e3
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if closed_form(1 / min(middle, 700))[1] < kl else (low, middle)
    return closed_form(1 / low)[0]


def count_a(rollout: Rollout, ctx: object) -> torch.Tensor:
    """The number of a's (id 1) in each completion."""
    return torch.tensor([float((c.ids == 1).sum()) for c in rollout.completions])


def train_ppo(
    seed: int, beta: float, kl: str, steps: int, updates: tuple[int, int], scorer: Callable[..., torch.Tensor] = count_a
) -> Numbers:
    """Train from the uniform policy and compare with the optimal policy.

    The measured reward and KL are exact sums over the vocabulary at every position of new completions.

    Args:
        updates: epochs and minibatches per step.
    """
    policy = model(V, 24, seed, depth=1, width=32, uniform=True)
    epochs, minibatches = updates
    settings = {"max_new": LENGTH, "beta": beta, "kl": kl, "lam": 1.0, "whiten": False}
    objective = PPO(PPOSettings(reward="rm", epochs=epochs, minibatches=minibatches, **settings))
    objective.scorer = scorer  # pyright: ignore
    companions, letters = {"reference": frozen(policy)}, Letters(V, ends=False)
    learner = engine(policy, objective, steps, 3e-3, seed, companions=companions, tokenizer=letters)
    for _ in range(steps):
        learner.step(PROMPTS)
    rollout = roll_out(PROMPTS, learner.context(10**6), samples=4, max_new=LENGTH, temperature=1.0)
    logp_NV = logits(policy, rollout.batch).log_softmax(-1)[torch.from_numpy(rollout.batch.labels_BT != -100)]
    reward = LENGTH * logp_NV[:, 1].exp().mean().item()
    nats = LENGTH * (logp_NV.exp() * (logp_NV + math.log(V))).sum(-1).mean().item()
    optimal_reward, optimal_nats = closed_form(beta)
    return {
        "reward": reward,
        "kl": nats,
        "J / J*": (reward - beta * nats) / (optimal_reward - beta * optimal_nats),
        "kl / kl*": nats / optimal_nats,
        "reward / frontier": reward / best_reward(nats),
    }


def _negative(rollout: Rollout, ctx: object) -> torch.Tensor:
    return -count_a(rollout, ctx)


def run(seed: int, arm: str, steps: int = STEPS) -> Numbers:
    if arm == "reward flipped":
        return train_ppo(seed, 0.5, "k1-reward", steps // 3, (2, 4), _negative)
    return train_ppo(seed, float(arm.removeprefix("beta ")), "k1-reward", steps, (2, 4))


def figure(by_arm: Mapping[str, Sequence[Numbers]]) -> str:
    """The frontier, and the measured reward and KL for each beta."""
    curve = [closed_form(1 / (0.02 * i)) for i in range(1, 300)]
    measured = {
        arm: [(n["kl"], n["reward"]) for n in by_seed] for arm, by_seed in by_arm.items() if arm.startswith("beta")
    }
    return chart(
        "PPO and the frontier of optimal policies",
        {"closed form": [(kl, r) for r, kl in curve]},
        measured,
        "KL from the reference, nats",
        "reward",
    )


GATES = [Gate("J / J*", low=0.97), Gate("kl / kl*", 0.9, 1.1), Gate("reward / frontier", low=0.95)]
PROOF = Proof(
    "P1",
    "PPO finds the optimal policy for each weight of the KL",
    "closed form: reward 2.238 / 4.108 / 5.706 / 7.091 at 0.681 / 3.520 / 7.378 / 12.03 nats",
    run,
    [*(Arm(f"beta {beta:g}", GATES) for beta in BETAS), Arm("reward flipped", GATES, control=True)],
    figure=figure,
)
