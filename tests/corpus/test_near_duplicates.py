"""Near-duplicates: hashes mean what they say, pairs are found by their similarity, nothing depends on batches."""

import hashlib
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

from ingot.core.errors import UserError
from ingot.core.events import Display
from ingot.corpus import minhash, near_duplicates, pieces, spool
from ingot.corpus.documents import iter_texts
from ingot.corpus.readers import read
from ingot.corpus.readers.utf8 import flatten
from ingot.corpus.settings import MinHashSettings
from tests.corpus.corpus_helpers import funnel, jsonl, make

WORDS = [f"{a}{b}{c}" for a in "bdfgklm" for b in "aeiou" for c in "nrst"]


def prose(words: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words)) + "."


def changed(text: str, rate: float, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) if draw.random() < rate else word for word in text.split())


def runs(text: str) -> set[tuple[str, ...]]:
    """The runs of five words, by a regular expression."""
    words = re.findall("[\u3000-\u9fff]|[a-z0-9\u0080-\u1fff]+", text.lower())
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def similarity(a: str, b: str) -> float:
    return len(runs(a) & runs(b)) / max(1, len(runs(a) | runs(b)))


def test_B3_hashes_of_runs_are_equal_exactly_where_the_runs_are():
    texts = [
        *("", "one two three four", "One, two;  three four: FIVE", "one two three four five six", " \n "),
        *(
            "naïve café über straße déjà vu",
            "汉字汉字五六七",
            "the 漢字 and かな both occur",
            "“one” two—three four… five",
        ),
        *(prose(300, seed) for seed in range(20)),
    ]
    hashes, counts = minhash._runs(*flatten(pl.Series(texts)))
    assert counts.tolist() == [
        max(0, len(re.findall("[\u3000-\u9fff]|[a-z0-9\u0080-\u1fff]+", t.lower())) - 4) for t in texts
    ]
    per_text = np.split(hashes, np.cumsum(counts)[:-1])
    assert [len(set(h.tolist())) for h in per_text] == [len(runs(t)) for t in texts]
    for a, hashes_a in zip(texts, per_text, strict=True):
        for b, hashes_b in zip(texts, per_text, strict=True):
            assert len(set(hashes_a.tolist()) & set(hashes_b.tolist())) == len(runs(a) & runs(b))


def test_B3_equal_numbers_estimate_the_similarity():
    """Of 2,000 hash functions; the deviations are those of coins with that probability."""
    number, a = 2000, prose(400, 1)
    others = [changed(a, rate, 2) for rate in (0.01, 0.03, 0.08, 0.2)]
    flat = minhash.signatures(pl.Series([a, *others]), number)
    for row, b in zip(flat[1:], others, strict=True):
        exact = similarity(a, b)
        sigma = (exact * (1 - exact) / number) ** 0.5
        assert abs((row == flat[0]).mean() - exact) < 4 * sigma


def test_B3_a_text_longer_than_a_chunk_is_hashed_like_a_short_one(monkeypatch: pytest.MonkeyPatch):
    texts = pl.Series([prose(60, seed) for seed in range(9)] + ["", "two words", prose(4000, 9)])
    whole = minhash.signatures(texts, 20)
    monkeypatch.setattr(minhash, "chunks", lambda data, starts: pieces.chunks(data, starts, 500))
    monkeypatch.setattr(pieces, "_POWERS", pieces._POWERS[:501])
    monkeypatch.setattr(pieces, "_INVERSES", pieces._INVERSES[:501])
    np.testing.assert_array_equal(minhash.signatures(texts, 20), whole)


def test_B3_planted_copies_are_found_by_their_similarity():
    """A control: with a threshold of 1 and one band, only equal sets are found."""
    originals = [prose(200, seed) for seed in range(300)]
    rates = [(0.0, 0.005, 0.02, 0.1, 0.3)[i % 5] for i in range(300)]
    copies = [changed(text, rate, i) for i, (text, rate) in enumerate(zip(originals, rates, strict=True))]
    exact = np.array([similarity(a, b) for a, b in zip(originals, copies, strict=True)])
    flat = minhash.signatures(pl.Series(originals + copies), 125)
    sizes = np.ones(600, np.int64)
    found = minhash.find(flat, sizes, MinHashSettings()).kept_for
    hit = found[:300] == found[300:]
    assert hit[exact > 0.8].all()
    assert hit[exact > 0.7].mean() > 0.92
    assert not hit[exact < 0.4].any()
    assert len(set(found.tolist())) == 600 - hit.sum()
    strict = minhash.find(flat, sizes, MinHashSettings(threshold=1, bands=1, rows=125)).kept_for
    assert ((strict[:300] == strict[300:]) == (exact == 1)).all()


