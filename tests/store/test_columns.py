"""Overlays of a store: columns filled in any order, resumed after a kill, published with checksums."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ingot.core.errors import UserError
from ingot.store.block_file import BLOCK
from ingot.store.columns import ColumnFiller
from ingot.store.reader import ColumnSpec, Store
from ingot.store.writer import StoreWriter
from tests.store.test_token_store import files, write_store
from tests.tokenizer.text_helpers import documents

LOGP = ColumnSpec("token", "<f4")
BEST3 = ColumnSpec("token", "<u2", 3)
SCORE = ColumnSpec("document", "<f8")
PAIR = ColumnSpec("document", "<f4", 2)
COLUMNS = {"logp": LOGP, "best": BEST3, "value": SCORE, "pair": PAIR}


@pytest.fixture
def base(tmp_path: Path) -> Store:
    """40 documents, about 6,000 tokens."""
    write_store(tmp_path / "store", length=200)
    return Store.open(tmp_path / "store")


def _values(store: Store) -> dict[str, np.ndarray]:
    """A value for every row of every column."""
    draw = np.random.default_rng(2)
    tokens, count = store.tokens, store.documents
    return {
        "logp": draw.normal(size=tokens).astype("<f4"),
        "best": draw.integers(0, 2**16, (tokens, 3)).astype("<u2"),
        "value": draw.normal(size=count),
        "pair": draw.normal(size=(count, 2)).astype("<f4"),
    }


def _fill(filler: ColumnFiller, store: Store, numbers: np.ndarray) -> None:
    """Write the rows of these documents."""
    values = _values(store)
    for document in numbers.tolist():
        token = np.arange(*store.span(document))
        for name in ("logp", "best"):
            filler.put(name, token, values[name][token])
        for name in ("value", "pair"):
            filler.put(name, np.array([document]), values[name][[document]])


def _complete(path: Path, store: Store) -> dict[str, bytes]:
    """The files of an overlay that was filled in order and in one go."""
    filler = ColumnFiller(path, store, COLUMNS)
    _fill(filler, store, np.arange(store.documents))
    filler.publish()
    return files(path)


def test_an_overlay_adds_columns_verifies_and_leaves_the_store_alone(base: Store, tmp_path: Path) -> None:
    before, values = files(base.path), _values(base)
    _complete(tmp_path / "overlay", base)
    assert files(base.path) == before
    store = Store.open(base.path, overlays=[tmp_path / "overlay"])
    store.verify()
    index = np.array([[0, 5], [store.tokens - 1, 7]])
    assert np.array_equal(store.columns["logp"].gather(index), values["logp"][index])
    assert np.array_equal(store.columns["best"].gather(index), values["best"][index])
    assert store.columns["best"].gather(index).shape == (2, 2, 3)
    assert np.array_equal(store.columns["value"].read(0, 40), values["value"])
    assert np.array_equal(store.columns["pair"].read(0, 40), values["pair"])
    assert store.columns["best"].dtype == np.dtype("<u2")
    assert store.fingerprint == base.fingerprint
    assert {path.name for path in (tmp_path / "overlay").iterdir()} == {"manifest.json", *(f"{n}.bin" for n in COLUMNS)}


def test_rows_may_be_written_in_any_order_and_twice(base: Store, tmp_path: Path) -> None:
    right = _complete(tmp_path / "ordered", base)
    filler = ColumnFiller(tmp_path / "shuffled", base, COLUMNS)
    filler.put("logp", np.arange(base.tokens), np.full(base.tokens, 9.0))
    _fill(filler, base, np.random.default_rng(0).permutation(base.documents))
    filler.publish()
    assert files(tmp_path / "shuffled") == right


def test_an_index_of_any_shape_writes_rows_of_the_columns_width(base: Store, tmp_path: Path) -> None:
    filler = ColumnFiller(tmp_path / "overlay", base, COLUMNS)
    index, values = np.array([[3, 900], [17, 4]]), np.arange(12).reshape(2, 2, 3)
    filler.put("best", index, values)
    filler.publish()
    column = Store.open(base.path, overlays=[tmp_path / "overlay"]).columns["best"]
    assert np.array_equal(column.gather(index), values)
    assert not column.gather(np.setdiff1d(np.arange(base.tokens), index)).any()


def test_rows_that_are_never_written(base: Store, tmp_path: Path) -> None:
    """NaN for floats of documents (a pair that was left out has no value), 0 for all others."""
    count = ColumnSpec("document", "<i4")
    ColumnFiller(tmp_path / "overlay", base, {**COLUMNS, "count": count}).publish()
    columns = Store.open(base.path, overlays=[tmp_path / "overlay"]).columns
    for name in ("value", "pair"):
        assert np.isnan(columns[name].read(0, 40)).all()
    for name, rows in (("logp", base.tokens), ("best", base.tokens), ("count", 40)):
        assert not columns[name].read(0, rows).any()


def test_there_is_no_overlay_before_it_is_published(base: Store, tmp_path: Path) -> None:
    filler = ColumnFiller(tmp_path / "overlay", base, COLUMNS)
    _fill(filler, base, np.arange(40))
    filler.checkpoint(40)
    with pytest.raises(UserError, match="missing, expected a finished"):
        Store.open(base.path, overlays=[tmp_path / "overlay"])
    filler.publish()
    again = ColumnFiller(tmp_path / "overlay", base, COLUMNS)
    assert again.done == 0, "what was published is not in progress"
    with pytest.raises(UserError, match="missing, expected a finished"):
        Store.open(base.path, overlays=[tmp_path / "overlay"])


def test_a_killed_process_is_continued_from_its_last_checkpoint(base: Store, tmp_path: Path) -> None:
    """Killed by the system in the middle of writing, after rows beyond the checkpoint: the same files to the byte."""
    code = (
        "import os, pathlib, signal, sys, numpy as np\n"
        "from tests.store.test_columns import COLUMNS, ColumnFiller, Store, _fill\n"
        "store = Store.open(pathlib.Path(sys.argv[1]))\n"
        "filler = ColumnFiller(pathlib.Path(sys.argv[2]), store, COLUMNS)\n"
        "_fill(filler, store, np.arange(25)); filler.checkpoint(25)\n"
        "_fill(filler, store, np.arange(25, 31))\n"
        "filler.put('logp', np.arange(store.tokens)[-50:], np.full(50, 7.0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "overlay"
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", code, base.path, path], cwd=root, check=False)
    assert killed.returncode == -9
    filler = ColumnFiller(path, base, COLUMNS)
    assert filler.done == 25
    _fill(filler, base, np.arange(filler.done, 40))
    filler.publish()
    assert files(path) == _complete(tmp_path / "straight", base)


def test_a_process_killed_while_it_published_is_continued(
    base: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some files are in place and no manifest: progress is still there, and publishing again completes it."""
    path = tmp_path / "overlay"
    filler = ColumnFiller(path, base, COLUMNS)
    _fill(filler, base, np.arange(40))
    filler.checkpoint(40)
    with monkeypatch.context() as patch:
        patch.setattr("ingot.store.columns.atomic_json", _raise)
        with pytest.raises(InterruptedError):
            filler.publish()
    assert (path / "logp.bin").exists()
    with pytest.raises(UserError, match="missing, expected a finished"):
        Store.open(base.path, overlays=[path])
    again = ColumnFiller(path, base, COLUMNS)
    assert again.done == 40
    again.publish()
    assert files(path) == _complete(tmp_path / "straight", base)


