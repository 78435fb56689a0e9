"""Tables and files as other programs write them are read as they mean it, and what cannot be read is named."""

import codecs
import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import UserError
from ingot.corpus.funnel import Quarantined
from ingot.corpus.readers import read as reader
from ingot.corpus.readers.locate import locate, not_read
from ingot.corpus.settings import Source
from tests.corpus.corpus_helpers import settings

pytestmark = pytest.mark.filterwarnings("ignore::ingot.core.errors.Notice")


def read(path: Path, content: str | bytes | None = None, **source: Any) -> tuple[list[str], list[str]]:
    """The texts, and the reasons of what is quarantined."""
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    bad: list[Quarantined] = []
    tables = reader.read(settings([{"path": str(path), **source}]), bad.append)
    return [row["text"] for table in tables for row in table.to_pylist()], [record.reason for record in bad]


def refusal(path: Path, content: str | bytes, **source: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(path, content, **source)
    return str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "id;text\n1;a, b\n2;c\n",
        '"id";"text"\n"1";"a, b"\n"2";"c"\n',
        "\ufeffid;text\r\n1;a, b\r\n2;c\r\n",
        "sep=;\nid;text\n1;a, b\n2;c\n",
        'sep=,\nid,text\n1,"a, b"\n2,c\n',
        "\ufeffsep=\t\r\nid\ttext\r\n1\ta, b\r\n2\tc\r\n",
        "id\ttext\n1\ta, b\n2\tc\n",
        'id,text\r1,"a, b"\r2,c\r',
        '"",text,,\n0,"a, b",,\n1,c,,\n',
    ],
)
def test_separators_and_line_ends_of_other_programs(tmp_path, content):
    assert read(tmp_path / "a.csv", content) == (["a, b", "c"], [])


def test_a_column_without_a_name_has_its_number(tmp_path):
    (tmp_path / "a.csv").write_text(",text,\n7,a,\n")
    (table,) = reader.read(settings(tmp_path / "a.csv"), print)
    assert json.loads(table["extra"][0].as_py()) == {"column 1": "7", "column 3": ""}


def test_commas_under_the_name_of_tabs(tmp_path):
    assert read(tmp_path / "a.tsv", 'id,text\n1,"a, b"\n2,c\n') == (["a, b", "c"], [])
    assert read(tmp_path / "b.tsv", "text\na, b\nc\n") == (["a, b", "c"], [])


@pytest.mark.parametrize(
    "rows",
    [
        [["id", "text"], ["1", "one\ntwo"], ["2", 'say "so"']],
        [["text", "id"], ["a\tb", "1"], ["plain", "2"]],
        [["id", "text"], ["1", 'the "Ada" clock'], ["2", "plain"]],
    ],
)
def test_cells_that_are_quoted_where_they_need_it(tmp_path, rows):
    """As pandas and Excel write tabs: the header is not quoted."""
    out = io.StringIO()
    csv.writer(out, delimiter="\t", lineterminator="\n").writerows(rows)
    column = rows[0].index("text")
    assert read(tmp_path / "a.tsv", out.getvalue()) == ([row[column] for row in rows[1:]], [])


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('id\ttext\n1\t"hello\n2\tworld"\n', ['"hello', 'world"']),
        ('id\ttext\n1\t"hello, world"\n2\t5" nail\n', ['"hello, world"', '5" nail']),
        ('id\ttext\n1\t"quoted"\n2\t"\n3\t""\n', ['"quoted"', '"', '""']),
        ('text\n"a\nb"\n', ['"a', 'b"']),
    ],
)
def test_quotation_marks_that_quoting_does_not_explain_are_characters(tmp_path, content, texts):
    assert read(tmp_path / "a.tsv", content) == (texts, [])


