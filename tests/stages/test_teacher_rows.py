"""`teacher` of an evaluate stage: agreement and divergence of its students, and predictions side by side."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.core.artifact import read_lines
from ingot.core.errors import UserError
from ingot.core.events import read_events
from ingot.evaluate.likelihood import comparison
from ingot.model.transformer import build
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of
from ingot.report.html.panels_model import evaluate
from ingot.stages import child
from ingot.stages.models.load import load_model
from ingot.store.reader import Store
from tests.stages.conftest import RUNS

CARD = """
[stage.again]
kind = "train"
init = "base"
data = { notes = 1.0 }
batch = 4
duration = "4 steps"
precision = "fp32"
optim = { lr = 3e-2 }
evaluate = { tokens = 1, sample = false }
loop = { threads = 1 }

[stage.card]
kind = "evaluate"
models = ["base", "again", "tuned"]
data = ["notes"]
teacher = "base"
"""
pytestmark = pytest.mark.usefixtures("world")


def _graph(world: Path, *changes: str):
    (world / "card.toml").write_text((world / "grid.toml").read_text() + CARD)
    return load_graph(Path("card.toml"), list(changes), RUNS)


def _run(world: Path, *changes: str) -> Path:
    graph = _graph(world, *changes)
    for node in graph.needed(["card"]):
        child.run(job_of(graph, node, quiet=True))
    return graph.stage(graph.nodes["card"]).path


def test_students_are_compared_with_their_teacher(world: Path) -> None:
    stage = _run(world)
    rows = {(r["model"], r["metric"]): r["value"] for r in read_lines(stage / "table.jsonl")}
    assert ("base", "agreement_with_teacher") not in rows  # of itself
    for student in ("again", "tuned"):
        assert 0 <= rows[student, "agreement_with_teacher"] < 1
        assert rows[student, "kl_from_teacher_nats"] > 0
    loaded = load_model(_graph(world).stage(_graph(world).nodes["again"]).path, print, device="cpu")
    events = read_events(stage / "metrics.jsonl", "prediction")
    assert {e["model"] for e in events} == {"base", "again", "tuned"}
    ids = np.asarray(loaded.tokenizer.encode(events[0]["before"]), np.int64)
    with torch.no_grad():
        p = loaded.model(torch.from_numpy(ids[None])).logits[0, -1, : loaded.tokenizer.vocab].softmax(-1)
    found = next(e for e in events if (e["model"], e["number"]) == ("again", events[0]["number"]))
    assert found["before"] == events[0]["before"]
    assert found["likely"][0] == [loaded.tokenizer.decode([int(p.argmax())]), pytest.approx(float(p.max()), abs=0.02)]
    assert abs(sum(q for _, q in found["likely"]) - float(p.topk(5).values.sum())) < 0.02
    page = str(evaluate(stage))
    assert "base (teacher)" in page
    assert page.count("<mark>") > 0
    assert "agreement with teacher" in page


def test_a_model_agrees_with_itself_and_with_no_other(world: Path) -> None:
    graph = _graph(world)
    paths = [graph.stage(graph.nodes[name]).path for name in ("base", "tuned", "notes@bpe")]
    base, tuned = (load_model(path, print, device="cpu").model for path in paths[:2])
    store = Store.open(paths[2] / "val")
    itself, other = (comparison(base, model, store, 0.5, 4) for model in (base, tuned))
    assert itself.agreement["value"] == 1
    assert itself.kl["value"] == pytest.approx(0, abs=1e-9)
    assert other.agreement["value"] < 1  # the control


def test_a_teacher_that_is_not_evaluated_is_refused(world: Path) -> None:
    for changes, sentence in (
        (["teacher='rm'"], "stage.card.teacher: found 'rm' with models base, again, tuned, expected one of several"),
        (["models=['base']"], "stage.card.teacher: found 'base' with models base, expected one of several"),
        (
            ["models=['base', 'base']"],
            "stage.card.teacher: found 'base' with models base, base, expected one of several",
        ),
        (["teacher='notes'"], "stage.card.teacher: stage 'notes' is a corpus, expected a train or import"),
        (["teacher='bas'"], "stage.card.teacher: .*did you mean 'base'"),
    ):
        with pytest.raises(UserError, match=sentence):
            _graph(world, *(f"stage.card.{change}" for change in changes))
    other = "stage.other={ kind = 'tokenizer', from = 'notes', vocab = 290 }"
    apart = (
        "stage.apart={ kind = 'train', tokenizer = 'other', data = { notes = 1.0 }, model = { depth = 1 }, "
        "duration = '1 steps' }"
    )
    with pytest.raises(UserError, match="has the tokenizer 'other', expected 'bpe'"):
        _graph(world, other, apart, "stage.card.models=['base', 'apart']")


STUDENTS = """
[stage.new]
kind = "train"
tokenizer = "bpe"
model = { depth = 1, width = 16, heads = 2, context = 40 }
objective = { kind = "distill", teacher = "base" }
data = { notes = 1.0 }
batch = 4
duration = "2 steps"
precision = "fp32"
optim = { lr = 3e-2 }
evaluate = { tokens = 1, sample = false }
loop = { threads = 1 }
seed = 3

[stage.pruned]
kind = "train"
init = "base"
init_layers = [0]
objective = { kind = "distill", teacher = "base" }
data = { notes = 1.0 }
batch = 4
duration = "2 steps"
precision = "fp32"
optim = { lr = 3e-2 }
evaluate = { tokens = 1, sample = false }
loop = { threads = 1 }
"""


def test_a_distilled_student_is_shown_before_its_first_step(world: Path) -> None:
    """With the weights of its seed, or with those of its `init`: here all layers of the teacher, so as the teacher."""
    (world / "card.toml").write_text((world / "grid.toml").read_text() + CARD + STUDENTS)
    graph = load_graph(Path("card.toml"), ["stage.card.models=['base', 'again', 'new', 'pruned']"], RUNS)
    for node in graph.needed(["card"]):
        child.run(job_of(graph, node, quiet=True))
    stage = graph.stage(graph.nodes["card"]).path
    events = {(e["model"], e["number"]): e for e in read_events(stage / "metrics.jsonl", "prediction")}
    models = "again", "base", "new before training", "new", "pruned before training", "pruned"
    assert tuple(dict.fromkeys(model for model, _ in events)) == models
    loaded = load_model(graph.stage(graph.nodes["new"]).path, print, device="cpu")
    seeded = build(loaded.config, 3).eval()
    for number in {number for _, number in events}:
        before, after = (events[f"new{when}", number]["likely"] for when in (" before training", ""))
        ids = np.asarray(loaded.tokenizer.encode(events["new", number]["before"]), np.int64)
        with torch.no_grad():
            p = seeded(torch.from_numpy(ids[None])).logits[0, -1, : loaded.tokenizer.vocab].softmax(-1)
        assert before[0][1] == pytest.approx(float(p.max()), abs=0.02)
        assert before != after
        assert events["pruned before training", number]["likely"] == events["base", number]["likely"]
        assert events["pruned", number]["likely"] != events["base", number]["likely"]
    assert "new before training" in str(evaluate(stage))
