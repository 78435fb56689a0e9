"""The process of a stage: a dashboard that fails costs a warning and nothing else."""

import json
from pathlib import Path

import pytest

from ingot.core import dashboards
from ingot.core.artifact import StageDir
from ingot.core.events import read_events
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import child_environment, job_of
from ingot.stages import child

RECIPE = """
[run]
name = "x"
sinks = ["tensorboard"]
[stage.clean]
kind = "corpus"
sources = ["note.txt"]
quality = "none"
holdout = { fraction = 0.5, by = "tail" }
"""


def _broken(target: dashboards.Target) -> dashboards.Sink:
    raise ImportError("a package of another age")


@pytest.mark.parametrize("works", [True, False])
def test_a_dashboard_that_fails_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], works: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note.txt").write_text("the cat sat on the mat " * 20)
    (tmp_path / "r.toml").write_text(RECIPE)
    if not works:
        monkeypatch.setitem(dashboards.SINKS, "tensorboard", _broken)
    graph = load_graph(Path("r.toml"), [], Path("runs"))
    job = json.loads(json.dumps(job_of(graph, graph.nodes["clean"], quiet=False)))
    child.run(job)
    out = StageDir(Path(job["dir"]))
    assert out.is_done()
    warnings = [e["why"] for e in read_events(out / "metrics.jsonl", "warning")]
    if works:
        assert warnings == []
        assert list((tmp_path / "runs/tensorboard/x/clean").iterdir())
    else:
        (why,) = warnings
        assert why.startswith("tensorboard: closed after an error (ImportError: a package of another age)")
        assert why in capsys.readouterr().err


def test_threads_of_a_stage_that_trains_do_not_spin_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another program they would spin on the core that it has left; alone, decoding is better off so."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert child_environment(short_spin=True)["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in child_environment()
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in child_environment(short_spin=True), "the user has chosen"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert child_environment(short_spin=True)["GOMP_SPINCOUNT"] == "7"
