"""`ingot inspect`: the right facts, and a sentence where the directory is of another kind."""

import json
import struct

import pytest

from ingot.core.artifact import atomic_json, digest_file
from ingot.core.errors import UserError
from ingot.report import reading
from ingot.report.inspect import inspect


def test_corpus(finished, capsys):
    data = inspect.corpus(finished.dir("clean").path)
    assert data["funnel"]["in"]["documents"] == 43
    assert [s["reason"] for s in data["dropped"]] == ["too_few_words", "exact_duplicate"]
    assert data["quarantined"][0]["line"] == 43
    assert json.loads(json.dumps(data)) == data
    inspect.print_corpus(data)
    shown = capsys.readouterr().out
    assert '<script>alert("owned")</script>' in shown
    assert "line 43" in shown
    counts = data["funnel"]
    read = counts["in"]["documents"] - counts["quarantined"]["documents"]
    assert counts["kept"]["documents"] < read, "of the documents read some are dropped"
    (field,) = (field for field in counts["fields"] if field["field"] == "text")
    assert f"field text: document, {field['rows']:,} of {read:,} rows" in shown


def test_store(finished, capsys):
    data = inspect.store(finished.dir("questions@bpe").path)
    assert data["splits"]["train"]["columns"]["mask"] == "u1 a token"
    assert data["splits"]["train"]["first"]["text"].startswith("<|user|>")
    inspect.print_store(data)
    assert "questions@bpe/val" in capsys.readouterr().out


@pytest.fixture
def saved(finished, tmp_path):
    """A train stage with two checkpoints, the newer one damaged."""
    stage = tmp_path / "base"
    atomic_json(stage / "inputs.json", json.loads((finished.dir("base") / "inputs.json").read_text()))
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "model.w": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}}
    ).encode()
    for step in (100, 200):
        path = stage / "checkpoints" / f"{step:08d}"
        atomic_json(path / "state.json", {"step": step, "best_val_loss_nats": 1.5})
        (path / "shard.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        files = {f.name: {"bytes": f.stat().st_size, "blake2b": digest_file(f)} for f in path.iterdir()}
        atomic_json(path / "manifest.json", files)
    damaged = stage / "checkpoints" / "00000200" / "shard.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    return stage


def test_checkpoints(saved, capsys):
    data = inspect.checkpoints(saved)
    good, bad = data["checkpoints"]
    assert good["problem"] is None
    assert good["state"]["step"] == 100
    assert good["tensors"] == [{"name": "model.w", "shape": [2, 1], "dtype": "F32"}]
    assert bad["problem"].endswith("shard.safetensors: content differs from its digest")
    inspect.print_checkpoints(data)
    shown = capsys.readouterr().out
    assert "digests match" in shown
    assert "2 x 1" in shown


@pytest.mark.parametrize(
    ("look", "name", "sentence"),
    [
        (inspect.corpus, "base", "is a train stage, expected a corpus stage, such as runs/NAME/clean"),
        (inspect.store, "card", "is an evaluate stage, expected a tokens stage"),
        (inspect.checkpoints, "clean", "is a corpus stage, expected a train stage, such as runs/NAME/base"),
        (inspect.checkpoints, "chat", "no checkpoint yet"),
    ],
)
def test_another_kind_of_stage(finished, look, name, sentence):
    with pytest.raises(UserError, match=sentence):
        look(finished.dir(name).path)


def test_no_stage_at_all(tmp_path):
    with pytest.raises(UserError, match=r"no inputs\.json"):
        inspect.store(tmp_path)


def test_what_could_not_be_read_is_shown_once_for_a_file_and_a_kind(tmp_path):
    rows = [("a.jsonl", n, f"byte {n} is not UTF-8") for n in range(30)]
    rows += [("a.jsonl", 40, "no field 'text'"), ("b.gz", 0, "truncated gzip data")]
    lines = [json.dumps({"path": path, "line": line, "reason": reason}) for path, line, reason in rows]
    (tmp_path / "quarantine.jsonl").write_text("\n".join(lines) + "\n")
    found = [(q["path"], q["line"], q["alike"]) for q in reading.quarantined(tmp_path)]
    assert found == [("a.jsonl", 0, 30), ("a.jsonl", 40, 1), ("b.gz", 0, 1)]
