"""Files behind fsspec: read only with recorded digests, a changed one is named, and what fails is one sentence."""

import hashlib
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import MissingFile, Notice, UserError
from ingot.core.file_hashes import FileHashes
from ingot.corpus.documents import iter_texts, read_documents
from ingot.corpus.readers.locate import locate, source_digest
from tests.corpus.corpus_helpers import make, settings

fsspec = pytest.importorskip("fsspec")
FILES = {
    "bucket/web/a.txt": b"first text\n",
    "bucket/web/deep/b.jsonl": b'{"text": "second text"}\n{"text": "third text"}\n',
    "bucket/web/picture.png": b"PNG",
    "bucket/other.txt": b"other text\n",
}


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file system in memory that answers to s3:// and hf://; counts what is opened."""
    from fsspec.implementations.memory import MemoryFileSystem

    class Bucket(MemoryFileSystem):
        store: dict[str, Any] = {}  # noqa: RUF012  (of the class, as in MemoryFileSystem)
        pseudo_dirs = [""]  # noqa: RUF012
        opened: list[str] = []  # noqa: RUF012
        error: Exception | None = None
        protocol = ("s3", "hf")
        cachable = False

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.replace("s3://", "memory://").replace("hf://", "memory://"))

        def open(self, path: str, *rest: Any, **options: Any) -> Any:
            if type(self).error:
                raise type(self).error
            type(self).opened.append(path)
            return super().open(path, *rest, **options)

    implementations = importlib.import_module("fsspec.registry")._registry  # the package has a mapping of this name
    for scheme in ("s3", "hf"):
        monkeypatch.setitem(implementations, scheme, Bucket)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Bucket().pipe_file(f"/{name}", content)
    Bucket.opened.clear()
    return Bucket


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_single_file_needs_its_digest(bucket: Any, tmp_path: Path) -> None:
    content = FILES["bucket/other.txt"]
    right = {"path": "s3://bucket/other.txt", "sha256": sha256(content)}
    source_digest(settings([right]), FileHashes(tmp_path / "memo.json"))
    assert bucket.opened == [], "the key needs no download"
    make(tmp_path / "out", [right])
    assert list(iter_texts(tmp_path / "out")) == ["other text\n"]
    (batch,) = read_documents(tmp_path / "out", None, ["path", "group"])
    assert (batch["path"][0].as_py(), batch["group"][0].as_py()) == ("s3://bucket/other.txt", "other.txt")
    bucket.opened.clear()
    make(tmp_path / "again", [right])
    assert bucket.opened == [], "the cache needs no network"
    with pytest.raises(UserError, match=r"'s3://bucket/other.txt' has no sha256.* or checksums = \"sums.txt\""):
        make(tmp_path / "x", ["s3://bucket/other.txt"])
    with pytest.raises(UserError, match=r"was downloaded with sha256 .*, expected 0000"):
        make(tmp_path / "x", [{"path": "s3://bucket/other.txt", "sha256": "0" * 64}])


@pytest.mark.parametrize(
    ("path", "names"), [("s3://bucket/web", 2), ("s3://bucket/web/**", 3), ("s3://bucket/web/*.txt", 1)]
)
def test_the_first_run_records_every_file(path: str, names: int, bucket: Any, tmp_path: Path) -> None:
    source = {"path": path, "checksums": "sums.txt"}
    with pytest.warns(Notice) as notices:
        key = source_digest(settings([source]), FileHashes(tmp_path / "memo.json"))
    messages = [str(notice.message) for notice in notices]
    assert f"sources: recording the SHA-256 of {names} files of {path} in sums.txt; keep it" in messages
    assert any("not read: 1 files without a suffix" in message for message in messages) == (names == 2)
    lines = Path("sums.txt").read_text().splitlines()
    listed = {f"s3://{name}": sha256(content) for name, content in FILES.items()}
    assert len(lines) == names
    assert all(listed[line[66:]] == line[:64] for line in lines)
    bucket.opened.clear()
    assert source_digest(settings([source]), FileHashes(tmp_path / "memo.json")) == key
    if "*" not in path or names > 1:
        with pytest.raises(UserError, match=r"line \d: found .*; delete the file to record them again"):
            locate(settings([{**source, "path": "s3://bucket/web/*.txt"}]).sources[0])
    located = locate(settings([source]).sources[0])
    assert [file.group for file in located][:1] == ["a.txt"]
    assert [file.file.read_bytes() for file in located] == [FILES[file.path.removeprefix("s3://")] for file in located]
    assert bucket.opened == []
    moved = {**source, "checksums": "moved.txt"}
    Path("sums.txt").rename("moved.txt")
    assert source_digest(settings([moved]), FileHashes(tmp_path / "memo.json")) == key


