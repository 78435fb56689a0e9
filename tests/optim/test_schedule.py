"""The learning rate by step: the numbers of D5, and what holds for every schedule."""

import itertools
import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ingot.core.errors import UserError
from ingot.optim.schedule import SHAPES, Schedule, schedule
from ingot.optim.settings import OptimSettings, ScheduleKind

KINDS = get_args(ScheduleKind)


def test_D5_warmup() -> None:
    warm = Schedule("cosine", 3e-4, 3e-5, 1000, 10_000)
    assert warm.lr(1) == pytest.approx(3e-7)
    assert warm.lr(500) == pytest.approx(1.5e-4)
    assert warm.lr(1000) == pytest.approx(3e-4)


def test_D5_source_error_zero_based_steps_waste_the_first_update() -> None:
    """All zero-based listings have lr 0 on the first update (003: learning_rate * it / warmup_iters at it = 0)."""
    assert 6e-4 * 0 / 2000 == 0
    for kind in KINDS:
        assert schedule(OptimSettings(lr=6e-4, schedule=kind, warmup=2000), 600_000, 768).lr(1) == pytest.approx(3e-7)


def test_D5_source_error_torchs_linear_warmup_from_zero_raises() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1)
    with pytest.raises(ValueError, match="Starting multiplicative factor"):
        torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.0)
    assert Schedule("linear", 3e-4, 0, 1000, 10_000).lr(0) == 0 < Schedule("linear", 3e-4, 0, 1000, 10_000).lr(1)


def test_D5_cosine_start_half_end_and_floor() -> None:
    cosine = Schedule("cosine", 3e-4, 1e-5, 0, 1000)
    assert [cosine.lr(t) for t in (0, 500, 1000)] == pytest.approx([3e-4, 1.55e-4, 1e-5])


def test_D5_source_error_schedules_that_climb_again_past_the_end() -> None:
    """000, 001 and 002 have no floor: half a period later their cosine is back at the peak."""
    assert 1e-5 + 0.5 * (3e-4 - 1e-5) * (1 + math.cos(math.pi * 2000 / 1000)) == pytest.approx(3e-4)
    cosine = Schedule("cosine", 3e-4, 1e-5, 0, 1000)
    assert cosine.lr(1500) == cosine.lr(2000) == cosine.lr(10**6) == pytest.approx(1e-5)


def test_D5_source_error_the_jump_at_the_joint() -> None:
    """t / T instead of (t - W) / (D - W) would drop to 2.929e-4 right after the warmup."""
    cosine = Schedule("cosine", 3e-4, 0, 1000, 10_000)
    assert cosine.lr(1000) - cosine.lr(1001) < 1e-10
    wrong = 1e-5 + 0.5 * (3e-4 - 1e-5) * (1 + math.cos(math.pi * 1000 / 10_000))
    assert wrong == pytest.approx(2.929e-4, abs=1e-7)


def test_D5_gpt2_600k() -> None:
    run = schedule(OptimSettings(lr=6e-4, warmup=2000), 600_000, 768)
    thousands = (50, 100, 200, 300, 400, 500)
    expected = (5.915e-4, 5.650e-4, 4.666e-4, 3.314e-4, 1.958e-4, 0.964e-4)
    assert [run.lr(1000 * k) for k in thousands] == pytest.approx(expected, abs=5e-8)
    assert run.lr(600_000) == pytest.approx(6e-5)  # minimum = peak / 10


def test_D5_source_error_003s_chart_is_not_its_function() -> None:
    """Its chart has 5.4, 4.2, 3.0 and 1.8e-4 at 100k to 400k: up to 10 % from its own formula."""
    run = Schedule("cosine", 6e-4, 6e-5, 2000, 600_000)
    off = [chart / run.lr(1000 * k) - 1 for k, chart in ((100, 5.4e-4), (200, 4.2e-4), (300, 3e-4), (400, 1.8e-4))]
    assert max(abs(x) for x in off) == pytest.approx(0.10, abs=0.005)


def test_D5_linear_and_constant() -> None:
    linear = Schedule("linear", 3e-4, 0.0, 0, 100)
    assert [linear.lr(t) for t in (25, 50, 99)] == pytest.approx([3e-4 * (1 - t / 100) for t in (25, 50, 99)])
    assert Schedule("constant", 1.0, 0.1, 10, 100).lr(5) == pytest.approx(0.5)
    assert Schedule("constant", 1.0, 0.1, 10, 100).lr(10**6) == 1.0


def test_D5_warmup_stable_decay() -> None:
    optim = OptimSettings(lr=1.0, schedule="wsd", warmup=100, cooldown=0.2, min_ratio=0.1)
    wsd = schedule(optim, 1000, 768)
    assert {wsd.lr(t) for t in range(100, 801)} == {1.0}
    assert [wsd.lr(t) for t in (900, 1000, 2000)] == pytest.approx([0.55, 0.1, 0.1])
    other = schedule(OptimSettings(lr=1.0, schedule="wsd", cooldown=50, cooldown_shape="sqrt", min_ratio=0), 1000, 768)
    assert [other.lr(t) for t in (950, 962.5, 1000)] == pytest.approx([1.0, 0.5, 0.0])
    assert schedule(OptimSettings(lr=1.0, schedule="wsd", cooldown=5000), 1000, 768).lr(510) < 1  # from the warmup on


