"""Every kind of file gives the same documents, in bounded memory; what is damaged is named, and the rest is read."""

import csv
import gzip
import io
import json
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from ingot.core.errors import Notice, UserError
from ingot.corpus.documents import iter_texts, read_documents
from ingot.corpus.funnel import Quarantined
from ingot.corpus.readers import content, file_reader, files, json_files, packing
from ingot.corpus.readers import read as reader
from ingot.corpus.readers import tables as table_files
from ingot.corpus.readers.locate import not_read
from ingot.corpus.settings import Source
from tests.conftest import DATA
from tests.corpus.corpus_helpers import funnel, make, quarantine, settings


def table(rows: list[dict[str, Any]], delimiter: str, **options: Any) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter, **options)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    return parquet_of(pa.Table.from_pylist(rows), **options)


def parquet_of(table: pa.Table, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


WRITERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "a.jsonl": lines,
    "a.ndjson": lambda rows: b"\xef\xbb\xbf" + lines(rows).rstrip(),
    "a.jsonl.gz": lambda rows: gzip.compress(lines(rows)),
    "a.jsonl.zst": lambda rows: zstd(lines(rows)),
    "a.json": lambda rows: json.dumps(rows).encode(),
    "pretty.json": lambda rows: b"\xef\xbb\xbf " + json.dumps(rows, indent=2, ensure_ascii=False).encode(),
    "object.json": lambda rows: json.dumps({"version": [1, 2], "data": rows, "by": "x"}).encode(),
    "lines.json": lambda rows: lines([*rows, rows[0]]),
    "a.json.gz": lambda rows: gzip.compress(json.dumps(rows).encode()),
    "a.csv": lambda rows: table(rows, ","),
    "bom.csv": lambda rows: b"\xef\xbb\xbf" + table(rows, ","),
    "a.tsv": lambda rows: table(rows, "\t", quoting=csv.QUOTE_ALL),
    "a.csv.gz": lambda rows: gzip.compress(table(rows, ",")),
    "a.csv.zst": lambda rows: zstd(table(rows, ",")),
    "a.parquet": parquet,
    "groups.parquet": lambda rows: parquet(rows, row_group_size=2, compression="zstd"),
    "dictionary.parquet": lambda rows: parquet([{**r, "n": i} for i, r in enumerate(rows)], use_dictionary=True),
}


def read(sources: Any, **more: Any) -> tuple[list[tuple[str, int]], list[Quarantined]]:
    """([(text, offset)], quarantined) as read, before any cleaning."""
    bad: list[Quarantined] = []
    tables = list(reader.read(settings(sources, **more), bad.append))
    assert all(t.schema == reader.RAW for t in tables)
    return [(r["text"], r["offset"]) for t in tables for r in t.to_pylist()], bad


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t\r"))
ROWS = st.lists(st.fixed_dictionaries({"text": TEXTS, "note": TEXTS}), min_size=1, max_size=8)


@examples(max_examples=20, deadline=None)
@given(rows=ROWS, block=st.integers(4, 40))
def test_b8_text_jsonl_json_csv_parquet_and_compressed_give_the_same_documents(rows, block):
    expected = [r["text"] for r in rows]
    with tempfile.TemporaryDirectory() as name, patch.object(packing, "BLOCK", block):
        for file, write in WRITERS.items():
            path = Path(name, file)
            path.write_bytes(write(rows))
            found, bad = read(path)
            if file == "lines.json":
                assert found[-1][0] == expected[0]
                found = found[:-1]
            assert ([text for text, _ in found], bad) == (expected, []), file
            if path.suffix not in (".jsonl", ".ndjson") and "jsonl" not in file and file != "lines.json":
                assert [offset for _, offset in found] == list(range(len(rows))), file
        for file, data in {"a.txt": expected[0].encode(), "b.txt.gz": gzip.compress(expected[0].encode())}.items():
            Path(name, file).write_bytes(data)
            if data:
                assert read([{"path": str(Path(name, file)), "kind": "text"}]) == ([(expected[0], 0)], [])


def test_lines_under_the_name_of_json_are_lines_whatever_the_first_one_is(tmp_path):
    """A first line longer than what the kind is told by, and one that is malformed."""
    (tmp_path / "long.json").write_bytes(lines([{"text": "a" * (content.SNIFF_BYTES + 9)}, {"text": "b"}]))
    (tmp_path / "bad.json").write_bytes(b'{"text": "a\n' + lines([{"text": "b"}, {"text": "c"}]))
    assert [len(text) for text, _ in read(tmp_path / "long.json")[0]] == [content.SNIFF_BYTES + 9, 1]
    found, bad = read(tmp_path / "bad.json")
    assert ([text for text, _ in found], len(bad)) == (["b", "c"], 1)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@examples(max_examples=150, deadline=None)
