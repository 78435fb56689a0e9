"""Items of evaluations are found in documents, verbatim and changed, and named; ordinary text stays."""

import gzip
import json
import random
from pathlib import Path

import polars as pl
import pytest

from ingot.core.errors import UserError
from ingot.corpus.contamination import contained, read_items
from ingot.corpus.documents import iter_texts
from tests.corpus.corpus_helpers import funnel, jsonl, make
from tests.corpus.test_near_duplicates import changed, prose

LONG = {"question": prose(40, 1), "choices": [prose(6, 2), prose(6, 3)], "answer": 1}
SHORT = {"prompt": "Which river flows through the old town?", "targets": ["The Danube"]}
TINY = {"prompt": "2 + 2 =", "targets": ["4"]}


@pytest.fixture
def tests_file(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "tests.jsonl", [{"task": "mine", "kind": "generate"}, LONG, SHORT, TINY])


def test_B5_items_are_rows_and_paragraphs(tests_file: Path, tmp_path: Path):
    (tmp_path / "more.txt").write_text(f"{prose(20, 5)}\n\n{prose(20, 6)}\n")
    items = read_items([str(tests_file), str(tmp_path / "more.txt")])
    assert items.names == [
        *(f"{tests_file}: line {n}" for n in (2, 3, 4)),
        *(f"{tmp_path}/more.txt: paragraph {n}" for n in (1, 2)),
    ]
    assert items.too_short == 1
    assert items.needed.tolist()[1] == 5  # nine words have five runs of five, and all are needed
    assert items.needed.tolist()[3] == 4  # a quarter of sixteen


def test_B5_documents_with_an_item_are_found(tests_file: Path):
    """Verbatim, in other case and punctuation, with a tenth of the words changed, inside a long document."""
    items = read_items([str(tests_file)])
    question = LONG["question"]
    short = "which RIVER flows, through the old town? The Danube!"
    found = {
        f"{question} {' '.join(LONG['choices'])}": 0,
        f"{prose(3000, 7)} {question.upper()} {prose(3000, 8)}": 0,
        f"{prose(100, 9)} {changed(question, 0.1, 4)} {' '.join(LONG['choices'])}": 0,
        f"So {short}": 1,
        "Which river flows through the old town? Nobody knows.": -1,  # not all of a short item
        " ".join(question.split()[:10]): -1,
        " ".join(random.Random(1).sample(question.split(), 40)): -1,
        prose(3000, 10): -1,
        "": -1,
        "2 + 2 = 4": -1,
    }
    assert contained(pl.Series(list(found)), items).tolist() == list(found.values())


def test_B5_copies_with_changed_words_are_found_and_no_other_text(tmp_path: Path):
    items_text = [prose(30, seed) for seed in range(200)]
    items = read_items([str(jsonl(tmp_path / "tests.jsonl", [{"prompt": text} for text in items_text]))])
    draw = random.Random(3)
    texts = [f"{prose(50, 1000 + i)} {changed(t, 0.1, i)}" for i, t in enumerate(items_text)]
    clean = [prose(draw.randrange(20, 2000), 5000 + i) for i in range(200)]
    found = contained(pl.Series(texts + clean), items)
    assert (found[:200] == range(200)).mean() > 0.9
    assert (found[200:] == -1).all()


def test_B5_contaminated_documents_are_dropped_named_and_counted(tests_file: Path, tmp_path: Path):
    poisoned = f"{prose(60, 20)} {changed(LONG['question'], 0.1, 4)} {' '.join(LONG['choices'])}"
    texts = [prose(80, 21), poisoned, "The old town? Which river flows through the old town? The Danube", prose(80, 22)]
    out = tmp_path / "out"
    result = make(out, jsonl(tmp_path / "in.jsonl", [{"text": t} for t in texts]), decontaminate=[str(tests_file)])
    assert list(iter_texts(out)) == [texts[0], texts[3]]
    assert funnel(out)["dropped"] == {"contaminated": {"documents": 2, "bytes": len(texts[1]) + len(texts[2])}}
    assert result["documents"] == 2
    report = pl.read_parquet(out / "contamination.parquet")
    assert report["item"].to_list() == [f"{tests_file}: line 2", f"{tests_file}: line 3"]
    assert report["text"][0].startswith(LONG["question"])


def test_B5_conversations_are_searched_by_their_words(tests_file: Path, tmp_path: Path):
    def row(question: str, answer: str) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    rows = [row(str(SHORT["prompt"]), "The Danube"), row("Which river?", "The Danube flows through the old town.")]
    out = tmp_path / "out"
    make(out, jsonl(tmp_path / "in.jsonl", rows), decontaminate=[str(tests_file)], format="chat")
    assert len(list(iter_texts(out))) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "decontaminate: found no file"),
        ('{"prompt": "a b', "line 1"),
        ("\n", "found no item in"),
    ],
)
def test_B5_files_that_are_no_evaluations_are_refused(content: str | None, message: str, tmp_path: Path):
    path = tmp_path / "tests.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        make(tmp_path / "out", jsonl(tmp_path / "in.jsonl", [{"text": prose(30, 1)}]), decontaminate=[str(path)])
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["tests.json", "tests.csv", "tests.jsonl.gz", "tests.parquet", "separated.jsonl"])
def test_B5_evaluations_are_read_like_a_corpus(name: str, tmp_path: Path):
    """Whatever the file is; a line separator of Unicode inside a text ends no line of JSON."""
    path, row = tmp_path / name, {"prompt": prose(20, 1).replace(" ", "\u2028", 1)}
    match path.suffix:
        case ".json":
            path.write_text(json.dumps([row]))
        case ".csv":
            path.write_text(f"prompt,answer\n{prose(20, 1)},4\n")
        case ".gz":
            path.write_bytes(gzip.compress(json.dumps(row).encode()))
        case ".parquet":
            pl.DataFrame([row]).write_parquet(path)
        case _:
            path.write_text(json.dumps(row, ensure_ascii=False) + "\n")
    items = read_items([str(path)])
    assert len(items.names) == 1
    assert contained(pl.Series([f"{prose(30, 2)} {prose(20, 1)}", prose(50, 3)]), items).tolist() == [0, -1]


def test_B5_pages_are_no_evaluations(tmp_path: Path):
    (tmp_path / "tests.html").write_text("<html><body>question</body></html>")
    with pytest.raises(UserError, match="is html without rows; name a file of rows or plain text"):
        read_items([str(tmp_path / "tests.html")])
