"""The pipeline: sums that close, duplicates, holdout, repeats, and bytes that depend on nothing but the input."""

import hashlib
import json
import random
import re

import polars as pl
import pytest

from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog
from ingot.corpus import holdout
from ingot.corpus.build import build
from ingot.corpus.documents import SCHEMA, iter_texts, read_documents
from ingot.corpus.readers import locate, read
from ingot.corpus.readers.python_library import library_files
from ingot.corpus.settings import DOCS, STDLIB, HoldoutSettings
from ingot.corpus.spool import SPOOL
from tests.corpus.corpus_helpers import funnel, jsonl, make, settings


def column(out, name, split=None):
    return [value for batch in read_documents(out, split, [name]) for value in batch[name].to_pylist()]


@pytest.fixture
def mixed(tmp_path):
    """1,200 lines: good, short, empty, copies, malformed."""
    draw = random.Random(3)
    lines = []
    for i in range(1200):
        words = " ".join(f"word{draw.randrange(10**6)}" for _ in range(140))
        kind = i % 10
        text = {0: "short", 1: "", 2: "One  text\nin many copies"}.get(kind, words)
        lines.append("{broken" if kind == 3 else json.dumps({"text": text}))
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_funnel_adds_up_to_the_document_and_the_byte(tmp_path, mixed):
    (tmp_path / "more.txt").write_text("short")
    out = tmp_path / "out"
    result = make(out, [mixed, tmp_path / "more.txt"], quality={"min_words": 4})
    total = funnel(out)
    assert {r: p["documents"] for r, p in total["dropped"].items()} == {
        "empty": 120,
        "too_few_words": 121,
        "exact_duplicate": 119,
    }
    for counts in (total, *total["sources"].values()):
        for unit in ("documents", "bytes"):
            parts = [counts["kept"], counts["quarantined"], *counts["dropped"].values()]
            assert counts["in"][unit] == sum(part[unit] for part in parts)
    assert total["in"]["documents"] == result["input_documents"] == 1201
    assert total["quarantined"]["documents"] == 120
    raw = sum(len(json.loads(x)["text"]) if x[1] != "b" else len(x) for x in mixed.read_text().split("\n"))
    assert total["in"]["bytes"] == raw + len("short")
    dropped = pl.read_parquet(out / "dropped.parquet")
    assert dropped["reason"].value_counts().sort("reason")["count"].to_list() == [120, 119, 121]
    assert dropped["text"].str.len_chars().max() <= 400
    assert column(out, "bytes") == [len(t.encode()) for t in iter_texts(out)]
    (batch, *_) = read_documents(out)
    assert batch.schema.remove_metadata() == SCHEMA


def test_result_does_not_depend_on_workers_or_batches(tmp_path, mixed, monkeypatch):
    def digests(name, by, workers):
        out = tmp_path / name
        make(
            out,
            [{"path": str(mixed), "repeat": 2}],
            quality={"min_words": 4},
            holdout={"fraction": 0.1, "by": by},
            workers=workers,
        )
        files = sorted(p for p in out.iterdir() if p.name != "metrics.jsonl")
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    for by in ("document", "tail", "characters"):
        monkeypatch.setattr(read, "BATCH_DOCUMENTS", 1024)
        one = digests("one", by, workers=1)
        assert digests("three", by, workers=3) == one
        monkeypatch.setattr(read, "BATCH_DOCUMENTS", 50)
        assert digests("fifty", by, workers=2) == one


def test_what_another_recipe_left_is_removed(tmp_path, mixed):
    out = tmp_path / "out"
    (out / SPOOL).mkdir(parents=True)
    (out / SPOOL / "plan.txt").write_text("another")
    (out / SPOOL / "part-00000.arrow").write_bytes(b"torn")
    (out / SPOOL / "part-00000.json").write_text("{}")
    (out / "documents-00007.parquet").write_bytes(b"old")
    make(out, mixed, holdout={"fraction": 0.1, "by": "tail"})
    assert sorted(p.name for p in out.iterdir()) == [
        "documents-00000.parquet",
        "dropped.parquet",
        "funnel.json",
        "metrics.jsonl",
        "quarantine.jsonl",
        "rules.json",
    ]