@given(values=st.lists(VALUES), block=st.integers(1, 30), indent=st.sampled_from([None, 1]))
def test_an_array_read_in_pieces_is_the_array(values, block, indent):
    with tempfile.TemporaryDirectory() as name, patch.object(packing, "BLOCK", block):
        Path(name, "a.json").write_text(json.dumps(values, indent=indent, ensure_ascii=bool(indent)), encoding="utf-8")
        file = files.TextFile(Path(name, "a.json"))
        assert [row.value for row in json_files.json_rows(file, json_files.scan(file, ()))] == values


@pytest.mark.parametrize(
    ("content", "good", "reason"),
    [
        (b'[{"text": "a"}, {"text": "b"', 1, "malformed JSON: Expecting ',' delimiter at character 29"),
        (b'[{"text": "a"} {"text": "b"}]', 1, "found '{' at character 16, expected ','"),
        (b'[{"text": "a"}', 1, "found the end of the file, expected ','"),
        (b'[{"text": "a"}] trailing', 1, "'t' after the array, at character 17"),
        (b'[{"text": "a"}, {"text": "\xff"}]', 1, r"byte 26 \(0xff\) is not UTF-8"),
        (b'[{"text": "a"}, ' + b"[" * 100_000, 1, "malformed JSON: nested too deeply"),
    ],
)
def test_a_damaged_array_keeps_what_came_before(tmp_path, content, good, reason):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.json").write_bytes(content)
    (tmp_path / "in/b.txt").write_text("good")
    found, (bad,) = read(tmp_path / "in")
    assert [text for text, _ in found] == ["a"] * good + ["good"]
    assert re.search(reason, bad.reason)
    assert f"after {good} readable rows" in bad.reason


def test_conversations_among_texts_are_told_their_format(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"messages": []}\n')
    _, (bad,) = read(tmp_path / "a.jsonl")
    assert bad.reason.endswith('or format = "chat" for conversations')


