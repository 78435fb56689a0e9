"""D10, F6: time, disk and price by closed forms, and the sources' table of what stages cost."""

import pytest

from ingot.plan.cost import (
    Speed,
    Work,
    evaluation_count,
    price,
    save_count,
    stage_seconds,
    update_seconds,
)
from ingot.plan.memory import gradients_at_peak
from ingot.plan.stage_costs import STAGES


def test_a_stage_takes_its_start_its_steps_its_evaluations_and_its_checkpoints() -> None:
    speed = Speed(step_s=2.0, token_s=1e-3, sample_s=5.0, byte_s=1e-9, start_s=7.0)
    work = Work(
        steps=100,
        evaluations=11,
        evaluation_tokens=1000,
        final_tokens=4000,
        saves=3,
        checkpoint_bytes=10**9,
        best_bytes=10**8,
    )
    assert stage_seconds(speed, work) == pytest.approx(
        {"start": 7.0, "steps": 200.0, "evaluations": 11 * (1 + 5) + 4, "checkpoints": 3 + 1.1}
    )


@pytest.mark.parametrize(("steps", "every", "count"), [(100, 10, 11), (101, 10, 12), (5, 10, 2), (1, 1, 2)])
def test_evaluations_are_counted_as_the_loop_makes_them(steps: int, every: int, count: int) -> None:
    """Before the first step, after every multiple but the last step, and after the last one."""
    after = [step for step in range(1, steps) if step % every == 0]
    assert evaluation_count(steps, every) == len([0, *after, steps]) == count


def test_saves_are_those_of_the_loop() -> None:
    assert save_count(1000, 0.001, [100], 30, 600) == 10
    assert save_count(1050, 0.001, [100], 30, 600) == 11, "the last step is saved too"
    assert save_count(1000, 0.001, [100, 250], 30, 600) == 12, "250 and 750 are no multiples of 100"
    assert save_count(2000, 1.0, [10**6], 30, 600) == len([32, 94, 216, 458, 940, 1542, 2000])


def test_a_step_follows_from_steps_of_one_and_of_two_micro_batches() -> None:
    """An update of 3 s and micro-batches of 2 s."""
    assert update_seconds(5.0, 7.0, 1) == 5.0
    assert update_seconds(5.0, 7.0, 8) == 3 + 8 * 2
    assert update_seconds(5.0, 7.0, 2.5) == 3 + 2.5 * 2
    assert update_seconds(5.0, 4.9, 8) == 5.0, "noise makes no step shorter than one micro-batch"


def test_price_of_all_devices() -> None:
    assert price(7200, 8, 2.5) == 40


@pytest.mark.parametrize(("gradients", "activations", "peak"), [(100, 500, 505), (100, 97, 102), (100, 20, 100)])
def test_f2_gradients_come_as_activations_go(gradients: int, activations: int, peak: int) -> None:
    assert gradients_at_peak(gradients, head=5, activations=activations) + activations == peak


def test_f6_the_sources_table_of_stages_follows_from_the_assumptions() -> None:
    """1-3T tokens about $2M: 2T tokens are the 1.72M hours of LLaMA 2. Compute does not explain the other two."""
    pretraining, tuning, alignment = STAGES
    assert pretraining.compute(2e12) == pytest.approx(pretraining.printed, rel=0.06)
    low, high = (pretraining.compute(tokens) for tokens in pretraining.tokens)
    assert low < pretraining.printed < high
    for stage in (tuning, alignment):
        assert stage.compute(stage.tokens[1]) < 0.05 * stage.printed
        for tokens in stage.tokens:
            assert stage.compute(tokens) + stage.people == pytest.approx(stage.printed, rel=0.05)
