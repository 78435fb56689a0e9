"""The stages `scorer`, `score` and `select` on a corpus that is half noise, and what they refuse."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingot.core.errors import UserError
from ingot.corpus import documents
from ingot.corpus.documents import columns_of, read_documents
from ingot.corpus.scores import classifier
from ingot.evaluate import likelihood
from ingot.pipeline.graph import load_graph
from ingot.pipeline.run import job_of
from ingot.stages import child
from ingot.stages.selection import partial, score, select
from ingot.store.reader import Store

RUNS = Path("runs")
RECIPE = """
[run]
name = "chosen"

[stage.good]
kind = "corpus"
sources = ["good.jsonl"]
quality = "none"
holdout = { fraction = 0.4 }

[stage.bad]
kind = "corpus"
sources = ["bad.jsonl"]
quality = "none"
holdout = { fraction = 0.4 }

[stage.mixed]
kind = "corpus"
sources = [{ path = "mixed.jsonl", repeat = 2 }]
quality = "none"
holdout = { fraction = 0.2 }

[stage.talk]
kind = "corpus"
sources = ["talk.jsonl"]
format = "chat"

[stage.quality]
kind = "scorer"
good = ["good"]
bad = ["bad"]

[stage.order]
kind = "scorer"
type = "ngram"
measure = "order"
good = ["good"]

[stage.bpe]
kind = "tokenizer"
from = "good"
vocab = 300

[stage.small]
kind = "train"
data = { good = 1.0 }
tokenizer = "bpe"
model = { depth = 1, width = 16, heads = 2, context = 32 }
batch = 4
duration = "4 steps"
precision = "fp32"
evaluate = { tokens = 1, sample = false }
loop = { threads = 1 }

[stage.scored]
kind = "score"
data = "mixed"
by = ["quality", "small"]

[stage.more]
kind = "score"
data = "scored"
by = ["order"]

[stage.phased]
kind = "select"
data = "more"
where = { quality = { min = 0.5 } }
phases = [{ name = "early", where = { order = { top = 0.5 } } }, { name = "late" }]

[stage.early]
kind = "select"
data = "phased"
phase = "early"

[stage.ordered]
kind = "select"
data = "phased"
sort = { by = "order", first = "high" }

