"""The event log: attempts, torn lines, the last attempt of a step."""

from pathlib import Path

import pytest

from ingot.core.errors import Notice
from ingot.core.events import EventLog, attempts, elapsed_seconds, read_events, stable


def test_the_last_attempt_of_a_step_wins(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = EventLog(path)
    for step in (1, 2, 3):
        first.write("step", step=step, loss=step * 1.0)
    first.close()
    second = EventLog(path)
    assert (first.attempt, second.attempt) == (1, 2)
    second.write("step", step=3, loss=30.0)
    second.write("step", step=4, loss=4.0)
    second.close()
    assert [(e["step"], e["loss"]) for e in read_events(path, "step")] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 4.0)]


def test_the_time_of_interrupted_attempts_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert elapsed_seconds(path) == 0
    lines = [(1, 100.0), (1, 112.5), (2, 5000.0), (2, 5001.0), (2, 5003.0)]
    path.write_text("".join(f'{{"event": "x", "attempt": {n}, "time": {t}}}\n' for n, t in lines))
    assert elapsed_seconds(path) == 15.5


def test_attempts_know_where_they_began_and_ended(tmp_path: Path) -> None:
    """The first is killed at step 3, the second before its first step, the third goes on from the checkpoint."""
    path = tmp_path / "metrics.jsonl"
    for events in (
        [("start", {}), ("step", {"step": 1}), ("step", {"step": 3})],
        [("start", {})],
        [("start", {}), ("resume", {"after": 2}), ("step", {"step": 3}), ("end", {})],
    ):
        log = EventLog(path)
        for name, fields in events:
            log.write(name, **fields)
        log.close()
    assert [(a.resumed_from, a.last_step) for a in attempts(path)] == [(None, 3), (None, None), (2, 3)]
    assert attempts(tmp_path / "none") == []


def test_a_torn_last_line_is_ignored_and_then_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = EventLog(path)
    log.write("step", step=1)
    log.close()
    with path.open("a") as file:
        file.write('{"event": "st')
    assert len(read_events(path)) == 1
    log = EventLog(path)
    log.write("step", step=2)
    log.close()
    assert [e["step"] for e in read_events(path)] == [1, 2]


def test_what_two_equal_runs_fraction() -> None:
    record = {"event": "step", "time": 1.0, "attempt": 2, "step": 3, "tok_s": 9, "loss": 0.5}
    assert stable(record) == {"event": "step", "step": 3, "loss": 0.5}


GARBAGE = {
    "no JSON": b'{"event": \xff',
    "zeros": bytes(40),
    "a list": b"[1, 2]",
    "no event": b'{"step": 3}',
    "a step that is no number": b'{"event": "step", "step": [3]}',
    "a time that is no number": b'{"event": "step", "time": "now"}',
    "nested": b"[" * 100_000,
}


@pytest.mark.parametrize("line", GARBAGE.values(), ids=GARBAGE)
def test_a_line_that_is_no_event_is_named_and_skipped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    good = [
        b'{"event": "start", "time": 1.0, "attempt": 2}',
        b'{"event": "step", "step": 1, "time": 3.0, "attempt": 2}',
    ]
    path.write_bytes(b"\n".join([good[0], line, good[1], b'{"event": "st']))
    with pytest.warns(Notice, match=r"metrics\.jsonl: skipped line 2, which is not an event"):
        assert [e["event"] for e in read_events(path)] == ["start", "step"]
    with pytest.warns(Notice, match="skipped line 2"):
        assert elapsed_seconds(path) == 2.0
    with pytest.warns(Notice, match="skipped line 2"):
        log = EventLog(path)
    log.write("step", step=2)
    log.close()
    assert log.attempt == 3
    with pytest.warns(Notice, match="skipped line 2"):
        assert [e.get("step") for e in read_events(path)] == [None, 1, 2]
