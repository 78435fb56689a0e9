"""Documents that the setting `without` names, against a corpus that never had them."""

import json
from pathlib import Path

import pytest

from ingot.core.errors import UserError
from ingot.corpus.documents import read_documents
from ingot.corpus.left_out import matches
from tests.corpus.corpus_helpers import funnel, jsonl, make

TEXTS = [f"document {number} about " + " ".join(f"w{number * 7 % 13}x{i}" for i in range(30)) for number in range(40)]
ROWS = [{"text": text} for text in [*TEXTS[:10], TEXTS[3], *TEXTS[10:], TEXTS[3]]]
OPTIONS = {"holdout": {"fraction": 0.2}, "dedup": {"minhash": {}, "overlap": {}}}


def _documents(out: Path) -> list[tuple[str, str]]:
    return [
        pair
        for batch in read_documents(out, columns=["text", "split"])
        for pair in zip(batch["text"].to_pylist(), batch["split"].to_pylist(), strict=True)
    ]


def _offset(number: int) -> int:
    return sum(len(json.dumps(row)) + 1 for row in ROWS[:number])


@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_the_corpus_is_that_of_sources_without_the_documents_and_their_copies(tmp_path: Path, options: dict) -> None:
    names = [f"{tmp_path}/a.jsonl#{_offset(number)}" for number in (3, 20)]
    make(tmp_path / "out", jsonl(tmp_path / "a.jsonl", ROWS), without=names, **options)
    left = {TEXTS[3], ROWS[20]["text"]}
    never = jsonl(tmp_path / "b.jsonl", [row for row in ROWS if row["text"] not in left])
    make(tmp_path / "never", never, **options)
    assert _documents(tmp_path / "out") == _documents(tmp_path / "never")
    assert funnel(tmp_path / "out")["dropped"]["left_out"]["documents"] == 4


def test_a_path_names_all_documents_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    jsonl(tmp_path / "notes" / "a.jsonl", ROWS[:10])
    jsonl(tmp_path / "notes" / "b#1.jsonl", ROWS[11:20])
    make(tmp_path / "out", tmp_path / "notes", without=[f"{tmp_path}/notes/a.jsonl"])
    assert [text for text, _ in _documents(tmp_path / "out")] == TEXTS[10:19]
    assert matches("notes/b#1", "notes/b", 1)
    assert not matches("notes/b#1", "notes/b", 2)
    assert matches("notes/b#1.jsonl", "notes/b#1.jsonl", 5)
    assert matches("notes/b#1.jsonl#5", "notes/b#1.jsonl", 5)
    assert matches("notes/b#1", "notes/b#1", 0), "a path may end in a number"


def test_a_name_that_no_document_has_is_refused(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ROWS)
    for name in (f"{source}#1", "b.jsonl"):
        with pytest.raises(UserError, match=f"without: found '{name}', expected PATH or PATH#OFFSET of a document"):
            make(tmp_path / "out", source, without=[f"{source}#0", name])
        assert not list((tmp_path / "out").glob("documents-*"))
