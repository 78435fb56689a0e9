"""Selection by scores: bounds, quantiles and phases are what they say, and every document has one fate."""

import itertools
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from ingot.corpus.documents import DocumentWriter
from ingot.corpus.scores import sorting
from ingot.corpus.scores.selection import NO_PHASE, decide, interval, tie
from ingot.corpus.scores.settings import Bounds, Phase, Sorting
from ingot.corpus.scores.sorting import SortedDocuments, sorted_rows


def _scores(n: int = 1000, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.3, 0.7, 1.0])
def test_top_and_bottom_are_fractions_of_the_documents(fraction: float) -> None:
    scores = _scores()
    for bounds, chosen in (
        (Bounds(top=fraction), scores >= np.sort(scores)[-round(1000 * fraction)]),
        (Bounds(bottom=fraction), scores <= np.sort(scores)[round(1000 * fraction) - 1]),
    ):
        np.testing.assert_array_equal(interval(bounds, scores).contains(scores), chosen)


@pytest.mark.parametrize("n", [1, 7, 10, 999])
def test_ranges_that_adjoin_share_no_document_and_leave_none_out(n: int) -> None:
    """Also where many scores are equal."""
    scores = np.round(_scores(n), 1)
    cuts = [0.0, 0.1, 0.25, 0.3, 0.7, 1.0]
    ranges = [Bounds(between=(a, b)) for a, b in itertools.pairwise(cuts)]
    total = np.sum([interval(bounds, scores).contains(scores) for bounds in ranges], axis=0)
    assert (total == 1).all()


def test_a_quantile_among_equal_scores_is_named() -> None:
    equal, mixed = np.full(100, 0.5, np.float32), np.repeat(np.arange(4, dtype=np.float32), 25)
    for bounds, kept in ((Bounds(top=0.5), 100), (Bounds(bottom=0.5), 0), (Bounds(between=(0.1, 0.6)), 0)):
        assert interval(bounds, equal).contains(equal).sum() == kept
        found = tie(bounds, equal)
        assert found is not None
        assert (found.kept, found.asked, found.equal, found.documents) == (kept, 50, 100, 100)
    found = tie(Bounds(top=0.1), mixed)
    assert found is not None
    assert found.message("a") == (
        "a: top = 0.1 keeps 25 of 100 documents, expected 10, because 25 of them have the score 3 and equal scores are "
        "kept or dropped together; choose another fraction or score"
    )
    for bounds in (Bounds(top=0.5), Bounds(top=0.48), Bounds(top=1), Bounds(min=0.5)):
        assert tie(bounds, mixed) is None
    assert all(tie(Bounds(top=q / 100), _scores(n)) is None for q in range(1, 100) for n in (1, 7, 100))
    assert tie(Bounds(top=0.5), equal[:0]) is None
    phases = [Phase(name="p", where={"a": Bounds(top=0.1)}), Phase(name="rest")]
    decision = decide({"a": mixed}, np.ones(100, bool), {"a": Bounds(bottom=0.9)}, phases)
    assert [*decision.ties] == ["a", "p.a"]


def test_thresholds_do_not_depend_on_the_order_of_documents_nor_on_held_out_ones() -> None:
    scores = _scores()
    order = np.random.default_rng(2).permutation(len(scores))
    assert interval(Bounds(top=0.3), scores) == interval(Bounds(top=0.3), scores[order])
    is_train = np.arange(len(scores)) % 4 > 0
    before = decide({"a": scores}, is_train, {"a": Bounds(top=0.3)}, [])
    others = np.where(is_train, scores, 100).astype(np.float32)
    after = decide({"a": others}, is_train, {"a": Bounds(top=0.3)}, [])
    assert before.intervals == after.intervals
    assert (before.reasons == after.reasons)[is_train].all()


def test_a_document_is_dropped_for_the_first_rule_it_breaks() -> None:
    scores = {"a": np.array([1, 0, 5, np.nan, 1, 0], np.float32), "b": np.array([9, 0, 9, 9, 0, np.nan], np.float32)}
    where = {"a": Bounds(min=1, max=4), "b": Bounds(min=1)}
    found = decide(scores, np.ones(6, bool), where, [])
    assert found.reasons.tolist() == [None, "a_low", "a_high", "a_missing", "b_low", "a_low"]
    assert found.phases is None


def test_bounds_and_quantiles_hold_together() -> None:
    scores = np.arange(10, dtype=np.float32)
    assert interval(Bounds(min=8, top=0.5), scores).contains(scores).sum() == 2
    assert interval(Bounds(max=6, top=0.5), scores).contains(scores).sum() == 2