def _raise(*_: object) -> None:
    raise InterruptedError


def test_progress_of_another_store_or_of_other_columns_is_not_continued(base: Store, tmp_path: Path) -> None:
    path = tmp_path / "overlay"
    filler = ColumnFiller(path, base, COLUMNS)
    _fill(filler, base, np.arange(40))
    filler.checkpoint(40)
    write_store(tmp_path / "other", length=200, vocab=4000)
    other = Store.open(tmp_path / "other")
    assert (other.tokens, other.documents) == (base.tokens, base.documents), "alike in size, unlike in content"
    assert ColumnFiller(path, base, COLUMNS).done == 40
    changed = {**COLUMNS, "best": ColumnSpec("token", "<u4", 3)}
    assert ColumnFiller(path, base, changed).done == 0
    filler = ColumnFiller(path, base, COLUMNS)
    _fill(filler, base, np.arange(40))
    filler.checkpoint(40)
    stale = ColumnFiller(path, other, COLUMNS)
    assert stale.done == 0
    stale.publish()
    values = Store.open(other.path, overlays=[path]).columns["value"].read(0, 40)
    assert np.isnan(values).all(), "no value of the other store is left"


def test_progress_whose_files_are_gone_is_not_continued(base: Store, tmp_path: Path) -> None:
    filler = ColumnFiller(tmp_path / "overlay", base, COLUMNS)
    filler.checkpoint(10)
    os.unlink(tmp_path / "overlay" / "best.part")
    assert ColumnFiller(tmp_path / "overlay", base, COLUMNS).done == 0
    (tmp_path / "overlay" / "progress.json").write_text("{")
    assert ColumnFiller(tmp_path / "overlay", base, COLUMNS).done == 0


