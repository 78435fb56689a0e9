"""Teachers that are columns of the store: written once, read by any student of the same tokens, refused otherwise."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot.core.artifact import StageDir
from ingot.core.errors import UserError
from ingot.core.events import Display, read_events
from ingot.objectives.distill import IDS, LOGITS, tail_name
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of
from ingot.report.plan import plan_rows
from ingot.stages import child
from ingot.stages.models.export import export_hf
from ingot.stages.models.load import load_model
from ingot.stages.training import annotate, reference_columns
from ingot.store.reader import Store
from tests.stages.conftest import RUNS

SOFT = """
[stage.soft]
kind = "annotate"
data = ["notes", "talk"]
teacher = "base"
k = 8
temperatures = [1.0, 2.5]
"""
STUDENT = 'objective={ kind = "distill", teacher = "soft" }'
pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(autouse=True)
def recipe(world: Path) -> None:
    (world / "soft.toml").write_text((world / "grid.toml").read_text() + SOFT)


def _graph(*changes: str) -> Any:
    return load_graph(Path("soft.toml"), list(changes), RUNS)


def _run(name: str, *changes: str) -> Path:
    graph = _graph(*changes)
    for node in graph.needed([name]):
        child.run(job_of(graph, node, quiet=True))
    return graph.stage(graph.nodes[name]).path


def _columns(stage: Path) -> dict[str, bytes]:
    return {str(f.relative_to(stage)): f.read_bytes() for f in stage.rglob("*.bin")}


def _losses(stage: Path, name: str = "loss_nats") -> list[float]:
    return [e[name] for e in read_events(stage / "metrics.jsonl") if e["event"] == "step"]


def test_a_stored_prediction_is_the_teachers(world: Path) -> None:
    """Of every token but the first, at the position of the token that is predicted, in at most 4 k + 4 bytes."""
    stage = _run("soft")
    graph = _graph()
    tokens = graph.stage(graph.nodes["notes@bpe"]).path / "train"
    store = Store.open(tokens, overlays=[annotate.directory(stage, "notes", "train")])
    loaded = load_model(graph.stage(graph.nodes["base"]).path, print, device="cpu")
    context = loaded.config.context
    ids = store.ids.read(0, store.tokens).astype(np.int64)
    with torch.no_grad():
        logits = loaded.model(torch.from_numpy(ids[None, :context])).logits[0].double()
    for t in (1.0, 2.5):
        p = (logits / t).softmax(-1)
        top = torch.from_numpy(store.columns[IDS].read(1, context + 1).astype(np.int64))
        tail = store.columns[tail_name(t)].read(1, context + 1)
        np.testing.assert_allclose(np.exp(tail), 1 - p.gather(1, top).sum(1), rtol=1e-4)
        stored = torch.from_numpy(store.columns[LOGITS].read(1, context + 1).copy()).double()
        head = (stored / t).softmax(-1) * (1 - torch.from_numpy(tail.copy()).double().exp())[:, None]
        torch.testing.assert_close(head, p.gather(1, top), rtol=2e-3, atol=0)
    assert (store.columns[tail_name(1.0)].read(1, store.tokens) < 0).all()
    assert store.columns[tail_name(1.0)].read(0, 1) == 0
    result = json.loads((stage / "result.json").read_text())
    assert result["bytes_per_token"] == 4 * 8 + 2 * 4
    assert 0 < result["tail/1"] < result["tail/2.5"] < 1


def test_the_default_store_takes_at_most_270_bytes_a_token() -> None:
    def size(vocab: int) -> int:
        columns = annotate.stored_columns(64, (1.0, 2.0, 4.0), vocab)
        return sum(np.dtype(c.dtype).itemsize * c.width for c in columns)

    assert size(1 << 16) == 268
    assert size((1 << 16) + 1) == 396


def _new_student(objective: str) -> str:
    """A change of the recipe: `tuned` as a new model that learns from the notes."""
    return (
        "stage.tuned={ kind = 'train', tokenizer = 'bpe', model = { depth = 1, width = 16, heads = 2, context = 40 }, "
        f"objective = {objective}, data = {{ notes = 1.0 }}, batch = 4, duration = '6 steps', precision = 'fp32', "
        "optim = { lr = 1e-2 }, evaluate = { tokens = 1, sample = false }, loop = { log_every = 1, threads = 1 }, "
        "seed = 3 }"
    )


def test_a_live_and_a_stored_teacher_train_the_same_student() -> None:
    """All ids but one are stored, so that only the rounding to fp16 differs. The control has no teacher."""
    objective = "{ kind = 'distill', teacher = 'TEACHER', alpha = 0.3, temperature = 2.5 }"
    live, stored = (
        _run("tuned", _new_student(objective.replace("TEACHER", teacher)), "stage.soft.k=279")
        for teacher in ("base", "soft")
    )
    for name in ("loss_nats", "distill", "divergence"):
        np.testing.assert_allclose(_losses(stored, name), _losses(live, name), rtol=2e-4)
    alone = _losses(_run("tuned", _new_student("'lm'")))
    assert abs(alone[-1] / _losses(live)[-1] - 1) > 2e-3


def test_with_labels_alone_training_is_fine_tuning_to_the_bit() -> None:
    alone = _losses(_run("tuned", _new_student("'lm'")))
    for teacher in ("base", "soft"):
        labels = _new_student(f"{{ kind = 'distill', teacher = '{teacher}', alpha = 1.0 }}")
        assert _losses(_run("tuned", labels)) == alone
    half = _new_student("{ kind = 'distill', teacher = 'base', alpha = 0.5 }")
    assert _losses(_run("tuned", half)) != alone


def test_one_annotation_serves_students_of_other_mixtures_and_objectives() -> None:
    changes = [
        "stage.tuned.objective={ kind = 'distill', teacher = 'soft' }",
        "stage.tuned.objective={ kind = 'distill', teacher = 'soft', divergence = 'jsd', temperature = 2.5 }",
        "stage.tuned.data={ talk = 0.3, notes = 0.7 }",
    ]
    soft = _run("soft")
    written = {f: f.stat().st_mtime_ns for f in soft.rglob("*.bin")}
    for change in (changes[:1], changes[1:2], [changes[0], changes[2]]):
        states = {row["name"]: row["state"] for row in plan_rows(_graph(*change))}
        assert (states["soft"], states["tuned"]) == ("HIT", "RUN")
        student = _run("tuned", *change)
        assert np.isfinite(_losses(student)).all()
    assert {f: f.stat().st_mtime_ns for f in soft.rglob("*.bin")} == written
    assert StageDir(soft).verify() == []


def test_an_annotation_that_is_killed_ten_times_ends_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while batches are computed and while columns are published; each life starts from its last checkpoint."""
    monkeypatch.setattr(reference_columns, "CHECKPOINT_ROWS", 2)
    monkeypatch.setattr(reference_columns, "rows_per_pass", lambda context: 2)
    stage = _run("soft", "stage.soft.k=7")
    files = _columns(stage)
    stage.rename(tmp_path / "kept")
    compute, publish = annotate.Annotator.__call__, reference_columns.ColumnFiller.publish
    for life in range(10):
        left = [life + 1]

        def dying(self: Any, batch: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return compute(self, batch)

        def killed(self: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(annotate.Annotator, "__call__", dying)
        monkeypatch.setattr(reference_columns.ColumnFiller, "publish", killed if life % 3 == 0 else publish)
        with pytest.raises(KeyboardInterrupt):
            _run("soft", "stage.soft.k=7")
        assert not (stage / "DONE").exists()
    monkeypatch.setattr(annotate.Annotator, "__call__", compute)
    monkeypatch.setattr(reference_columns.ColumnFiller, "publish", publish)
    assert _columns(_run("soft", "stage.soft.k=7")) == files


def test_a_student_with_other_rows_than_were_annotated_is_refused() -> None:
    """Conversations are cut at the context, so rows of 30 tokens leave the rest of them without a prediction."""
    with pytest.raises(UserError, match=r"found no stored output for .* tokens of a batch"):
        _run("tuned", f"stage.tuned.{STUDENT}", "stage.soft.context=30")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["objective={ kind = 'distill', teacher = 'soft', temperature = 3 }"], "found 3.0, expected one of 1.0, 2.5"),
        (["objective={ kind = 'distill', teacher = 'bpe' }"], "expected a train or import"),
        (["objective={ kind = 'distill', teacher = 'rm' }", "data={ notes = 1.0 }"], "'rm' is a reward model"),
        (["objective={ kind = 'distill', teacher = 'soft', beta = 0.1 }"], "found beta with divergence"),
        (
            ["objective={ kind = 'distill', teacher = 'soft', temperature = 1.0000001 }"],
            "found 1.0000001, expected one of",
        ),
        (
            ["objective={ kind = 'distill', teacher = 'base', relations = { gram = 1.0, heads = 2 } }"],
            "found heads = 2 w",
        ),
        (["objective={ kind = 'distill' }"], "teacher"),
        (
            ["objective={ kind = 'distill', teacher = 'base', temperature = 1e-30 }"],
            "expected at least 0.01 .T, above 1",
        ),
        (["objective={ kind = 'gkd', teacher = 'base', temperature = 1e6 }"], "found 1000000.0, expected at most 100"),
        (["init_layers=true"], "init_layers: found true, expected a whole number"),
        ([STUDENT, "data={ talk = 1.0, more = 1.0 }"], "'soft' has no predictions for 'more'"),
        (["objective={ kind = 'dpo', reference = 'soft' }", "data={ preferences = 1.0 }"], "is a annotate, expected"),
    ],
)
def test_bad_input_is_one_sentence(changes: list[str], sentence: str) -> None:
    more = "stage.more={ kind = 'corpus', sources = ['notes.txt'], quality = 'none' }"
    with pytest.raises(UserError, match=sentence) as caught:
        _graph(*(f"stage.tuned.{change}" for change in changes), more)
    assert len(str(caught.value).splitlines()) == 1, caught.value


