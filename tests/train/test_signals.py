"""A run that is asked to end saves what it has learned, wherever it is, and goes on to the bit."""

import itertools
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ingot.core.events import read_events, stable
from ingot.core.process import TERMINATION_SIGNALS
from ingot.distributed import checkpoint
from ingot.optim.settings import OptimSettings
from ingot.train.engine import Engine
from tests.train.test_engine import _engine, _run, _text

OPTIONS = {"precision": "fp32", "micro": 4, "log_every": 1, "save_every": 1000}
SIGNALS = (signal.SIGINT, *TERMINATION_SIGNALS)


def _new(path: Path, ema: float = 0, **options) -> Engine:
    engine = _engine(path, **OPTIONS | options)
    plan = replace(engine.plan, optim=OptimSettings(ema=ema))
    engine = Engine(engine.model, engine.objective, plan, engine.execution, engine.mesh, path)
    evaluate = engine.evaluate
    engine.evaluate = lambda batches: evaluate(
        row for batch in batches for row in batch.micro_batches(1)
    )  # many pieces of work
    return engine


def _asked(engine: Engine, after: int, *numbers: int, learning: bool = True) -> Engine:
    """Signals of these numbers reach the process in the middle of the step that follows, or of the evaluation."""
    loss, left = engine.objective.loss, list(numbers)

    def loss_with_signals(out, batch, ctx):
        if left and engine.state["step"] == after and torch.is_grad_enabled() == learning:
            while left:
                os.kill(os.getpid(), left.pop(0))
        return loss(out, batch, ctx)

    engine.objective.loss = loss_with_signals  # type: ignore[method-assign]
    return engine


@pytest.fixture
def hangs_up():
    """SIGHUP ends a process, also below `nohup make test`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(("learning", "ema", "saved"), [(True, 0, 11), (False, 0, 10), (False, 0.8, 10)])
def test_what_was_learned_is_saved_and_the_run_goes_on_to_the_bit(
    tmp_path: Path, make_store, number: int, learning: bool, ema: float, saved: int
) -> None:
    """In a step, which is finished first; in an evaluation, also of averaged weights, which is made when it goes on."""
    source = _text(make_store)
    straight = _new(tmp_path / "a", ema)
    final = _run(straight, source, tmp_path / "a")
    handlers = [signal.getsignal(n) for n in SIGNALS]
    with pytest.raises(KeyboardInterrupt):
        _run(_asked(_new(tmp_path / "b", ema), 10, number, learning=learning), source, tmp_path / "b")
    assert [signal.getsignal(n) for n in SIGNALS] == handlers
    assert checkpoint.checkpoint_steps(tmp_path / "b" / "checkpoints") == [saved]
    done = [e["step"] for e in read_events(tmp_path / "b" / "metrics.jsonl", "evaluation")]
    assert done == ([0, 5, 10] if learning else [0, 5])
    again = _new(tmp_path / "b", ema)
    assert _run(again, source, tmp_path / "b") == final
    for (name, a), b in zip(
        straight.training_state.tensors().items(), again.training_state.tensors().values(), strict=True
    ):
        assert torch.equal(a, b), name
    logs = [[stable(e) for e in read_events(tmp_path / x / "metrics.jsonl")] for x in "ab"]
    assert sorted(map(str, logs[0])) == sorted(map(str, logs[1]))


def test_where_nothing_would_be_lost_a_run_ends_at_once(tmp_path: Path, make_store) -> None:
    """In its first step, which may compile for a minute; and right after a checkpoint."""
    engine = _asked(_new(tmp_path), 0, signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        _run(engine, _text(make_store), tmp_path)
    assert engine.state["step"] == 0
    assert checkpoint.checkpoint_steps(tmp_path / "checkpoints") == []
    engine = _asked(_new(tmp_path, save_every=4), 4, signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        _run(engine, _text(make_store), tmp_path)
    assert engine.state["step"] == 4


def test_a_second_interruption_from_the_keyboard_does_not_wait(tmp_path: Path, make_store) -> None:
    engine = _asked(_new(tmp_path), 7, signal.SIGINT, signal.SIGTERM, signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        _run(engine, _text(make_store), tmp_path)
    assert ended.value.code == 130
    assert checkpoint.checkpoint_steps(tmp_path / "checkpoints") == []


def test_what_is_ignored_stays_ignored(tmp_path: Path, make_store) -> None:
    """As SIGHUP is below nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        engine = _asked(_new(tmp_path), 10, signal.SIGHUP)
        _run(engine, _text(make_store), tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert engine.state["step"] == engine.plan.steps


def test_a_slow_run_is_saved_by_the_clock(tmp_path: Path, make_store) -> None:
    _run(_new(tmp_path, save_minutes=1e-9, keep=100), _text(make_store), tmp_path)
    assert checkpoint.checkpoint_steps(tmp_path / "checkpoints") == list(range(20, 0, -1))


def test_the_first_checkpoints_come_early(tmp_path: Path, make_store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a few minutes that is killed does not begin anew. Each reading of the clock is 10 s later."""
    readings = itertools.count(0, 10)
    monkeypatch.setattr("ingot.train.loop.time", SimpleNamespace(monotonic=lambda: float(next(readings))))
    _run(_new(tmp_path, keep=100), _text(make_store), tmp_path)
    assert checkpoint.checkpoint_steps(tmp_path / "checkpoints") == [20, 11, 4]