def test_an_overlay_of_another_store_is_refused_and_so_is_a_second_column_of_a_name(
    base: Store, tmp_path: Path
) -> None:
    ColumnFiller(tmp_path / "overlay", base, {"value": SCORE}).publish()
    write_store(tmp_path / "other", length=200, vocab=4000)
    other = Store.open(tmp_path / "other").fingerprint
    with pytest.raises(UserError, match=f"columns of store {base.fingerprint}, expected store {other}"):
        Store.open(tmp_path / "other", overlays=[tmp_path / "overlay"])
    with pytest.raises(UserError, match="column 'value' already exists"):
        Store.open(base.path, overlays=[tmp_path / "overlay"] * 2)


def test_columns_that_the_store_has_and_rows_that_it_has_not_are_our_error(base: Store, tmp_path: Path) -> None:
    for name in ("ids", "ends", "bytes", "mask"):
        with pytest.raises(AssertionError, match="already"):
            ColumnFiller(tmp_path / "overlay", base, {name: LOGP})
    with pytest.raises(AssertionError, match="a column's name"):
        ColumnFiller(tmp_path / "overlay", base, {"../x": LOGP})
    filler = ColumnFiller(tmp_path / "overlay", base, COLUMNS)
    with pytest.raises(IndexError):
        filler.put("value", np.array([40]), np.zeros(1))
    with pytest.raises(ValueError, match="shape"):
        filler.put("best", np.arange(5), np.zeros((5, 2)))


def test_columns_of_an_empty_store(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", tokenizer="fp", vocab=300):
        pass
    base = Store.open(tmp_path / "store")
    filler = ColumnFiller(tmp_path / "overlay", base, COLUMNS)
    filler.checkpoint(0)
    filler.publish()
    assert len(Store.open(base.path, overlays=[tmp_path / "overlay"]).columns["best"]) == 0


def test_memory_does_not_grow_with_the_column(tmp_path: Path) -> None:
    """A column of 2 and one of 40 times the size of a chunk: values go through memory maps, files through chunks."""

    def peak(tokens: int) -> int:
        with StoreWriter(tmp_path / f"store{tokens}", tokenizer="fp", vocab=300) as writer:
            rows = documents(["x"]).combine_chunks().to_batches()[0]
            writer.append(np.zeros(tokens, np.uint32), np.array([tokens]), np.array([tokens]), rows)
        base, width = Store.open(tmp_path / f"store{tokens}"), 32
        tracemalloc.start()
        filler = ColumnFiller(tmp_path / f"overlay{tokens}", base, {"wide": ColumnSpec("token", "<f4", width)})
        for start in range(0, tokens, 1000):
            index = np.arange(start, min(start + 1000, tokens))
            filler.put("wide", index, np.ones((len(index), width), "<f4"))
        filler.checkpoint(tokens)
        filler.publish()
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    peak(1000)
    assert peak(1_300_000) < 1.2 * peak(65_000)  # 166 MB against 8 MB


def test_a_damaged_overlay_is_found_when_it_is_read(base: Store, tmp_path: Path) -> None:
    write_store(tmp_path / "large")
    large = Store.open(tmp_path / "large")
    filler = ColumnFiller(tmp_path / "overlay", large, {"logp": LOGP})
    filler.put("logp", np.arange(large.tokens), np.ones(large.tokens))
    filler.publish()
    path = tmp_path / "overlay" / "logp.bin"
    data = bytearray(path.read_bytes())
    data[BLOCK + 5] ^= 1
    path.write_bytes(data)
    column = Store.open(large.path, overlays=[tmp_path / "overlay"]).columns["logp"]
    assert column.read(0, 1000).all()
    with pytest.raises(UserError, match=r"logp\.bin: block 1 .* is damaged"):
        column.gather(np.array([BLOCK // 4 + 1]))
