"""D9: what the plan says a micro-batch needs with activation checkpointing, against the tensors that exist."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.tensor_bytes import TensorBytes

from ingot.backends.cpu_blocks import CPUBackend
from ingot.backends.estimate import cpu_activations
from ingot.kernels import cpu_train
from ingot.model.backend import TORCH, Backend
from ingot.model.config import Checkpointing, ModelConfig, ModelSettings, segment_blocks
from ingot.model.transformer import build
from ingot.plan.memory import Activations, checkpointed, engine_activations

ROWS, DEPTH = 4, 9
SMALL: dict[str, Any] = {"depth": DEPTH, "width": 64, "heads": 4, "ffn": 192, "context": 256}
SHAPES = {
    "llama": ModelSettings(**SMALL),
    "gpt2": ModelSettings(family="gpt2", **SMALL),
    "dropout": ModelSettings(family="gpt2", dropout=0.1, **SMALL),
    "isolated": ModelSettings(**SMALL),
    "qwen3": ModelSettings(family="qwen3", head_size=32, **SMALL),
}
MODES: list[Checkpointing] = ["none", "full", "sqrt", "selective"]


def _measured(config: ModelConfig, mode: Checkpointing, bf16: bool, isolated: bool, backend: Backend) -> int:
    """The most bytes of tensors from the start of the forward pass on, without parameters and the gradients of an
    earlier micro-batch."""
    model = build(config, seed=0).train()
    model.checkpointing, model.backend = mode, backend
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids_BT = torch.randint(config.vocab, (ROWS, config.context))
    documents_BT = (torch.arange(config.context) // 20).repeat(ROWS, 1) if isolated else None
    with TensorBytes() as found:
        with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
            out = model(ids_BT, documents_BT=documents_BT)
            loss = out.head.nll(out.hidden.flatten(0, 1), ids_BT.flatten()).sum()
        del out
        loss.backward()
    return found.peak


def _planned(config: ModelConfig, mode: Checkpointing, bf16: bool, isolated: bool) -> Activations:
    element, eager, masks = (2 if bf16 else 4), bf16 or config.dropout > 0, ROWS if isolated else 0
    stored = engine_activations(config, ROWS, element, eager, config.vocab, masks, dropout_element=element)
    if mode == "none":
        return replace(stored, logits=0)
    segment, selective = segment_blocks(mode, DEPTH), mode == "selective"
    return checkpointed(replace(stored, logits=0), config, ROWS, element, eager, segment, selective, masks)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in SHAPES if n != "llama")])
def test_D9_the_plan_of_each_mode_is_what_is_allocated(name: str, bf16: bool) -> None:
    """Within 10 %, and less in every mode than without."""
    config, isolated = SHAPES[name].resolve(64), name == "isolated"
    found: dict[Checkpointing, int] = {mode: _measured(config, mode, bf16, isolated, TORCH) for mode in MODES}
    for mode, allocated in found.items():
        assert _planned(config, mode, bf16, isolated).total == pytest.approx(allocated, rel=0.1), mode
    assert found["full"] < found["sqrt"] < 0.5 * found["none"], "fewer inputs, but more blocks at once"
    assert found["selective"] < 0.8 * found["none"]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_D9_the_plan_of_each_mode_of_the_cpus_kernels_is_what_is_allocated(bf16: bool) -> None:
    if not cpu_train.available(torch.bfloat16 if bf16 else torch.float32):
        pytest.skip("no such vectors, or no C++ compiler")
    config, found = SHAPES["llama"].resolve(64), {}
    for mode in MODES[:-1]:
        found[mode] = _measured(config, mode, bf16, False, CPUBackend())
        segment = 0 if mode == "none" else segment_blocks(mode, DEPTH)
        planned = cpu_activations(config, ROWS, "bf16" if bf16 else "fp32", 1, segment)
        assert planned is not None
        assert planned.total - planned.logits == pytest.approx(found[mode], rel=0.1), mode
    assert found["full"] < found["sqrt"] < 0.6 * found["none"]


def test_D9_sqrt_needs_less_than_full_only_in_a_very_deep_model() -> None:
    """L a + b against sqrt(L) (a + b), with a bytes of a block's input and b of its activations: from L = (b / a)^2."""
    totals = {}
    for depth in (100, 625):
        config = ModelSettings(**{**SMALL, "depth": depth}).resolve(64)
        stored = engine_activations(config, ROWS, 4, False, 64)
        totals[depth] = [
            checkpointed(stored, config, ROWS, 4, False, segment_blocks(mode, depth)).total for mode in MODES[1:3]
        ]
        ratio = stored.layers / depth / (4 * 64 * ROWS * 256)
        assert 20 < ratio < 23
    assert totals[100][0] < totals[100][1]
    assert totals[625][0] > totals[625][1]
