"""Metrics, notes and state of an objective: logged beside the loss, never part of it, and saved."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ingot.core.events import EventLog, read_events
from ingot.data.batches import Batch, all_rows
from ingot.objectives.lm import LanguageModel
from ingot.train.engine import Engine
from ingot.train.loop import train
from ingot.train.metrics import StepMetrics, merge_updates
from ingot.train.objective import Needs, Objective, Term
from ingot.train.throughput import Throughput
from tests.train.test_engine import _engine, _gradient, _ragged, _run, _text


class _Measuring(LanguageModel):
    """`lm` that measures its rows, notes the sum of its ids, counts its steps, and trains on each half in turn."""

    needs = Needs(initial_state={"steps": 0})

    def __init__(self, updates: int = 1):
        super().__init__()
        self.updates = updates

    def expand(self, batch, ctx):
        ctx.metrics["ids"] = float(batch.ids_BT.sum())
        ctx.state["steps"] += 1
        half = len(batch) // self.updates
        for start in range(0, len(batch), half):
            yield batch._map(lambda array, part=slice(start, start + half): array[part])

    def loss(self, out, batch, ctx):
        rows = torch.ones(int((batch.labels_BT != batch.ignore).any(1).sum())).sum()
        return super().loss(out, batch, ctx) | {"double": Term(2 * rows, "sequence", metric=True)}


def _measuring(path, updates=1, **options) -> Engine:
    plain = _engine(path, **options)
    return Engine(plain.model, _Measuring(updates), plain.plan, plain.execution, plain.mesh, path)


@pytest.mark.parametrize("micro", [16, 3])
def test_a_metric_changes_neither_gradient_nor_loss(tmp_path, micro):
    batch = _ragged()
    plain, measuring = _engine(tmp_path, micro=micro), _measuring(tmp_path, micro=micro)
    assert torch.equal(_gradient(plain, batch), _gradient(measuring, batch))
    loss, counts, others = measuring.gradients(batch)
    assert (loss, counts) == plain.gradients(batch)[:2]
    assert float(others["double"]) == pytest.approx(2.0, rel=1e-6)


def test_metrics_and_notes_of_a_step_are_logged(tmp_path, make_store):
    _run(_measuring(tmp_path, precision="fp32", micro=8, steps=2, log_every=1), _text(make_store), tmp_path)
    for event in read_events(tmp_path / "metrics.jsonl", "step"):
        assert event["double"] == pytest.approx(2.0)
        assert event["ids"] > 0


def test_numbers_of_a_step_with_several_updates(tmp_path):
    """Mean loss, largest norm, all tokens; the weights move at each update."""
    batch = _ragged(1)
    engine = _measuring(tmp_path, updates=2)
    halves = list(replace(batch).micro_batches(8))
    first = engine.gradients(halves[0])[0]
    step = engine.step(batch)
    assert step.tokens == step.tokens_seen == engine.state["tokens"] == batch.counts()["token"]
    assert engine.state["step"] == 1
    assert float(step.loss) != float(first)
    alone = _measuring(tmp_path)
    one = alone._update(1, alone.plan.schedule.lr(1), halves[0], 0)
    two = alone._update(1, alone.plan.schedule.lr(1), halves[1], 1)
    assert float(step.loss) == pytest.approx(float(one.loss + two.loss) / 2, rel=1e-12)
    assert float(step.grad_norm) == float(torch.maximum(one.grad_norm, two.grad_norm))


def test_an_evaluation_goes_through_expand_and_keeps_nothing(tmp_path):
    engine = _measuring(tmp_path)
    batch = _ragged()
    loss, counts, measured = engine.evaluate([batch, *batch.micro_batches(4)])[:3]
    plain = _engine(tmp_path).evaluate([batch])
    assert (loss, counts["token"]) == (pytest.approx(plain[0], rel=1e-12), 2 * plain[1]["token"])
    assert measured["double"] == pytest.approx(2.0)
    quarters = [float(part.ids_BT.sum()) for part in batch.micro_batches(4)]
    assert measured["ids"] == pytest.approx((16 * sum(quarters) + 4 * sum(quarters)) / 32)
    assert engine.state["objective"] == {"steps": 0}


def test_the_state_of_an_objective_is_declared_saved_and_restored(tmp_path):
    engine = _measuring(tmp_path)
    for _ in range(3):
        engine.step(_ragged())
    engine.training_state.save()
    again = _measuring(tmp_path)
    assert again.state["objective"] == {"steps": 0}
    assert again.training_state.resume(print)
    assert again.state["objective"] == {"steps": 3}
    again.state["objective"]["secret"] = 1
    with pytest.raises(AssertionError, match=r"undeclared state: \{'secret'\}"):
        again.training_state.save()


def test_the_best_weights_are_those_of_the_lowest_loss_unless_an_objective_needs_another_metric():
    for objective in (Objective, LanguageModel):
        assert (objective.needs.best_metric, objective.needs.higher_is_better) == ("loss_nats", False)


def test_an_update_that_overflowed_does_not_break_the_step_of_the_others() -> None:
    """In fp16 one of several updates of a step may be skipped: its norm is not the step's."""

    def update(norm: float, skipped: bool) -> StepMetrics:
        return StepMetrics(
            1, torch.tensor(math.nan if skipped else 2.0), {}, torch.tensor(norm), 1e-3, 10, 10, torch.tensor(skipped)
        )

    some = merge_updates([update(math.inf, True), update(0.5, False), update(0.25, False)], {})
    assert (float(some.grad_norm), bool(some.lost), int(some.skipped), some.tokens) == (0.5, False, 1, 30)
    assert float(some.loss) == 2.0
    assert merge_updates([update(math.nan, True), update(math.inf, True)], {}).lost