def test_every_document_has_one_phase_or_a_reason() -> None:
    scores = {"a": _scores(), "b": _scores(seed=2)}
    phases = [
        Phase(name="reasoning", where={"a": Bounds(top=0.2), "b": Bounds(min=0)}),
        Phase(name="knowledge", where={"a": Bounds(top=0.2)}),
        Phase(name="foundation", where={"b": Bounds(bottom=0.6)}),
    ]
    where = {"b": Bounds(min=-1)}
    found = decide(scores, np.ones(1000, bool), where, phases)
    kept = scores["b"] >= -1
    top = scores["a"] >= np.sort(scores["a"][kept])[-math.floor(0.2 * kept.sum())]  # of what `where` left
    assert found.phases is not None
    assert set(found.phases[kept & top]) == {"reasoning", "knowledge"}
    assert (found.phases[kept & top & (scores["b"] >= 0)] == "reasoning").all()
    assert ((found.phases == None) == (found.reasons != None)).all()  # noqa: E711
    assert set(found.reasons[~kept]) == {"b_low"}
    assert set(found.reasons[kept]) == {None, NO_PHASE}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "no bound"),
        ({"top": 0.3, "bottom": 0.3}, "expected one of them"),
        ({"min": 2.0, "max": 1.0}, "min = 2 above max = 1"),
        ({"between": [0.5, 0.2]}, "two quantiles"),
        ({"top": 0.0}, "greater than 0"),
        ({"min": 0.5, "per": "language"}, "per = 'language' without a quantile"),
    ],
)
def test_bounds_without_a_meaning_are_refused(table: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Bounds.model_validate(table)


def test_thresholds_per_language_are_those_of_each_language_alone() -> None:
    """German scores are a hundredth of English ones: together, a quantile would keep no German text."""
    languages = np.array(["en"] * 800 + ["de"] * 200, object)
    scores = np.where(languages == "de", _scores() / 100 - 1, _scores() + 5).astype(np.float32)
    is_train = np.arange(1000) % 4 > 0
    alone = {}
    for name in ("en", "de"):
        rows = languages == name
        alone[name] = decide({"a": scores[rows]}, is_train[rows], {"a": Bounds(top=0.3)}, [])
    found = decide({"a": scores}, is_train, {"a": Bounds(top=0.3, per="language")}, [], languages)
    for name, own in alone.items():
        assert found.reasons[languages == name].tolist() == own.reasons.tolist()
        assert found.intervals[f"a/{name}"] == own.intervals["a"]
        kept = (found.reasons == None)[languages == name]  # noqa: E711
        assert kept.mean() == pytest.approx(0.3, abs=0.05)
    together = decide({"a": scores}, is_train, {"a": Bounds(top=0.3)}, [], languages)
    assert set(together.reasons[languages == "de"]) == {"a_low"}
    phases = [Phase(name="rare", where={"a": Bounds(top=0.5, per="language")}), Phase(name="rest")]
    phased = decide({"a": scores}, is_train, {}, phases, languages).phases
    assert phased is not None
    for name in alone:
        assert (phased[languages == name] == "rare").mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("first", ["low", "high"])
def test_documents_in_the_order_of_a_score(first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal scores in their own order, none at the end; copies after all originals; also with many files."""
    scores = np.round(_scores(300), 1)
    scores[::7] = np.nan
    clusters = np.arange(300, dtype=np.uint64)
    clusters[200:] = np.arange(100)  # the copies that `repeat` appends
    scores[200:] = scores[:100]
    order = sorted_rows(scores, Sorting.model_validate({"by": "a", "first": first}), clusters)
    sign = 1 if first == "low" else -1
    expected = sorted(range(300), key=lambda i: (i >= 200, np.isnan(scores[i]), sign * np.nan_to_num(scores[i]), i))
    assert order.tolist() == expected
    texts = [f"text {i} " * (i % 9) for i in range(300)]
    sizes = np.array([len(text) for text in texts])
    table = pa.table(
        {"text": texts, "bytes": pa.array(sizes), **dict.fromkeys(("source", "path", "group", "split"), texts)}
    )
    chosen = order[order % 2 == 0]
    for size in (1 << 20, 500):
        monkeypatch.setattr(sorting, "PART_BYTES", size)
        writer = SortedDocuments(DocumentWriter(tmp_path), chosen, sizes, tmp_path / "scratch")
        for start in range(0, 300, 37):
            writer.write(table.slice(start, 37), start)
        writer.flush()
        assert [path.name for path in tmp_path.iterdir()] == ["documents-00000.parquet"]
        found = pq.read_table(tmp_path / "documents-00000.parquet")
        assert found["text"].to_pylist() == [texts[i] for i in chosen]