def test_rows_of_an_array_that_are_no_documents_are_named_by_row(tmp_path):
    rows = [{"text": "a"}, {"text": 1}, 5, {"body": "x"}, {"text": "\ud800"}, {"text": "z"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    found, bad = read(tmp_path / "a.json")
    assert found == [("a", 0), ("z", 5)]
    assert [(b.row, b.line, b.offset) for b in bad] == [(n + 1, 0, n) for n in (1, 2, 3, 4)]
    assert bad[2].reason == "no field 'text', found 'body'; set `field` to the one that holds the document"
    assert bad[0].bytes == len('{"text": 1}')
    assert "row 2: field 'text' is a JSON number, expected a string" in bad[0].message()
    assert "surrogate" in bad[3].reason
    assert "found a JSON number, expected an object" in bad[1].reason


@pytest.mark.parametrize("block", [3, 1 << 20])
def test_a_name_twice_in_an_object_costs_its_row_alone(tmp_path, block):
    """Python's decoder keeps the last value, so the first text would be lost without a word."""
    rows = [
        '{"text": "first", "id": 1, "text": "last"}',
        '{"text": "a", "meta": {"x": [{"k\\u0065y": 1, "key": 2}]}}',
        '{"text": "b", "meta": {"x": 1, "y": {"x": 1}}}',
        '{"text": "c \\"text\\": 1, \\"text\\": 2"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "a.json").write_text(f"[{', '.join(rows)}]")
    (tmp_path / "object.json").write_text(f'{{"data": [{", ".join(rows)}]}}')
    for name in ("a.jsonl", "a.json", "object.json"):
        with patch.object(packing, "BLOCK", block):
            found, bad = read(tmp_path / name)
        assert [text for text, _ in found] == ["b", 'c "text": 1, "text": 2']
        assert [b.reason.split(",")[0] for b in bad] == ["names 'text' twice", "names 'key' twice"]
        assert [b.row or b.line for b in bad] == [1, 2]
    talk = '[{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": "c"}]'
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": talk, "completion": "d"}))
    with pytest.raises(UserError, match="field 'prompt': names 'content' twice"):
        read(tmp_path / "b.jsonl", format="chat")


def test_a_row_without_an_end_is_not_read_for_ever(tmp_path):
    (tmp_path / "a.json").write_bytes(b'[{"text": "a"}, {"text": "' + b"x" * 5000)
    with patch.object(packing, "BLOCK", 100):
        found, (bad,) = read(tmp_path / "a.json", max_document_mb=0.001)
    assert len(found) == 1
    assert "its row is longer than the 0.001 MB of max_document_mb" in bad.reason
    assert bad.reason.endswith("after 1 readable rows")


def test_configuration_is_text_and_one_row_is_a_row(tmp_path):
    top = tmp_path / "in"
    top.mkdir()
    config = '{"name": "x", "version": [1, 2], "scripts": {"test": "pytest"}, "private": true}'
    (top / "config.json").write_text(config)
    (top / "empty.json").write_text("{}")
    (top / "row.json").write_text('{"text": "the row", "id": [{"a": 1}]}')
    with pytest.warns(Notice, match=r"config.json and 1 more: a JSON object without rows, read as one text"):
        found, bad = read(top)
    assert ([text for text, _ in found], bad) == ([config, "{}", "the row"], [])
    (top / "two.json").write_text('{"a": [{"text": "1"}], "b": [{"text": "2"}]}')
    with pytest.raises(UserError, match=r"several lists of rows \(found 'a', 'b'\), expected an array"):
        read(top / "two.json", format="chat")
    with pytest.raises(UserError, match=r"a JSON object without rows"):
        read(top / "config.json", format="chat")


def test_members_beside_the_list_of_rows_are_named_or_refused(tmp_path):
    pair = {"prompt": "a", "response": "b"}
    file = tmp_path / "a.json"
    others = {"version": "1", "empty": "", "none": [None], "tags": ["x"], "c": 3, "d": {"e": 4}, "f": 5, "g": 6}
    file.write_text(json.dumps({**others, "data": [pair, pair]}))
    with pytest.warns(Notice) as notices:
        assert len(read(file, format="chat")[0]) == 2
    (notice,) = (str(notice.message) for notice in notices)
    assert notice.endswith("only the rows of 'data' are read, not 'version', 'tags', 'c', 'd', 'f', ... beside them")
    for name, value in {"system_prompt": "s", "input": ["x"], "tools": {"name": "t"}, "defaultPrompt": "p"}.items():
        file.write_text(json.dumps({"data": [pair], name: value}))
        with pytest.raises(UserError, match=f"member '{name}' beside the rows of 'data' is .*, which would be lost"):
            read(file, format="chat")
        assert len(read(file, format="chat", metadata=[name])[0]) == 1
        assert len(read(file, field="prompt")[0]) == 1
    file.write_text(json.dumps({"data": [pair], "prompts": 1, "input": "7"}))
    assert len(read(file, format="chat")[0]) == 1
    file.write_text(json.dumps({"data": [pair], "system": ""}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read(file, format="chat")[0]) == 1


def test_csv_quotes_line_ends_and_bad_rows(tmp_path):
    content = (
        "\ufeffid,text\r\n"
        '1,"one, ""quoted""\r\nand two lines"\r\n'
        "\r\n"
        "2,too,many\r\n"
        "3\r\n"
        '4,"closed"wrongly\r\n'
        "5,plain\r\n"
    ).encode()
    (tmp_path / "a.csv").write_bytes(content + b"6,caf\xe9\n7,last\n" + b'8,"never closed\n9,lost\n')
    found, bad = read(tmp_path / "a.csv")
    assert found == [('one, "quoted"\r\nand two lines', 0), ("plain", 4), ("last", 6), ("lost", 8)]
    assert [(b.line, b.row) for b in bad] == [(5, 0), (6, 0), (7, 0), (9, 0), (11, 0)]
    reasons = [b.reason for b in bad]
    assert reasons[0] == "found 3 fields, expected 2 (id, text)"
    assert reasons[1] == "found 1 fields, expected 2 (id, text)"
    assert reasons[2].startswith("malformed table in line 7: ',' expected after '\"'")
    assert "(0xe9) is not UTF-8" in reasons[3]
    assert reasons[4].startswith("malformed table in line 11: unexpected end of data")


def test_a_quote_that_opens_by_mistake_costs_its_line_alone(tmp_path):
    rows = [f"{n},text {n}" for n in range(40)]
    rows[7] = '7,"never closed'
    rows[9] = '9,"in ""two""\nlines"'
    (tmp_path / "a.csv").write_text("id,text\n" + "\n".join(rows) + "\n")
    found, bad = read(tmp_path / "a.csv")
    texts = [f"text {n}" for n in range(40) if n != 7]
    texts[8] = 'in "two"\nlines'
    assert [text for text, _ in found] == texts
    assert [(b.line, b.reason.partition(":")[0]) for b in bad] == [(9, "malformed table in line 9")]
    with patch.object(table_files, "MAX_REWINDS", 0):
        _, bad = read(tmp_path / "a.csv")
    assert bad[0].reason.startswith("malformed table in lines 9 to 11, which are lost")


def test_a_name_that_shouts_is_unpacked_and_columns_of_one_name_are_refused(tmp_path):
    (tmp_path / "A.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    assert read(tmp_path / "A.JSONL.GZ")[0] == [("packed", 0)]
    columns = [pa.array(["q"]), pa.array(["one"]), pa.array(["two"])]
    pq.write_table(pa.table(columns, names=["question", "answer", "answer"]), tmp_path / "two.parquet")
    with pytest.raises(UserError, match="names column 'answer' more than once"):
        read(tmp_path / "two.parquet", format="chat")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"id,body\n1,x\n", "a.csv: line 2: no field 'text', found 'id', 'body'; set `field`"),
        ("a.csv", b"text,text\n1,x\n", "the header names column 'text' more than once"),
        ("a.csv", b"text\xe9\nx\n", "the header cannot be read: byte 4 .* is not UTF-8; set the encoding"),
        ("a.parquet", parquet([{"body": "x", "id": 1}]), "a.parquet: no field 'text', found 'body', 'id'; set `field`"),
        ("a.parquet", parquet([{"text": 3}]), "a.parquet: column 'text' is int64, expected a string"),
        (
            "a.parquet",
            parquet_of(pa.table([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])),
            "a.parquet: the table names column 'text' more than once; rename one",
        ),
        ("a.parquet", b"PAR1 and nothing more", "a.parquet: not a valid Parquet file"),
        ("a.json", b'[{"body": "x"}]', "a.json: row 1: no field 'text', found 'body'"),
    ],
)
def test_nothing_usable_names_the_columns(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path / name)
    assert "no line of this file is usable: fix it or remove it" in str(caught.value)


def test_fields_of_a_table_are_text_of_any_arrow_type(tmp_path):
    texts = ["one", None, "drei €", ""]
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"text": pa.array(texts, kind)}), tmp_path / "a.parquet")
        found, (bad,) = read(tmp_path / "a.parquet")
        assert found == [("one", 0), ("drei €", 2), ("", 3)], kind
        assert (bad.row, bad.offset, bad.reason) == (2, 1, "column 'text' is null, expected a string")
    pq.write_table(pa.table({"text": pa.array([b"ok", b"\xff\xfe", b"fine"])}), tmp_path / "a.parquet")
    found, (bad,) = read(tmp_path / "a.parquet")
    assert found == [("ok", 0), ("fine", 2)]
    assert (bad.row, bad.reason) == (2, "column 'text' is not UTF-8")


