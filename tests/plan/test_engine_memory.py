"""What the plan says our engine keeps, against what autograd keeps of a real model."""

import contextlib

import pytest
import torch

from ingot.model.settings import ModelConfig, ModelSettings
from ingot.model.transformer import build
from ingot.plan.memory import engine_activations

ROWS = 2
SHAPES = {
    "llama": {"width": 64, "heads": 4, "ffn": 192},
    "grouped": {"width": 64, "heads": 4, "kv_heads": 1, "ffn": 192},
}


def _kept(config: ModelConfig, path: str, bf16: bool) -> int:
    """Bytes of all distinct tensors that a forward pass saves, parameters aside."""
    model = build(config, seed=0)
    model.attention_path = path  # type: ignore[assignment]
    seen = {p.untyped_storage().data_ptr(): None for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen.setdefault(storage.data_ptr(), storage)
        return tensor

    ids = torch.randint(config.vocab, (ROWS, config.context))
    forward = torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), forward:
        out = model(ids)
    del out
    return sum(storage.nbytes() for storage in seen.values() if storage is not None)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("path", ["sdpa", "plain"])
@pytest.mark.parametrize("name", SHAPES)
def test_f2_activations_are_what_autograd_keeps(name: str, path: str, bf16: bool) -> None:
    config = ModelSettings(depth=3, context=128, **SHAPES[name]).resolve(64)
    told = engine_activations(config, ROWS, 2 if bf16 else 4, plain=path == "plain", max_logits=1 << 26)
    assert told.layers + told.scores + told.casts == pytest.approx(_kept(config, path, bf16), rel=0.03)


def test_d7_source_error_16_bits_do_not_halve_even_what_a_layer_keeps() -> None:
    """The residual stream stays fp32 under autocast: 16 bits keep more than half of it, and copies of the weights."""
    config = ModelSettings(depth=3, width=64, heads=4, ffn=192, context=128).resolve(64)
    full, half = (engine_activations(config, ROWS, b, plain=False, max_logits=1 << 26) for b in (4, 2))
    assert 0.5 * full.layers < half.layers < 0.75 * full.layers
    assert half.casts > 0 == full.casts


def test_f2_logits_are_bounded_whatever_the_batch() -> None:
    config = ModelSettings(depth=1, context=1024).resolve(50_257)
    sizes = [engine_activations(config, rows, 2, plain=False, max_logits=1 << 26).logits for rows in (1, 8, 64)]
    assert sizes[0] < sizes[1] == sizes[2] == 3 * 4 * (1 << 26)
