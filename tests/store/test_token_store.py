"""SPEC row A8: ids in flat files, memory-mapped, checked as they are read."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ingot.core.errors import UserError
from ingot.store.block_file import BLOCK, BlockFile
from ingot.store.reader import ColumnSpec, Store, id_dtype
from ingot.store.writer import StoreWriter
from tests.tokenizer.text_helpers import documents

TOP3 = ColumnSpec("token", "<f4", 3)  # 12 bytes a row: rows lie across blocks
MASK = ColumnSpec("token", "u1")
SCORE = ColumnSpec("document", "<f8")


def write_store(path: Path, count: int = 40, length: int = 20_000, vocab: int = 5000, batch: int = 7) -> dict:
    """`count` documents of about `length` ids; returns what was written."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(length // 2, length, count)
    n = int(lengths.sum())
    ids = rng.integers(0, vocab, n).astype(np.uint32)
    columns = {"mask": (ids % 2).astype(np.uint8), "top": rng.random((n, 3), np.float32), "score": rng.random(count)}
    table = documents([f"text {i}" for i in range(count)])
    specs = {"mask": MASK, "top": TOP3, "score": SCORE}
    ends = np.concatenate([[0], np.cumsum(lengths)])
    with StoreWriter(path, tokenizer="fp", vocab=vocab, columns=specs) as writer:
        for start in range(0, count, batch):
            stop = min(count, start + batch)
            a, b = ends[start], ends[stop]
            rows = table.slice(start, stop - start).combine_chunks().to_batches()[0]
            values = {"mask": columns["mask"][a:b], "top": columns["top"][a:b], "score": columns["score"][start:stop]}
            writer.append(ids[a:b], lengths[start:stop], 3 * lengths[start:stop], rows, **values)
    return {"ids": ids, "ends": ends[1:], "bytes": 3 * lengths, **columns}


@pytest.fixture
def written(tmp_path):
    return tmp_path / "store", write_store(tmp_path / "store")


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def test_A8_store_round_trip(written):
    path, data = written
    store = Store.open(path, tokenizer="fp")
    assert (store.tokens, store.documents, store.bytes) == (len(data["ids"]), 40, data["bytes"].sum())
    assert np.array_equal(store.ends, data["ends"])
    assert np.array_equal(store.ids.read(0, store.tokens), data["ids"])
    rng = np.random.default_rng(1)
    index = rng.integers(0, store.tokens, (8, 129))
    assert np.array_equal(store.ids.gather(index), data["ids"][index])
    assert np.array_equal(store.columns["mask"].gather(index), data["mask"][index])
    assert np.array_equal(store.columns["top"].gather(index), data["top"][index])
    assert store.columns["top"].gather(index).shape == (8, 129, 3)
    assert np.array_equal(store.columns["score"].read(3, 9), data["score"][3:9])
    assert np.array_equal(store.columns["bytes"].gather(np.arange(40)), data["bytes"])
    assert store.ids.gather(np.empty((0, 4), np.int64)).shape == (0, 4)
    store.verify()


def test_A8_documents_are_found_from_tokens(written):
    store = Store.open(written[0])
    for document in (0, 1, 20, 39):
        start, stop = store.span(document)
        assert store.document_of(start) == store.document_of(stop - 1) == document
    assert store.document_of(np.array([0, store.tokens - 1])).tolist() == [0, 39]
    assert store.identity(4) == {
        "source": "notes",
        "path": "notes/1.jsonl",
        "offset": 400,
        "bytes": 6,
        "group": "1.jsonl",
        "cluster": 2**63 + 4,
    }
    with pytest.raises(UserError, match="no document 40; it has 40"):
        store.identity(40)


