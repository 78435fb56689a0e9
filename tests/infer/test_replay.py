"""Recorded steps of decoding: the logits of the full forward pass, with later slots hidden.

A recording is played here by its own operations; those of a GPU are tested in `backends/test_cuda_decode.py`.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from ingot.infer import decoder as decoders
from ingot.infer.decoder import Decoder, DecodeState
from ingot.infer.ops import TorchOps
from tests.infer.decoding import FP32, Case, WithOps, broken, make

made: list[int] = []
"""Rows of each recording."""
played: list[int] = []
"""Rows of each replayed step."""


class _Played:
    """A step as a graph runs it: inputs are copied to where the recording reads them."""

    def __init__(self, step: Callable[..., Tensor], inputs: Sequence[Tensor]):
        made.append(len(inputs[0]))
        self.step, self.inputs = step, [x.clone() for x in inputs]

    def __call__(self, *inputs: Tensor) -> Tensor:
        played.append(len(inputs[0]))
        for recorded, new in zip(self.inputs, inputs, strict=True):
            recorded.copy_(new)
        return self.step(*self.inputs)


class _RecordingOps(TorchOps):
    records = True

    def record(self, step: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[..., Tensor]:
        return _Played(step, inputs)


class _FailingOps(_RecordingOps):
    def record(self, step: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[..., Tensor]:
        made.append(len(inputs[0]))
        raise RuntimeError("no")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of few slots are recorded, and every one that comes again."""
    monkeypatch.setattr(decoders, "_MIN_SLOTS", 4)
    monkeypatch.setattr(decoders, "_RECORD_STEPS", 1)
    made.clear()
    played.clear()


@pytest.mark.parametrize("dropped_at", [None, 9])
@pytest.mark.parametrize(
    "settings", [{}, {"family": "gpt2"}, {"family": "mistral", "window": 7, "kv_heads": 2}], ids=str
)
def test_recorded_steps_give_the_logits_of_the_full_forward(settings: dict, dropped_at: int | None) -> None:
    model = make(**settings)
    model.backend = WithOps(_RecordingOps)
    case = Case((12, 3, 1, 9), 18, dropped_at=dropped_at)
    assert broken(Decoder(model), model, case, FP32) == []
    assert made == ([4, 4] if dropped_at is None else [4, 4, 2])  # for 16 and 30 slots, and for fewer rows
    assert len(played) == 18 - len(made), "the first step of each kind is not replayed"


def test_a_control_a_slot_that_is_not_hidden_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    model.backend = WithOps(_RecordingOps)
    bias = DecodeState._bias
    monkeypatch.setattr(DecodeState, "_bias", lambda self, slot, read: torch.zeros_like(bias(self, slot, read)))
    assert broken(Decoder(model), model, Case((12, 12), 18), FP32) != []


def test_steps_that_cannot_be_recorded_are_run_and_reported_once() -> None:
    model = make()
    model.backend = WithOps(_FailingOps)
    with pytest.warns(UserWarning, match="decoding without CUDA graphs, because recording a step failed: no") as warned:
        assert broken(Decoder(model), model, Case((12, 12), 18), FP32) == []
    assert len(warned) == 1
    assert made == [2]


def test_a_step_is_recorded_only_where_enough_of_its_kind_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_RECORD_STEPS", 8)
    model = make()
    model.backend = WithOps(_RecordingOps)
    assert broken(Decoder(model), model, Case((12, 12), 9), FP32) == []
    assert made == [], "neither of the 4 steps up to slot 16 nor of the 5 behind"
    assert broken(Decoder(model), model, Case((12, 12), 18), FP32) == []
    assert made == [2]


def test_slots_read_are_few_and_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number doubles, so few steps are recorded."""
    reads: list[tuple[int, int]] = []
    bias = DecodeState._bias

    def noted(self: DecodeState, slot: int | Tensor, read: int) -> Tensor | None:
        reads.append((int(slot), read))
        return bias(self, slot, read)

    monkeypatch.setattr(DecodeState, "_bias", noted)
    model = make(depth=1, context=700)
    model.backend = WithOps(_RecordingOps)
    with torch.inference_mode():
        state = DecodeState(Decoder(model), torch.zeros(1, 2, dtype=torch.long), torch.tensor([2]), 600)
        for _ in range(600):
            state.run(torch.zeros(1, dtype=torch.long))
    assert len(reads) == 600
    assert all(slot < read <= max(4, min(602, 2 * slot)) for slot, read in reads)
    assert len(made) <= 9
    assert len(played) > 550
