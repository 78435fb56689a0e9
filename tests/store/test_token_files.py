"""Token files of other tools, written and read: ids and borders of documents are exact, and damage is refused."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest

from ingot.core.errors import UserError
from ingot.core.events import Display, EventLog, read_events
from ingot.store import token_files, token_import
from ingot.store.encode import build_tokens
from ingot.store.reader import Store
from ingot.store.token_files import read_tokens, write_store
from ingot.store.token_formats import TokenFormat, files_beside
from ingot.store.token_import import import_tokens
from ingot.store.writer import IDENTITY, StoreWriter
from ingot.tokenizer.byte_bpe import ByteBPE, Char
from ingot.tokenizer.hf_files import export_tokenizer, import_tokenizer
from tests.tokenizer.text_helpers import SOURCES

FORMATS = get_args(TokenFormat)
SUFFIX = {"nanogpt": ".bin", "llm.c": ".bin", "megatron": ".bin", "datatrove": ".ds"}
PARAGRAPHS = [*(p for source in SOURCES for p in source.split("\n\n") if p)][:200]


@pytest.fixture
def store(corpus: Callable[..., Path], bpe: ByteBPE, display: Display, log: EventLog, tmp_path: Path) -> Store:
    build_tokens(corpus(["", *PARAGRAPHS], PARAGRAPHS[:9]), bpe, "text", tmp_path / "store", 1, display, log)
    return Store.open(tmp_path / "store" / "train")


def large_store(path: Path, vocab: int, documents: list[list[int]]) -> Store:
    """A store of the given documents, whose ids may need 32 bits."""
    lengths = np.array([len(ids) for ids in documents])
    identity = pa.RecordBatch.from_pylist([dict.fromkeys(IDENTITY.names)] * len(documents), schema=IDENTITY)
    with StoreWriter(path, tokenizer="t", vocab=vocab) as writer:
        writer.append(np.concatenate(documents).astype(np.uint32), lengths, lengths, identity)
    return Store.open(path)


@pytest.mark.parametrize("format", FORMATS)
def test_ids_and_documents_come_back(
    format: TokenFormat, store: Store, bpe: ByteBPE, display: Display, log: EventLog, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(token_files, "CHUNK", 1000)  # several parts
    monkeypatch.setattr(token_import, "CHUNK", 1000)
    assert write_store(store, tmp_path / "train", format, bpe.eot) == []
    file = tmp_path / f"train{SUFFIX[format]}"
    assert all(path.is_file() for path in (file, *files_beside(file, format)))
    result = import_tokens({"train": [file, file], "val": []}, format, bpe, tmp_path / "again", display, log)
    again, empty = (Store.open(tmp_path / "again" / split, tokenizer=bpe.fingerprint) for split in ("train", "val"))
    ids, ends = store.ids.read(0, store.tokens), store.ends
    assert np.array_equal(again.ids.read(0, again.tokens), np.concatenate((ids, ids)))
    assert np.array_equal(again.ends, np.concatenate((ends, ends + ends[-1])))
    sizes = store.columns["bytes"].read(0, store.documents)
    assert np.array_equal(again.columns["bytes"].read(0, again.documents), np.concatenate((sizes, sizes)))
    start, _ = store.span(5)
    assert again.identity(store.documents + 5) | {"group": ""} == {
        "source": file.name,
        "path": str(file),
        "offset": start,
        "bytes": sizes[5],
        "group": "",
        "cluster": store.documents + 5,
    }
    assert (empty.tokens, result["val_tokens"], result["train_documents"]) == (0, 0, 2 * store.documents)
    assert result["bytes_per_token"] == store.bytes / store.tokens
    log.flush()
    assert read_events(log.path, "encoded")[-1]["split"] == "val"


def test_the_files_are_those_of_the_other_tools(store: Store, bpe: ByteBPE, tmp_path: Path) -> None:
    """Read with numpy and struct alone, as the tools' own readers do."""
    ids, ends = store.ids.read(0, store.tokens), store.ends.astype(np.int64)
    for format in FORMATS:
        write_store(store, tmp_path / format, format, bpe.eot)
    assert np.array_equal(np.fromfile(tmp_path / "nanogpt.bin", np.uint16), ids)
    header = np.fromfile(tmp_path / "llm.bin", np.int32, 256)
    assert header[:3].tolist() == [20240520, 1, len(ids)]
    assert not header[3:].any()
    assert np.array_equal(np.fromfile(tmp_path / "llm.bin", np.uint16)[512:], ids)
    index = (tmp_path / "megatron.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    assert struct.unpack("<QBQQ", index[9:34]) == (1, 8, len(ends), len(ends) + 1)
    n = len(ends)
    lengths = np.frombuffer(index, np.int32, n, 34)
    pointers = np.frombuffer(index, np.int64, n, 34 + 4 * n)
    assert np.frombuffer(index, np.int64, n + 1, 34 + 12 * n).tolist() == [*range(n + 1)]
    for document in (0, 1, n - 1):
        start, stop = store.span(document)
        assert (pointers[document], lengths[document]) == (2 * start, stop - start)
    assert np.array_equal(np.fromfile(tmp_path / "megatron.bin", np.uint16), ids)
    assert np.array_equal(np.fromfile(tmp_path / "datatrove.ds.index", np.uint64), store.ends)
    name, count, _ = (tmp_path / "datatrove.ds.metadata").read_text().split("\n")
    assert (name, count) == (f"ingot-{bpe.fingerprint}|2", str(len(ids)))


@pytest.mark.parametrize("format", FORMATS[1:])
def test_large_vocabularies_have_ids_of_32_bits(format: TokenFormat, tmp_path: Path) -> None:
    documents = [[5, 70_000, 9], [100_000, 9]]
    store = large_store(tmp_path / "store", 100_001, documents)
    write_store(store, tmp_path / "train", format, 9)
    tokens = read_tokens(tmp_path / f"train{SUFFIX[format]}", format, 9, "t")
    assert (tokens.ids.tolist(), tokens.ends.tolist()) == ([5, 70_000, 9, 100_000, 9], [3, 5])
    with pytest.raises(UserError, match="found a vocabulary of 100,001, expected at most 65,536"):
        write_store(store, tmp_path / "nano", "nanogpt", 9)


def test_borders_that_a_format_cannot_say_are_named(tmp_path: Path) -> None:
    store = large_store(tmp_path / "store", 100, [[5, 6], [7, 9], [8]])
    for format in ("nanogpt", "llm.c"):
        assert write_store(store, tmp_path / format, format, 9) == [
            f"{format}: the format records no documents, and not every one of them ends in the end of text"
        ]
    assert read_tokens(tmp_path / "nanogpt.bin", "nanogpt", 9, "t").ends.tolist() == [4, 5]
    assert read_tokens(tmp_path / "nanogpt.bin", "nanogpt", None, "t").ends.tolist() == [5]


def test_sequences_of_a_document_are_one_document(tmp_path: Path) -> None:
    """Megatron's preprocessing may split documents into sentences."""
    np.array([1, 2, 3, 4, 5, 6], np.int32).tofile(tmp_path / "x.bin")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 3, 3)
    parts = [np.array([2, 1, 3], "<i4"), np.array([0, 8, 12], "<i8"), np.array([0, 2, 3], "<i8")]
    (tmp_path / "x.idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    tokens = read_tokens(tmp_path / "x.bin", "megatron", None, "t")
    assert (tokens.ids.tolist(), tokens.ends.tolist()) == ([1, 2, 3, 4, 5, 6], [3, 6])


@pytest.mark.parametrize("format", FORMATS)
def test_an_id_outside_the_vocabulary_is_refused_with_its_place(
    format: TokenFormat, display: Display, log: EventLog, tmp_path: Path
) -> None:
    store = large_store(tmp_path / "store", 1000, [[1, 2], [3, 700, 4]])
    write_store(store, tmp_path / "train", format, 2)
    file = tmp_path / f"train{SUFFIX[format]}"
    if format == "datatrove":
        (tmp_path / "train.ds.metadata").unlink()
    tokenizer = Char("abcdefgh")
    place = "document 0" if format in ("nanogpt", "llm.c") else "document 1"  # no end of text: one document
    with pytest.raises(UserError, match=rf"token 3 \({place}, both from 0\) is id 700, expected ids below 8"):
        import_tokens({"train": [file], "val": []}, format, tokenizer, tmp_path / "out", display, log)
    assert not (tmp_path / "out" / "train").exists()


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:size])