def test_A8_identities_of_several_row_groups(tmp_path):
    count = 40_000
    batch = documents(["x"] * count).combine_chunks().to_batches()[0]
    ones = np.ones(count, np.int64)
    for name, step in (("a", count), ("b", 999)):
        with StoreWriter(tmp_path / name, tokenizer="fp", vocab=300) as writer:
            for start in range(0, count, step):
                rows = batch.slice(start, step)
                writer.append(ones[: len(rows)], ones[: len(rows)], ones[: len(rows)], rows)
    store = Store.open(tmp_path / "a")
    assert [store.identity(n)["offset"] for n in (0, 16_383, 16_384, 39_999)] == [0, 1_638_300, 1_638_400, 3_999_900]
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize(("vocab", "dtype"), [(65_536, "<u2"), (65_537, "<u4"), (128_000, "<u4")])
def test_A8_width_of_ids_at_65536(tmp_path, vocab, dtype):
    ids = np.array([0, 1, vocab - 1], np.uint32)
    with StoreWriter(tmp_path, tokenizer="fp", vocab=vocab) as writer:
        writer.append(ids, np.array([3]), np.array([3]), documents(["x"]).to_batches()[0])
    store = Store.open(tmp_path)
    assert store.ids.dtype == np.dtype(dtype) == np.dtype(id_dtype(vocab))
    assert store.ids.read(0, 3).tolist() == [0, 1, vocab - 1]
    assert (tmp_path / "ids.bin").stat().st_size == 3 * int(dtype[-1])


def test_A8_source_error_uint16_does_not_hold_a_vocabulary_of_128000():
    """003 writes uint16 whatever the vocabulary: the last of 128,000 ids comes back as another token."""
    last = np.array([127_999])
    assert last.astype(np.uint16).tolist() == [62_463]
    assert last.astype(id_dtype(128_000)).tolist() == [127_999]


def test_A8_memory_does_not_grow_with_the_corpus(tmp_path):
    def peak(batches: int) -> int:
        rows = documents(["x"] * 4).combine_chunks().to_batches()[0]
        ids, lengths = np.zeros(400_000, np.uint32), np.full(4, 100_000)
        tracemalloc.start()
        with StoreWriter(tmp_path / str(batches), tokenizer="fp", vocab=300) as writer:
            for _ in range(batches):
                writer.append(ids, lengths, lengths, rows)
        store = Store.open(tmp_path / str(batches))
        store.verify()
        store.ids.gather(np.arange(0, store.tokens, 1000))
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    peak(1)
    assert peak(40) < 1.2 * peak(4)  # 32 MB of ids against 3.2 MB


def test_flipped_byte_names_file_and_block_on_first_read(written):
    path, data = written
    with (path / "top.bin").open("r+b") as file:
        file.seek(3 * BLOCK + 17)
        byte = file.read(1)
        file.seek(3 * BLOCK + 17)
        file.write(bytes([byte[0] ^ 1]))
    store = Store.open(path)  # sizes are right, so opening is fine
    top = store.columns["top"]
    assert np.array_equal(top.read(0, 1000), data["top"][:1000])
    damaged = (3 * BLOCK + 17) // 12
    for read in (lambda: top.gather(np.array([[5, damaged]])), lambda: top.read(damaged, damaged + 1), store.verify):
        with pytest.raises(UserError, match=r"top\.bin: block 3 .* is damaged"):
            read()
    across = 3 * BLOCK // 12  # starts in block 2, ends in block 3
    with pytest.raises(UserError, match="block 3"):
        top.gather(np.array([across]))


def test_blocks_are_verified_once(written):
    path, _ = written
    store = Store.open(path)
    index = np.arange(0, store.tokens, 100)
    store.ids.gather(index)
    assert store.ids.file.verified
    assert not store.columns["mask"].file.verified
    store.ids.file._recorded = b""  # would fail if a block were hashed again
    store.ids.gather(index)
    store.ids.read(0, store.tokens)


