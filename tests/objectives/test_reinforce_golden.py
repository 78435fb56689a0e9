"""Policy and value losses against other libraries' numbers on seeded tensors in fp64 (trl 1.10.0, OpenRLHF)."""

import json
from pathlib import Path

import pytest
import torch

from ingot.data.batches import Batch
from ingot.objectives.advantages import whiten
from ingot.objectives.grpo import GRPO
from ingot.objectives.on_policy_settings import GRPOSettings
from ingot.objectives.policy import clipped, log_ratios, policy_loss, value_loss

GOLDEN = json.loads((Path(__file__).parent / "reinforce.json").read_text())
MASK = torch.tensor(GOLDEN["mask"]).bool()


def _tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _slopes(gradient: torch.Tensor) -> list[float]:
    """The gradient along three fixed directions."""
    n = torch.arange(gradient.numel(), dtype=torch.float64)
    return [float((gradient.flatten() * torch.sin(n * (k + 1) * 0.7 + k)).sum()) for k in range(3)]


@pytest.mark.parametrize("case", GOLDEN["grpo"], ids=lambda c: "-".join(str(v) for v in list(c.values())[:-2]))
def test_2_4_losses_and_gradients_equal_trl(case):
    """Each loss type, ratio level, KL and upper border of `GRPOTrainer._compute_loss`."""
    settings = {name: case[name] for name in ("aggregation", "ratio", "beta", "kl", "clip_high")}
    objective = GRPO(GRPOSettings(reward="judge", max_new=GOLDEN["length"], **settings))
    labels = torch.where(MASK, 1, -100)
    place = torch.zeros_like(labels)
    columns = {
        "old_logps_BT": _tensor(GOLDEN["old"]),
        "reference_logps_BT": _tensor(GOLDEN["reference"]),
        "advantages_BT": _tensor(GOLDEN["advantages"])[:, None].expand(MASK.shape),
    }
    batch = Batch(labels, labels, place, None, place[:, 0], place[:, 0], columns=columns)
    if not case["beta"]:
        del columns["reference_logps_BT"]
    logps = _tensor(GOLDEN["logps"]).requires_grad_()
    counts = batch.counts()
    terms = [t for t in objective.policy_terms(logps, batch).values() if not t.metric]
    loss = torch.stack([t.weight * t.sum / counts[t.unit] for t in terms]).sum()
    loss.backward()
    assert loss.item() == pytest.approx(case["value"], rel=1e-12)
    assert _slopes(logps.grad) == pytest.approx(case["slopes"], rel=1e-10)


def test_2_3_the_policy_loss_equals_openrlhf():
    golden, logps = GOLDEN["policy"], _tensor(GOLDEN["logps"]).requires_grad_()
    ratio = log_ratios(logps, _tensor(GOLDEN["old"]), MASK).exp()
    advantages = _tensor(golden["advantages"])
    loss = policy_loss(ratio, advantages, 0.2, 0.28)[MASK].mean()
    loss.backward()
    assert loss.item() == pytest.approx(golden["value"], rel=1e-12)
    assert _slopes(logps.grad) == pytest.approx(golden["slopes"], rel=1e-10)
    assert clipped(ratio, advantages, 0.2, 0.28)[MASK].double().mean().item() == pytest.approx(golden["clipped"])


def test_2_3_the_value_loss_equals_openrlhf():
    golden, values = GOLDEN["value"], _tensor(GOLDEN["value"]["values"]).requires_grad_()
    loss = value_loss(values, _tensor(golden["old"]), _tensor(golden["returns"]), 0.2)[MASK].mean()
    loss.backward()
    assert loss.item() == pytest.approx(golden["value"], rel=1e-12)
    assert _slopes(values.grad) == pytest.approx(golden["slopes"], rel=1e-10)


def test_2_3_whitening_equals_trl_but_for_n_minus_1():
    n = int(MASK.sum())
    found = whiten(_tensor(GOLDEN["whiten"]["x"]), MASK) * ((n - 1) / n) ** 0.5
    torch.testing.assert_close(found, _tensor(GOLDEN["whiten"]["out"]), rtol=0, atol=1e-7)