def test_every_part_of_joined_files_may_begin_with_a_byte_order_mark(tmp_path):
    lines = [codecs.BOM_UTF8 + json.dumps({"text": text}).encode() for text in ("a", "b", "c")]
    assert read(tmp_path / "a.jsonl", b"\n".join(lines)) == (["a", "b", "c"], [])
    assert read(tmp_path / "a.csv", codecs.BOM_UTF8 + b"text\na\n" + codecs.BOM_UTF8 + b"b\n") == (["a", "b"], [])
    assert read(tmp_path / "b.jsonl", b"\r".join(lines)) == (["a", "b", "c"], [])


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a.txt"])
def test_what_is_not_utf8_is_told_to_name_its_encoding(tmp_path, name):
    text = {".csv": "text\n%s\n", ".tsv": "text\n%s\n", ".txt": "%s"}.get(Path(name).suffix, '[{"text": "%s"}]')
    text = '{"text": "%s"}' if name == "a.jsonl" else text
    content = (text % "café").encode("cp1252")
    assert '(0xe9) is not UTF-8; set the encoding of the source, such as "cp1252"' in refusal(tmp_path / name, content)
    assert read(tmp_path / name, content, encoding="cp1252") == (["café"], [])


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab29\nsize 12345\n"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.csv", "a.json", "a.md"])
def test_a_pointer_to_a_file_is_not_its_text(tmp_path, name):
    assert "is a pointer of Git LFS, not text; fetch the file itself with `git lfs pull`" in refusal(
        tmp_path / name, LFS
    )
    annex = "/annex/objects/MD5E-s12345--0123456789abcdef.parquet\n"
    assert "is a pointer of git-annex, not text; fetch the file itself" in refusal(tmp_path / name, annex)
    assert read(tmp_path / "b.txt", f"A pointer begins so:\n{LFS}") == ([f"A pointer begins so:\n{LFS}"], [])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("__manifest__.py", '{\n    "name": "Clock",\n    "depends": ["base"],\n    "installable": True,\n}\n'),
        ("routes.js", '[{"path": "/"},\n function (a) { return a }]\n'),
        ("notes.md", '{"a": 1} is an object.\n'),
        ("conf.yaml", '{"a": 1, "b": [x]}\n'),
    ],
)
def test_source_code_that_begins_like_json_is_text(tmp_path, name, content):
    assert read(tmp_path / name, content) == ([content], [])


@pytest.mark.parametrize("name", ["rows.jl", "rows.md", "rows.jsonl", "rows.ndjson", "rows.txt", "part-0"])
def test_an_array_on_one_line_is_its_rows(tmp_path, name):
    assert read(tmp_path / name, '[{"text": "a"}, {"text": "b"}]') == (["a", "b"], [])


@pytest.mark.parametrize(
    "value",
    [
        {"a1": {"text": "one"}, "b2": {"text": "two", "score": 1}},
        {"q": {"title": "x", "body": "one"}, "r": {"body": "two"}, "s": {"body": "three", "id": 1}},
        {"0": "one", "1": "two"},
    ],
)
def test_rows_by_index_are_no_configuration(tmp_path, value):
    assert "looks like a table by columns or index" in refusal(tmp_path / "a.json", json.dumps(value))


@pytest.mark.parametrize(
    "value",
    [
        {"menu": {"open": "Öffnen"}, "page": {"next": "Weiter"}},
        {"name": "clock", "scripts": {"test": "x"}, "files": ["a"]},
        {"model": {"0": {"content": "x"}}, "size": 1},
    ],
)
def test_configuration_is_one_text(tmp_path, value):
    assert read(tmp_path / "a.json", json.dumps(value)) == ([json.dumps(value)], [])


def snapshot(top: Path) -> Path:
    """A data set in the cache of the Hugging Face Hub: links to files beside it."""
    blobs, data = top / "datasets--a--b" / "blobs", top / "datasets--a--b" / "snapshots" / "1f2e" / "data"
    blobs.mkdir(parents=True)
    data.mkdir(parents=True)
    for name, blob in (("train.jsonl", "aa"), ("test.jsonl", "bb")):
        (blobs / blob).write_text(json.dumps({"text": name}) + "\n")
        (data / name).symlink_to(os.path.relpath(blobs / blob, data))
    return data.parent


@pytest.mark.parametrize("pattern", ["", "data", "data/*.jsonl", "**/*.jsonl", "*"])
def test_a_snapshot_in_a_cache_is_read(tmp_path, pattern):
    top = snapshot(tmp_path)
    assert sorted(read(top / pattern)[0]) == ["test.jsonl", "train.jsonl"]


def test_other_links_out_of_a_snapshot_are_not_followed(tmp_path):
    top = snapshot(tmp_path)
    (tmp_path / "secret.jsonl").write_text('{"text": "secret"}\n')
    (top / "data" / "other.jsonl").symlink_to(tmp_path / "secret.jsonl")
    source = Source(path=str(top))
    assert [file.file.name for file in locate(source)] == ["test.jsonl", "train.jsonl"]
    assert [skipped.path.name for skipped in not_read(source)] == ["other.jsonl"]
