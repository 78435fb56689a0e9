"""Preference and reward losses by themselves: closed forms, fixed points, and another library's numbers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.data.batches import IGNORE, Batch
from ingot.model.lm_head import LMHead
from ingot.model.transformer import ModelOut
from ingot.objectives.preference import LOSSES, Options, Preference, Unpaired, kto
from ingot.objectives.reward import bradley_terry, calibration
from ingot.objectives.settings import PreferenceSettings, UnpairedSettings
from ingot.train.divergences import log1mexp
from ingot.train.execution import Execution
from ingot.train.objective import Context
from ingot.train.runner import Runner

GOLDEN = json.loads((Path(__file__).parent / "trl.json").read_text())
"""Inputs and outputs of trl 1.10's trainers (DPO, KTO, CPO, ORPO, Reward) on seeded tensors in fp64, ORPO's in fp32."""


def _golden_batch() -> tuple[Batch, torch.Tensor, np.ndarray]:
    """The golden rows in our order (their first half is the chosen sides), their logits, and the order."""
    ids, mask = np.array(GOLDEN["ids"]), np.array(GOLDEN["completion_mask"])
    order = np.arange(len(ids)).reshape(2, -1).T.reshape(-1)
    labels = np.full_like(ids, IGNORE)
    labels[:, :-1] = np.where(mask[:, 1:] == 1, ids[:, 1:], IGNORE)
    lengths = np.array([n for pair in GOLDEN["lengths"] for n in pair])
    columns = {"lengths_B": lengths, "reference_logps_B": np.array(GOLDEN["reference_logps"])[order]}
    ids, labels = ids[order], labels[order]
    place = np.zeros_like(ids)
    return (
        Batch(ids, labels, place, None, place[:, 0], place[:, 0], columns=columns, group=2),
        torch.tensor(GOLDEN["logits"], dtype=torch.float64),
        order,
    )


def _slopes(gradient: torch.Tensor) -> list[float]:
    """The gradient along three fixed directions."""
    n = torch.arange(gradient.numel(), dtype=torch.float64)
    return [float((gradient.flatten() * torch.sin(n * (k + 1) * 0.7 + k)).sum()) for k in range(3)]


@pytest.mark.parametrize("case", GOLDEN["losses"], ids=lambda c: "-".join(str(v) for v in list(c.values())[:-2]))
def test_2_5_every_loss_and_its_gradient_equal_trl(case) -> None:
    options = {k: v for k, v in case.items() if k not in ("kind", "value", "slopes", "zero")}
    batch, logits, order = _golden_batch()
    if case["kind"] == "kto":
        objective: Preference | Unpaired = Unpaired(UnpairedSettings(**options))
        batch.columns["kl_zero_B"] = np.full(len(batch), max(0.0, case["zero"]))  # type: ignore[index]
    else:
        objective = Preference(PreferenceSettings(**options))
    batch, counts = batch.to("cpu"), batch.counts()
    logits.requires_grad_(True)
    head = LMHead(torch.eye(logits.shape[-1], dtype=logits.dtype))
    execution = Execution("cpu", "fp64", 1, len(batch), "test")
    ctx = Context(1, 0, torch.nn.Identity(), execution, Runner(execution))
    term = objective.loss(ModelOut(logits[order], head, {}), batch, ctx)["preference"]
    loss = term.sum / counts[term.unit]
    loss.backward()
    tight = 1e-5 if case.get("loss") == "orpo" else 1e-12
    assert loss.item() == pytest.approx(case["value"], rel=tight)
    assert _slopes(logits.grad) == pytest.approx(case["slopes"], rel=max(tight, 1e-9), abs=tight)


@pytest.mark.parametrize("case", GOLDEN["reward_losses"], ids=lambda c: f"{c['margin']}-{c['centering']}")
def test_2_2_the_loss_and_its_gradient_equal_trl(case) -> None:
    reward = torch.tensor(GOLDEN["rewards"], dtype=torch.float64, requires_grad=True)
    chosen, rejected = reward.chunk(2)
    loss = bradley_terry(chosen, rejected, case["margin"]).mean()
    loss = loss + case["centering"] * (chosen + rejected).square().mean()
    loss.backward()
    assert loss.item() == pytest.approx(case["value"], rel=1e-12)
    assert reward.grad.tolist() == pytest.approx(case["gradient"], abs=1e-14)


# -- closed forms ------------------------------------------------------------------------------------------------------

H = torch.linspace(-9, 9, 61, dtype=torch.float64)


def test_2_5_closed_forms_of_h() -> None:
    o = Options(beta=0.7, label_smoothing=0.15, gamma=0.4)
    s = 1 / (1 + np.exp(-0.7 * H.numpy()))
    forms = {
        "sigmoid": -0.85 * np.log(s) - 0.15 * np.log(1 - s),
        "robust": (-0.85 * np.log(s) + 0.15 * np.log(1 - s)) / 0.7,
        "ipo": (H.numpy() - 1 / 1.4) ** 2,
        "hinge": np.maximum(0, 1 - 0.7 * H.numpy()),
        "simpo": np.log1p(np.exp(-(0.7 * H.numpy() - 0.4))),
        "orpo": 0.7 * np.log1p(np.exp(-H.numpy())),
        "cpo": -0.85 * np.log(s) - 0.15 * np.log(1 - s),
    }
    assert forms.keys() == LOSSES.keys()
    for name, right in forms.items():
        assert LOSSES[name](H, o).numpy() == pytest.approx(right, rel=1e-10), name


def test_2_5_losses_are_convex_and_fall_where_they_should() -> None:
    """A sign that was turned round would show: every loss is lower for the pair that is ranked rightly."""
    for name, loss in LOSSES.items():
        assert float(loss(torch.tensor([3.0]), Options(1.0))) < float(loss(torch.tensor([-3.0]), Options(1.0))), name


def test_2_5_log1mexp_keeps_its_digits_near_zero() -> None:
    for x in (-1e-20, -1e-8, -1e-3, -0.5, -0.7, -5.0, -80.0):
        right = math.log(-math.expm1(x))
        assert float(log1mexp(torch.tensor(x, dtype=torch.float32))) == pytest.approx(right, rel=1e-5, abs=1e-30)
    x = torch.tensor([0.0, -1e-30, -1e-5, -100.0], requires_grad=True)
    log1mexp(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    naive = torch.log1p(-torch.exp(torch.tensor(-1e-8, dtype=torch.float32)))
    assert not torch.isfinite(naive)  # what others write


def _settles(loss, steps: int = 400, lr: float = 4.0) -> float:
    """Where gradient descent on h itself comes to rest."""
    h = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for _ in range(steps):
        (slope,) = torch.autograd.grad(loss(h), h)
        h = (h - lr * slope).detach().requires_grad_(True)
    return h.item()


@pytest.mark.parametrize(("error", "logit"), [(0.05, 2.944), (0.1, 2.197), (0.2, 1.386)])
def test_2_5_fixed_point_of_conservative_dpo_is_the_logit(error: float, logit: float) -> None:
    at = _settles(lambda h: LOSSES["sigmoid"](h, Options(1.0, error)))
    assert at == pytest.approx(logit, abs=1e-3)
    assert _settles(lambda h: LOSSES["sigmoid"](h, Options(1.0))) > 5  # without it the margin grows without end


@pytest.mark.parametrize("share", [1.0, 0.8, 0.6])
def test_2_5_fixed_point_of_ipo(share: float) -> None:
    """Where the chosen side wins with probability p: h = (2 p - 1) / 2 tau; for certain winners 1 / 2 tau."""
    o = Options(beta=0.25)
    at = _settles(lambda h: share * LOSSES["ipo"](h, o) + (1 - share) * LOSSES["ipo"](-h, o), steps=200, lr=0.25)
    assert at == pytest.approx((2 * share - 1) / 0.5, rel=1e-6)


@pytest.mark.parametrize("wrong", [0.1, 0.3])
def test_2_5_robust_is_unbiased_under_wrong_labels(wrong: float) -> None:
    """Its mean over labels of which that share is turned round is the loss of the true labels."""
    o = Options(0.6, wrong)
    noisy = (1 - wrong) * LOSSES["robust"](H, o) + wrong * LOSSES["robust"](-H, o)
    assert noisy.numpy() == pytest.approx(LOSSES["sigmoid"](H, Options(0.6)).numpy(), abs=1e-10)


def test_2_5_kto_by_hand_and_its_zero_point() -> None:
    ratio = torch.tensor([0.5, 0.5, -1.0, 2.0], dtype=torch.float64)
    liked = torch.tensor([True, False, True, False])
    loss = kto(ratio, liked, torch.tensor(0.5, dtype=torch.float64), Options(2.0), 1.0, 1.3)
    assert loss[:2].tolist() == [0.5, 0.65]  # at the zero point nothing is known
    assert loss[2:].tolist() == pytest.approx([1 / (1 + math.exp(-3.0)), 1.3 / (1 + math.exp(-3.0))])


# -- reward models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spread", "accuracy", "floor"),
    [(1.0, 0.725, 0.5395), (1.5, 0.787, 0.448), (2.0, 0.828, 0.375), (3.0, 0.878, 0.277), (4.0, 0.906, 0.217)],
)
def test_2_2_bayes_limits_of_bradley_terry(spread: float, accuracy: float, floor: float) -> None:
    """With the true rewards N(0, s^2) themselves, loss and accuracy are the best there are; our loss says so."""
    draw = np.random.default_rng(0)
    a, b = draw.normal(0, spread, (2, 400_000))
    first = draw.random(len(a)) < 1 / (1 + np.exp(b - a))
    chosen, rejected = np.where(first, a, b), np.where(first, b, a)
    nll = bradley_terry(torch.from_numpy(chosen), torch.from_numpy(rejected)).mean()
    assert float(nll) == pytest.approx(floor, abs=0.003)
    assert np.mean(chosen > rejected) == pytest.approx(accuracy, abs=0.003)
    found = calibration(np.stack([chosen, rejected], 1).reshape(-1), np.ones(2 * len(a)))
    assert found["calibration_error"] < 0.005  # the truth is calibrated
    overconfident = calibration(3 * np.stack([chosen, rejected], 1).reshape(-1), np.ones(2 * len(a)))
    assert overconfident["calibration_error"] > 0.05


def test_2_2_canary_a_constant_reward_costs_ln_2() -> None:
    constant = torch.full((5,), 3.7, dtype=torch.float64)
    assert bradley_terry(constant, constant).tolist() == pytest.approx([math.log(2)] * 5, abs=1e-15)


def test_2_2_calibration_of_a_reward_model() -> None:
    reward = np.array([2.0, 1.0, 0.0, 1.0, 3.0, 3.0, 5.0, 0.0])
    length = np.array([4, 2, 0, 2, 6, 6, 10, 0])
    found = calibration(reward, length)
    assert (found["reward_mean"], found["reward_std"]) == (2.5, pytest.approx(np.std(reward, ddof=1)))
    assert found["length_correlation"] == pytest.approx(1.0)
    assert found["calibration/0.7-0.8/pairs"] == 2  # |delta| = 1: one right, one wrong
    assert found["calibration/0.7-0.8/chosen"] == 0.5
    assert found["calibration/0.7-0.8/predicted"] == pytest.approx(1 / (1 + math.exp(-1)))
    assert found["calibration/0.5-0.6/chosen"] == 0.5  # level: half
    assert found["calibration/0.9-1/pairs"] == 1
    assert sum(v for name, v in found.items() if name.endswith("/pairs")) == 4
    alike = calibration(
        np.array([5.0, -1.0, 5.0, -1.0]), length[:4]
    )  # good answers are: their own spread would be no unit
    assert alike["reward_std"] == pytest.approx(6 / math.sqrt(3))
    flat = calibration(np.ones(4), length[:4])
    assert (flat["reward_std"], flat["length_correlation"]) == (1.0, 0.0)
