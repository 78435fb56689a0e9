"""Dashboards as readers of the log: the same numbers, once each, and never the end of a training run."""

import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.core.dashboards import SINKS, Sinks, Target, replay, scalars_of
from ingot.core.errors import UserError
from ingot.core.events import EventLog, read_events
from ingot.core.recipe import load_recipe
from ingot.pipeline.graph import load_graph
from ingot.stages.kinds import RECIPE_KINDS


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy, so that what a sink sets there is gone after the test."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if not k.startswith("WANDB")})


def _target(root: Path, key: str = "0123456789abcdef0123") -> Target:
    return Target(root, "tiny", "lr=0.1,seed=1/base", "train", key, {"optim": {"lr": 0.1}})


def _attempt(stage: Path, names: list[str], said: list[str], after: int | None = None) -> tuple[EventLog, Sinks]:
    """A stage's log as the child opens it; `after`: the checkpoint that the attempt goes on from."""
    log = EventLog(stage / "metrics.jsonl")
    sinks = Sinks(names, _target(stage.parent), log.path, said.append)
    log.listeners.append(sinks)
    log.write("start", pid=1)
    if after is not None:
        log.write("resume", after=after)
    return log, sinks


def _step(log: EventLog, step: int, loss: float) -> None:
    log.write("step", step=step, loss_nats=loss, tok_s=100 * log.attempt)


def _killed_and_resumed(stage: Path, name: str) -> None:
    """Steps 1 to 7, killed after the checkpoint of step 5; then 6 to 9, with evaluations."""
    log, sinks = _attempt(stage, [name], [])
    log.write("evaluation", step=0, val_loss_nats=4.0)
    for step in range(1, 8):
        _step(log, step, 4 - step / 10)
        if step == 4:
            log.write("evaluation", step=4, val_loss_nats=3.7)
            log.write("sample", step=4, prompt="a", text="b")
    log.close()  # no sinks.close(): the process was killed
    log, sinks = _attempt(stage, [name], [], after=5)
    for step in range(6, 10):
        _step(log, step, 4 - step / 10)
    log.write("evaluation", step=9, val_loss_nats=float("nan"))
    sinks.close(failed=False)
    log.write("end", seconds=1.0)
    log.close()


def _scalars(stage: Path) -> dict[tuple[str, int], float]:
    """What the log says, in TensorBoard's precision (it stores 32 bits)."""
    found = {}
    for record in read_events(stage / "metrics.jsonl"):
        for name, value in scalars_of(record).items() if "step" in record else ():
            found[name, record["step"]] = float(np.float32(value))
    return found