@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_B3_keys_that_do_not_fit_memory_give_the_same_result(memory: int, monkeypatch: pytest.MonkeyPatch):
    texts = [changed(prose(120, seed % 30), 0.02, seed) for seed in range(90)]
    flat, sizes = minhash.signatures(pl.Series(texts), 125), np.ones(90, np.int64)
    expected = minhash.find(flat, sizes, MinHashSettings())
    monkeypatch.setattr(minhash, "_KEYS_BYTES", memory)
    np.testing.assert_array_equal(minhash.find(flat, sizes, MinHashSettings()).kept_for, expected.kept_for)


def kept(out: Path, rows: list[Any], **table: Any) -> list[str]:
    make(out, jsonl(out.with_suffix(".jsonl"), rows), dedup={"minhash": table.pop("minhash", {})}, **table)
    return list(iter_texts(out))


def test_B3_a_changed_word_and_a_shift_by_a_word_are_near_duplicates(tmp_path: Path):
    """And the same words in another order, the beginning alone, and another text are not."""
    text = prose(300, 1)
    words = text.split()
    one_word = " ".join([*words[:150], "another", *words[151:]])
    shuffled = random.Random(1).sample(words, len(words))
    texts = [text, one_word, "first " + text, " ".join(shuffled), " ".join(words[:100]), prose(300, 2), "two words"]
    assert kept(tmp_path / "out", [{"text": t} for t in texts]) == [text, *texts[3:]]
    assert funnel(tmp_path / "out")["dropped"]["near_duplicate"]["documents"] == 2
    pairs = pl.read_parquet(tmp_path / "out" / "near_duplicates.parquet")
    assert pairs["kept_offset"].to_list() == [0, 0]
    assert pairs["similarity"].min() > 0.9
    dropped = pl.read_parquet(tmp_path / "out" / "dropped.parquet")
    assert dropped["reason"].to_list() == ["near_duplicate"] * 2
    assert not list((tmp_path / "out").glob(".*"))


def test_B3_the_longest_of_a_cluster_can_be_kept(tmp_path: Path):
    text = prose(300, 1)
    texts = [text, f"{text} and more", prose(40, 3), f"{text} and"]
    assert kept(tmp_path / "first", [{"text": t} for t in texts]) == [text, texts[2]]
    assert kept(tmp_path / "longest", [{"text": t} for t in texts], minhash={"keep": "longest"}) == texts[1:3]


@pytest.mark.parametrize("format", ["chat", "pairs", "prompts"])
def test_B3_rows_of_every_format_are_compared_by_their_words(format: str, tmp_path: Path):
    def row(question: str, answer: str) -> dict[str, Any]:
        return {
            "chat": {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]},
            "pairs": {"prompt": question, "chosen": answer, "rejected": "no"},
            "prompts": {"prompt": f"{question} {answer}"},
        }[format]

    question, answer = prose(60, 1), prose(200, 2)
    rows = [row(question, answer), row(question, changed(answer, 0.01)), row(question, prose(200, 5))]
    assert len(kept(tmp_path / "out", rows, format=format)) == 2