def test_D5_inverse_square_root() -> None:
    """Vaswani et al. 2017, eq. 3: min(t^-0.5, t W^-1.5), here with its top, W^-0.5, at the peak."""
    run = schedule(OptimSettings(lr=1.0, schedule="inverse-sqrt", warmup=4000), 100_000, 512)
    for t in (1, 1000, 4000, 16_000, 100_000):
        assert run.lr(t) == pytest.approx(min(t**-0.5, t * 4000**-1.5) / 4000**-0.5)
    floored = schedule(OptimSettings(lr=1.0, schedule="inverse-sqrt", warmup=10, min_ratio=0.5), 100_000, 512)
    assert floored.lr(10_000) == floored.lr(10**7) == 0.5


def test_D5_the_decay_may_end_elsewhere_than_the_run() -> None:
    for kind in ("cosine", "linear", "wsd"):
        short = schedule(OptimSettings(lr=1.0, schedule=kind, decay_steps=4000), 10_000, 768)
        assert short.lr(3999) > short.lr(4000) == short.lr(10_000) == pytest.approx(0.1)
        long = schedule(OptimSettings(lr=1.0, schedule=kind, decay_steps=40_000), 10_000, 768)
        assert long.lr(10_000) > 0.5


def test_a_share_of_the_steps_does_not_outlast_the_decay() -> None:
    settings = OptimSettings(lr=1.0, warmup=0.5, decay_steps=100)
    assert schedule(settings, 100, 768).lr(100) == pytest.approx(0.1)
    with pytest.raises(UserError, match="found decay_steps = 100 and a warmup of 500 steps, expected the floor"):
        schedule(settings, 1000, 768)


def test_D5_peaks_by_size() -> None:
    """6e-4 at 124M, 3e-4 at 7B, 1.5e-4 at 65B, by the square root of the width, to a quarter; E1: a tenth with init."""
    for width, peak in ((768, 6e-4), (4096, 3e-4), (8192, 1.5e-4)):
        assert schedule(OptimSettings(), 1000, width).peak == pytest.approx(peak, rel=0.25)
    assert schedule(OptimSettings(), 1000, 768, finetune=True).peak == pytest.approx(6e-5)
    assert schedule(OptimSettings(kind="lion"), 1000, 768).peak == pytest.approx(1.2e-4)  # 3 to 10 times below Adam's
    assert (
        schedule(OptimSettings(), 10_000, 768).warmup == 200
    )  # 2 %, within the 1 to 10 % and .1 to 1 % of the sources


@pytest.mark.parametrize(
    ("warmup", "steps"),
    [(0.01, 1000), (0.1, 10_000), (0.001, 100), (1000, 1000), (2000, 2000), (100, 100), (0, 0)],
)
def test_D5_warmup_is_a_share_or_a_number_of_steps(warmup: float, steps: int) -> None:
    """1 to 10 % (000), .1 to 1 % or 1k to 2k (002), 100 to 2,000 (004), of 100,000 steps."""
    run = schedule(OptimSettings(lr=1.0, warmup=warmup), 100_000, 768)
    assert run.warmup == steps
    assert max(range(0, 20_000, 50), key=run.lr) == steps


@st.composite
def runs(draw: Any) -> tuple[Schedule, int]:
    """Schedules as recipes make them: any kind, warmup, floor, decay, even longer than the run."""
    kind = draw(st.sampled_from(KINDS))
    steps = draw(st.integers(1, 300))
    table: dict[str, Any] = {"schedule": kind, "lr": 1.0}
    table["warmup"] = draw(st.one_of(st.floats(0, 0.99), st.integers(1, 400)))
    if kind != "constant":
        table["min_ratio"] = draw(st.floats(0, 1))
    if kind in ("cosine", "linear", "wsd"):
        table["decay_steps"] = draw(st.one_of(st.none(), st.integers(1, 600)))
    if kind == "wsd":
        table["cooldown"] = draw(st.one_of(st.floats(0.01, 0.99), st.integers(1, 400)))
        table["cooldown_shape"] = draw(st.sampled_from(sorted(SHAPES)))
    try:
        return schedule(OptimSettings(**table), steps, 768), steps
    except (ValidationError, UserError):
        assume(False)
        raise


@settings(max_examples=150, deadline=None)
@given(runs())
def test_D5_every_schedule_is_continuous_moves_at_once_and_never_climbs_again(run: tuple[Schedule, int]) -> None:
    plan, steps = run
    joints = {plan.warmup, plan.end, plan.end - plan.cooldown} if plan.warmup < plan.end else {plan.warmup}
    for joint in (j for j in joints if j > 0):
        # 1 - sqrt(p) has no slope bound at its start, so its gap shrinks by the root: 1e-10 becomes 1e-5
        assert abs(plan.lr(joint + 1e-10) - plan.lr(joint - 1e-10)) < 2e-5
    rates = [plan.lr(t) for t in range(1, steps + 50)]
    assert rates[0] > 0
    after = [plan.lr(t) for t in range(max(1, plan.warmup), plan.warmup + steps + 700)]
    assert all(b <= a for a, b in itertools.pairwise(after))
    assert plan.lr(plan.end + 1) == plan.lr(plan.end + 10**6) or plan.warmup >= plan.end
    assert max(rates) <= 1.0
    assert min(after) >= plan.floor


def test_the_property_sees_the_jump_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with t / T the same property fails."""
    wrong = lambda s, t: t / s.warmup if t < s.warmup else 0.5 * (1 + math.cos(math.pi * min(1, t / s.end)))  # noqa: E731
    monkeypatch.setattr(Schedule, "lr", wrong)
    plan = Schedule("cosine", 1.0, 0.0, 100, 1000)
    assert abs(plan.lr(100 + 1e-10) - plan.lr(100 - 1e-10)) > 0.02
