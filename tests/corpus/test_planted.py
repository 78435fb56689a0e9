"""Planted truth: known damage is found or not as the recipe says, and the corpus does not notice."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from ingot.corpus.planted import COPIES, DAMAGES, Text, _parsed, chosen, plant
from tests.corpus.corpus_helpers import jsonl, make, settings
from tests.corpus.test_near_duplicates import WORDS, prose

NUMBER = 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [f"{prose(200, seed)}\n\n{prose(30, 100 + seed)}" for seed in range(30)]
    return jsonl(tmp_path_factory.mktemp("planted") / "in.jsonl", [{"text": text} for text in texts])


def kinds(out: Path, source: Path, **table: Any) -> dict[str, Any]:
    make(out, source, check={"plant": NUMBER}, **table)
    return json.loads((out / "planted.json").read_text())["kinds"]


def test_copies_are_found_by_the_step_that_should_find_them(source: Path, tmp_path: Path):
    near = kinds(tmp_path / "near", source, dedup={"minhash": {}})
    assert list(near) == [*COPIES, *DAMAGES]
    assert near["copy"]["reasons"] == {"exact_duplicate": NUMBER}
    assert near["copy_1_percent"]["reasons"] == {"near_duplicate": NUMBER}
    assert near["copy_shifted"]["recall"] == 1
    assert near["copy_15_percent"]["recall"] < 0.5, "a similarity of 0.28 is below the threshold"
    assert near["copy_5_percent"]["precision"] == 1
    exact = kinds(tmp_path / "exact", source)
    assert (exact["copy"]["recall"], exact["copy_1_percent"]["recall"]) == (1, 0), "control: no near-duplicates"
    assert exact["copy_1_percent"]["precision"] is None


def test_damage_is_found_by_filters_that_know_it(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nothing = kinds(tmp_path / "none", source)
    assert all(nothing[kind]["found"] == 0 for kind in DAMAGES), "control: no filter"
    bounds = {"min_words": 10, "min_unique_fraction": 0.3, "min_mean_word_length": 1}
    found = kinds(tmp_path / "bounds", source, quality=bounds)
    assert found["repeated_paragraph"]["reasons"] == {"too_repetitive": NUMBER}
    assert found["boilerplate"]["recall"] == 1
    assert found["shuffled_words"]["recall"] == 0, "bounds do not see the order of words"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rude.py").write_text(
        "def rude(documents):\n    return documents['text'].str.contains('idiot|moron')\n"
    )
    rude = kinds(tmp_path / "rude", source, filters=["rude.py:rude"])
    assert rude["insults"]["reasons"] == {"rude": NUMBER}
    assert rude["insults"]["precision"] == 1


def test_a_filter_that_removes_what_should_stay_has_low_precision(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Documents begin with a capital here, and halves of documents do not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.py").write_text("def odd(documents):\n    return documents['text'].str.contains('^[a-z]')\n")
    capital = [{"text": "A" + json.loads(line)["text"]} for line in source.read_text().splitlines()]
    upper = jsonl(tmp_path / "upper.jsonl", capital)
    found = kinds(tmp_path / "out", upper, filters=["odd.py:odd"], quality={"min_words": 1, "min_unique_fraction": 0.3})
    assert found["boilerplate"]["recall"] == 1
    assert found["boilerplate"]["wrong"] > NUMBER / 2
    assert found["boilerplate"]["precision"] == round(NUMBER / (NUMBER + found["boilerplate"]["wrong"]), 4)


def test_damage_keeps_lines_and_paragraphs():
    text = _parsed("One two three,\nfour five.\n\nSix seven eight nine ten eleven.\n")._replace(others=_parsed("x y z"))
    for kind in ("copy", "copy_5_percent", "scrambled_letters", "shuffled_words", "insults"):
        planted = (COPIES | DAMAGES)[kind](text, random.Random(1))
        assert [c for c in planted if c == "\n"] == ["\n"] * 3, kind
    assert COPIES["copy"](text, random.Random(1)) == "One two three,\nfour five.\n\nSix seven eight nine ten eleven."


def test_the_corpus_does_not_depend_on_the_check_nor_the_check_on_batches(source: Path, tmp_path: Path):
    digests = []
    for name, table in {"with": {"check": {"plant": NUMBER}}, "without": {}}.items():
        result = make(tmp_path / name, source, dedup={"minhash": {}}, holdout={"fraction": 0.2}, **table)
        files = sorted(p for p in (tmp_path / name).iterdir() if p.name not in ("planted.json", "metrics.jsonl"))
        digests.append([(p.name, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files])
        assert ("planted_copy_recall" in result) == (name == "with")
    assert digests[0] == digests[1]
    base = chosen(tmp_path / "with", NUMBER)
    part = base.slice(3, 5)
    for kind, damage in (COPIES | DAMAGES).items():
        if kind not in ("copy_1_percent", "copy_5_percent", "copy_15_percent"):  # those draw from the next document
            assert plant(base, kind, damage)["text"].to_pylist()[3:8] == plant(part, kind, damage)["text"].to_pylist()


def test_edit_rates_are_exact():
    text, draw = (
        Text([f"w{i}" for i in range(200)], [" "] * 200, Text([word.upper() for word in WORDS], [])),
        random.Random(1),
    )
    for kind, changed in {"copy": 0, "copy_1_percent": 2, "copy_5_percent": 10, "copy_15_percent": 30}.items():
        new = COPIES[kind](text, draw).split()
        assert sum(a != b for a, b in zip(text.words, new, strict=True)) == changed
    assert sorted(DAMAGES["scrambled_letters"](_parsed("abc de"), draw).replace(" ", "")) == list("abcde")


def test_other_formats_are_refused():
    with pytest.raises(ValueError, match=r"check\.plant: found 3 for format chat"):
        settings("a", format="chat", check={"plant": 3})
