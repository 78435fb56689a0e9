"""Decoding on a GPU: recorded steps give the logits of the full forward pass. Skipped without a GPU."""

from typing import Any

import numpy as np
import pytest
import torch

from ingot.backends.cuda import CUDABackend
from ingot.backends.cuda_decode import CUDAOps, RecordedStep
from ingot.infer import decoder as decoders
from ingot.infer.decoder import Decoder
from ingot.infer.generate import generate
from ingot.infer.sampling import Sampling
from tests.infer.decoding import BF16, CASES, FP32, VOCAB, Case, broken, make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SETTINGS: list[dict[str, Any]] = [
    {},
    {"family": "gpt2"},
    {"family": "qwen3"},
    {"family": "mistral", "window": 7, "kv_heads": 2},
]


def _model(**settings: Any) -> Any:
    model = make(**settings).cuda()
    model.backend = CUDABackend()
    return model


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_recorded_steps_give_the_logits_of_the_full_forward(
    settings: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(decoders, "_MIN_SLOTS", 4)
    monkeypatch.setattr(decoders, "_RECORD_STEPS", 1)
    recorded: list[int] = []
    real = CUDAOps.record
    monkeypatch.setattr(CUDAOps, "record", lambda *arguments: recorded.append(1) or real(*arguments))
    model = _model(**settings)
    for case in CASES:
        recorded.clear()
        assert broken(Decoder(model, dtype), model, case, dtype) == [], case
        assert recorded
    assert not [w for w in recwarn if "recording" in str(w.message)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_gpu_continues_as_a_cpu_does(settings: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    cpu, gpu = make(**settings, context=400), _model(**settings, context=400)
    prompts = [np.arange(1, 1 + n) % VOCAB for n in (9, 2, 5)]
    sampling = Sampling(max_new=300, temperature=0)
    expected, found = ([c.ids.tolist() for c in generate(model, prompts, sampling)] for model in (cpu, gpu))
    same = np.mean([a == b for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)])
    assert same > 0.9, same
    assert not [w for w in recwarn if "recording" in str(w.message)]


def test_rows_leave_a_recorded_batch() -> None:
    model = _model(context=400)
    prompts = [np.arange(1, 1 + n) % VOCAB for n in range(1, 17)]
    sampling = Sampling(max_new=200, stop=frozenset((0, 1, 2)))
    drawn = generate(model, prompts, sampling, seed=5)
    alone = [generate(model, [p], sampling, seed=5, keys=[(i, 0)])[0] for i, p in enumerate(prompts)]
    assert len({len(c.ids) for c in drawn}) > 4
    same = np.mean([a.ids.tolist() == b.ids.tolist() for a, b in zip(drawn, alone, strict=True)])
    assert same > 0.8, same


def test_a_recorded_step_reads_its_inputs_anew() -> None:
    weight = torch.randn(8, 8, device="cuda")
    inputs = [torch.randn(3, 8, device="cuda"), torch.ones(1, device="cuda")]
    weight @ inputs[0].T  # prepares the kernel
    step = RecordedStep(lambda x, scale: x @ weight * scale, inputs)
    for factor in (1.0, 2.0, 3.0):
        x, scale = torch.randn(3, 8, device="cuda"), torch.full((1,), factor, device="cuda")
        torch.testing.assert_close(step(x, scale), x @ weight * scale)


def test_a_step_that_reads_from_the_device_cannot_be_recorded() -> None:
    with pytest.raises(RuntimeError):
        RecordedStep(lambda x: x * x.sum().item(), [torch.ones(3, device="cuda")])
    torch.testing.assert_close(torch.ones(3, device="cuda").sum(), torch.tensor(3.0, device="cuda"))


def test_steps_are_recorded_where_enough_of_their_kind_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    real = CUDAOps.record
    monkeypatch.setattr(CUDAOps, "record", lambda *arguments: recorded.append(1) or real(*arguments))
    model = _model()
    for new, expected in ((30, 1), (6, 0)):
        recorded.clear()
        assert broken(Decoder(model), model, Case((3, 2), new), FP32) == []
        assert len(recorded) == expected