def test_B3_the_result_depends_on_documents_and_their_order_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not on workers, batches or files; dropped rows are recorded in the same order."""
    rows = [{"text": changed(prose(150, seed % 40), 0.01, seed)} for seed in range(200)]
    rows += [{"text": ""}, rows[7], rows[7]]

    def digests(name: str, files: int, batch: int, workers: int) -> dict[str, str]:
        monkeypatch.setattr(read, "BATCH_DOCUMENTS", batch)
        folder = tmp_path / name / "in"
        folder.mkdir(parents=True)
        size = -(-len(rows) // files)
        for i in range(files):
            jsonl(folder / f"{i:02}.jsonl", rows[i * size : (i + 1) * size])
        out = tmp_path / name / "out"
        make(out, folder, dedup={"minhash": {}}, workers=workers, holdout={"fraction": 0.2})
        texts = json.dumps([list(iter_texts(out, split)) for split in ("train", "val")])
        counts = {r: p["documents"] for r, p in funnel(out)["dropped"].items()}
        assert counts["empty"] == 1
        assert counts["exact_duplicate"] >= 2
        assert counts["near_duplicate"] > 50
        return {"texts": hashlib.sha256(texts.encode()).hexdigest(), **counts}

    assert digests("one", 1, 1024, 1) == digests("many", 7, 16, 2)


def test_B3_the_funnel_adds_up_and_a_corpus_without_documents_is_refused(tmp_path: Path):
    rows = [{"text": changed(prose(150, seed % 5), 0.003, seed)} for seed in range(40)] + [{"text": ""}]
    result = make(tmp_path / "out", jsonl(tmp_path / "in.jsonl", rows), dedup={"minhash": {}})
    counts = funnel(tmp_path / "out")
    dropped = sum(p["documents"] for p in counts["dropped"].values())
    assert counts["in"]["documents"] == 41 == counts["kept"]["documents"] + dropped
    assert result["documents"] == counts["kept"]["documents"] == 5
    with pytest.raises(Exception, match="kept none of 1 documents"):
        make(tmp_path / "none", jsonl(tmp_path / "none.jsonl", [{"text": ""}]), dedup={"minhash": {}})
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["metrics.jsonl"]


def test_B3_a_run_whose_disk_was_full_continues_from_what_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    source = jsonl(tmp_path / "in.jsonl", [{"text": prose(50, 1)}])
    with monkeypatch.context() as patch:
        patch.setattr(near_duplicates, "write_pairs", full)
        with pytest.raises(OSError, match="No space"):
            make(tmp_path / "out", source, dedup={"minhash": {}})
    monkeypatch.setattr(spool, "prepare", full)
    assert make(tmp_path / "out", source, dedup={"minhash": {}})["documents"] == 1
    assert not (tmp_path / "out" / spool.SPOOL).exists()


def test_B3_the_best_of_a_cluster_by_a_measure_a_field_or_its_language_can_be_kept(tmp_path: Path):
    """Of equal ones the first; one without the number is never better."""
    text = prose(300, 1)
    texts = [text, f"{text} {'!' * 40}", f"{text} and", prose(60, 3)]
    rows = [{"text": t, "score": s} for t, s in zip(texts, [None, 2.5, 2, 1], strict=True)]
    special = {"keep": "best", "by": "quality.special_fraction"}
    for name, minhash_, best in (
        ("high", special, 1),
        ("low", {**special, "prefer": "low"}, 2),  # one full stop in a few more characters
        ("field", {"keep": "best", "by": "metadata.score"}, 1),
        ("low-field", {"keep": "best", "by": "metadata.score", "prefer": "low"}, 2),
    ):
        found = kept(tmp_path / name, rows, minhash=minhash_, quality={"min_words": 1, "min_unique_fraction": 0})
        assert found == [texts[best], texts[3]], name
    equal = [{"text": t, "score": 1} for t in texts]
    assert kept(tmp_path / "equal", equal, minhash={"keep": "best", "by": "metadata.score"}) == [texts[0], texts[3]]


@pytest.mark.parametrize("prefer", ["high", "low"])
@pytest.mark.parametrize("score", [math.inf, -math.inf, math.nan, 10**400, True, "9"])
def test_B3_a_score_that_is_no_finite_number_is_never_the_best(
    score: Any, prefer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    messages: list[str] = []
    monkeypatch.setattr(Display, "notify", lambda self, message: messages.append(message))
    texts = [f"{prose(300, 1)}{end}" for end in (" a", " b", " c")]
    rows = [{"text": t, "score": s} for t, s in zip(texts, [score, 1, 1], strict=True)]
    best = {"keep": "best", "by": "metadata.score", "prefer": prefer}
    assert kept(tmp_path / "out", rows, minhash=best) == [texts[1]]
    (message,) = [m for m in messages if "dedup.minhash.by" in m]
    assert message.startswith("dedup.minhash.by: 1 of 3 documents have no finite number metadata.score")


@pytest.mark.parametrize(
    ("minhash_", "message"),
    [
        ({"keep": "best"}, 'keep = "best" without by'),
        ({"by": "language_score"}, 'beside keep = "first"'),
        ({"keep": "best", "by": "quality.word"}, r"no rule of this corpus measures; did you mean 'quality.words'"),
        ({"keep": "best", "by": "language_score"}, "no rule of this corpus measures"),  # without `languages`
        ({"keep": "best", "by": "metadata.score"}, "no document with the number metadata.score"),
    ],
)
def test_B3_a_best_copy_by_what_is_not_known_is_refused(minhash_: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises((UserError, ValidationError), match=message):
        kept(tmp_path / "out", [{"text": prose(60, 1)}], minhash=minhash_, quality={"min_words": 1})
