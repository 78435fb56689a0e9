"""Train stages on corpora that hold nothing out, and stages that train on more than they were asked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import UserError
from ingot.core.events import read_events
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of
from ingot.report.html.panels_model import train
from ingot.report.plan import plan_rows, print_plan
from ingot.report.terminal import RESULT_LINES
from ingot.stages import child
from tests.stages.conftest import RUNS

GRPO = """stage.tuned.objective={kind="grpo", reward="check.py:score", group=2, max_new=4}"""


def _run(*overrides: str) -> tuple[Path, dict[str, Any]]:
    """Run `tuned` and what it needs; returns its directory and its result."""
    graph = load_graph(Path("grid.toml"), list(overrides), RUNS)
    for node in graph.needed(["tuned"]):
        child.run(job_of(graph, node, quiet=False))
    path = graph.stage(graph.nodes["tuned"]).path
    return path, json.loads((path / "result.json").read_text())


@pytest.mark.parametrize(
    ("overrides", "without", "metrics"),
    [
        (["stage.talk.holdout.fraction=0"], "talk", set()),
        (
            ["stage.talk.holdout.fraction=0", "stage.tuned.data={talk=0.5, notes=0.5}"],
            "talk",
            {"val_loss_nats", "bits_per_byte"},
        ),
        (["stage.questions.holdout.fraction=0", "stage.tuned.data={questions=1}", GRPO], "questions", set()),
    ],
)
def test_training_without_validation(
    world: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], without: str, metrics: set[str]
) -> None:
    path, result = _run(*overrides, "stage.tuned.evaluate={every=2, sample='', sample_tokens=2}")
    assert f"no validation: nothing is held out of {without}" in capsys.readouterr().err
    assert {name for name in result if name.startswith(("val_", "best_val", "bits_"))} - {
        "best_val_loss_nats"
    } == metrics
    assert len(read_events(path / "metrics.jsonl", "evaluation")) == 3  # at the start, in the middle and at the end
    (final,) = read_events(path / "metrics.jsonl", "final")
    validation = {name for name in final if name.startswith(("val_", "bits_"))}
    assert validation == metrics
    assert {name: final[name] for name in validation} == {name: result[name] for name in validation}
    (line,) = RESULT_LINES["train"]("tuned", path)
    assert ("no validation" in line) == (not metrics)
    assert ("validation loss, complete split" in str(train(path))) == bool(metrics)


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        ("", "stage.rm.data: a reward model is calibrated on held-out text, but preferences holds nothing out"),
        (
            'kind = "evaluate"\nmodels = ["base"]\ndata = ["talk"]',
            "stage.card.data: likelihood is measured on held-out text, but talk holds nothing out",
        ),
        (
            'kind = "evaluate"\nmodels = ["tuned"]',
            "stage.card.data: likelihood is measured on held-out text, but talk holds nothing out",
        ),
        (
            'kind = "judge"\nmodels = ["tuned"]\nagainst = "base"\ndata = "talk"\nby = ["check.py:score"]',
            "stage.card.data: prompts are taken from held-out text, but talk holds nothing out",
        ),
    ],
)
def test_what_needs_held_out_text_is_refused_before_anything_runs(world: Path, stage: str, problem: str) -> None:
    text = Path("grid.toml").read_text()
    Path("more.toml").write_text(f"{text}\n[stage.card]\n{stage}\n" if stage else text)
    with pytest.raises(UserError) as error:
        load_graph(Path("more.toml"), [f"stage.{name}.holdout.fraction=0" for name in ("talk", "preferences")], RUNS)
    assert f"{problem}; set holdout.fraction above 0 there" in str(error.value)


@pytest.mark.parametrize(
    ("duration", "batch", "times"), [("3 epochs", 400, True), ("2000 tokens", 400, True), ("3 epochs", 8, False)]
)
def test_training_on_more_than_was_asked_for_is_said(
    world: Path, capsys: pytest.CaptureFixture[str], duration: str, batch: int, times: bool
) -> None:
    overrides = [f'stage.tuned.duration="{duration}"', f"stage.tuned.batch={batch}"]
    path, result = _run(*overrides)
    said = f"times the {'2,000' if 'tokens' in duration else ''}"
    log = capsys.readouterr().err
    assert (said in log) == times
    assert (f"{result['epochs/talk']:.3g} epochs of talk, because a step is never cut" in log) == times
    assert ("because a step is never cut" in str(train(path))) == times
    print_plan(plan_rows(load_graph(Path("grid.toml"), overrides, RUNS)))
    assert ("overshoot" in capsys.readouterr().out) == times
