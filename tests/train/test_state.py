"""The numbers of a checkpoint are those of its run, or the run does not resume from them."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ingot.core.artifact import checkpoint_path, write_manifest
from ingot.core.errors import UserError
from ingot.optim import optimizers
from ingot.optim.average import Average
from ingot.optim.settings import OptimSettings
from ingot.train.state import TrainingState

LAST = 40


def _state(directory: Path, last_step: int = LAST, background: bool = False) -> TrainingState:
    named = {"w": nn.Parameter(torch.ones(2, 3))}
    settings = OptimSettings()
    optimizer, average = optimizers.build(named, settings, 1e-3), Average(named, settings.ema)
    return TrainingState(directory, named, optimizer, average, {"beta": 0.5}, 2, {}, last_step, background=background)


def _saved(directory: Path, **changes: Any) -> Path:
    state = _state(directory)
    state.numbers.update(step=20, tokens=100, best_val=-0.5, best_step=10)
    state.save()
    path = checkpoint_path(directory / "checkpoints", 20)
    numbers = json.loads((path / "state.json").read_text())
    for name, value in changes.items():
        if value is ...:
            del numbers[name]
        else:
            numbers[name] = value
    (path / "state.json").write_text(json.dumps(numbers))
    (path / "manifest.json").unlink()
    write_manifest(path)
    return path


def test_numbers_of_the_run_are_resumed(tmp_path: Path) -> None:
    _saved(tmp_path)
    state = _state(tmp_path)
    assert state.resume(print)
    assert {n: state.numbers[n] for n in ("step", "tokens", "best_val", "best_step")} == {
        **{"step": 20, "tokens": 100, "best_val": -0.5, "best_step": 10}
    }
    assert not _state(tmp_path / "new").resume(print)


def test_a_checkpoint_written_in_the_background_is_that_of_its_step(tmp_path: Path) -> None:
    """Training changes the weights and numbers while it is written; a full disk is noticed at the next checkpoint."""
    state = _state(tmp_path, background=True)
    release = threading.Event()
    state._writer.submit(release.wait)  # pyright: ignore[reportOptionalMemberAccess] - the writer is busy
    for step in (1, 2):
        state.numbers["step"] = step
        state.save() if step == 1 else release.set()
        state.named["w"].data.fill_(-step)
    state.finish_saving()
    resumed = _state(tmp_path)
    assert resumed.resume(print)
    assert resumed.numbers["step"] == 1
    assert torch.equal(resumed.named["w"], torch.ones(2, 3))
    state.checkpoints = tmp_path / "file"
    state.checkpoints.write_text("no directory")
    state.save()
    with pytest.raises(OSError, match="file"):
        state.save()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"step": 41}, "step: found 41, expected 20"),
        ({"step": 19}, "step: found 19, expected 20"),
        ({"step": -1}, "step: found -1, expected a value such as 0"),
        ({"step": "20"}, 'step: found "20", expected a value such as 0'),
        ({"step": 20.5}, r"step: found 20\.5, expected a value such as 0"),
        ({"step": True}, "step: found true, expected a value such as 0"),
        ({"tokens": -5}, "tokens: found -5, expected"),
        ({"tokens": None}, "tokens: found null, expected"),
        ({"loss_scale": "large"}, 'loss_scale: found "large", expected'),
        ({"loss_scale": float("nan")}, "loss_scale: found NaN, expected"),
        ({"objective": {"beta": float("inf")}}, "objective: found .*Infinity.*, expected"),
        ({"health": {"now": "healthy", "steps": -1, "clipped": 0}}, "health: found .*-1.*, expected"),
        ({"health": {"now": 1, "steps": 0, "clipped": 0}}, "health: found .*, expected"),
        ({"best_val": [1]}, r"best_val: found \[1\], expected"),
        ({"best_step": 30}, "best_step: found 30, expected 0 to 20"),
        ({"objective": 3}, "objective: found 3, expected"),
        ({"objective": {"gamma": 1}}, "objective: found the fields gamma, expected beta"),
        ({"more": 1}, "expected the numbers step, tokens"),
        ({"health": ...}, "expected the numbers step, tokens"),
    ],
)
def test_numbers_that_cannot_be_of_the_run_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = _saved(tmp_path, **changes)
    state = _state(tmp_path)
    with pytest.raises(UserError, match=rf"state\.json: .*{problem}.*; delete {path} to resume") as caught:
        state.resume(print)
    assert "\n" not in str(caught.value)
    assert state.numbers["step"] == 0


def test_a_step_beyond_the_plan_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path)
    with pytest.raises(UserError, match=r"step: found 20, expected 20, and at most 15, the last"):
        _state(tmp_path, 15).resume(print)


@pytest.mark.parametrize("text", ["[]", "3", "[" * 100_000])
def test_a_state_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = _saved(tmp_path)
    (path / "state.json").write_text(text)
    (path / "manifest.json").unlink()
    write_manifest(path)
    with pytest.raises(UserError, match=r"state\.json"):
        _state(tmp_path).resume(print)


def test_a_checkpoint_from_before_the_first_best_is_loaded_by_a_run_that_has_one(tmp_path: Path) -> None:
    """As a run that goes back does."""
    _saved(tmp_path, best_val=None, best_step=0)
    state = _state(tmp_path)
    state.numbers.update(best_val=2.5, best_step=1, step=30)
    assert state.resume(print)
    assert state.numbers["best_val"] is None


def test_what_was_discarded_leaves_an_older_checkpoint(tmp_path: Path) -> None:
    """A bit that flipped while the newest was written may be in it."""
    state = _state(tmp_path)
    state.keep = 1
    for step in (10, 20):
        state.numbers["step"] = step
        state.save()
    state.discard()
    assert state.saved_step == 10
    assert checkpoint_path(tmp_path / "checkpoints", 10).exists()