[stage.talked]
kind = "score"
data = "talk"
by = ["order"]
"""
SIMILAR = 'stage.new={ kind = "score", data = "phased", measures = ["similarity"], similar_to = ["good", "OTHER"] }'
NAMES = ["cat", "dog", "hill", "sun", "mill", "sea"]


def _sentence(draw: random.Random) -> str:
    a, b, c = draw.choices(NAMES, k=3)
    return f"the {a} saw the {b} near the old {c} and then it went home."


def _result(stage: str) -> dict[str, Any]:
    return json.loads((RUNS / "chosen" / stage / "result.json").read_text())


def _documents(stage: str) -> pa.Table:
    path = RUNS / "chosen" / stage
    return pa.Table.from_batches(list(read_documents(path, None, columns_of(path))))


@pytest.fixture(scope="module")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, draw = tmp_path_factory.mktemp("chosen"), random.Random(1)
    texts = [" ".join(_sentence(draw) for _ in range(8)) for _ in range(200)]
    noise = [" ".join(draw.sample(text.split(), len(text.split()))) for text in texts]
    rows = {"good": texts[:100], "bad": noise[:100], "mixed": [t for pair in zip(texts, noise) for t in pair][200:]}  # noqa: B905
    for name, own in rows.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in own))
    talk = [[{"role": "user", "content": "what?"}, {"role": "assistant", "content": text}] for text in texts[:40]]
    (path / "talk.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in talk))
    (path / "recipe.toml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        graph = load_graph(Path("recipe.toml"), [], RUNS)
        (RUNS / "chosen").mkdir(parents=True, exist_ok=True)
        for node in graph.needed([]):
            child.run(job_of(graph, node, quiet=True))
            if not graph.link(node).exists():
                graph.link(node).symlink_to(graph.stage(node).path.absolute())
    return path


@pytest.fixture
def world(_world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(_world)
    return _world


def test_scores_are_columns_of_the_same_documents(world: Path) -> None:
    before, after = _documents("mixed"), _documents("more")
    assert after.select(before.column_names).equals(before)
    assert after.column_names == [*before.column_names, "score_quality", "score_small", "score_order"]
    assert _result("scored")["train_bytes"] == sum(
        size
        for size, split in zip(before["bytes"].to_pylist(), before["split"].to_pylist(), strict=True)
        if split == "train"
    )


def test_a_model_scores_each_document_by_itself(world: Path) -> None:
    """The documents are written twice (`repeat`), with other neighbours; the scores of both are equal."""
    table = _documents("scored")
    texts = np.array(table["text"].to_pylist())
    scores = table["score_small"].to_numpy()
    assert len(set(texts)) < len(texts)
    for text in set(texts):
        same = scores[texts == text]
        np.testing.assert_allclose(same, same[0], rtol=1e-5)
    store = Store.open(RUNS / "chosen" / "mixed@bpe" / "train")
    bits = np.log2(300) * store.tokens / store.bytes
    assert scores.mean() == pytest.approx(bits, rel=0.1)  # after four steps a model still guesses


def _digests(stage: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(stage.glob("documents-*"))}


def _job(world: Path, name: str) -> dict[str, Any]:
    """The job of the stage `scored`, in a directory of its own."""
    graph = load_graph(Path("recipe.toml"), [], RUNS)
    return {**job_of(graph, graph.nodes["scored"], quiet=True), "dir": str(world / name), "parent": os.getpid()}


def test_a_score_stage_that_was_interrupted_continues(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the scorers, of the model, and of the writing; nothing that was saved is computed again."""
    monkeypatch.setattr(documents, "BATCH_ROWS", 64)
    monkeypatch.setattr(partial, "SAVE_SECONDS", 0.0)
    scored, scores = [], classifier.Classifier.scores

    def interrupted(method: Any, at: int) -> Any:
        calls = []

        def call(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == at:
                raise KeyboardInterrupt
            return method(*arguments)

        return call

    monkeypatch.setattr(classifier.Classifier, "scores", lambda self, x: scored.append(len(x)) or scores(self, x))
    job, out = _job(world, "interrupted"), world / "interrupted"
    for owner, name, at in (
        (partial.Partial, "save", 3),  # two batches of 64 are saved
        (partial.Partial, "save", 9),  # the model's first rows are
        (score.DocumentWriter, "write", 2),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted(getattr(owner, name), at))
            with pytest.raises(KeyboardInterrupt):
                child.run(job)
        assert not (out / "DONE").exists()
    child.run(job)
    assert sum(scored) == _documents("mixed").num_rows + 64  # the batch that was not saved
    assert _digests(out) == _digests(RUNS / "chosen" / "scored")
    assert not (out / score.PARTIAL).exists()
    result = json.loads((out / "result.json").read_text())
    assert {**result, "seconds": 0} == {**_result("scored"), "seconds": 0}


def test_a_score_that_is_no_finite_number_is_none(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document of unknown characters alone has no bytes; a model that diverged gives NaN."""
    found = likelihood.by_itself

    def broken(*arguments: Any) -> Any:
        one = found(*arguments)
        one.bytes[:1], one.nats[1:2] = 0.0, np.nan
        return one

    monkeypatch.setattr(likelihood, "by_itself", broken)
    child.run(_job(world, "broken"))
    result = json.loads((world / "broken" / "result.json").read_text())
    scores = np.concatenate(
        [b["score_small"].to_numpy(False) for b in read_documents(world / "broken", None, ["score_small"])]
    )
    assert result["unscored/small"] == np.isnan(scores).sum() == 4  # two of each split
    assert np.isfinite(scores[~np.isnan(scores)]).all()
    assert np.isfinite(result["mean/small"])


KILLED = """
import json, os, signal, sys
from ingot.corpus import documents
from ingot.stages import child
from ingot.stages.selection import partial

documents.BATCH_ROWS, partial.SAVE_SECONDS, left = 64, 0.0, int(sys.argv[1])
save = partial.Partial.save

def dying(self):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    save(self)

partial.Partial.save = dying
child.run(json.load(sys.stdin))
"""


@pytest.mark.slow
def test_a_score_stage_that_was_killed_twice_gives_the_undisturbed_bytes(world: Path) -> None:
    job = json.dumps(_job(world, "killed")).encode()
    codes = [subprocess.run([sys.executable, "-c", KILLED, n], input=job, check=False).returncode for n in "370"]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert _digests(world / "killed") == _digests(RUNS / "chosen" / "scored")


def test_noise_is_dropped_and_every_document_is_accounted_for(world: Path) -> None:
    funnel = json.loads((RUNS / "chosen" / "phased" / "funnel.json").read_text())
    for unit in ("documents", "bytes"):
        dropped = sum(counts[unit] for counts in funnel["dropped"].values())
        assert funnel["in"][unit] == funnel["kept"][unit] + dropped
        assert funnel["kept"][unit] == sum(counts[unit] for counts in funnel["phases"].values())
    kept, scored = _documents("phased"), _documents("more")
    assert funnel["in"]["documents"] == scored.num_rows
    dropped = pq.read_table(RUNS / "chosen" / "phased" / "dropped.parquet")
    assert dropped.num_rows == scored.num_rows - kept.num_rows
    assert set(dropped["reason"].to_pylist()) == {"quality_low"}
    real = [text.startswith("the ") and "went home." in text[:70] for text in kept["text"].to_pylist()]
    assert sum(real) >= 0.9 * len(real)
    assert sum(real) >= 0.45 * scored.num_rows


def test_a_stage_of_one_phase_has_its_documents_alone(world: Path) -> None:
    phased, early = _documents("phased"), _documents("early")
    assert set(phased["phase"].to_pylist()) == {"early", "late"}
    assert set(early["phase"].to_pylist()) == {"early"}
    assert early.num_rows == _result("phased")["phase/early"]
    low = _result("phased")["threshold/early.order/low"]
    assert (early["score_order"].to_numpy() >= np.float32(low)).all()


def test_documents_are_written_in_the_order_of_a_score(world: Path) -> None:
    before, after = _documents("phased"), _documents("ordered")
    assert after.column_names == before.column_names
    assert sorted(after["score_order"].to_pylist()) == sorted(before["score_order"].to_pylist())
    texts, scores = after["text"].to_pylist(), after["score_order"].to_pylist()
    originals = len(set(texts))
    assert originals < len(texts)  # `repeat` comes after all originals, in the same order
    assert len(set(texts[:originals])) == originals
    for part in (scores[:originals], scores[originals:]):
        assert part == sorted(part, reverse=True)
    assert scores != before["score_order"].to_pylist()


def test_conversations_are_scored_by_their_words(world: Path) -> None:
    assert _result("talked")["mean/order"] > 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stage.phased.where={ qualty = { min = 0.5 } }", "'more' has no score 'qualty'; did you mean 'quality'"),
        ("stage.phased.data='mixed'", "'mixed' has no score 'quality'; score it first"),
        ("stage.early.phase='erly'", "'phased' has no phase 'erly'; did you mean 'early'"),
        ("stage.early.data='more'", "'more' has no phase 'early'; define some"),
        (SIMILAR.replace("OTHER", "phased"), "similar_to: found 'phased', which has the documents of data themselves"),
        (SIMILAR.replace("OTHER", "mixed"), "similar_to: found 'mixed', which has the documents of data themselves"),
        ("stage.more.by=['quality']", "has the score 'quality' already"),
        ("stage.talked.by=['small']", "a model scores documents of format text"),
        ("stage.ordered.sort={ by = 'ordr' }", "'phased' has no score 'ordr'; did you mean 'order'"),
        ("stage.phased.where={ quality = { top = 0.5, per = 'language' } }", "a corpus that tells none apart"),
        ("stage.scored.by=['bpe']", "'bpe' is a tokenizer, expected a"),
        ("stage.bad.holdout.fraction=0.0", "a scorer is measured on held-out text"),
        ("stage.quality.bad=[]", "found no bad"),
        ("stage.quality.bad=['good']", "found good in good and in bad"),
        ("stage.phased.phases=[{ name = 'a' }, { name = 'b' }]", "phase 'a' without bounds"),
    ],
)
def test_a_recipe_without_a_meaning_is_refused(world: Path, setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_graph(Path("recipe.toml"), [setting], RUNS)


def test_documents_may_be_compared_with_others(world: Path) -> None:
    load_graph(Path("recipe.toml"), [SIMILAR.replace("OTHER", "bad")], RUNS)


def test_nothing_left_is_an_error_that_says_why(world: Path) -> None:
    graph = load_graph(Path("recipe.toml"), ["stage.phased.where={ quality = { min = 2.0 } }"], RUNS)
    with pytest.raises(UserError, match=r"kept no training document of \d+ \(quality_low \d+\); relax the bounds"):
        child.run(job_of(graph, graph.nodes["phased"], quiet=True))
    assert not graph.stage(graph.nodes["phased"]).is_done()


def test_equal_scores_at_a_quantile_are_named(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = select._columns

    def equal(corpus: Path, settings: Any) -> pa.Table:
        table = read(corpus, settings)
        at = table.column_names.index("score_quality")
        return table.set_column(at, "score_quality", pa.array([0.5] * len(table), pa.float32()))

    monkeypatch.setattr(select, "_columns", equal)
    for bound in ("top", "bottom"):
        where = f"stage.phased.where={{ quality = {{ {bound} = 0.5 }} }}"
        graph = load_graph(Path("recipe.toml"), [where], RUNS)
        job = job_of(graph, graph.nodes["phased"], quiet=False)
        if bound == "top":
            child.run(job)
            found = r"quality: top = 0.5 keeps (\d+) of \1 documents, expected \d+, because \1 of them have the score"
            assert re.search(found, capsys.readouterr().err)
        else:
            with pytest.raises(UserError, match=r"\(quality_high \d+; of quality, \d+ are equal: 0.5\); relax"):
                child.run(job)
