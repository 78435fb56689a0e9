"""The funnel by rule: what each removed first, alone and only; histograms add up; nothing depends on batches."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ingot.corpus.readers import read
from ingot.report.html.panels import corpus
from ingot.report.html.panels_corpus import cost
from ingot.report.inspect.corpus_checks import print_checks
from tests.corpus.corpus_helpers import funnel, jsonl, make

BOUNDS = {"min_words": 10, "max_words": 100, "max_special_fraction": 0.3, "min_unique_fraction": 0.5}


def words(number: int, distinct: int | None = None, end: str = "") -> str:
    names = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "nrstm"]
    return " ".join(names[i % (distinct or number)] + end for i in range(number))


TEXTS = [
    words(50),
    words(10),  # just enough words: a near miss
    words(9),  # too few
    words(8, 1),  # too few, and repetitive
    words(40, 4),  # repetitive
    words(40, 4, "!!!"),  # repetitive, and too many signs
    words(30, end="!!!!"),  # too many signs
    words(50),  # a duplicate
    " ",
]


def rules(out: Path) -> dict[str, Any]:
    return json.loads((out / "rules.json").read_text())


def build(tmp_path: Path, name: str = "out", **table: Any) -> Path:
    source = jsonl(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS])
    make(tmp_path / name, source, quality=BOUNDS, **table)
    return tmp_path / name


def test_each_rule_knows_what_it_removes_first_alone_and_only(tmp_path: Path):
    found = {
        name: tuple(rule[n] for n in ("removed", "alone", "only"))
        for name, rule in rules(build(tmp_path))["rules"].items()
    }
    assert found == {
        "too_few_words": (2, 2, 1),
        "too_many_words": (0, 0, 0),
        "words_too_short": (0, 0, 0),
        "words_too_long": (0, 0, 0),
        "too_many_special_characters": (2, 2, 1),
        "too_repetitive": (1, 3, 1),
        "empty": (1, 1, 1),
        "exact_duplicate": (1, None, None),
    }


def test_histograms_say_how_many_cross_each_bound_and_near_misses_are_kept(tmp_path: Path):
    data = rules(build(tmp_path))
    for rule in data["rules"].values():
        if "measure" not in rule:
            continue
        bins = data["measures"][rule["measure"]]
        assert sum(bins["documents"]) == rule["measured"] == len(TEXTS) - 1
        at = bins["edges"].index(rule["least" if "least" in rule else "most"]) + 1
        outside = sum(bins["documents"][:at]) if "least" in rule else sum(bins["documents"][at:])
        assert outside == rule["alone"]
    assert [near["value"] for near in data["rules"]["too_few_words"]["near"]] == [10]
    assert data["rules"]["too_few_words"]["near"][0]["text"] == TEXTS[1]


def test_steps_begin_where_the_one_before_ends(tmp_path: Path):
    counts = funnel(build(tmp_path))
    steps = counts["steps"]
    assert steps[0]["in"] == counts["in"]
    assert all(a["out"] == b["in"] for a, b in itertools.pairwise(steps))
    assert steps[-1]["out"] == {unit: counts["kept"][unit] for unit in ("documents", "bytes")}
    assert {s["step"]: s["in"]["documents"] - s["out"]["documents"] for s in steps if s["in"] != s["out"]} == {
        "content": 1,
        "quality": 5,
        "exact duplicates": 1,
    }


def test_counts_depend_on_neither_batches_nor_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = (build(tmp_path, workers=1) / "rules.json").read_bytes()
    monkeypatch.setattr(read, "BATCH_DOCUMENTS", 2)
    assert (build(tmp_path, "other", workers=1) / "rules.json").read_bytes() == one


def test_the_panel_draws_bounds_and_the_cost_of_steps(tmp_path: Path):
    out = build(tmp_path)
    html = corpus(out)
    assert html.count("<figure class=chart>") == 4
    assert "too_few_words: 10</title>" in html
    assert {name for name, _, _ in cost(out)} == {"clean", "language", "quality"}
    assert sum(percent for *_, percent in cost(out)) == pytest.approx(100)


def test_the_terminal_shows_rules_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = build(tmp_path, pii_audit=2, check={"plant": 2})
    planted = {"copy": {"planted": 2, "found": 1, "recall": 0.5, "precision": None}}
    print_checks({"rules": rules(out)["rules"], "planted": planted, "instructions": {}, "masked": {}})
    lines = capsys.readouterr().out.splitlines()
    assert "  too_repetitive: alone 3, only it 1" in lines
    assert f"  too_few_words, near miss: 10, {tmp_path / 'in.jsonl'}" in lines
    assert "planted copy: 1 of 2 found, recall 0.500, precision –" in lines
