"""D10: what is measured on a machine, kept, and used by later plans."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.core.errors import UserError
from ingot.model.config import ModelSettings
from ingot.pipeline.measure import OVERHEAD, SPARE, measure_job, why_not
from ingot.plan.cost import Speed, Work, stage_seconds
from ingot.plan.machine import Device
from ingot.stages.training.calibration import machine, read_speed, workload, write_speed
from ingot.stages.training.costs import costs, work_of
from ingot.stages.training.forecast import ForecastInputs, forecast
from ingot.stages.training.measure import Measurement, make_engine, measure, random_batches, tensor_peak
from ingot.stages.training.prediction import run_speed
from ingot.stages.training.settings import TrainSettings

CPU = Device("CPU", 16 * 10**9)
MODEL = {"depth": 2, "width": 64, "heads": 2, "context": 64}
BASE = {"data": {"text": 1.0}, "tokenizer": "bpe", "model": MODEL, "batch": 8, "duration": "100 steps"}
INPUTS = ForecastInputs(ModelSettings.model_validate(MODEL).resolve(300), CPU)
SPEED = Speed(step_s=2.0, token_s=1e-3, sample_s=5.0, byte_s=1e-9, start_s=7.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without speeds; compiled kernels stay where they are."""
    monkeypatch.setattr("ingot.stages.training.calibration.cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def _settings(**changes: object) -> TrainSettings:
    return TrainSettings.model_validate(BASE | changes)


def _workload(settings: TrainSettings, inputs: ForecastInputs = INPUTS) -> dict[str, Any]:
    return workload(settings, inputs, forecast(settings, inputs))


@pytest.mark.parametrize(
    "changes",
    [
        {"duration": "700 steps"},
        {"optim": {"lr": 1e-5}},
        {"loop": {"save_every": 7}},
        {"data": {"other": 1.0}},
        {"evaluate": {"tokens": 10}},
    ],
    ids=str,
)
def test_a_speed_does_not_depend_on_length_data_and_rate(changes: dict[str, Any], without_cpu_kernels: None) -> None:
    """A length of another power of two may be compiled, where PyTorch computes: its backend is then named."""
    backend = {"loop": {"backend": "torch", **changes.pop("loop", {})}}
    assert _workload(_settings(**backend, **changes)) == _workload(_settings(loop={"backend": "torch"}))


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 16},
        {"loop": {"micro_batch": 2}},
        {"loop": {"threads": 1}},
        {"precision": "fp32"},
        {"optim": {"kind": "sgd", "lr": 0.1}},
        {"optim": {"ema": 0.9}},
        {"model": {**MODEL, "depth": 3}},
        {"evaluate": {"sample_tokens": 5}},
        {"objective": {"kind": "lm", "z_loss": 1e-4}},
    ],
    ids=str,
)
def test_a_speed_depends_on_the_work_of_a_step(changes: dict[str, Any]) -> None:
    settings = _settings(**changes)
    assert settings.model
    inputs = replace(INPUTS, config=settings.model.resolve(300))
    assert _workload(settings, inputs) != _workload(_settings())


def test_a_speed_depends_on_the_machine() -> None:
    assert machine(CPU) != machine(Device("A100", 10**9))
    assert {"cpu", "cores", "torch"} <= machine(CPU).keys()


def test_a_plan_uses_the_speed_that_was_kept(cache: Path) -> None:
    settings = _settings()
    figures = forecast(settings, INPUTS)
    assert costs(settings, INPUTS, figures)["time"] is None
    write_speed(_workload(settings), SPEED, by="a measurement", peak_bytes=5, gemm_flops=1e9)
    time = costs(settings, INPUTS, figures, per_hour=3600.0)
    assert time["price"] == time["time"]["total"]
    assert time["time"]["steps"] == 100 * SPEED.step_s
    assert time["time"]["by"] == "a measurement"
    flops = figures["length"]["flops"]
    assert time["time"]["mfu"] == pytest.approx(flops / (100 * SPEED.step_s) / 1e9)
    known = replace(INPUTS, device=replace(CPU, peak=2e9))
    write_speed(_workload(settings, known), SPEED, by="a measurement", gemm_flops=1e9)
    assert costs(settings, known, figures)["time"]["mfu"] == pytest.approx(time["time"]["mfu"] / 2), "by the data sheet"
    assert costs(settings, replace(INPUTS, here=False), figures)["time"] is None, "another machine"
    kept = next((cache / "speed").iterdir())
    for damaged in ("{", "{}", '{"speed": {"step_s": 1}, "work": {}}'):
        kept.write_text(damaged)
        assert read_speed(_workload(settings)) is None


