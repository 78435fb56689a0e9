"""P1 in small: PPO against a reference that is exactly uniform, where the optimum is known in closed form.

Eight tokens, eight to a completion, no stop; the reward is the number of a's. The best policy at price beta draws an a
with chance e^(1/beta) / (e^(1/beta) + 7) everywhere, whatever came before.
"""

import math

import pytest
import torch

from ingot.objectives.ppo import PPO
from ingot.objectives.rollout import roll_out
from tests.objectives.rl_helpers import count_a, play, policy, prompts

LENGTH, BETA = 8, 0.5
PROMPTS = prompts([[7]] * 128)


def closed_form(beta: float) -> tuple[float, float, float]:
    """Reward, KL in nats and J = reward - beta KL of the best policy."""
    a = math.exp(1 / beta) / (math.exp(1 / beta) + 7)
    other = (1 - a) / 7
    kl = LENGTH * (a * math.log(8 * a) + 7 * other * math.log(8 * other))
    return LENGTH * a, kl, LENGTH * a - beta * kl


@pytest.mark.parametrize(
    ("beta", "table"),
    [
        (1, (2.238, 0.681, 1.557)),
        (0.5, (4.108, 3.520, 2.348)),
        (0.35, (5.706, 7.378, 3.124)),
        (0.25, (7.091, 12.03, 4.082)),
    ],
)
def test_P1_the_closed_form_is_the_table(beta, table):
    assert closed_form(beta) == pytest.approx(table, abs=6e-3)


def reached(engine) -> tuple[float, float]:
    """Exact reward and KL given the prefixes of fresh completions: sums over the whole vocabulary at every place."""
    played = roll_out(PROMPTS, engine.context(10**6), samples=4, max_new=LENGTH, temperature=1.0)
    rows = played.batch.to("cpu")
    with torch.no_grad():
        logp = engine.model.logits(engine.model(rows.ids_BT).hidden).log_softmax(-1)[rows.labels_BT != rows.ignore]
    kl = (logp.exp() * (logp + math.log(8))).sum(-1)
    return LENGTH * logp[:, 1].exp().mean().item(), LENGTH * kl.mean().item()


def trained(path, steps: int, scorer=count_a, **options):
    model = policy()
    with torch.no_grad():
        model.head.weight.zero_()
    objective = PPO(max_new=LENGTH, beta=BETA, lam=1.0, **options)
    engine = play(objective, path, model=model, steps=steps, lr=3e-3, scorer=lambda p, c: scorer(p, c))
    for _ in range(steps):
        engine.step(PROMPTS)
    return engine


def test_P1_ppo_comes_near_the_frontier_and_a_flipped_reward_does_not(tmp_path):
    best = closed_form(BETA)[2]
    found_reward, found_kl = reached(trained(tmp_path, 60))
    j = found_reward - BETA * found_kl
    print(found_reward, found_kl, j, best)
    assert j >= 0.9 * best
    flipped, _ = reached(trained(tmp_path / "control", 20, scorer=lambda p, c: -count_a(p, c)))
    assert flipped < 0.7