def test_the_rate_is_recent_and_the_first_step_is_no_part_of_the_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first step of 10 s, which compiles; then a step a second; and an evaluation, which counts for nothing."""
    now = [100.0]
    monkeypatch.setattr("ingot.train.throughput.time.monotonic", lambda: now[0])
    throughput = Throughput(_engine(tmp_path, "fp32", micro=8).plan)
    assert throughput.mean() == {}
    now[0] += 10
    throughput.add(1000)
    assert throughput.recent() == 100
    assert throughput.mean() == {}, "the first step alone gives no rate"
    now[0] += 0.1
    throughput.add(100)
    assert throughput.recent() == pytest.approx(1000), "the rate of the first step is replaced at once"
    for _ in range(2):
        now[0] += 1
        throughput.add(1000)
    with throughput.paused("evaluation"):
        now[0] += 50
    assert throughput.recent() == 1000
    now[0] += 0.1
    throughput.add(1000)
    assert throughput.recent() == 1000, "a moment is too short to measure"
    assert throughput.mean() == {"tok_s": round(3100 / 2.2)}


def test_evaluations_are_no_part_of_the_rate(tmp_path: Path, make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second a step and 50 s an evaluation, by a clock that the test moves."""
    now, tokens = [100.0], []
    monkeypatch.setattr("ingot.train.throughput.time.monotonic", lambda: now[0])
    engine = _engine(tmp_path, "fp32", micro=8)

    def batches() -> Iterator[Batch]:
        for batch in itertools.islice(itertools.cycle(all_rows(_text(make_store), 8)), engine.plan.steps):
            now[0] += 1
            tokens.append(batch.counts()["token"])
            yield batch

    def evaluation(step: int, complete: bool) -> dict[str, float]:
        now[0] += 50
        return {"val_loss_nats": 1.0}

    with contextlib.closing(EventLog(tmp_path / "metrics.jsonl")) as log:
        final = train(engine, lambda first: batches(), evaluation, log, lambda metrics, rate: None)
    assert final["tok_s"] == round(sum(tokens[1:]) / (engine.plan.steps - 1))


def test_the_time_left_is_known_after_twenty_steps(tmp_path: Path, make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the test moves: 30 s of compilation, 0.1 s a row, evaluations of 5 s, and the batch grows."""
    now, shown = [100.0], {}
    monkeypatch.setattr("ingot.train.throughput.time.monotonic", lambda: now[0])
    engine = _engine(tmp_path, "fp32", micro=8)
    steps = 400
    work = [0, *itertools.accumulate(8 if step <= 200 else 24 for step in range(1, steps + 1))]
    engine.plan = replace(engine.plan, steps=steps, evaluate_every=15, work=work.__getitem__)
    monkeypatch.setattr(engine, "step", _instant_step(engine))
    monkeypatch.setattr(engine.training_state, "save", lambda: None)

    def batches() -> Iterator[int]:
        for step in range(1, steps + 1):
            now[0] += 0.1 * (work[step] - work[step - 1]) + (30 if step == 1 else 0)
            yield step

    def evaluation(step: int, complete: bool) -> dict[str, float]:
        now[0] += 5
        return {}

    def progress(m: StepMetrics, throughput: Throughput) -> None:
        shown[m.step] = now[0], throughput.seconds_left(m.step)

    with contextlib.closing(EventLog(tmp_path / "metrics.jsonl")) as log:
        train(engine, lambda first: batches(), evaluation, log, progress)
    assert shown[1][1] is None, "the first step alone gives no estimate"
    for step in (2, 20, 200, 399):
        at, left = shown[step]
        assert left == pytest.approx(now[0] - at, rel=0.01, abs=0.1)
    logged = {e["step"]: e.get("eta_s") for e in read_events(tmp_path / "metrics.jsonl", "step")}
    assert (logged[1], logged[20]) == (None, round(shown[20][1], 1)), "`status` shows the same"


def _instant_step(engine: Engine) -> Callable[[int], StepMetrics]:
    def step(number: int) -> StepMetrics:
        engine.state["step"] = number
        return StepMetrics(number, torch.tensor(2.0), {}, torch.tensor(0.5), 1e-3, 10, 10 * number, torch.tensor(0))

    return step
