"""What the plan says our engine keeps, against what autograd keeps of a real model."""

import contextlib

import pytest
import torch

from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings, adapter_parameters, linear_layers
from ingot.model.attention import AttentionImpl
from ingot.model.config import MAX_LOGITS, ModelConfig, ModelSettings
from ingot.model.transformer import build
from ingot.plan.memory import adapter_activations, engine_activations
from tests.model.helpers import set_impl

ROWS = 2
SMALL = {"width": 64, "heads": 4, "ffn": 192}
SHAPES = {
    "llama": ModelSettings(depth=3, context=128, **SMALL),
    "grouped": ModelSettings(depth=3, context=128, kv_heads=1, **SMALL),
    "gpt2": ModelSettings(depth=3, context=128, family="gpt2", **SMALL),
    "qwen2": ModelSettings(depth=3, context=128, family="qwen2", **SMALL),
    "qwen3": ModelSettings(depth=3, context=128, family="qwen3", head_size=32, **SMALL),
    "mistral": ModelSettings(depth=3, context=128, family="mistral", window=48, **SMALL),
    "isolated": ModelSettings(depth=3, context=128, **SMALL),
    "dropout": ModelSettings(depth=3, context=128, family="gpt2", dropout=0.1, **SMALL),
}

UNFUSED = [("dropout", "sdpa")]
"""On a CPU the fused kernel has no dropout: torch writes the scores out by itself, in fp32."""


def _kept(config: ModelConfig, bf16: bool, isolated: bool, adapter: AdapterSettings | None = None) -> int:
    """Bytes of all distinct tensors that a forward pass saves, parameters aside."""
    model = build(config, seed=0)
    if adapter:
        lora.add_adapters(model, adapter, seed=0)
        lora.cast_frozen(model, torch.bfloat16 if bf16 else torch.float32)
    seen = {p.untyped_storage().data_ptr(): None for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen.setdefault(storage.data_ptr(), storage)
        return tensor

    ids = torch.randint(config.vocab, (ROWS, config.context))
    documents = (torch.arange(config.context) // 20).repeat(ROWS, 1) if isolated else None
    forward = torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), forward:
        out = model(ids, documents_BT=documents)
    del out
    return sum(storage.nbytes() for storage in seen.values() if storage is not None)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "impl"), [(n, i) for n in SHAPES for i in ("sdpa", "eager") if (n, i) not in UNFUSED])
def test_f2_activations_are_what_autograd_keeps(
    monkeypatch: pytest.MonkeyPatch, name: str, impl: AttentionImpl, bf16: bool
) -> None:
    set_impl(monkeypatch, impl)
    config, isolated = SHAPES[name].resolve(64), name == "isolated"
    masks = 1 if config.window else ROWS if isolated else 0
    element = 2 if bf16 else 4
    planned = engine_activations(
        config, ROWS, element, impl == "eager", MAX_LOGITS["cpu"], masks, dropout_element=element
    )
    kept = _kept(config, bf16, isolated)
    assert planned.layers + planned.scores + planned.casts == pytest.approx(kept, rel=0.03)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_f2_e6_activations_under_an_adapter_are_what_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, kind: str, dropout: float, bf16: bool
) -> None:
    set_impl(monkeypatch, "sdpa")
    config = SHAPES["llama"].resolve(64)
    adapter = AdapterSettings.model_validate({"kind": kind, "rank": 8, "dropout": dropout})
    element = 2 if bf16 else 4
    whole = engine_activations(config, ROWS, element, False, MAX_LOGITS["cpu"], frozen=dropout > 0, gains=False)
    sizes, tokens = linear_layers(config).values(), ROWS * config.context
    planned = whole.layers + adapter_activations(sizes, 8, tokens, element, kind == "dora", dropout > 0, element)
    casts = adapter_parameters(adapter, config) * element if bf16 else 0
    kept = _kept(config, bf16, False, adapter)
    assert planned + casts == pytest.approx(kept, rel=0.1)


def test_d7_source_error_16_bits_do_not_halve_even_what_a_layer_keeps() -> None:
    """The residual stream stays fp32 under autocast: 16 bits keep more than half of it, and copies of the weights."""
    config = SHAPES["llama"].resolve(64)
    full, half = (engine_activations(config, ROWS, b, eager=False, max_logits=MAX_LOGITS["cpu"]) for b in (4, 2))
    assert 0.5 * full.layers < half.layers < 0.75 * full.layers
    assert half.casts > 0 == full.casts


def test_f2_logits_are_bounded_whatever_the_batch() -> None:
    config = ModelSettings(depth=1, context=1024).resolve(50_257)
    sizes = [
        engine_activations(config, rows, 2, eager=False, max_logits=MAX_LOGITS["cpu"]).logits for rows in (1, 8, 64)
    ]
    assert sizes[0] < sizes[1] == sizes[2] == 2 * MAX_LOGITS["cpu"]