def _tensorboard(directory: Path) -> list[tuple[tuple[str, int], float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    read.Reload()
    return [((tag, e.step), e.value) for tag in read.Tags()["scalars"] for e in read.Scalars(tag)]


def test_tensorboard_has_every_scalar_of_the_log_once_after_a_kill(tmp_path: Path) -> None:
    _killed_and_resumed(tmp_path / "stage", "tensorboard")
    read = _tensorboard(tmp_path / "tensorboard/tiny/lr=0.1,seed=1/base")
    expected = _scalars(tmp_path / "stage")
    assert ("step/tok_s", 6) in expected
    assert ("evaluation/val_loss_nats", 4) in expected
    assert len(read) == len(expected)
    for place, value in read:
        np.testing.assert_equal(value, expected[place])
    steps = [step for (tag, step), _ in read if tag == "step/loss_nats"]
    assert steps == list(range(1, 10))


def test_a_replay_equals_the_live_sink(tmp_path: Path) -> None:
    _killed_and_resumed(tmp_path / "stage", "tensorboard")
    directory = tmp_path / "tensorboard/tiny/lr=0.1,seed=1/base"
    live = sorted(map(repr, _tensorboard(directory)))
    assert replay(tmp_path / "stage", "tensorboard", _target(tmp_path)) == 12  # events; the sample has no number
    assert len(list(directory.iterdir())) == 1
    assert sorted(map(repr, _tensorboard(directory))) == live


def test_an_attempt_without_a_checkpoint_starts_over(tmp_path: Path) -> None:
    log, _ = _attempt(tmp_path / "stage", ["tensorboard"], [])
    for step in range(1, 5):
        _step(log, step, 1.0)
    log.close()
    log, sinks = _attempt(tmp_path / "stage", ["tensorboard"], [])
    _step(log, 1, 2.0)
    sinks.close(failed=False)
    read = _tensorboard(tmp_path / "tensorboard/tiny/lr=0.1,seed=1/base")
    assert read == [(("step/loss_nats", 1), 2.0), (("step/tok_s", 1), 200.0)]


def test_the_event_that_a_resumed_run_repeats_is_shown_once(tmp_path: Path) -> None:
    """Killed after the last checkpoint: the final evaluation comes again, and equals the one before."""
    log, _ = _attempt(tmp_path / "stage", ["tensorboard"], [])
    _step(log, 5, 1.0)
    log.write("evaluation", step=5, val_loss_nats=1.5)
    log.close()
    log, sinks = _attempt(tmp_path / "stage", ["tensorboard"], [], after=5)
    log.write("evaluation", step=5, val_loss_nats=1.5)
    sinks.close(failed=False)
    read = dict(_tensorboard(tmp_path / "tensorboard/tiny/lr=0.1,seed=1/base"))
    assert len(_tensorboard(tmp_path / "tensorboard/tiny/lr=0.1,seed=1/base")) == len(read) == 3


@pytest.mark.parametrize("moment", ["open", "write", "flush", "close"])
def test_a_sink_that_fails_is_told_of_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    class Broken:
        def __init__(self, target: Target):
            self._at("open")

        def _at(self, now: str) -> None:
            if now == moment:
                raise ConnectionError("no route\nto host")

        def write(self, *_: Any) -> None:
            self._at("write")

        def flush(self) -> None:
            self._at("flush")

        def close(self, failed: bool) -> None:
            self._at("close")

    monkeypatch.setitem(SINKS, "broken", Broken)
    said: list[str] = []
    log, sinks = _attempt(tmp_path / "stage", ["broken", "tensorboard"], said)
    for step in range(1, 4):
        _step(log, step, 1.0)
        log.flush()
    sinks.close(failed=False)
    log.close()
    (line,) = said
    assert "broken: closed after an error (ConnectionError: no route); the stage continues" in line
    assert [e["step"] for e in read_events(log.path, "step")] == [1, 2, 3]
    assert len(_tensorboard(tmp_path / "tensorboard/tiny/lr=0.1,seed=1/base")) == 6


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class _Run:
    """What both W&B and trackio hand out: `log(dict, step=)` and `finish`."""

    def __init__(self, calls: list[Any], name: str = "", starting_step: int = 0):
        self.calls, self.name, self.starting_step = calls, name, starting_step

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.calls.append((step, numbers))

    def finish(self, **arguments: Any) -> None:
        self.calls.append(("finish", arguments))

    def delete(self) -> bool:
        self.calls.append(("delete", self.name))
        return True


@pytest.mark.parametrize("mode", [None, "online"])
def test_wandb_is_offline_unless_asked_and_goes_on_by_the_stages_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    if mode:
        os.environ["WANDB_MODE"] = mode
    inits: list[dict[str, Any]] = []
    calls: list[Any] = []

    def init(**arguments: Any) -> _Run:
        inits.append({**arguments, "reports": os.environ["WANDB_ERROR_REPORTING"]})
        return _Run(calls, starting_step=8 if mode and len(inits) == 2 else 0)  # the server has steps up to 7

    _module(monkeypatch, "wandb", init=init)
    _killed_and_resumed(tmp_path / "stage", "wandb")
    first, second = inits
    assert first == second
    assert first["id"] == "0123456789abcdef0123"
    assert (first["project"], first["name"], first["job_type"]) == ("tiny", "lr=0.1,seed=1/base", "train")
    assert (first["mode"], first["resume"]) == (("online", "allow") if mode else ("offline", None))
    assert (first["dir"], first["reports"]) == (str(tmp_path.absolute()), "false")
    assert first["config"] == {"optim": {"lr": 0.1}}
    before, after = calls[:9], calls[9:]
    assert [step for step, _ in before] == [0, 1, 2, 3, 4, 4, 5, 6, 7]
    assert before[1][1] == {"step/loss_nats": 3.9, "step/tok_s": 100.0}
    online = [8, 9, 9]  # what the server lacks
    offline = [0, 1, 2, 3, 4, 4, 5, 6, 7, *online]  # a new directory with everything
    assert [step for step, _ in after[:-1]] == (online if mode else offline)
    assert after[-1] == ("finish", {"exit_code": 0})


def test_trackio_writes_an_interrupted_run_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inits: list[dict[str, Any]] = []
    calls: list[Any] = []
    known: list[_Run] = []

    class Api:
        def runs(self, project: str) -> list[_Run]:
            if not known:
                raise ValueError(f"Project '{project}' does not exist")
            return known

    def init(**arguments: Any) -> _Run:
        inits.append(arguments)
        known[:] = [_Run(calls, "another"), _Run(calls, arguments["name"])]
        return known[1]

    _module(monkeypatch, "trackio", init=init, Api=Api)
    _killed_and_resumed(tmp_path / "stage", "trackio")
    assert inits[0] == inits[1]
    assert (inits[0]["project"], inits[0]["name"]) == ("tiny", "lr=0.1,seed=1/base 01234567")
    assert "space_id" not in inits[0]  # local, unless TRACKIO_SPACE_ID says else
    again = calls.index(("delete", "lr=0.1,seed=1/base 01234567"))
    assert ("delete", "another") not in calls
    assert [step for step, _ in calls[again + 1 : -1]] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 9]


def _recipe(tmp_path: Path, sinks: str) -> Any:
    (tmp_path / "a.txt").write_text("a text")
    stage = '[stage.a]\nkind = "corpus"\nsources = ["a.txt"]\n'
    (tmp_path / "r.toml").write_text(f'[run]\nname = "x"\nsinks = {sinks}\n{stage}')
    return load_graph(tmp_path / "r.toml", [], tmp_path).recipe


def test_a_missing_extra_is_one_sentence_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError) as error:
        _recipe(tmp_path, '["wandb"]')
    assert str(error.value) == "run.sinks: the sink 'wandb' needs the extra wandb; pip install 'ingot[wandb]'"
    with pytest.raises(UserError, match=r"run\.sinks: found the sink 'tensorbord'; did you mean 'tensorboard'\?"):
        _recipe(tmp_path, '["tensorbord"]')
    assert _recipe(tmp_path, "[]").run.sinks == ()


def test_the_directory_of_a_sink_is_no_name_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('[run]\nname = "tensorboard"\n[stage.a]\nkind = "thing"\n')
    with pytest.raises(UserError, match=r"run\.name: found 'tensorboard', a directory that all runs share"):
        load_recipe(tmp_path / "r.toml", [], RECIPE_KINDS)


def test_every_sink_has_an_extra_of_its_name() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    for name in SINKS:
        (requirement,) = project["optional-dependencies"][name]
        assert requirement.startswith(name)


def test_numbers_of_an_event() -> None:
    record = {"event": "e", "time": 1.0, "attempt": 2, "step": 3, "model": "m", "loss": 1, "ok": True, "text": "x"}
    assert scalars_of(record) == {"e/m/loss": 1.0}
    assert json.dumps(scalars_of({"event": "e"})) == "{}"