def test_another_tokenizer_is_refused() -> None:
    other = "stage.other={ kind = 'tokenizer', from = 'notes', vocab = 290 }"
    student = (
        "stage.tuned={ kind = 'train', tokenizer = 'other', model = { depth = 1 }, data = { notes = 1.0 }, "
        "duration = '1 steps', objective = { kind = 'distill', teacher = 'TEACHER' } }"
    )
    for teacher, sentence in (("soft", "has predictions for the tokenizer 'bpe', expected 'other'"), ("base", "'bpe'")):
        with pytest.raises(UserError, match=sentence):
            _graph(other, student.replace("TEACHER", teacher))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("teacher='rm'", "is a reward model"),
        ("data=['preferences']", "an annotate stage reads text and chat"),
        ("packing={ stride = 2 }", "one stored prediction"),
        ("temperatures=[1.0, 1.0]", "expected different temperatures"),
        ("temperatures=[]", "temperatures"),
        ("temperatures=[1.0, 1e-30]", r"temperatures.1: found 1e-30, expected at least 0.01"),
        ("temperatures=[1000.0]", r"temperatures.0: found 1000.0, expected at most 100"),
        ("k=true", "k: found true, expected a whole number"),
        ("k=0", "k"),
    ],
)
def test_an_annotation_that_cannot_be_made_is_refused(change: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        _graph(f"stage.soft.{change}")
    assert len(str(caught.value).splitlines()) == 1, caught.value


PADDED = """
[stage.padded]
kind = "import"
path = "hf:padded"
tokenizer = "bpe"
"""


def _pad(ids: int) -> None:
    """Write the base as a model of another maker, with rows of its embedding that no token has and that are likely."""
    graph = _graph()
    to = Path("padded")
    shutil.rmtree(to, ignore_errors=True)
    export_hf(graph.stage(graph.nodes["base"]).path, to, "float32", False, print)
    config = json.loads((to / "config.json").read_text())
    vocab = config["vocab_size"]
    (to / "config.json").write_text(json.dumps({**config, "vocab_size": vocab + ids}))
    tensors = load_file(to / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = torch.cat((tensors[name], tensors[name].mean(0).expand(ids, -1) * 30))
    save_file(tensors, to / "model.safetensors")


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (
            "padded",
            "teacher: ids that only one of 'padded' (288) and 'tuned' (280) has are left out before the softmax",
        ),
        ("soft", "8 ids of the teacher's head that no token has are left out"),
    ],
)
def test_padding_of_a_vocabulary_is_cut_before_the_softmax_and_named(
    world: Path, monkeypatch: pytest.MonkeyPatch, teacher: str, message: str
) -> None:
    """The student is the same as with a head without padding."""
    messages: list[str] = []
    monkeypatch.setattr(Display, "notify", lambda self, message: messages.append(message))
    objective, notes = "{ kind = 'distill', teacher = 'TEACHER', alpha = 0.3 }", "stage.soft.data=['notes']"
    _pad(8)
    Path("soft.toml").write_text(Path("soft.toml").read_text() + PADDED)
    change = _new_student(objective.replace("TEACHER", teacher))
    padded = _losses(_run("tuned", change, "stage.soft.teacher='padded'", notes), "distill")
    assert message in messages
    plain = _new_student(objective.replace("TEACHER", "base" if teacher == "padded" else teacher))
    np.testing.assert_allclose(padded, _losses(_run("tuned", plain, notes), "distill"), rtol=1e-5)


def test_another_teacher_or_other_tokens_are_annotated_anew() -> None:
    """A store is found by what it was made of. One that is moved under other tokens is refused where it is read."""
    changes = ["stage.soft.data=['notes']", f"stage.tuned.{STUDENT}", "stage.tuned.data={ notes = 1.0 }"]
    _run("soft", *changes)
    states = []
    for change in ("stage.base.seed=5", "stage.notes.quality='text'", "stage.tuned.seed=5"):
        states.append({row["name"]: row["state"] for row in plan_rows(_graph(*changes, change))}["soft"])
    assert states == ["RUN", "RUN", "HIT"]
    graph = _graph(*changes)
    soft = graph.stage(graph.nodes["soft"]).path
    other = Store.open(graph.stage(graph.nodes["notes@bpe"]).path / "val")
    with pytest.raises(UserError, match=r"found columns of store \w+, expected store \w+ .*; run the stage that wrote"):
        other.add_overlay(annotate.directory(soft, "notes", "train"))