@pytest.mark.parametrize("name", ["ids.bin", "ends.bin", "mask.bin", "documents.parquet"])
def test_truncated_file_names_bytes_found_and_expected(written, name):
    path, _ = written
    size = (path / name).stat().st_size
    with (path / name).open("r+b") as file:
        file.truncate(size - 3)
    with pytest.raises(UserError, match=f"{name}: found {size - 3:,} bytes, expected {size:,}"):
        Store.open(path)
    (path / name).unlink()
    with pytest.raises(UserError, match=f"{name}: missing"):
        Store.open(path)


def test_damaged_identities_are_refused(written):
    path, _ = written
    data = bytearray((path / "documents.parquet").read_bytes())
    data[len(data) // 2] ^= 4
    (path / "documents.parquet").write_bytes(data)
    with pytest.raises(UserError, match=r"documents\.parquet: block 0"):
        Store.open(path).identity(0)


def test_other_tokenizer_is_refused_with_both_fingerprints(written):
    with pytest.raises(UserError, match="tokenizer fp, expected other"):
        Store.open(written[0], tokenizer="other")


def test_no_store_and_other_formats(tmp_path, written):
    with pytest.raises(UserError, match="missing, expected a finished"):
        Store.open(tmp_path / "nothing")
    manifest = written[0] / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 9'))
    with pytest.raises(UserError, match="found ingot-store 9, expected ingot-store 2"):
        Store.open(written[0])
    manifest.write_text("{")
    with pytest.raises(UserError, match="not a manifest"):
        Store.open(written[0])


def test_failed_writing_leaves_nothing(tmp_path):
    def fail():
        with StoreWriter(tmp_path / "store", tokenizer="fp", vocab=300) as writer:
            writer.append(np.ones(2), np.array([2]), np.array([2]), documents(["x"]).to_batches()[0])
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert list((tmp_path / "store").iterdir()) == []


def test_rewriting_starts_by_withdrawing_the_manifest(written):
    path, _ = written
    writer = StoreWriter(path, tokenizer="fp", vocab=300)
    with pytest.raises(UserError, match="missing, expected a finished"):
        Store.open(path)
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def test_batching_leaves_no_trace(tmp_path):
    for batch in (1, 7, 40):
        write_store(tmp_path / str(batch), batch=batch)
    assert files(tmp_path / "1") == files(tmp_path / "7") == files(tmp_path / "40")


def test_ids_beyond_the_vocabulary_are_our_error(tmp_path):
    with pytest.raises(AssertionError), StoreWriter(tmp_path, tokenizer="fp", vocab=300) as writer:
        writer.append(np.array([300]), np.array([1]), np.array([1]), documents(["x"]).to_batches()[0])


def test_groups_must_be_whole(tmp_path):
    rows = documents(["a", "b", "c"]).combine_chunks().to_batches()[0]
    ones = np.ones(3, np.int64)
    with pytest.raises(AssertionError), StoreWriter(tmp_path / "x", tokenizer="fp", vocab=300, group=2) as writer:
        writer.append(ones, ones, ones, rows)
    with StoreWriter(tmp_path / "y", tokenizer="fp", vocab=300, group=2) as writer:
        writer.append(ones[:2], ones[:2], ones[:2], rows.slice(0, 2))
    assert Store.open(tmp_path / "y").group == 2


def test_empty_store(tmp_path):
    with StoreWriter(tmp_path, tokenizer="fp", vocab=300):
        pass
    store = Store.open(tmp_path)
    assert (store.tokens, store.documents, len(store.ends), len(store.ids)) == (0, 0, 0, 0)
    assert store.ids.read(0, 0).size == 0
    store.verify()


def test_positions_out_of_range_are_our_error(written):
    store = Store.open(written[0])
    with pytest.raises(AssertionError):
        store.ids.gather(np.array([-1]))
    with pytest.raises(IndexError):
        store.ids.gather(np.array([store.tokens + BLOCK]))


def test_manifest_with_too_few_checksums(written):
    file = written[0] / "ids.bin"
    with pytest.raises(UserError, match="the manifest has 0 checksums, expected 2"):
        BlockFile(file, {"bytes": file.stat().st_size, "blocks": ""})
