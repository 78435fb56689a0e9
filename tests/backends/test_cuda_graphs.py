"""When an update is recorded, with a recording that only counts; real ones need a GPU (`test_gpu.py`)."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ingot.backends import cuda_graphs
from ingot.backends.cuda_graphs import Recorder
from ingot.data.batches import IGNORE, Batch
from ingot.model.adapter_config import AdapterSettings
from ingot.model.backend import Backend
from tests.backends.training import engine, rows

PLAIN = 3
"""Updates of a shape that are not recorded: by then everything is compiled and planned."""


def _batch(rows: int = 2, ignored: int = 0) -> Batch:
    ids = np.zeros((rows, 4), np.int64)
    labels = ids.copy()
    labels[:1, :ignored] = IGNORE
    return Batch(ids, labels, ids, None, ids[:, 0], ids[:, 0])


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Learning rates of replayed updates, on a GPU with memory for another set of activations."""
    rates: list[float] = []

    class Counting:
        def __init__(self, learn: Callable[..., Any], batch: Batch, counts: Any, lr: float):
            learn(batch, counts, lr, 0)

        def __call__(self, batch: Batch, lr: float) -> tuple[str]:
            rates.append(lr)
            return ("replayed",)

    monkeypatch.setattr(cuda_graphs, "_Recording", Counting)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 20)
    return rates


def _ask(recorder: Recorder, batch: Batch, times: int = 1) -> list[bool]:
    return [recorder(batch, batch.counts(), 0.1 * number) is not None for number in range(times)]


def test_a_shape_that_comes_again_is_recorded_once_and_replayed(replayed: list[float]) -> None:
    learned: list[int] = []
    recorder = Recorder(lambda batch, *_: learned.append(len(batch)))  # type: ignore
    assert _ask(recorder, _batch(), PLAIN + 3) == [False] * PLAIN + [True] * 3
    assert replayed == pytest.approx([0.1 * number for number in range(PLAIN, PLAIN + 3)])
    assert learned == [2]
    assert _ask(recorder, _batch(rows=3), PLAIN + 2) == [False] * (PLAIN + 2), "one recording, for one shape"
    assert _ask(recorder, _batch()) == [True]


def test_what_differs_from_batch_to_batch_is_never_recorded(replayed: list[float]) -> None:
    recorder = Recorder(lambda *_: None)  # type: ignore
    assert not any(_ask(recorder, _batch(ignored=1), 10))
    assert not any(_ask(recorder, replace(_batch(), replay=_batch()), 10))
    texts = {"texts_B": np.array(["a", "b"], object)}
    assert not any(_ask(recorder, replace(_batch(), columns=texts), 10))


def test_nothing_is_recorded_where_memory_is_short(replayed: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 30)
    assert not any(_ask(Recorder(lambda *_: None), _batch(), 10))  # type: ignore


def test_a_recording_that_fails_is_reported_once_and_never_tried_again(replayed: list[float]) -> None:
    tried: list[int] = []

    def learn(*_: object) -> None:
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder = Recorder(learn)  # type: ignore
    with pytest.warns(UserWarning, match="recording.* failed: operation not perm"):
        assert not any(_ask(recorder, _batch(), 10))
    assert tried == [1]


class _Recording(Backend):
    """Counts the updates that a recorder is asked for; it replays none."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def recorder(self, update: Any) -> Any:
        return lambda batch, counts, lr: self.asked.append(len(batch))


@pytest.mark.parametrize(("micro", "asked"), [(4, [4]), (2, [])])
def test_an_update_of_several_micro_batches_is_not_recorded(micro: int, asked: list[int]) -> None:
    backend = _Recording()
    engine(backend, micro=micro, cuda_graphs=True).step(rows(0))
    assert backend.asked == asked


@pytest.mark.parametrize(
    "settings", [{"cuda_graphs": False}, {"dropout": 0.1}, {"adapter": AdapterSettings(rank=2)}], ids=str
)
def test_updates_that_draw_numbers_are_not_recorded(settings: dict[str, Any]) -> None:
    """Dropout draws anew each time, and adapters may have it too."""
    backend = _Recording()
    engine(backend, **{"cuda_graphs": True, **settings}).step(rows(0))
    assert backend.asked == []


def test_the_reference_records_nothing() -> None:
    assert Backend().recorder(lambda *_: None) is None
    assert engine(cuda_graphs=True)._recorder is None
