"""Shared by all tests: no network, fixed threads, and small stores made by hand."""

import os
import signal
import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import numpy as np
import pytest

os.environ.pop("COLUMNS", None)  # which pytest-xdist sets: the width of a pipe is the product's to choose
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny matrices: more threads only wait for each other

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("ingot", deadline=None)  # a machine may be busy with something else
hypothesis.settings.load_profile("ingot")

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for the network fails at once."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"network call to {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(autouse=True)
def _denormal_numbers() -> None:
    """They exist, whatever a stage that an earlier test ran has told this process (`Execution.prepare`)."""
    if torch := sys.modules.get("torch"):
        torch.set_flush_denormal(False)


@pytest.fixture
def shakespeare() -> Path:
    """The public benchmark text, where it is at hand."""
    path = DATA / "tinyshakespeare" / "input.txt"
    if not path.exists():
        pytest.skip("tinyshakespeare is not on this machine")
    return path


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., object]:
    """documents (lists of ids), optional masks -> an opened store."""
    import pyarrow as pa

    from ingot.store.reader import Store
    from ingot.store.writer import IDENTITY, ColumnSpec, StoreWriter

    count = iter(range(1000))

    def make(documents: list[list[int]], masks: list[list[int]] | None = None, vocab: int = 64) -> Store:
        path = tmp_path / f"store{next(count)}"
        columns, content = ({}, "text") if masks is None else ({"mask": ColumnSpec("token", "u1")}, "chat")
        n = len(documents)
        values = {
            "source": ["made"] * n,
            "path": [f"doc{i}" for i in range(n)],
            "offset": [0] * n,
            "group": ["g"] * n,
            "cluster": list(range(n)),
            "bytes": [len(d) for d in documents],
        }
        identity = pa.RecordBatch.from_pydict({name: values[name] for name in IDENTITY.names}, schema=IDENTITY)
        with StoreWriter(path, tokenizer="made", vocab=vocab, columns=columns, content=content) as writer:
            extra = {"mask": np.concatenate([np.array(m, np.uint8) for m in masks])} if masks is not None else {}
            ids = np.concatenate([np.array(d, np.uint32) for d in documents])
            lengths = np.array([len(d) for d in documents], np.int64)
            writer.append(ids, lengths, np.array(values["bytes"], np.int64), identity, **extra)
        return Store.open(path)

    return make


@pytest.fixture
def without_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as on a machine whose CPU no kernels are written for."""
    if find_spec("ingot.backends"):
        monkeypatch.setattr("ingot.backends.estimate._has_instructions", lambda precision: False)


@pytest.fixture
def bench() -> Callable[..., object]:
    """Run the benchmarks in a process of their own: bench("train", "--shape", "tiny") -> CompletedProcess."""
    import subprocess

    def call(*arguments: object) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])

    return call


@pytest.fixture
def ingot() -> Callable[..., object]:
    """Run the command line in a process of its own: ingot("run", recipe, cwd=...) -> CompletedProcess."""
    import subprocess

    def call(*arguments: object, **options: object) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", "from ingot.cli.app import main; main()", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]

    return call