def test_exact_duplicates_keep_the_first_and_short_texts_too(tmp_path):
    """001 drops every text shorter than n words and everything that shares its header with another."""
    header = "All rights reserved by the very same people who wrote all of the other documents here too. "
    texts = ["a b", "a  b\n", "c", header + "one", header + "two", "c"]
    make(tmp_path / "out", jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts]))
    assert list(iter_texts(tmp_path / "out")) == ["a b", "c", header + "one", header + "two"]
    make(tmp_path / "all", tmp_path / "a.jsonl", dedup={"exact": False})
    found = column(tmp_path / "all", "cluster")
    assert len(found) == 6
    assert found[0] == found[1]
    assert found[2] == found[5]
    assert len(set(found)) == 4


def test_holdout_by_document_is_about_its_share_and_stable(tmp_path):
    rows = [{"text": f"document {i}"} for i in range(4000)]
    make(tmp_path / "small", jsonl(tmp_path / "a.jsonl", rows[:2000]), holdout={"fraction": 0.1})
    make(tmp_path / "large", jsonl(tmp_path / "b.jsonl", rows[::-1]), holdout={"fraction": 0.1})
    make(tmp_path / "more", tmp_path / "b.jsonl", holdout={"fraction": 0.2})
    small, large, more = (set(iter_texts(tmp_path / n, "val")) for n in ("small", "large", "more"))
    assert 340 < len(large) < 460
    assert small == {t for t in large if int(t.split()[1]) < 2000}
    assert large < more
    assert not large & set(iter_texts(tmp_path / "large", "train"))


def test_holdout_keeps_equal_texts_together_without_dedup(tmp_path):
    rows = [{"text": f"document {i % 50}"} for i in range(500)]
    make(tmp_path / "out", jsonl(tmp_path / "a.jsonl", rows), dedup={"exact": False}, holdout={"fraction": 0.3})
    assert not set(column(tmp_path / "out", "cluster", "val")) & set(column(tmp_path / "out", "cluster", "train"))


def test_D13_tail_cuts_one_document_at_tinyshakespeares_numbers(tmp_path):
    text = "".join(random.Random(0).choices("abcdefgh \n", k=1_115_393)) + "\n"
    text = "x" + text[1:-2] + "x\n"
    (tmp_path / "input.txt").write_text(text)
    result = make(tmp_path / "out", tmp_path / "input.txt", holdout={"fraction": 0.1, "by": "tail"})
    assert (result["train_characters"], result["val_characters"]) == (1_003_854, 111_540)
    assert (result["characters"], result["documents"], result["cut_documents"]) == (1_115_394, 1, 1)
    train, val = (list(iter_texts(tmp_path / "out", s)) for s in ("train", "val"))
    assert (train, val) == ([text[:1_003_854]], [text[1_003_854:]])


def test_tail_over_several_documents_counts_characters_not_bytes(tmp_path):
    rows = [{"text": f"é{i}" + "字" * 8} for i in range(10)]
    result = make(tmp_path / "out", jsonl(tmp_path / "a.jsonl", rows), holdout={"fraction": 0.25, "by": "tail"})
    assert (result["train_characters"], result["val_characters"]) == (75, 25)
    assert (result["train_documents"], result["val_documents"], result["documents"]) == (8, 3, 10)
    assert "".join(iter_texts(tmp_path / "out")) == "".join(r["text"] for r in rows)
    chat = [{"messages": [{"role": "assistant", "content": f"hello {i}"}]} for i in range(10)]
    make(tmp_path / "chat", jsonl(tmp_path / "c.jsonl", chat), format="chat", holdout={"fraction": 0.25, "by": "tail"})
    assert [len(json.loads(t)) for t in iter_texts(tmp_path / "chat")] == [1] * 10


