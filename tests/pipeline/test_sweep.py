"""A sweep: what its points share runs once, `kill -9` in the middle costs nothing, one bad point stops no other."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot as package
from ingot.core.artifact import StageDir, atomic_json
from ingot.core.dashboards import scalars_of
from ingot.core.errors import StageFailed, UserError
from ingot.core.events import read_events
from ingot.core.statistics import mean_interval, paired_difference
from ingot.pipeline import sweep
from ingot.pipeline.gc import orphans
from ingot.pipeline.graph import Graph, load_graphs
from ingot.report.plan import plan_rows
from ingot.report.sweep import print_any_plan, sweep_rows, write_any_report
from ingot.report.terminal import status_rows

RECIPE = """
[run]
name = "lrs"
sinks = ["tensorboard"]

[stage.clean]
kind = "corpus"
sources = ["notes"]
quality = "none"
holdout = { fraction = 0.2, by = "document" }

[stage.bpe]
kind = "tokenizer"
from = "clean"
vocab = 300

[stage.base]
kind = "train"
data = { clean = 1.0 }
tokenizer = "bpe"
model = { depth = 1, width = 16, heads = 2, context = 16 }
batch = 8
duration = "40 steps"
precision = "fp32"
evaluate = { every = 20, tokens = 256, sample = false }
loop = { save_every = 4, log_every = 1, threads = 1 }

[sweep]
seeds = [1, 2, 3]
"stage.base.optim.lr" = [1e-3, 1e-2]
"""
LABELS = [f"lr={lr},seed={seed}" for lr in ("0.001", "0.01") for seed in (1, 2, 3)]


@pytest.fixture
def work(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small pipeline's directory with a sweep in it."""
    (work / "sweep.toml").write_text(RECIPE)
    monkeypatch.chdir(work)
    return work


def _graphs(*overrides: str) -> list[Graph]:
    return load_graphs(Path("sweep.toml"), list(overrides), Path("runs"))


def _keys(graphs: list[Graph], stage: str) -> set[str]:
    return {g.nodes[stage].key for g in graphs}


def test_points_share_what_no_swept_setting_reaches(work: Path) -> None:
    graphs = _graphs()
    assert [sweep.label(g) for g in graphs] == LABELS
    assert len(_keys(graphs, "base")) == 6
    assert {len(_keys(graphs, s)) for s in ("clean", "bpe", "clean@bpe")} == {1}
    both = _graphs("sweep.stage.bpe.vocab=[300, 310]")
    assert [len(_keys(both, s)) for s in ("clean", "bpe", "clean@bpe", "base")] == [1, 2, 2, 12]
    plain = load_graphs(Path("tiny.toml"), [], Path("runs"))
    assert [g.recipe.home for g in plain] == ["tiny"]


def test_a_setting_that_changes_no_result_is_refused(work: Path) -> None:
    with pytest.raises(
        UserError, match=r"have the same stages, because the setting that differs does not change any result"
    ):
        _graphs("sweep.stage.base.loop.micro_batch=[1, 2]")
    with pytest.raises(UserError, match=r"lrs/lr=0.001,seed=1 and lrs/lr=0.001,seed=2 have the same stages"):
        _graphs("stage.base.seed=5")


