"""When an update is recorded and when it is made plainly, with a recording that only counts; a real one needs a GPU
(`test_gpu.py`)."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ingot.backends import cuda_graphs
from ingot.backends.cuda_graphs import WARM, Recorder
from ingot.data.batches import IGNORE, Batch
from tests.train.test_engine import _engine, _ragged


def _batch(rows: int = 2, ignored: int = 0) -> Batch:
    ids = np.zeros((rows, 4), np.int64)
    labels = ids.copy()
    labels[:1, :ignored] = IGNORE
    return Batch(ids, labels, ids, None, ids[:, 0], ids[:, 0])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Learning rates of replayed updates, on a GPU with room for another set of activations."""
    rates: list[float] = []

    class Counting:
        def __init__(self, learn, batch, counts, lr):
            learn(batch, counts, lr, 0)

        def __call__(self, batch, lr):
            rates.append(lr)
            return ("replayed",)

    monkeypatch.setattr(cuda_graphs, "_Recording", Counting)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 20)
    return rates


def _ask(recorder: Recorder, batch: Batch, times: int = 1) -> list[bool]:
    return [recorder(batch, batch.counts(), 0.1) is not None for _ in range(times)]


def test_a_shape_that_comes_again_is_recorded_once_and_replayed(made: list[float]) -> None:
    learned: list[int] = []
    recorder = Recorder(lambda batch, *_: learned.append(len(batch)))  # type: ignore
    assert _ask(recorder, _batch(), WARM + 3) == [False] * WARM + [True] * 3
    assert len(made) == 3
    assert learned == [2]
    assert _ask(recorder, _batch(rows=3), WARM + 2) == [False] * (WARM + 2), "one recording, for one shape"
    assert _ask(recorder, _batch()) == [True]


def test_what_differs_from_batch_to_batch_is_never_recorded(made: list[float]) -> None:
    recorder = Recorder(lambda *_: None)  # type: ignore
    assert not any(_ask(recorder, _batch(ignored=1), 10))
    assert not any(_ask(recorder, replace(_batch(), replay=_batch()), 10))
    texts = {"texts_B": np.array(["a", "b"], object)}
    assert not any(_ask(recorder, replace(_batch(), columns=texts), 10))


def test_nothing_is_recorded_where_memory_is_short(made: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 30)
    assert not any(_ask(Recorder(lambda *_: None), _batch(), 10))  # type: ignore


def test_a_recording_that_fails_is_told_once_and_never_tried_again(made: list[float]) -> None:
    tried: list[int] = []

    def learn(*_: object) -> None:
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder = Recorder(learn)  # type: ignore
    with pytest.warns(UserWarning, match="updates are not replayed, since recording one failed: operation not perm"):
        assert not any(_ask(recorder, _batch(), 10))
    assert tried == [1]


@pytest.mark.parametrize(("micro", "asked"), [(16, 1), (8, 0)])
def test_an_update_of_several_micro_batches_is_made_plainly(tmp_path: Path, micro: int, asked: int) -> None:
    engine, times = _engine(tmp_path, micro=micro), list[float]()
    assert engine._recorder is None, "a CPU replays nothing"
    engine._recorder = lambda batch, counts, lr: times.append(lr)  # type: ignore
    engine.step(_ragged())
    assert len(times) == asked
