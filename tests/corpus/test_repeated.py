"""Lines and runs of words that documents share: the three faults of source 001, counts, nothing by batches."""

from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ingot.corpus.documents import iter_texts, read_documents
from ingot.corpus.readers import read
from ingot.corpus.repeated import frequent, line_hashes, lines_column, overlapping, runs_column
from tests.corpus.corpus_helpers import funnel, jsonl, make
from tests.corpus.test_near_duplicates import changed, prose, runs

HEADER = "Copyright 2024 by the authors of this fine work"


def drops(texts: list[str], fraction: float = 0.5) -> list[bool]:
    column = runs_column(pl.Series(texts), 13)
    return overlapping([column], np.zeros(len(texts), bool), fraction).tolist()


def test_B3_a_copy_of_exactly_13_words_and_one_that_is_shifted_are_found():
    long, short = prose(100, 1), " ".join(prose(14, 2).split()[:13])
    assert drops([short, short]) == [False, True]
    assert drops([long, "One " + long, " ".join(long.split()[1:])]) == [False, True, True]
    assert drops([prose(12, 3), prose(12, 3)]) == [False, False], "fewer words have no run; exact duplicates do"


def test_B3_a_shared_header_is_no_copy():
    header = prose(40, 1)
    assert drops([header + " " + prose(200, 2), header + " " + prose(200, 3)]) == [False, False]
    assert drops([header + " " + prose(20, 2), header + " " + prose(20, 3)]) == [False, True], "control"


def test_B3_overlap_is_what_a_loop_over_sets_finds():
    texts = [changed(prose(60, n % 7), rate, n) for n, rate in enumerate(np.linspace(0, 0.08, 60))]
    seen: set[tuple[str, ...]] = set()
    expected = []
    for text in texts:
        words = text.lower().replace(".", "").split()
        own = {tuple(words[i : i + 13]) for i in range(len(words) - 12)}
        expected.append(len(own & seen) >= 0.5 * len(own))
        seen |= set() if expected[-1] else own
    assert drops(texts) == expected
    assert 5 < sum(expected) < 55
    assert runs("a b c d e f"), "of five words, elsewhere"


def test_lines_have_equal_hashes_exactly_where_they_are_equal():
    texts = [f"{HEADER}\n  {HEADER}  \nshort\n" + prose(20, 1), "", "\n\n", prose(20, 1), HEADER + "."]
    found, numbers = line_hashes(pl.Series(texts), 20)
    lines = [line.strip() for text in texts for line in text.split("\n")]
    assert numbers.tolist() == [n for n, text in enumerate(texts) for _ in text.split("\n")]
    groups = dict(zip(lines, found.tolist(), strict=True))
    assert all(groups[line] == h for line, h in zip(lines, found.tolist(), strict=True))
    assert [len(line) < 20 for line in groups] == [h == 0 for h in groups.values()]
    assert len({h for h in groups.values() if h}) == sum(len(line) >= 20 for line in groups)
    assert lines_column(pl.Series(texts), 20).to_pylist()[1:3] == [[], []]


def test_frequent_counts_documents():
    texts = [f"{HEADER}\n{HEADER}\n{prose(9, n)}" for n in range(4)]
    columns = [lines_column(pl.Series([text]), 20).flatten().to_numpy() for text in texts]
    assert [len(frequent(columns, n)) for n in (3, 4)] == [1, 0]


@pytest.mark.parametrize("batch", [2, 1000])
def test_B3_repeated_lines_are_removed_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int):
    monkeypatch.setattr(read, "BATCH_DOCUMENTS", batch)
    bodies = [prose(20, n) for n in range(6)]
    texts = [*(f"{HEADER}\n{body}\n  {HEADER}" for body in bodies[:4]), HEADER, *bodies[4:]]
    out = tmp_path / "out"
    result = make(
        out,
        jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts]),
        dedup={"lines": {"documents": 4}},
        holdout={"fraction": 0.3, "by": "tail"},
        workers=1,
    )
    assert "".join(iter_texts(out)) == "".join(bodies)
    counts = funnel(out)
    assert counts["removed_lines"] == 8
    assert {r: n["documents"] for r, n in counts["dropped"].items()} == {"repeated_lines": 1}
    assert counts["in"]["documents"] == counts["kept"]["documents"] + 1 == 7
    assert counts["kept"]["clean_bytes"] == result["bytes"] == sum(map(len, bodies))
    sizes = [
        n for b in read_documents(out, columns=["text", "bytes"]) for n in zip(*b.to_pydict().values(), strict=True)
    ]
    assert all(len(text) == size for text, size in sizes)


def test_B3_five_documents_are_needed_for_more_than_four(tmp_path: Path):
    texts = [f"{HEADER}\n{prose(20, n)}" for n in range(4)]
    make(
        tmp_path / "out", jsonl(tmp_path / "in.jsonl", [{"text": t} for t in texts]), dedup={"lines": {"documents": 4}}
    )
    assert list(iter_texts(tmp_path / "out")) == texts


def test_B3_overlap_is_a_step_of_the_funnel(tmp_path: Path):
    texts = [prose(60, 1), "Also: " + prose(60, 1), prose(60, 2)]
    make(tmp_path / "out", jsonl(tmp_path / "in.jsonl", [{"text": t} for t in texts]), dedup={"overlap": {}})
    assert list(iter_texts(tmp_path / "out")) == [texts[0], texts[2]]
    assert Counter(funnel(tmp_path / "out")["dropped"]) == Counter(
        {"overlap": {"documents": 1, "bytes": len(texts[1])}}
    )


def test_lines_are_of_texts(tmp_path: Path):
    with pytest.raises(ValueError, match=r"dedup\.lines: found it for format chat"):
        make(tmp_path, "a", format="chat", dedup={"lines": {}})
