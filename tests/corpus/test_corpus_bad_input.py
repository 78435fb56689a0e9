"""Bad input: counted and named where the rest is good, one sentence where nothing is."""

import gzip
import hashlib
import io
import json
import tomllib
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingot.core.errors import UserError
from ingot.core.file_hashes import FileHashes
from ingot.core.recipe import dump_toml, load_recipe
from ingot.core.settings import canonical, settings_tree
from ingot.corpus.documents import iter_texts, read_documents
from ingot.corpus.filters import load_filters
from ingot.corpus.readers.locate import source_digest
from ingot.corpus.settings import CorpusSettings
from tests.corpus.corpus_helpers import funnel, jsonl, make, quarantine, settings

GOOD = [{"text": f"line number {i}"} for i in range(2000)]


def data(rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_bad_lines_are_quarantined_with_line_and_offset(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"text": "one"}',
        b'{"text": "broken',
        b"",
        b'{"text": "bad \xff byte"}',
        b'{"text": 5}',
        b'{"body": "x"}',
        b"[1]",
        b'{"text": "\\ud800"}',
        b'{"text": "\\ud83d\\ude00 last"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    make(tmp_path / "out", tmp_path / "a.jsonl")
    assert list(iter_texts(tmp_path / "out")) == ["one", "😀 last"]
    bad = quarantine(tmp_path / "out")
    starts = [sum(len(line) + 1 for line in lines[:n]) for n in range(len(lines))]
    assert [(b["line"], b["offset"]) for b in bad] == [(n + 1, starts[n]) for n in (1, 3, 4, 5, 6, 7)]
    assert f"byte {starts[3] + 14} (0xff) is not UTF-8" in bad[1]["reason"]
    assert "no field 'text', found 'body'" in bad[3]["reason"]
    offsets = [o for b in read_documents(tmp_path / "out", columns=["offset"]) for o in b["offset"].to_pylist()]
    assert offsets == [0, starts[8]]


@pytest.mark.parametrize("packed", ["gz", "zst"])
def test_compressed_whole_and_truncated(tmp_path, packed):
    rows = [{"text": hashlib.sha256(str(i).encode()).hexdigest() * 8} for i in range(6_000)]
    body = data(rows)
    whole = gzip.compress(body[:1000]) + gzip.compress(body[1000:])
    if packed == "zst":
        whole = pa.Codec("zstd").compress(body, asbytes=True)
    (tmp_path / f"whole.jsonl.{packed}").write_bytes(whole)
    (tmp_path / f"cut.jsonl.{packed}").write_bytes(whole[: len(whole) * 2 // 3])
    result = make(tmp_path / "whole", tmp_path / f"whole.jsonl.{packed}")
    assert (result["documents"], result["quarantined_documents"]) == (6_000, 0)
    result = make(tmp_path / "cut", tmp_path / f"cut.jsonl.{packed}")
    assert 1_000 < result["documents"] < 6_000
    assert result["quarantined_documents"] == 1
    assert "truncated" in quarantine(tmp_path / "cut")[0]["reason"]


def test_every_kind_of_bad_input_costs_its_own_rows_alone(tmp_path):
    """In one folder, where other readers lose a file or the run."""
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [{"text": f"{i} {hashlib.sha256(str(i).encode()).hexdigest()}"} for i in range(4000)]
    good = data(rows[:5])
    packed = gzip.compress(data(rows))
    table = pa.Table.from_pylist(rows[:5])
    pq.write_table(table, tmp_path / "whole.parquet")
    parquet = (tmp_path / "whole.parquet").read_bytes()
    inputs = {  # file -> (content, documents in it, why something of it is in quarantine)
        "malformed.jsonl": (good + b'{"text": "a\n', 5, "malformed JSON"),
        "utf8.jsonl": (good + b'{"text": "\xff"}\n', 5, "is not UTF-8"),
        "cut.jsonl.gz": (packed[: len(packed) // 2], None, "truncated gzip data"),
        "blank.jsonl": (b"\n" + good + b"\n \n", 5, None),
        "empty.jsonl": (b"", 0, None),
        "surrogate.jsonl": (good + b'{"text": "\\ud800"}\n', 5, "surrogate"),
        "long.jsonl": (data([{"text": "x" * 20_000_000}]) + good, 5, "16 MB"),
        "corrupt.parquet": (parquet[: len(parquet) // 2] + parquet[len(parquet) // 2 + 9 :], 0, "cannot be decoded"),
    }
    for name, (content, _, _) in inputs.items():
        (folder / name).write_bytes(content)
    make(tmp_path / "out", folder, dedup={"exact": False})
    documents = Counter(p for b in read_documents(tmp_path / "out", columns=["path"]) for p in b["path"].to_pylist())
    found = {Path(path).name: number for path, number in documents.items()}
    bad = {Path(record["path"]).name: record["reason"] for record in quarantine(tmp_path / "out")}
    assert set(bad) == {name for name, (_, _, why) in inputs.items() if why}
    for name, (_, number, why) in inputs.items():
        assert why is None or why in bad[name], bad[name]
        assert found.get(name, 0) == number or (number is None and 1000 < found[name] < 4000), name
    counts = funnel(tmp_path / "out")
    assert counts["in"]["documents"] == counts["kept"]["documents"] + counts["quarantined"]["documents"]
    assert len(quarantine(tmp_path / "out")) == 6
    assert counts["quarantined"]["documents"] == 5 + 5  # of Parquet a group of five rows
    assert make(tmp_path / "larger", folder / "long.jsonl", max_document_mb=32)["documents"] == 6


def test_a_line_longer_than_any_block(tmp_path):
    long = "x" * 3_000_000
    jsonl(tmp_path / "a.jsonl", [{"text": long}, {"text": "short"}])
    make(tmp_path / "out", tmp_path / "a.jsonl")
    assert [len(t) for t in iter_texts(tmp_path / "out")] == [3_000_000, 5]


def test_invalid_utf8_file_is_quarantined_in_a_directory(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("good")
    (tmp_path / "in/b.txt").write_bytes(b"one\ntwo \xe9\n")
    make(tmp_path / "out", tmp_path / "in")
    (bad,) = quarantine(tmp_path / "out")
    assert (bad["line"], bad["offset"]) == (2, 8)
    assert "byte 8 (0xe9) is not UTF-8; set the encoding of the source, such as" in bad["reason"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_what_an_editor_marks_as_another_unicode_is_read(tmp_path, encoding):
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "a.txt").write_bytes(f"{mark}Häuser und 東京".encode(encoding))
    make(tmp_path / "out", tmp_path / "a.txt")
    assert list(iter_texts(tmp_path / "out")) == ["Häuser und 東京"]


def test_directories_skip_what_is_no_text(tmp_path):
    top = tmp_path / "in"
    for name in ("b/z.md", "b/a.py", "a.txt", ".hidden.txt", ".git/x.txt", "b/__pycache__/x.py", "image.png"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(name)
    make(tmp_path / "out", top)
    assert list(iter_texts(tmp_path / "out")) == ["a.txt", "b/a.py", "b/z.md"]
    (batch,) = read_documents(tmp_path / "out")
    assert batch["group"].to_pylist() == ["a.txt", "b/a.py", "b/z.md"]
    make(tmp_path / "glob", f"{top}/**/*.md")
    assert list(iter_texts(tmp_path / "glob")) == ["b/z.md"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("missing.txt", None, "does not exist .* expected a file, a directory"),
        ("*.nothing", None, "contains no readable file, expected at least one such as .txt"),
        ("empty.txt", b"", r"is empty \(0 bytes in 1 file"),
        ("blank.jsonl", b"\n\n", "contains no document"),
        ("latin.txt", b"caf\xe9", r"latin.txt: line 1: byte 3 \(0xe9\) is not UTF-8; set the encoding of the source"),
        ("bad.jsonl", b'\n{"text": \n', "bad.jsonl: line 2: malformed JSON: .*; no line of this file is usable"),
        ("other.jsonl", b'{"body": "x", "id": 1}\n', "no field 'text', found 'body', 'id'; set `field`"),
        ("spaces.txt", b" \n \n", r"kept none of 1 documents \(empty 1\)"),
    ],
)
def test_nothing_usable_is_one_sentence(tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    with pytest.raises(UserError, match=sentence) as caught:
        make(out, tmp_path / name)
    assert "\n" not in str(caught.value)
    assert [p.name for p in out.iterdir()] == ["metrics.jsonl"]


def test_settings_are_refused_with_the_fix():
    for table, sentence in {
        ("quality", "texte"): "did you mean 'text'",
        ("format", "chart"): "'text', 'chat', 'pairs' or 'prompts'",
        ("workers", 0): "greater than or equal to 1",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            settings("x", **dict([table]))
    with pytest.raises(ValueError, match="expected format text"):
        settings("x", format="chat", quality="text")


def test_settings_survive_the_resolved_recipe_and_workers_stay_out_of_the_key():
    table = {"path": "x", "repeat": 2}
    for quality in ("code", "none", {"min_words": 3}):
        one = settings([table, "python:stdlib"], quality=quality, holdout={"fraction": 0.1, "by": "group"})
        again = CorpusSettings.model_validate(tomllib.loads(dump_toml(settings_tree(one))))
        assert again == one
    assert canonical(settings("x", workers=1)) == canonical(settings("x", workers=7))
    assert "workers" not in canonical(one)


def test_wrong_settings_of_a_recipe_are_one_sentence_each(tmp_path):
    (tmp_path / "r.toml").write_text(
        '[run]\nname = "x"\n[stage.a]\nkind = "corpus"\nsources = [{ path = "x", repeet = 2 }, ""]\n'
        "quality = { min_word = 3, max_special_fraction = 2 }\nholdout = { shere = 0.1 }\nfilter = []\n"
        '[stage.b]\nkind = "corpus"\n'
    )
    with pytest.raises(UserError) as caught:
        load_recipe(tmp_path / "r.toml", [], {"corpus": CorpusSettings})
    assert sorted(line.partition(";")[0] for line in str(caught.value).split("\n")) == [
        "stage.a.filter: unknown setting",
        "stage.a.holdout.shere: unknown setting",
        "stage.a.quality.max_special_fraction: found 2, expected at most 1 (Maximum fraction of "
        "characters that are neither letters, marks, digits nor white space.)",
        "stage.a.quality.min_word: unknown setting",
        "stage.a.sources.0.repeet: unknown setting",
        "stage.a.sources.1.path: found '', expected 1 or more characters (A file, a directory, a glob, "
        "`python:stdlib`, `python:docs`, or `https://`, `hf://datasets/` or `s3://`.)",
        "stage.b.sources: missing",
    ]
    assert "did you mean 'min_words'?" in str(caught.value)


def test_digest_needs_sources_and_follows_content_and_filters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hashes = FileHashes(tmp_path / "memo.json")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "f.py").write_text("def f(d): return d['text'] == 'x'\n")
    first = source_digest(settings("a.txt", filters=["f.py:f"]), hashes)
    (tmp_path / "f.py").write_text("def f(d): return d['text'] == 'yy'\n")
    second = source_digest(settings("a.txt", filters=["f.py:f"]), hashes)
    (tmp_path / "a.txt").write_text("other")
    third = source_digest(settings("a.txt", filters=["f.py:f"]), hashes)
    assert len({first, second, third}) == 3
    with pytest.raises(UserError, match="does not exist"):
        source_digest(settings("b.txt"), hashes)


def test_remote_files_need_a_sha256_and_are_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url, body = "https://example.org/a.txt", b"remote text\n"
    right = {"path": url, "sha256": hashlib.sha256(body).hexdigest()}
    calls = []

    def answer(address, timeout):
        calls.append(address)
        return io.BytesIO(body)

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    source_digest(settings([right]), FileHashes(tmp_path / "memo.json"))
    assert not calls
    for _ in range(2):
        make(tmp_path / "out", [right])
    assert list(iter_texts(tmp_path / "out")) == ["remote text\n"]
    assert calls == [url]
    next((tmp_path / "cache").rglob("a.txt")).write_bytes(b"damaged\n")
    make(tmp_path / "out", [right])
    assert list(iter_texts(tmp_path / "out")) == ["remote text\n"], "what was kept is checked before it is read"
    assert calls == [url, url]
    with pytest.raises(UserError, match="was downloaded with sha256"):
        make(tmp_path / "out", [{"path": url, "sha256": "0" * 64}])
    with pytest.raises(UserError, match="has no sha256"):
        make(tmp_path / "out", [url])
    with pytest.raises(UserError, match="expected https"):
        make(tmp_path / "out", ["http://example.org/a.txt"])


def test_offline_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def offline(address, timeout):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    with pytest.raises(UserError, match=r"could not be downloaded \(no route\).*--set 'stage.NAME.sources="):
        make(tmp_path / "out", [{"path": "https://example.org/a.txt", "sha256": "0" * 64}])


def test_local_sha256_is_checked(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="correct the sha256 or the path"):
        make(tmp_path / "out", [{"path": str(tmp_path / "a.txt"), "sha256": "0" * 64}])


def test_chat_messages_are_checked_and_cleaned_inside(tmp_path):
    def talk(content, role="assistant"):
        return {"messages": [{"role": "user", "content": "hi"}, {"role": role, "content": content, "id": 1}]}

    rows = [talk("a\r\nme@x.org"), talk("x", "robot"), talk(5), talk(" "), {"messages": []}, {"messages": "hi"}]
    make(tmp_path / "out", jsonl(tmp_path / "a.jsonl", rows), format="chat", pii=True)
    (text,) = iter_texts(tmp_path / "out")
    assert json.loads(text) == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a\n[EMAIL]"}]
    assert len(quarantine(tmp_path / "out")) == 4
    assert funnel(tmp_path / "out")["dropped"]["empty"]["documents"] == 1
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="is plain text, but format"):
        make(tmp_path / "out", tmp_path / "a.txt", format="chat")


def test_what_one_name_would_hide_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'qa\.jsonl' is named twice with repeat = 3 and 1, expected the same"):
        settings([{"path": "qa.jsonl", "field": "q", "repeat": 3}, {"path": "qa.jsonl", "field": "a"}])
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("def bad(documents):\n    return documents['text'] == 'x'\n")
    with pytest.raises(UserError, match=r"filters: found two called 'bad', expected different names"):
        load_filters([f"{tmp_path / name}.py:bad" for name in ("a", "b")])


@pytest.mark.parametrize("name", ["https://[x/y", "~nosuchuser/x", "x" * 300])
def test_a_source_that_can_be_no_path_is_one_sentence(name):
    with pytest.raises(UserError, match=r"^sources: ") as caught:
        source_digest(settings([{"path": name, "sha256": "0" * 64}]), FileHashes(Path("none")))
    assert "\n" not in str(caught.value)


def test_a_broken_link_beside_a_source_is_passed_over(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    make(tmp_path / "out", str(tmp_path / "*.txt"))
    assert list(iter_texts(tmp_path / "out")) == ["one"]


def test_a_column_that_nobody_asked_for_ends_nothing(tmp_path):
    """Nanoseconds of a time and years beyond Python's: the row is kept, its field as a number in text."""
    times = [1_700_000_000_123_456_789, 5]
    for kind, name in ((pa.timestamp("ns"), "ns"), (pa.timestamp("us"), "us"), (pa.duration("ns"), "length")):
        values = pa.array([10**18, 5] if name == "us" else times, pa.int64()).cast(kind)
        table = pa.table({"prompt": ["q", "r"], "t": values})
        pq.write_table(table, tmp_path / f"{name}.parquet")
        counts = make(tmp_path / name, tmp_path / f"{name}.parquet", format="prompts")
        assert counts["documents"] == 2


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"PAR1 and no footer PAR1"])
def test_damaged_documents_are_one_sentence(tmp_path, damage):
    (tmp_path / "documents-00000.parquet").write_bytes(damage)
    with pytest.raises(UserError, match=r"documents-00000\.parquet: not readable, expected the documents"):
        list(iter_texts(tmp_path))