def test_holdout_by_characters_takes_the_documents_of_smallest_hash(tmp_path):
    """Those that `document` draws first: of texts alike in size it holds out the same, up to the one on the border."""
    source = jsonl(tmp_path / "a.jsonl", [{"text": f"document {i:04d}"} for i in range(2000)])
    for by in ("document", "characters"):
        make(tmp_path / by, source, holdout={"fraction": 0.1, "by": by})
    drawn, exact = (list(iter_texts(tmp_path / by, "val")) for by in ("document", "characters"))
    assert len(exact) == 200
    assert set(drawn) <= set(exact) or set(exact) <= set(drawn)
    assert list(iter_texts(tmp_path / "characters", "train")) == sorted(iter_texts(tmp_path / "characters", "train"))


def test_holdout_by_characters_cuts_one_text_and_no_row(tmp_path):
    sizes = (300, 50, 20, 900)
    texts = ["".join(random.Random(n).choices("abcdefgh", k=n)) for n in sizes]
    result = make(
        tmp_path / "text",
        jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts]),
        holdout={"fraction": 0.25, "by": "characters"},
    )
    assert result["train_characters"] == int(0.75 * sum(sizes))
    assert result["cut_documents"] == 1
    assert "".join(iter_texts(tmp_path / "text")) == "".join(texts)
    chat = [{"messages": [{"role": "assistant", "content": text}]} for text in texts]
    source = jsonl(tmp_path / "c.jsonl", chat)
    result = make(tmp_path / "chat", source, format="chat", holdout={"fraction": 0.25, "by": "characters"})
    assert (result["train_documents"] + result["val_documents"], result["cut_documents"]) == (4, 0)


def test_equal_texts_are_not_separated_by_the_border(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"text": f"document {i % 3}"} for i in range(60)])
    out = tmp_path / "out"
    result = make(out, source, dedup={"exact": False}, holdout={"fraction": 0.4, "by": "characters"})
    assert result["val_documents"] == 40
    assert not set(column(out, "cluster", "val")) & set(column(out, "cluster", "train"))


@pytest.mark.parametrize(("by", "notified"), [("document", True), ("characters", False)])
def test_a_held_out_share_of_the_text_far_from_the_wanted_is_named(tmp_path, capsys, by, notified):
    """One document is longer than all others: held out by document it is most of the text, else too little is."""
    rows = [{"text": f"document {i}" * (1 if i else 1000)} for i in range(200)]
    source, out = jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out"
    out.mkdir()
    log = EventLog(out / "metrics.jsonl")
    build(settings(source, holdout={"fraction": 0.1, "by": by}), out, Display(), log)
    log.close()
    said = capsys.readouterr()
    notice = (
        "% of the text is held out, expected 10.0%, because few documents are drawn, or they differ in size; "
        'by = "characters" takes that into account'
    )
    assert (notice in said.err + said.out) == notified
    assert "% of the text)" in said.err + said.out
    notice = holdout.share_notice(HoldoutSettings(fraction=0.1, by=by), 3, 10, divisible=False)
    assert notice is not None
    assert notice.endswith("few documents are drawn, or they differ in size; another fraction may come closer")


def test_an_empty_split_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "a.txt").write_text("only one")
    with pytest.raises(UserError, match=r'leaves no held-out document of 1; use by = "characters"'):
        make(tmp_path / "out", tmp_path / "a.txt", holdout={"fraction": 0.01})
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["metrics.jsonl"]
    (tmp_path / "b.txt").write_text("b")
    chats = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])  # no conversation is cut
    for source, table in (
        (tmp_path / "b.txt", {"holdout": {"fraction": 0.5, "by": "characters"}}),
        (chats, {"format": "chat", "holdout": {"fraction": 0.01}}),
        (chats, {"format": "chat", "holdout": {"fraction": 0.01, "by": "characters"}}),
    ):
        with pytest.raises(UserError, match=r"leaves no .* document of 1; choose another fraction, or add documents"):
            make(tmp_path / "out", source, **table)


