"""A file is what its bytes say: packed files, archives, binary files, encodings, JSON of many arrangements, links."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import pickle
import random
import socket
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from ingot.core.errors import Notice, UserError
from ingot.corpus.funnel import Quarantined
from ingot.corpus.readers import read as reader
from ingot.corpus.readers.content import not_text
from ingot.corpus.readers.locate import locate, not_read
from ingot.corpus.readers.packing import packing_of
from ingot.corpus.readers.walk import describe
from ingot.corpus.settings import Source
from tests.corpus.corpus_helpers import settings

ROWS = [{"text": "one"}, {"text": "zwei und drei"}]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstd,
    "bzip2": lambda data: bz2.compress(data, 1),
    "xz": lambda data: lzma.compress(data, preset=0),
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE, preset=0),
}


def read(source: Any, **more: Any) -> tuple[list[str], list[Quarantined]]:
    bad: list[Quarantined] = []
    found = [r["text"] for t in reader.read(settings(source, **more), bad.append) for r in t.to_pylist()]
    return found, bad


def refusal(path: Path, content: bytes, **source: Any) -> str:
    """The sentence with which a single file is refused."""
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read([{"path": str(path), **source}])
    return str(caught.value)


def tar(**options: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as archive:
        info = tarfile.TarInfo("a.txt")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"hello"))
    return out.getvalue()


def zipped(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, "hello")
    return out.getvalue()


def numpy_file() -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(3))
    return out.getvalue()


def arrow(compression: str) -> bytes:
    out = io.BytesIO()
    feather.write_feather(pa.table({"text": ["a"]}), out, compression=compression)
    return out.getvalue()


def database() -> bytes:
    with tempfile.TemporaryDirectory() as name, sqlite3.connect(f"{name}/x") as db:
        db.execute("create table t (text)")
        db.commit()
        return Path(name, "x").read_bytes()


FOREIGN = {
    "a tar archive": [tar(), tar(format=tarfile.PAX_FORMAT), v7 := tar(format=tarfile.USTAR_FORMAT)],
    "a ZIP archive": [zipped("a.txt"), b"PK\x05\x06" + b"\0" * 18],
    "an Office, EPUB or OpenDocument file": [zipped("word/document.xml"), zipped("mimetype")],
    "a 7z archive": [b"7z\xbc\xaf\x27\x1c\0\4"],
    "a RAR archive": [b"Rar!\x1a\x07\x01\0"],
    "a cpio archive": [b"070701" + b"0" * 104, b"070707" + b"0" * 70],
    "an ar archive": [b"!<arch>\na.txt/          0           0     0     644     5         `\nhello\n"],
    "an ARC archive, older than WARC": [b"filedesc://IA-001102.arc 0 19960923142103 text/plain 76\n"],
    "a PDF document": [b"%PDF-1.4\n1 0 obj << /Type /Catalog >> endobj\n"],
    "an RTF document": [rb"{\rtf1\ansi hello}"],
    "an image": [b"\x89PNG\r\n\x1a\n\0", b"\xff\xd8\xff\xe0\0\x10JFIF", b"GIF89a\x01\0\x01\0\x80"],
    "an SQLite database": [database()],
    "a pickle": [pickle.dumps(["text"], protocol=p) for p in (0, 2, 5)],
    "a NumPy array": [numpy_file()],
    "an Arrow or Feather file": [arrow("uncompressed"), arrow("zstd")],
    "a program": [Path(sys.executable).resolve().read_bytes()[:4096], b"MZ\x90\0\3\0"],
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_text_is_refused_by_its_name_under_any_suffix(tmp_path, name):
    for number, content in enumerate(FOREIGN[name]):
        for suffix in (".txt", ".jsonl", ".csv", "", ".tgz"):
            assert name in refusal(tmp_path / f"{number}{suffix}", content)
    for pack in PACKINGS.values():
        assert name in refusal(tmp_path / "packed.txt", pack(FOREIGN[name][0]))


def test_a_tar_archive_without_a_magic_word_is_known_by_its_sum(tmp_path):
    header = bytearray(v7)
    header[257:345] = bytes(88)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    assert "is a tar archive" in refusal(tmp_path / "a.txt", bytes(header))


def test_text_that_begins_like_a_file_of_another_kind_is_text(tmp_path):
    for text in (
        "BM is a mark",
        "GIF89a was a format",
        "MZ",
        "PACK my box",
        "ORC\n",
        "ID3 tags",
        "[link](x)",
        "{% if %}",
    ):
        (tmp_path / "a.txt").write_text(text)
        assert read(tmp_path / "a.txt") == ([text], [])


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_packed_file_is_read_under_any_name(tmp_path, packing):
    data = PACKINGS[packing](LINES)
    assert packing_of(data[:32]) == packing
    for name in ("rows.jsonl", "rows.jsonl.gz", "rows.jsonl.bz2", "part-00000", "rows.txt"):
        (tmp_path / name).write_bytes(data)
        assert read(tmp_path / name) == (["one", "zwei und drei"], []), name
    assert "packed twice" in refusal(tmp_path / "rows.jsonl.gz", gzip.compress(data))


def test_other_packings_are_named(tmp_path):
    for name, magic in {
        "lz4": b"\x04\x22\x4d\x18",
        "compress": b"\x1f\x9d\x90",
        "snappy": b"\xff\x06\0\0sNaPpY",
    }.items():
        message = refusal(tmp_path / "rows.jsonl", magic + b"\x00" * 20)
        assert f"is packed with {name}; unpack it, or pack it with gzip or zstd" in message


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.json", "a.txt"])
def test_a_truncated_stream_gives_the_rows_that_were_complete(tmp_path, packing, name):
    noise = random.Random(1)
    texts = [f"{i} {noise.getrandbits(4000):x}" for i in range(400)]  # several blocks of bzip2
    rows = [json.dumps({"text": t}) for t in texts]
    bodies = {
        ".jsonl": "\n".join(rows) + "\n",
        ".json": f"[{', '.join(rows)}]",
        ".txt": "\n".join(texts),
    }
    data = PACKINGS[packing](bodies.get(Path(name).suffix, "\n".join(["text", *texts]) + "\n").encode())
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data[: -len(data) // 30])
    (tmp_path / "in" / "z.txt").write_text("whole")
    *found, last = read(tmp_path / "in")[0]
    (bad,) = read(tmp_path / "in")[1]
    assert f"truncated {packing} data" in bad.reason
    assert last == "whole"
    assert found == texts[: len(found)]
    assert (len(found) == 0) if name == "a.txt" else (len(found) > 90)


@pytest.mark.parametrize("name", ["rows.jl", "rows.jsonlines", "rows.jsonl.txt", "part-00000", "rows.csv", "rows.json"])
def test_lines_of_json_are_rows_under_any_name(tmp_path, name):
    (tmp_path / name).write_bytes(LINES)
    assert read(tmp_path / name) == (["one", "zwei und drei"], [])
    message = refusal(tmp_path / name, b'{"body": "x", "id": 1}\n{"body": "y", "id": 2}\n')
    assert "no field 'text', found 'body', 'id'" in message
    assert read([{"path": str(tmp_path / name), "kind": "text"}])[0] == [
        '{"body": "x", "id": 1}\n{"body": "y", "id": 2}\n'
    ]


def test_how_a_file_was_read_is_said_once_for_each_source(tmp_path):
    for name, content in {"a.txt": LINES, "b.md": LINES, "c.jsonl.xz": lzma.compress(LINES)}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "d.txt").write_text("Häuser", encoding="utf-16")
    with pytest.warns(Notice) as caught:
        read(tmp_path)
    messages = [str(w.message).removeprefix(f"{tmp_path}/") for w in caught]
    assert messages == [
        "a.txt and 1 more: read as jsonl, which it looks like; set `kind` of the source to read it otherwise",
        "c.jsonl.xz: packed with xz, which unpacks slowly; gzip and zstd are faster",
        "d.txt: read as utf-16",
    ]


def test_an_array_under_the_name_of_lines_and_parquet_under_another_name_are_read(tmp_path):
    for name in ("a.jsonl", "a.txt", "a"):
        (tmp_path / name).write_text(json.dumps(ROWS, indent=1))
        assert read(tmp_path / name) == (["one", "zwei und drei"], [])
    for name in ("b.txt", "b.jsonl", "b.bin"):
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / name)
        assert read(tmp_path / name) == (["one", "zwei und drei"], [])
    packed = gzip.compress((tmp_path / "b.txt").read_bytes())
    assert "is a Parquet file packed with gzip; unpack it" in refusal(tmp_path / "b.parquet.gz", packed)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"data": [{"body": "x", "id": 1}]}, "no field 'text', found 'body', 'id'"),
        ({"version": 1, "rows": [{"title": "x"}], "by": "y"}, "no field 'text', found 'title'"),
        ({"train": [{"text": "x"}], "test": [{"text": "y"}]}, "several lists of rows (found 'train', 'test')"),
        ({"columns": ["id", "text"], "index": [0], "data": [[1, "x"]]}, "several lists of rows (found 'data')"),
        ({"text_": {"0": "x", "1": "y"}}, "looks like a table by columns or index (found 'text_')"),
        ({"0": {"body": "x"}, "1": {"body": "y"}}, "looks like a table by columns or index (found '0', '1')"),
        ({"body": ["x", "y"], "id": [1, 2]}, "looks like a table by columns or index (found 'body', 'id')"),
        ({"result": {"items": [{"text": "x"}]}}, "a JSON object with rows inside 'result'"),
        ([[1, "x"], [2, "y"]], "found a JSON array, expected an object"),
        (["x", "y"], "found a JSON string, expected an object"),
        ('{"a": 1,\n "b": "x"}\n{"a": 2,\n "b": "y"}\n', "no field 'text', found 'a', 'b'"),
        ('[{"body": "x"}, {"body": "y', "no field 'text', found 'body'"),
        ('{"name": "x", "a": ', "malformed JSON"),
        ('{"a": 1} trailing', "malformed JSON: 't' after the object"),
    ],
)
def test_json_of_other_arrangements_never_becomes_a_document_of_json(tmp_path, content, reason):
    text = content if isinstance(content, str) else json.dumps(content)
    for data in (text, text.replace(": ", ":")):
        assert reason in refusal(tmp_path / "a.json", data.encode())
    assert reason in refusal(tmp_path / "a.json", gzip.compress(text.encode()))
    (tmp_path / "a.json").write_text(text)
    assert read([{"path": str(tmp_path / "a.json"), "kind": "text"}])[0] == [text]


def test_a_list_of_rows_in_an_object_is_read_up_to_its_damage(tmp_path):
    (tmp_path / "a.json").write_bytes(b'{"v": 1, "rows": ' + json.dumps(ROWS).encode()[:-1] + b', {"text": "cu')
    found, (bad,) = read(tmp_path / "a.json")
    assert found == ["one", "zwei und drei"]
    assert "after 2 readable rows" in bad.reason
    (tmp_path / "a.json").write_text("\n".join(json.dumps(row, indent=1) for row in ROWS))
    assert read(tmp_path / "a.json") == (["one", "zwei und drei"], [])


@pytest.mark.parametrize(
    "content", [b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"text": ' + b"[" * 9999 + b"]" * 9999 + b"}"]
)
def test_deeply_nested_json_is_a_sentence(tmp_path, content):
    assert "nested too deeply" in refusal(tmp_path / "a.json", content)
    (tmp_path / "a.jsonl").write_bytes(content + b"\n" + LINES)
    found, (bad,) = read(tmp_path / "a.jsonl")
    assert (len(found), bad.line) == (2, 1)
    assert "nested too deeply" in bad.reason


SENTENCES = {
    "cp1252": "Das „Café“ kostet fünf €.",
    "latin-1": "Où est la forêt enchantée ?",
    "koi8-r": "Широкая электрификация южных губерний",
    "shift_jis": "吾輩は猫である。名前はまだ無い。",
    "gb18030": "学而时习之，不亦说乎？",
    "utf-16-le": "Plain words, twice as wide.",
    "utf-32-be": "Plain words, four times as wide.",
    "iso2022_jp": "吾輩は猫である。",
}


@pytest.mark.parametrize("encoding", SENTENCES)
def test_an_encoding_is_named_or_the_file_is_quarantined(tmp_path, encoding):
    text = SENTENCES[encoding]
    row = json.dumps({"text": text}, ensure_ascii=False) + "\n"
    for name, content in {"a.txt": text, "a.jsonl": row, "a.tsv": f"text\n{text}\n"}.items():
        assert "encoding" in refusal(tmp_path / name, content.encode(encoding)) or name != "a.txt"
        assert read([{"path": str(tmp_path / name), "encoding": encoding, "field": "text"}]) == ([text], []), name


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_tells_the_encoding_of_every_format(tmp_path, encoding):
    for name, content in {
        "a.txt": "Häuser 東京",
        "a.jsonl": '{"text": "Häuser 東京"}\n',
        "a.tsv": "text\nHäuser 東京\n",
    }.items():
        (tmp_path / name).write_bytes(content.encode(encoding))
        found, bad = read(tmp_path / name)
        assert ([text.removeprefix("\ufeff") for text in found], bad) == (["Häuser 東京"], [])


def test_an_encoding_that_is_wrong_is_refused(tmp_path):
    assert "is UTF-8, but its source has encoding" in refusal(tmp_path / "a.txt", "fünf".encode(), encoding="cp1252")
    assert "byte 4 is not shift_jis" in refusal(tmp_path / "a.txt", b"abcd\x81", encoding="shift_jis")
    with pytest.raises(ValueError, match="expected an encoding that Python knows"):
        settings([{"path": "a", "encoding": "klingon"}])


@pytest.mark.parametrize(
    "content", [b"a\0b", b"words " + bytes(range(1, 32)), "a\x80\x81\x82".encode(), b"N\x08NA\x08A"]
)
def test_control_characters_are_not_text(tmp_path, content):
    assert "binary, not text" in refusal(tmp_path / "a.txt", content)
    assert not_text(b"a line of a log \x1b[0m" + b"and so on" * 20) is None


def test_a_walk_names_what_it_does_not_read(tmp_path, monkeypatch):
    top, other = tmp_path / "in", tmp_path / "other"
    (top / ".git").mkdir(parents=True)
    (top / "deep").mkdir()
    other.mkdir()
    for file in (top / "a.txt", top / "deep" / "b.txt", top / ".git" / "c.txt", other / "d.txt"):
        file.write_text(file.name)
    (top / "linked").symlink_to(other)
    (top / "e.txt").symlink_to(other / "d.txt")
    (top / "f.txt").symlink_to("a.txt")
    (top / "gone.txt").symlink_to("nowhere")
    (top / "loop").symlink_to(top)
    (top / "i.png").write_bytes(b"x")
    os.mkfifo(top / "pipe.txt")
    names = lambda source: [Path(f.path).name for f in locate(source)]  # noqa: E731
    assert names(Source(path=str(top))) == ["a.txt", "f.txt", "b.txt"]
    reasons = {path.name: reason for path, reason in not_read(Source(path=str(top)))}
    assert reasons == {
        ".git": "hidden",
        "e.txt": "link",
        "gone.txt": "broken link",
        "i.png": "suffix",
        "linked": "link",
        "loop": "link",
        "pipe.txt": "special",
    }
    assert "3 links to a directory or out of this one" in describe(not_read(Source(path=str(top)))).replace(
        "links to directories", "links to a directory"
    )
    assert names(Source(path=str(top), follow_links=True)) == ["a.txt", "e.txt", "f.txt", "b.txt", "d.txt"]
    assert names(Source(path=f"{top}/**/*.txt")) == ["a.txt", "b.txt", "f.txt"]
    assert {p.name for p, r in not_read(Source(path=f"{top}/*.txt")) if r == "link"} == {"e.txt"}
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "b.txt")
    assert names(Source(path=str(top))) == ["a.txt", "f.txt"]


def test_a_pipe_or_socket_is_never_opened(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "a.txt")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)
        server.bind("b.txt")
        for path in (tmp_path / "a.txt", tmp_path / "b.txt", Path("/dev/null")):
            with pytest.raises(UserError, match="is a pipe, socket or device, expected a regular file"):
                locate(Source(path=str(path)))
        with pytest.raises(UserError, match=r"not read: 2 files that are not regular"):
            locate(Source(path=f"{tmp_path}/*.txt"))


@pytest.mark.parametrize("name", ["data [v1]", "[2024]", "a[b-c]d"])
def test_brackets_in_a_name_that_exists_are_no_pattern(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "[x] a.txt").write_text("bracket")
    for path in (
        f"{tmp_path}/{name}/*.txt",
        f"{tmp_path}/{name}/[x] a.txt",
        f"{tmp_path}/{name}/[x]*",
        f"{tmp_path}/{name}",
    ):
        assert read([path]) == (["bracket"], []), path
    assert [f.group for f in locate(Source(path=f"{tmp_path}/{name}/*.txt"))] == ["[x] a.txt"]
    (tmp_path / "b.txt").write_text("pattern")
    assert read([f"{tmp_path}/[ab].txt"]) == (["pattern"], [])
    with pytest.raises(UserError, match=r"\[ \] is a pattern for one character"):
        read([f"{tmp_path}/[cd].txt"])


def test_tsv_has_no_quoting_unless_its_header_is_quoted(tmp_path):
    rows = ['"lang', 'said "yes"', '"all"', 'ends"', "it's", '"a ""b"" c"']
    (tmp_path / "a.tsv").write_text("id\ttext\r\n" + "".join(f"{i}\t{row}\r\n" for i, row in enumerate(rows)))
    assert read(tmp_path / "a.tsv") == (rows, [])
    (tmp_path / "b.tsv").write_text('"id"\t"text"\n"1"\t"two\nlines, ""quoted"""\n"2"\t"tab\there"\n')
    assert read(tmp_path / "b.tsv") == (['two\nlines, "quoted"', "tab\there"], [])
    (tmp_path / "c.tsv").write_bytes(b"id\ttext\n1\ta\tb\n2\n\n3\tcaf\xe9\n4\tlast\n")
    found, bad = read(tmp_path / "c.tsv")
    assert (found, [b.line for b in bad], [b.bytes for b in bad]) == (["last"], [2, 3, 5], [5, 1, 6])