def start(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes(data + (directory / name).read_bytes()[len(data) :])


@pytest.mark.parametrize(
    ("format", "damage", "found"),
    [
        ("nanogpt", cut("x.bin", -1), "bytes of ids, expected a multiple of 2; the file is cut off"),
        ("nanogpt", cut("x.bin", 0), "found no token"),
        (
            "nanogpt",
            start("x.bin", struct.pack("<2i", 20240520, 1)),
            'found the header of llm.c.* set format = "llm.c"',
        ),
        ("nanogpt", lambda d: (d / "x.idx").touch(), "found Megatron's .idx beside it"),
        ("nanogpt", lambda d: (d / "x.bin").unlink(), "no such file"),
        ("llm.c", cut("x.bin", -2), r"found 8 ids, expected 9 by its header; the file is cut off"),
        ("llm.c", cut("x.bin", 100), "expected the header of llm.c"),
        ("llm.c", start("x.bin", b"abcd"), "expected the header of llm.c"),
        ("megatron", cut("x.bin", -2), "found 8 ids, expected 9 by its index"),
        ("megatron", cut("x.idx", -3), "x.idx: found 79 bytes, expected 82"),
        ("megatron", cut("x.idx", 20), "not an index of Megatron"),
        ("megatron", start("x.idx", b"MMIDIDX\0\1"), "not an index of Megatron"),
        ("megatron", lambda d: (d / "x.idx").unlink(), "found no x.idx beside it"),
        ("datatrove", cut("x.ds", -2), "found 8 ids of 2 bytes, expected 9 by its index"),
        ("datatrove", cut("x.ds.index", -1), "bytes of ids, expected a multiple of 8"),
        ("datatrove", cut("x.ds.index", -8), "found 9 ids of 2 bytes, expected 5 by its index"),
        ("datatrove", start("x.ds.index", struct.pack("<Q", 99)), "found a document that ends before it starts"),
        ("datatrove", lambda d: (d / "x.ds.index").unlink(), "found no x.ds.index beside it"),
        ("datatrove", lambda d: (d / "x.ds.loss").touch(), "x.ds.loss: marks ids that are not trained on"),
        ("datatrove", start("x.ds.metadata", b"ingot-x|2\n"), "found tokenizer x, expected t; name the tokenizer"),
    ],
)
def test_damaged_files_are_refused(
    format: TokenFormat, damage: Callable[[Path], Any], found: str, tmp_path: Path
) -> None:
    write_store(large_store(tmp_path / "store", 100, [[1, 2, 3, 4, 9], [5, 6, 7, 9]]), tmp_path / "x", format, 9)
    file = tmp_path / f"x{SUFFIX[format]}"
    assert read_tokens(file, format, 9, "t").ends.tolist() == [5, 9]
    damage(tmp_path)
    with pytest.raises(UserError, match=found):
        read_tokens(file, format, 9, "t")


def test_an_export_is_read_with_the_tokenizer_that_is_exported_with_it(
    store: Store, bpe: ByteBPE, display: Display, log: EventLog, tmp_path: Path
) -> None:
    """Its file is that of another program, so its fingerprint differs; every id stands for the same bytes."""
    write_store(store, tmp_path / "train", "datatrove", bpe.eot, bpe.vocabulary_digest)
    export_tokenizer(bpe, tmp_path / "tokenizer")
    exported = import_tokenizer(tmp_path / "tokenizer")
    assert exported.fingerprint != bpe.fingerprint
    files = {"train": [tmp_path / "train.ds"], "val": []}
    for tokenizer in (exported, bpe):
        import_tokens(files, "datatrove", tokenizer, tmp_path / tokenizer.fingerprint, display, log)
        again = Store.open(tmp_path / tokenizer.fingerprint / "train", tokenizer=tokenizer.fingerprint)
        assert np.array_equal(again.ids.read(0, again.tokens), store.ids.read(0, store.tokens))
    swapped = ByteBPE([*bpe.tokens[:-2], bpe.tokens[-2] + b"~", bpe.tokens[-1]], bpe.pattern)
    with pytest.raises(UserError, match=f"found tokenizer {bpe.vocabulary_digest}, expected .*; name the tokenizer"):
        import_tokens(files, "datatrove", swapped, tmp_path / "out", display, log)


def test_arrays_and_wider_ids_are_not_read_as_ids_of_16_bits(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    ids = np.random.default_rng(0).integers(0, 100_000, 40)
    with file.open("wb") as out:
        np.save(out, ids.astype(np.uint16))
    with pytest.raises(UserError, match=r"x.bin: found the header of NumPy's .npy, expected ids alone"):
        read_tokens(file, "nanogpt", None, "t")
    for wide in (ids.astype("<u4"), (ids % 99).astype("<u4"), ids.astype("<i8")):
        wide.tofile(file)
        with pytest.raises(UserError, match=r"x.bin: found ids of 32 bits or more .*, expected ids of 16 bits; write"):
            read_tokens(file, "nanogpt", None, "t")
    for narrow in (ids % (1 << 16), ids % 4, ids % 2, ids * 0, np.arange(16) % 2):  # the last has too few to tell
        narrow.astype("<u2").tofile(file)
        assert np.array_equal(read_tokens(file, "nanogpt", None, "t").ids, narrow)


def test_conversations_are_not_written(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", tokenizer="t", vocab=9, content="chat"):
        pass
    with pytest.raises(
        UserError, match="found documents of format chat, expected text, because token files do not say"
    ):
        write_store(Store.open(tmp_path / "store"), tmp_path / "x", "megatron", 1)


def test_documents_that_begin_otherwise_are_named(
    store: Store, bpe: ByteBPE, log: EventLog, tmp_path: Path, capsys: Any
) -> None:
    write_store(store, tmp_path / "x", "megatron", bpe.eot)
    with_bos = ByteBPE(bpe.tokens, bpe.pattern)
    with_bos.special_tokens_map = {**with_bos.special_tokens_map, "bos_token": "<|system|>"}
    import_tokens({"train": [tmp_path / "x.bin"], "val": []}, "megatron", with_bos, tmp_path / "o", Display(), log)
    assert "its first document does not begin with '<|system|>'" in capsys.readouterr().err