def test_repeat_writes_training_documents_again_at_the_end(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", [{"text": f"a{i}"} for i in range(40)])
    b = jsonl(tmp_path / "b.jsonl", [{"text": f"b{i}"} for i in range(3)])
    result = make(tmp_path / "out", [{"path": str(a), "repeat": 3}, b], holdout={"fraction": 0.2})
    texts, val = list(iter_texts(tmp_path / "out", "train")), list(iter_texts(tmp_path / "out", "val"))
    again = [t for t in texts if t.startswith("a")]
    third = len(again) // 3
    assert again == again[:third] * 3
    assert len(val) == len(set(val)) == 43 - len(set(texts))
    assert (result["documents"], result["train_documents"]) == (43, len(texts))


@pytest.mark.slow
def test_the_library_as_code_prose_and_conversations_shares_its_holdout(tmp_path, monkeypatch):
    some = [pair for n, pair in enumerate(library_files()) if n % 3 == 0 or pair[0].startswith(("json/", "argparse"))]
    monkeypatch.setattr(locate, "library_files", lambda: some)
    by_group = {"fraction": 0.05, "by": "group"}
    make(tmp_path / "code", STDLIB, quality="code", pii=True, holdout=by_group)
    make(tmp_path / "prose", DOCS, holdout=by_group)
    for format in ("chat", "pairs", "prompts"):
        make(tmp_path / format, DOCS, format=format, holdout=by_group)
    split = {}
    for name in ("code", "prose", "chat", "pairs", "prompts"):
        for group, where in zip(column(tmp_path / name, "group"), column(tmp_path / name, "split"), strict=True):
            assert split.setdefault(group, where) == where
    groups = set(column(tmp_path / "code", "group"))
    assert {"json/__init__.py", "argparse.py"} <= groups
    assert not [g for g in groups if "/test" in g or "site-packages" in g]
    pairs = {}
    for text in iter_texts(tmp_path / "chat"):
        (question, answer) = json.loads(text)
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert 0 < len(answer["content"]) <= 400
        pairs[question["content"]] = answer["content"]
    assert len(pairs) > 1000
    answers = {a for q, a in pairs.items() if "json.dumps" in q}
    assert "import json" in answers
    decoded = {a for q, a in pairs.items() if "raw_decode(s, idx=0)" in q}
    assert decoded
    assert decoded <= {
        "needs s",
        "only idx",
        "by default idx=0",
        "import json.decoder",
        "class json.decoder.JSONDecoder",
    }
    assert not [q for q in pairs if "._" in q]
    preferred = [json.loads(text) for text in iter_texts(tmp_path / "pairs")]
    assert len(preferred) > 500
    for pair in preferred:
        (asked,), (good,), (bad,) = pair["prompt"], pair["chosen"], pair["rejected"]
        assert pairs[asked["content"]] == good["content"] != bad["content"]
        assert good["content"].split()[0] == bad["content"].split()[0]  # of the same kind
    prompts = [json.loads(text)[0]["content"] for text in iter_texts(tmp_path / "prompts")]
    answers = [json.loads(extra)["answer"] for extra in column(tmp_path / "prompts", "extra")]
    assert [pairs[prompt] for prompt in prompts] == answers


@pytest.mark.parametrize(("book", "said"), [(5000, True), (300, False)])
def test_bounds_that_take_most_of_the_text_are_named(tmp_path, monkeypatch, book, said):
    """A folder of books, judged by bounds for pages of the web."""
    lines: list[str] = []
    monkeypatch.setattr(Display, "notify", lambda self, text: lines.append(text))
    folder = tmp_path / "in"
    folder.mkdir()
    draw = random.Random(0)
    for name, words in (("a", 200), ("b", 200), ("book", book)):
        (folder / f"{name}.txt").write_text(" ".join(f"word{draw.randrange(10_000)}" for _ in range(words)))
    make(tmp_path / "out", folder, quality={"max_words": 4096}, holdout={"fraction": 0.3, "by": "tail"})
    found = [line for line in lines if "the bounds of `quality` dropped" in line]
    assert bool(found) == said
    assert not said or re.search(r"dropped 9\d% of the text, most of it as too_many_words ", found[0])