def test_the_sweep_of_the_page_has_six_points(work: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/stages/sweep.md").read_text()
    (table,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    (work / "sweep.toml").write_text(RECIPE.partition("[sweep]")[0] + table)
    graphs = _graphs()
    assert [sweep.label(g) for g in graphs] == [f"lr={lr},seed={s}" for lr in ("0.001", "0.002") for s in (1, 2, 3)]
    shapes = _graphs("sweep.stage.base.model=[{ depth = 2 }, { depth = 4 }]", "sweep.seeds=[1]")
    assert [g.nodes["base"].settings.model.depth for g in shapes] == [2, 4] * 2  # type: ignore[attr-defined]


def _pretend(monkeypatch: pytest.MonkeyPatch, fails: Any = lambda graph, node: False) -> list[str]:
    """Stages that are done at once, or fail; returns the names of those that ran."""
    ran: list[str] = []

    def run(graph: Graph, only: list[str], report: Any, quiet: bool, nproc: int | None) -> dict[str, Path]:
        for node in graph.needed(only):
            out = graph.stage(node)
            if not out.is_done():
                ran.append(f"{sweep.label(graph)}/{node.name}")
                if code := fails(graph, node):
                    raise StageFailed(code)
                atomic_json(out / "DONE", {"seconds": 2.0 if node.kind == "train" else 0.5})
        return {n.name: graph.stage(n).path for n in graph.needed(only)}

    monkeypatch.setattr(sweep, "run", run)
    return ran


def test_shared_stages_run_once_and_only_works(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = _pretend(monkeypatch)
    announced: list[tuple[int, str, float | None]] = []

    def announce(number: int, graph: Graph, left: float | None) -> None:
        announced.append((number, sweep.label(graph), left))

    done = sweep.run_all(_graphs(), ["bpe"], lambda *_: None)
    assert ran == [f"{LABELS[0]}/clean", f"{LABELS[0]}/bpe"]
    assert list(done)[:3] == [f"{LABELS[0]}/clean", f"{LABELS[0]}/bpe", f"{LABELS[1]}/clean"]
    sweep.run_all(_graphs(), [], lambda *_: None, announce)
    assert ran[2:] == [f"{LABELS[0]}/clean@bpe", *(f"{label}/base" for label in LABELS)]
    assert [a[:2] for a in announced] == list(enumerate(LABELS, 1))
    assert [left for _, _, left in announced] == [None, 10.0, 8.0, 6.0, 4.0, 2.0]
    ran.clear()
    sweep.run_all(_graphs("sweep.stage.base.optim.lr=[1e-2, 1e-1]"), [], lambda *_: None)
    assert ran == [f"lr=0.1,seed={seed}/base" for seed in (1, 2, 3)]  # a wider grid runs what is new in it


def test_a_point_that_fails_stops_no_other(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = _pretend(monkeypatch, lambda graph, node: 2 if node.name == "base" and graph.recipe.run.seed == 2 else 0)
    with pytest.raises(StageFailed) as error:
        sweep.run_all(_graphs(), [], lambda *_: None)
    assert error.value.code == 2
    assert capsys.readouterr().err == f"not done: {LABELS[1]}, {LABELS[4]}; the same command tries again\n"
    assert [r for r in ran if r.endswith("base")] == [f"{label}/base" for label in LABELS]


def test_a_shared_stage_that_fails_is_tried_once_and_an_interrupt_ends_all(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = _pretend(monkeypatch, lambda graph, node: 1 if node.name == "bpe" else 0)
    with pytest.raises(StageFailed):
        sweep.run_all(_graphs(), [], lambda *_: None)
    assert ran == [f"{LABELS[0]}/clean", f"{LABELS[0]}/bpe"]
    ran = _pretend(monkeypatch, lambda graph, node: 130 if node.name == "bpe" else 0)
    with pytest.raises(StageFailed) as error:
        sweep.run_all(_graphs(), [], lambda *_: None)
    assert (error.value.code, len(ran)) == (130, 1)


def test_plan_and_status_name_each_stage_once(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs = _graphs()
    rows = sweep_rows(graphs, plan_rows)
    assert json.loads(json.dumps(rows)) == rows
    shared = [("", name) for name in ("clean", "bpe", "clean@bpe")]
    assert [(r["point"], r["name"]) for r in rows] == [*shared, *((label, f"{label}/base") for label in LABELS)]
    assert [r["name"] for r in sweep_rows(graphs, status_rows)] == [r["name"] for r in rows]
    _pretend(monkeypatch)
    sweep.run_all(graphs[:1], [], lambda *_: None)
    print_any_plan(graphs, sweep_rows(graphs, plan_rows))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["all", "clean", "HIT", "bpe", "HIT", "clean@bpe", "HIT"]
    assert lines[2].split() == [LABELS[0], "base", "HIT"]
    assert lines[3].split() == [LABELS[1], "base", "RUN"]
    assert lines[-1] == "1 of 6 points are done, about 10.0 s left"


def test_a_run_without_its_sweep_forgets_the_points(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch)
    sweep.run_all(_graphs(), ["clean"], lambda *_: None)
    assert [p["label"] for p in json.loads(Path("runs/lrs/sweep.json").read_text())["points"]] == LABELS
    (work / "sweep.toml").write_text(RECIPE.partition("[sweep]")[0])
    sweep.run_all(_graphs(), ["clean"], lambda *_: None)
    assert not Path("runs/lrs/sweep.json").exists()


def test_report_of_a_sweep_that_has_not_begun(work: Path) -> None:
    page = write_any_report(_graphs())
    assert page == Path("runs/lrs/report.html")
    assert all(label in page.read_text() for label in LABELS)


def _start(work: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", "from ingot.cli.app import main; main()", "run", "sweep.toml"]
    with (work / "log.txt").open("ab") as log:
        return subprocess.Popen(command, cwd=work, stdout=log, stderr=log, start_new_session=True)


def _base() -> dict[str, StageDir]:
    return {sweep.label(g): g.stage(g.nodes["base"]) for g in _graphs()}


def _tensorboard(directory: Path) -> dict[tuple[str, int], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    read.Reload()
    found = [((tag, e.step), e.value) for tag in read.Tags()["scalars"] for e in read.Scalars(tag)]
    assert len(found) == len(dict(found)), "a step is there twice"
    return dict(found)


@pytest.mark.slow
def test_a_sweep_killed_in_the_middle_goes_on_and_compare_prints_means_with_intervals(work: Path, ingot) -> None:
    """Two settings by three seeds; `kill -9` at the third point after its first checkpoint; then the same command."""
    third = _base()[LABELS[2]]
    parent = _start(work)
    while parent.poll() is None and not list(third.path.glob("checkpoints/0*/manifest.json")):
        time.sleep(0.002)
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()
    log = (work / "log.txt").read_text
    assert not third.is_done(), log()[-2000:]
    finished = {label: (d / "DONE").stat().st_mtime_ns for label, d in _base().items() if d.is_done()}
    assert list(finished) == LABELS[:2]
    time.sleep(0.2)  # the lock of a killed child goes with it
    assert _start(work).wait() == 0, log()[-3000:]

    everything = _base()
    assert all(d.is_done() and d.verify() == [] for d in everything.values())
    assert {label: (everything[label] / "DONE").stat().st_mtime_ns for label in finished} == finished
    attempts = {label: read_events(d / "metrics.jsonl")[-1]["attempt"] for label, d in everything.items()}
    assert attempts == {label: 2 if label == LABELS[2] else 1 for label in LABELS}
    assert log().count("clean             RUN") == 1
    assert "point 4 of 6  lr=0.01,seed=1  about" in log()
    assert "±" in log()

    for label, d in everything.items():
        steps = [e["step"] for e in read_events(d / "metrics.jsonl") if "step" in e]
        assert label == LABELS[2] or steps == sorted(steps)  # who reads along gets them in order
        expected = {
            (name, e["step"]): float(np.float32(value))
            for e in read_events(d / "metrics.jsonl")
            if "step" in e
            for name, value in scalars_of(e).items()
        }
        assert _tensorboard(Path("runs/tensorboard/lrs") / label / "base") == expected

    shown = ingot("compare", "runs/lrs", "--json", cwd=work)
    assert shown.stderr == ""
    (found,) = json.loads(shown.stdout)
    losses = {label: json.loads((d / "result.json").read_text())["val_loss_nats"] for label, d in everything.items()}
    assert [g["label"] for g in found["groups"]] == ["lr=0.001", "lr=0.01"]
    for group, labels in zip(found["groups"], (LABELS[:3], LABELS[3:]), strict=True):
        by_hand = mean_interval([losses[label] for label in labels])
        assert group["val_loss_nats"] == {"mean": by_hand.mean, "low": by_hand.low, "high": by_hand.high, "n": 3}
    slow, fast = ({n: losses[label] for n, label in enumerate(labels)} for labels in (LABELS[:3], LABELS[3:]))
    paired = paired_difference(slow, fast)
    assert paired is not None
    assert (found["paired"][0]["mean"], found["paired"][0]["high"]) == (paired.mean, paired.high)
    assert list(found["differing"]) == ["optim.lr"]

    page = write_any_report(_graphs()).read_text()
    assert f"{by_hand.mean:.4f} ± {by_hand.half:.4f}" in page
    assert page.count('class="badge done"') == 6 * 4
    assert orphans(Path("runs")) == []
    Path("runs/lrs", LABELS[0], "base").unlink()
    assert [o.path.name for o in orphans(Path("runs"))] == [everything[LABELS[0]].path.name]
    assert package.run("sweep.toml")[f"{LABELS[0]}/base"].directory == everything[LABELS[0]].path  # and links it again
    assert orphans(Path("runs")) == []