def test_a_damaged_row_group_is_lost_alone_and_counted(tmp_path):
    rows = [{"text": f"document {i} " + "x" * 50} for i in range(100)]
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(rows, row_group_size=10, write_page_checksum=True, compression="none", use_dictionary=[]))
    group = pq.ParquetFile(path).metadata.row_group(3).column(0)
    data = bytearray(path.read_bytes())
    data[group.data_page_offset + group.total_compressed_size // 2] ^= 1
    path.write_bytes(bytes(data))
    out = tmp_path / "out"
    result = make(out, path)
    assert (result["documents"], result["quarantined_documents"], result["input_documents"]) == (90, 10, 100)
    (bad,) = quarantine(out)
    assert (bad["row"], bad["documents"]) == (31, 10)
    assert "row group 3 cannot be decoded from row 31 on" in bad["reason"]
    assert [t.split()[1] for t in iter_texts(out)] == [str(i) for i in range(100) if not 30 <= i < 40]


def test_a_mixed_folder_counts_and_keeps_going(tmp_path):
    top = tmp_path / "in"
    (top / "deep").mkdir(parents=True)
    for number, (name, write) in enumerate(WRITERS.items()):
        (top / "deep" / name).write_bytes(write([{"text": f"{number} one"}, {"text": f"{number} two"}]))
    (top / "README.md").write_text("readme")
    (top / "script.py").write_text("pass")
    (top / "picture.png").write_bytes(b"\x89PNG")
    (top / "cut.parquet").write_bytes(parquet([{"text": "x"}])[:-10])
    (top / "cut.json.gz").write_bytes(gzip.compress(b'[{"text": "x"}]')[:10])
    (top / "other.csv").write_bytes(b"id,body\n1,x\n2,y\n")
    out = tmp_path / "out"
    result = make(out, top, dedup={"exact": False})
    assert not_read(Source(path=str(top))) == [(top / "picture.png", "suffix")]
    (top / "\udcff.txt").write_text("a name that is no text")
    with pytest.raises(UserError, match=r"the file name '.*\\udcff.txt' is not UTF-8"):
        make(tmp_path / "refused", top)
    (top / "\udcff.txt").unlink()
    assert result["documents"] == 2 * len(WRITERS) + 1 + 2
    assert result["quarantined_documents"] == 4
    assert result["input_documents"] == result["documents"] + 4
    names = [Path(b["path"]).name for b in quarantine(out)]
    assert names == ["cut.json.gz", "cut.parquet", "other.csv", "other.csv"]
    groups = {g for b in read_documents(out, columns=["group"]) for g in b["group"].to_pylist()}
    assert groups == {f"deep/{name}" for name in WRITERS} | {"README.md", "script.py"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.csv.gz", "groups.parquet"])
def test_a_file_larger_than_the_allowance_is_streamed(tmp_path, monkeypatch, name):
    """Batches are small, and the first one is there before the file was read to its end."""
    rows = [{"text": f"{i} " + "x" * 1000} for i in range(3000)]  # 3 MB
    data = parquet(rows, row_group_size=300) if name == "groups.parquet" else WRITERS[name](rows)
    (tmp_path / name).write_bytes(data)
    for module in (reader, file_reader):
        monkeypatch.setattr(module, "BATCH_CHARACTERS", 20_000)
    monkeypatch.setattr(packing, "BLOCK", 10_000)
    monkeypatch.setattr(content, "SNIFF_BYTES", 10_000)
    taken = []
    unpacked, batches = files.unpacked, table_files.parquet_batches
    monkeypatch.setattr(files, "unpacked", lambda *a: (taken.append(1) or b for b in unpacked(*a)))
    monkeypatch.setattr(table_files, "parquet_batches", lambda *a: (taken.append(1) or b for b in batches(*a)))
    found = reader.read(settings(tmp_path / name), lambda bad: None)
    first = next(found)
    assert first["text"].nbytes < 50_000
    assert len(taken) < 10
    rest = list(found)
    assert max(t["text"].nbytes for t in rest) < 50_000
    assert len(taken) > 100
    assert first.num_rows + sum(t.num_rows for t in rest) == 3000


def test_parquet_batches_are_small_where_rows_are_large(tmp_path):
    """One row group holds everything, as some writers leave it."""
    pq.write_table(pa.table({"text": ["y" * 100_000 for _ in range(64)]}), tmp_path / "a.parquet", use_dictionary=False)
    tables = [b for _, b in table_files.parquet_batches(tmp_path / "a.parquet", 1024, 400_000)]
    assert sum(t.num_rows for t in tables) == 64
    assert max(t.num_rows for t in tables) <= 4


def test_plain_text_in_a_folder_of_conversations_is_named(tmp_path):
    top = tmp_path / "in"
    top.mkdir()
    (top / "a.json").write_text(json.dumps([{"messages": [{"role": "assistant", "content": "hi"}]}]))
    (top / "LICENSE.md").write_text("all of it")
    make(tmp_path / "out", top, format="chat")
    assert funnel(tmp_path / "out")["kept"]["documents"] == 1
    assert quarantine(tmp_path / "out")[0]["reason"].startswith('is plain text, but format = "chat" needs rows (.jsonl')


def test_conversations_in_parquet_have_no_empty_extras(tmp_path):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "train": True}]
    (tmp_path / "a.parquet").write_bytes(parquet([{"messages": talk, "id": 1}]))
    make(tmp_path / "out", tmp_path / "a.parquet", format="chat")
    assert [json.loads(t) for t in iter_texts(tmp_path / "out")] == [talk]


@pytest.mark.skipif(not DATA.exists(), reason="the public data sets are not on this machine")
@pytest.mark.parametrize(
    ("name", "field", "documents"),
    [
        ("instructions/instruction-data.json", "output", 1100),
        ("gsm8k/train.jsonl", "question", 7473),
        ("gsm8k/test.jsonl", "question", 1319),
        ("tinyshakespeare/input.txt", "text", 1),
        ("wikitext-2/valid.txt", "text", 1),
    ],
)
def test_real_data_is_read_to_the_row(tmp_path, name, field, documents):
    result = make(tmp_path / "out", DATA / name, field=field, dedup={"exact": False}, pii=False)
    assert (result["documents"], result["quarantined_documents"]) == (documents, 0)
