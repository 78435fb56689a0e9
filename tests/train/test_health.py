"""The verdict on gradient norms, of a list and while training (D6)."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.core.errors import UserError
from ingot.core.events import read_events, stable
from ingot.optim.settings import OptimSettings
from ingot.train import health
from ingot.train.engine import Engine
from ingot.train.health import WINDOW, update, verdict
from tests.train.test_engine import _engine, _run, _text
from tests.train.test_guard import breaks_from


def test_D6_health() -> None:
    assert verdict([0.5, 0.9, 1.4, 0.8], clip=1.0) == "healthy"
    assert verdict([20.0] * 20, clip=1.0) == "always clipped"
    assert verdict([20.0] * 17 + [0.9] * 3, clip=1.0) == "healthy"
    assert verdict([0.5, math.nan], clip=1.0) == "critical"
    assert verdict([0.5, math.inf], clip=1.0) == "critical"
    assert verdict([], clip=1.0) == "healthy"


def test_the_guard_says_of_each_step_what_it_did() -> None:
    skipped = [{"step": step, "updates": step - 8, "why": "W"} for step in (9, 10, 30)]
    rollbacks = [{"step": 12, "first": 8, "to": 4, "why": "V"}, {"step": 20, "to": 16, "why": "a bit flipped"}]
    told = {step: health.repair_of(step, skipped, rollbacks) for step in range(1, 40)}
    assert {step: text for step, text in told.items() if text} == {
        **dict.fromkeys(range(8, 13), "left out, because the run went back to step 4: V"),
        30: "22 updates skipped, because W",
    }
    assert health.repair_of(9, skipped, []) == "skipped, because W"
    assert (
        health.repairs([], rollbacks) == "back to step 4, without steps 8 to 12; back to step 16, because a bit flipped"
    )


def test_D6_a_verdict_comes_with_a_whole_window_and_agrees_with_the_rule() -> None:
    norms = [20.0] * WINDOW + [20.0] * 89 + [0.5] * (WINDOW - 89) + [0.5] * 50 + [math.nan]
    state, verdicts = dict(health.INITIAL), []
    for norm in norms:
        state = update(state, norm, 1.0)
        verdicts.append(state["now"])
    assert verdicts[: WINDOW - 1] == ["healthy"] * (WINDOW - 1)
    assert verdicts[WINDOW - 1 : 2 * WINDOW - 1] == ["always clipped"] * WINDOW
    assert verdicts[2 * WINDOW - 1 : -1] == ["healthy"] * 51
    assert verdicts[-1] == "critical"
    for end in (WINDOW, 2 * WINDOW):
        assert verdicts[end - 1] == verdict(norms[end - WINDOW : end], 1.0)


def test_D6_a_run_reports_once_that_its_threshold_is_too_low(tmp_path: Path, make_store, monkeypatch) -> None:
    """One event and one line with advice at the end of the first window, none again after a kill, none if healthy."""
    monkeypatch.setattr(health, "WINDOW", 5)

    def engine(name: str, clip: float) -> Engine:
        made = _engine(tmp_path / name, "fp32", micro=8, steps=9, save_every=3)
        made.plan = replace(made.plan, optim=OptimSettings(clip=clip))
        return made

    source, messages = _text(make_store), []
    _run(engine("a", 1e-3), source, tmp_path / "a", notify=messages.append)
    (line,) = messages
    assert line.startswith("step 5: always clipped, was healthy: at least 90 % of the gradient norms exceed 10 times")
    assert line.endswith("raise it, or lower optim.lr")
    for stop in (4, 8):
        with pytest.raises(InterruptedError):
            _run(engine("b", 1e-3), source, tmp_path / "b", stop_at=stop, notify=messages.append)
    _run(engine("b", 1e-3), source, tmp_path / "b", notify=messages.append)
    assert messages == [line, line]
    events = [[stable(e) for e in read_events(tmp_path / x / "metrics.jsonl", "health")] for x in "ab"]
    assert events[0] == events[1] == [{"event": "health", "step": 5, "health": "always clipped"}]
    _run(engine("c", 100.0), source, tmp_path / "c", notify=messages.append)
    assert read_events(tmp_path / "c" / "metrics.jsonl", "health") == []
    assert len(messages) == 2


def test_D6_the_step_that_broke_is_found_wherever_it_is(tmp_path: Path, make_store) -> None:
    """Also where no line was due: every norm is checked, not only the logged ones."""
    engine = _engine(tmp_path, "fp32", micro=8, log_every=100, steps=40)
    breaks_from(engine, 7)
    with pytest.raises(UserError, match=r"step 26: loss .*, gradient norm nan, expected finite numbers"):
        _run(engine, _text(make_store), tmp_path)
    (event,) = read_events(tmp_path / "metrics.jsonl", "health")
    assert (event["step"], event["health"]) == (26, "critical")
    assert [e["step"] for e in read_events(tmp_path / "metrics.jsonl", "step")] == [1]
    assert [e["step"] for e in read_events(tmp_path / "metrics.jsonl", "skipped")] == list(range(7, 27))
