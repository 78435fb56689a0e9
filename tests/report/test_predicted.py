"""The report shows what was predicted of a run beside what it took."""

from pathlib import Path
from typing import Any

import pytest

from ingot.core.artifact import atomic_json
from ingot.core.events import EventLog
from ingot.report.html.panels_model import predicted_lines

TIME = {"total": 100.0, "step": 0.5, "mfu": 0.3, "peak_flops": 1e12, "peak_by": "measured"}
RESULT = {"seconds": 110.0, "peak_bytes": 2_000_000, "training_flops": 10**15}


def _lines(stage: Path, seconds: dict[str, Any] | None, device: str) -> dict[str, str]:
    atomic_json(stage / "execution.json", {"device": device})
    log = EventLog(stage / "metrics.jsonl")
    log.write("predicted", seconds=seconds, peak_bytes=1_000_000)
    log.write("speed", seconds={"step": 0.6})
    log.close()
    return dict(predicted_lines(stage, RESULT))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_predicted_beside_actual(tmp_path: Path, device: str) -> None:
    lines = _lines(tmp_path, TIME, device)
    assert lines["time"] == "predicted 1 min 40 s, took 1 min 50 s (+10%)"
    held = "2.0 MB" if device == "cuda" else "the process held 2.0 MB"
    assert lines["peak memory"] == f"predicted 1.0 MB of tensors, {held}"
    assert lines["training, without evaluations and checkpoints"].startswith("25% of 1,000 GFLOP/s")


def test_without_a_measurement_only_the_actual_time_is_shown(tmp_path: Path) -> None:
    lines = _lines(tmp_path, None, "cpu")
    assert lines["time"] == "1 min 50 s"
    assert set(lines) == {"time", "peak memory"}