def test_long_text_is_cut_and_long_rows_are_quarantined(tmp_path):
    text = "".join(f"line {i} of ä long text\n" + "\n" * (i % 7 == 0) for i in range(3000))
    (tmp_path / "a.txt").write_text(text)
    with pytest.warns(Notice, match=r"a.txt: longer than max_document_mb, cut at line ends into \d+ documents"):
        found, bad = read(tmp_path / "a.txt", max_document_mb=0.01)
    assert ("".join(found), bad) == (text, [])
    assert all(piece.endswith("\n") and len(piece.encode()) <= 10_000 for piece in found)
    (tmp_path / "b.txt").write_text("東" * 9999)
    with pytest.warns(Notice):
        assert "".join(read(tmp_path / "b.txt", max_document_mb=0.01)[0]) == "東" * 9999
    long = "x" * 20_000
    files = {
        "a.jsonl": json.dumps({"text": long}) + "\n" + LINES.decode(),
        "a.csv": f"text\n{long}\none\nzwei und drei\n",
        "q.csv": f'text\n"{long}\n{long}"\none\nzwei und drei\n',
        "a.tsv": f"text\n{long}\none\nzwei und drei\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        found, bad = read(tmp_path / name, max_document_mb=0.01)
        assert found == ["one", "zwei und drei"], name
        assert all("of max_document_mb" in b.reason for b in bad), name
        assert sum(b.bytes for b in bad) >= 20_000, name
    pq.write_table(pa.table({"text": ["one", long, "zwei und drei"]}), tmp_path / "a.parquet")
    found, (one,) = read(tmp_path / "a.parquet", max_document_mb=0.01)
    assert (found, one.row) == (["one", "zwei und drei"], 2)


BOMB = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from tests.corpus.corpus_helpers import make
def high_water():  # getrusage's begins with the memory of the process that started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = high_water()
result = make(Path(sys.argv[2]), sys.argv[1], max_document_mb=float(sys.argv[3]), pii=False)
peak = high_water()
print(result["documents"], result["input_bytes"], before >> 10, peak >> 10)
"""


def bomb(path: Path, name: str, mebibytes: int, mb: float) -> list[int]:
    """Documents, bytes, and MiB of memory before and at the peak, for a packed file of one long document."""
    before, after = {".txt": (b"", b""), ".jsonl": (b'{"text": "a"}\n{"text": "', b'"}\n{"text": "b"}\n')}[
        Path(name).suffix
    ]
    member = gzip.compress(b"a" * (1 << 20))
    (path / name).write_bytes(gzip.compress(before) + member * mebibytes + gzip.compress(after))
    command = [sys.executable, "-c", BOMB, str(path / name), str(path / "out"), str(mb)]
    return [*map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_memory_stays_below_a_multiple_of_the_bound(tmp_path, name):
    documents, size, before, peak = bomb(tmp_path, name, 100, mb=2)
    assert (documents, size) == ((2, 100 << 20) if name == "a.txt" else (2, (100 << 20) + 14))
    assert peak - before < 300


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_document_of_a_gibibyte_takes_less_than_one(tmp_path, name):
    assert bomb(tmp_path, name, 1024, mb=16)[3] < 1024


@examples(max_examples=60, deadline=None)
@example(data=b"\xfe\xff\x00", pack=None, cut=0)
@example(data=b"\xfe\xff\x00a\x00", pack="gzip", cut=0)
@given(
    data=st.binary(max_size=300)
    | st.text(max_size=200).map(str.encode)
    | st.tuples(st.text(min_size=1, max_size=100), st.sampled_from([*SENTENCES, "utf-16", "utf-8-sig"])).map(
        lambda pair: pair[0].encode(pair[1], errors="ignore")
    ),
    pack=st.sampled_from([None, *PACKINGS]),
    cut=st.integers(0, 20),
)
def test_every_byte_is_kept_or_quarantined_and_no_kept_text_was_no_text(data, pack, cut):
    with tempfile.TemporaryDirectory() as name:
        top = Path(name, "in")
        top.mkdir()
        packed = PACKINGS[pack](data) if pack else data
        (top / "a.txt").write_bytes(packed[: len(packed) - cut])
        (top / "b.txt").write_bytes(b"good")
        *found, last = read([{"path": str(top), "kind": "text"}])[0]
        bad = read([{"path": str(top), "kind": "text"}])[1]
    assert (len(found) + len(bad), last) == (1, "good")
    rest = packed[: len(packed) - cut]
    if pack and cut and packing_of(rest):  # a checksum or padding may be all that is lost
        assert not found or found[0].encode() == data
        return
    content = data if packing_of(rest) and pack else rest
    wide = "utf-32" if content[:4] in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE) else ""
    wide = wide or ("utf-16" if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "")
    if found:
        text = content.decode(wide or "utf-8")
        assert (found[0], not_text(text.encode())) == (text, None)
    else:
        assert wide or bad[0].bytes in (len(content), len(rest))  # others are counted as if they were UTF-8
