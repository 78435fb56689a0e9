"""A small BPE, a quiet display, a log, and corpora written by hand."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingot.core.events import Display, EventLog
from ingot.tokenizer.byte_bpe import ByteBPE
from ingot.tokenizer.train import train
from tests.tokenizer.text_helpers import SOURCES, documents, labelled, settings


@pytest.fixture
def log(tmp_path: Path):
    log = EventLog(tmp_path / "log" / "metrics.jsonl")
    yield log
    log.close()


@pytest.fixture
def display() -> Display:
    return Display(quiet=True)


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> ByteBPE:
    log = EventLog(tmp_path_factory.mktemp("bpe") / "metrics.jsonl")
    tokenizer, _ = train(settings(vocab=600), labelled(*SOURCES), Display(quiet=True), log)
    log.close()
    assert isinstance(tokenizer, ByteBPE)
    return tokenizer


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., Path]:
    def write(train: list[str], val: list[str] | None = None, extras: list[str | None] | None = None) -> Path:
        directory = tmp_path / "corpus"
        directory.mkdir()
        table = pa.concat_tables([documents(train, extras=extras), documents(val or [], "val", len(train))])
        pq.write_table(table, directory / "documents-00000.parquet", row_group_size=7)
        return directory

    return write