def test_a_changed_file_is_named(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"path": "s3://bucket/web/**/*.*", "checksums": "sums.txt"}
    with pytest.warns(Notice):
        source_digest(settings([source]), FileHashes(tmp_path / "memo.json"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other machine"))
    bucket().pipe_file("/bucket/web/deep/b.jsonl", b'{"text": "changed"}\n')
    with pytest.raises(
        UserError, match=r"'s3://bucket/web/deep/b.jsonl' was downloaded .* in sums.txt: the remote file has"
    ):
        locate(settings([source]).sources[0])
    assert not list((tmp_path / "other machine").rglob("b.jsonl"))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("xyz  s3://bucket/web/a.txt", "sums.txt, line 2: found 'xyz"),
        ("0" * 64 + "  s3://bucket/other.txt", "line 2: found .* expected a SHA-256 and a file of s3://bucket/web"),
        ("0" * 64 + "  https://example.org/a", "line 2: found"),
    ],
)
def test_a_record_of_something_else_is_refused(line: str, found: str, bucket: Any, tmp_path: Path) -> None:
    Path("sums.txt").write_text(f"{sha256(FILES['bucket/web/a.txt'])}  s3://bucket/web/a.txt\n{line}\n")
    with pytest.raises(UserError, match=found):
        source_digest(settings([{"path": "s3://bucket/web", "checksums": "sums.txt"}]), FileHashes(tmp_path / "memo"))


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (PermissionError("Forbidden"), r"is not open to this user \(Forbidden\); set AWS_ACCESS_KEY_ID"),
        (FileNotFoundError("x"), "does not exist, expected a file; check the path"),
        (ConnectionError("no route"), r"could not be downloaded \(no route\); put the files on this machine"),
        (RuntimeError(), r"could not be downloaded \(RuntimeError\)"),
    ],
)
def test_what_fails_on_the_way_is_one_sentence(error: Exception, found: str, bucket: Any, tmp_path: Path) -> None:
    bucket.error = error
    with pytest.raises(UserError, match=found) as caught:
        make(tmp_path / "out", [{"path": "s3://bucket/other.txt", "sha256": "0" * 64}])
    assert "\n" not in str(caught.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_nothing_matches_or_no_package(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"path": "s3://bucket/none/*.txt", "checksums": "sums.txt"}
    with pytest.raises(MissingFile, match=r"'s3://bucket/none/\*\.txt' matches no file"):
        source_digest(settings([source]), FileHashes(tmp_path / "memo.json"))
    assert not Path("sums.txt").exists()
    with pytest.raises(UserError, match="'hf://gpt2/x' is no data set, expected hf://datasets/ORG/NAME/FILE"):
        make(tmp_path / "out", [{"path": "hf://gpt2/x", "sha256": "0" * 64}])
    for wrong in ({"path": "a.txt"}, {"path": "s3://b/a", "sha256": "0" * 64}):
        with pytest.raises(
            ValueError, match=r"checksums: found 'sums\.txt' for .*, expected it for hf:// or s3:// without"
        ):
            settings([{**wrong, "checksums": "sums.txt"}])
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UserError, match=r"needs fsspec and huggingface_hub; pip install 'ingot\[remote\]'"):
        make(tmp_path / "out", [{"path": "hf://datasets/o/n/x.txt", "sha256": "0" * 64}])