def test_disk_is_what_is_kept_and_one_more_while_it_is_written() -> None:
    settings = _settings(loop={"keep": 3, "keep_every": 40})
    figures = forecast(settings, INPUTS)
    disk, weights = costs(settings, INPUTS, figures)["disk"], 4 * INPUTS.config.parameters
    assert disk == {"checkpoint": 3 * weights, "best": weights, "total": (3 + 1 + 100 // 40) * 3 * weights + weights}


def test_the_speed_of_a_run_gives_the_seconds_of_that_run() -> None:
    """The inverse of `stage_seconds`: what a run took is what a plan of the same run predicts."""
    work = Work(100, 11, 1000, 4000, 3, 10**9, 10**8)
    took = stage_seconds(SPEED, work)
    seconds = {
        "step": SPEED.step_s,
        "first": SPEED.step_s + 4.0,
        "evaluation": 1000 * SPEED.token_s + SPEED.sample_s + 10**8 * SPEED.byte_s,
        "final evaluation": 4000 * SPEED.token_s,
        "save": 10**9 * SPEED.byte_s,
    }
    speed = run_speed(seconds, work, start_s=SPEED.start_s - 4.0)
    assert stage_seconds(speed, work) == pytest.approx(took)


def test_steps_count_in_units_of_the_largest_one() -> None:
    """A batch that grows from 2 to 8 rows takes less than as many steps of 8."""
    settings = _settings(batch={"from": 2, "to": 8, "over": "100 steps"})
    figures = forecast(settings, INPUTS)
    assert 100 * 2 / 8 < work_of(settings, INPUTS, figures, 1.0).steps < 100
    assert work_of(_settings(), INPUTS, forecast(_settings(), INPUTS), 1.0).steps == 100


def test_a_cpu_measures_no_more_rows_than_memory_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings(batch=10)
    total = {
        rows: forecast(_settings(batch=10, loop={"micro_batch": rows}), INPUTS)["memory"]["total"] for rows in (3, 10)
    }
    free = (OVERHEAD + total[10]) / SPARE

    def measured(free: float) -> int:
        monkeypatch.setattr("ingot.pipeline.measure.available_memory", lambda: round(free))
        return measure_job(settings, INPUTS, forecast(settings, INPUTS), tmp_path)["micro_batch"]

    assert measured(2 * free) == 10
    assert measured((OVERHEAD + total[3]) / SPARE + 10) == 3
    with pytest.raises(UserError, match=r"a row needs more than the .* GB of free memory"):
        measured(OVERHEAD)


def test_what_only_a_run_shows_is_named() -> None:
    assert why_not(_settings(), INPUTS) is None
    assert "reward" in (why_not(_settings(objective="reward"), INPUTS) or "")
    assert "processes" in (why_not(_settings(), replace(INPUTS, ranks=2)) or "")


def _measured(settings: TrainSettings, tmp_path: Path, clock: Callable[[], float]) -> Measurement:
    return measure({**measure_job(settings, INPUTS, forecast(settings, INPUTS), tmp_path), "started": 0.0}, clock)


def test_a_step_is_measured_by_one_and_two_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only steps move: 3 s an update and 0.5 s a row."""
    now = [100.0]

    def step(engine: Any, batch: Any) -> None:
        now[0] += 3 + 0.5 * len(batch)

    monkeypatch.setattr("ingot.stages.training.measure._step", step)
    monkeypatch.setattr("ingot.stages.training.measure.gemm_flops", lambda *_: 1e9)
    settings = _settings(loop={"micro_batch": 2, "backend": "torch"}, evaluate={"sample": False})
    found = _measured(settings, tmp_path, lambda: now[0])
    assert found.speed.step_s == pytest.approx(3 + 0.5 * 8)
    assert found.rows == 2
    assert found.speed.start_s == pytest.approx(100 + 3.5), "until the first step, and what it took to compile"


def test_a_slow_micro_batch_is_measured_with_fewer_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """9 s a row: two rows are as many as 20 s allow, and four such micro-batches are a step."""
    now = [0.0]

    def step(engine: Any, batch: Any) -> None:
        now[0] += 9 * len(batch)

    monkeypatch.setattr("ingot.stages.training.measure._step", step)
    monkeypatch.setattr("ingot.stages.training.measure.gemm_flops", lambda *_: 1e9)
    settings = _settings(loop={"backend": "torch"}, evaluate={"sample": False})
    found = _measured(settings, tmp_path, lambda: now[0])
    assert (found.rows, found.speed.step_s) == (2, pytest.approx(9 * 8))


@pytest.mark.parametrize("micro_batch", [8, 2])
@pytest.mark.parametrize("vocab", [300, 32_000])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_f2_predicted_memory_is_what_tensors_take(tmp_path: Path, family: str, vocab: int, micro_batch: int) -> None:
    """Within 10 % of the peak of all tensors, in a step of one micro-batch and of several. With many tokens the head's
    copies and gradients are most of it, and their sizes are known: within 1 %."""
    model = {**MODEL, "family": family, "width": 128, "context": 128}
    settings = _settings(model=model, precision="fp32", loop={"micro_batch": micro_batch, "backend": "torch"})
    assert settings.model
    inputs = replace(INPUTS, config=settings.model.resolve(vocab))
    figures = forecast(settings, inputs)
    job = measure_job(settings, inputs, figures, tmp_path)
    engine, make = make_engine(settings, inputs.config, job, tmp_path), random_batches(vocab, 128, False)
    engine.step(make(8))  # makes the moments
    peak = tensor_peak(engine, lambda: engine.step(make(8)))
    assert figures["memory"]["total"] == pytest.approx(peak, rel=0.1 if vocab == 300 else 0.01)


@pytest.mark.parametrize("micro_batch", [2, 1])
@pytest.mark.parametrize(
    "changes",
    [{"model": {"tied": True}}, {"objective": {"kind": "lm", "z_loss": 1e-4}}],
    ids=["tied", "z-loss"],
)
def test_f2_memory_of_tied_tables_and_penalties(tmp_path: Path, changes: dict[str, Any], micro_batch: int) -> None:
    """A tied table has two gradients and their sum at the end; penalties keep copies of all logits."""
    model = {**MODEL, "width": 128, **changes.pop("model", {})}
    settings = _settings(
        model=model, precision="fp32", batch=2, loop={"micro_batch": micro_batch, "backend": "torch"}, **changes
    )
    assert settings.model
    inputs = replace(INPUTS, config=settings.model.resolve(32_000))
    figures = forecast(settings, inputs)
    job = measure_job(settings, inputs, figures, tmp_path)
    engine, make = make_engine(settings, inputs.config, job, tmp_path), random_batches(32_000, 64, False)
    engine.step(make(2))
    assert figures["memory"]["total"] == pytest.approx(tensor_peak(engine, lambda: engine.step(make(2))), rel=0.02)


@pytest.mark.parametrize("micro_batch", [1, 16])
def test_the_largest_micro_batch_fits_and_one_more_row_does_not(micro_batch: int) -> None:
    def planned(rows: int) -> dict[str, Any]:
        loop = {"micro_batch": rows, "checkpointing": "full", "backend": "torch"}
        settings = _settings(model={"depth": 12, "width": 768, "context": 1024}, batch=512, loop=loop)
        assert settings.model
        inputs = replace(INPUTS, config=settings.model.resolve(50_000))
        figures = forecast(settings, inputs)
        return {**figures["memory"], **costs(settings, inputs, figures)}

    fits = planned(micro_batch)["fits"]
    assert planned(fits)["total"] <= CPU.memory < planned(fits + 1)["total"]


def test_garbage_of_earlier_steps_is_no_part_of_a_peak(tmp_path: Path) -> None:
    """A cycle that holds a tensor and that the collector meets in the middle of a step."""
    settings = _settings(precision="fp32", loop={"backend": "torch"})
    job = measure_job(settings, INPUTS, forecast(settings, INPUTS), tmp_path)
    engine, make = make_engine(settings, INPUTS.config, job, tmp_path), random_batches(300, 64, False)
    engine.step(make(8))
    garbage: dict[str, Any] = {"tensor": torch.zeros(10**7)}
    garbage["itself"] = garbage
    del garbage

    def step() -> None:
        gc.collect()
        engine.step(make(8))

    assert tensor_peak(engine, step) == pytest.approx(tensor_peak(engine, step), rel=0.01)


def test_how_many_rows_fit_is_not_said_where_layers_are_read() -> None:
    """What relations keep is not counted."""
    relations = {"kind": "distill", "teacher": "large", "relations": {"gram": 1.0}}
    for settings, known in ((_settings(), True), (_settings(objective=relations), False)):
        assert (costs(settings, INPUTS, forecast(settings, INPUTS))["fits"] is not None) == known
