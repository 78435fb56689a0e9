"""What the plan says our engine keeps, against what autograd keeps of a real model."""

import contextlib

import pytest
import torch

from ingot.backends.select import compiled
from ingot.kernels import cpu_train
from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings, adapter_parameters, linear_layers
from ingot.model.config import LANES, MAX_LOGITS, ModelConfig, ModelSettings
from ingot.model.transformer import build
from ingot.plan.memory import adapter_activations, engine_activations, native_activations

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


def _kept(config: ModelConfig, path: str, bf16: bool, isolated: bool, adapter: AdapterSettings | None = None) -> int:
    """Bytes of all distinct tensors that a forward pass saves, parameters aside."""
    model = build(config, seed=0)
    if adapter:
        lora.adapt(model, adapter, seed=0)
        lora.hold(model, torch.bfloat16 if bf16 else torch.float32)
    model.attention_path = path  # type: ignore[assignment]
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
@pytest.mark.parametrize(("name", "path"), [(n, p) for n in SHAPES for p in ("sdpa", "plain") if (n, p) not in UNFUSED])
def test_f2_activations_are_what_autograd_keeps(name: str, path: str, bf16: bool) -> None:
    config, isolated = SHAPES[name].resolve(64), name == "isolated"
    masks = 1 if config.window else ROWS if isolated else 0
    told = engine_activations(config, ROWS, 2 if bf16 else 4, path == "plain", MAX_LOGITS["cpu"], masks)
    kept = _kept(config, path, bf16, isolated)
    assert told.layers + told.scores + told.casts == pytest.approx(kept, rel=0.03)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_f2_e6_activations_under_an_adapter_are_at_most_what_the_plan_says(
    kind: str, dropout: float, bf16: bool
) -> None:
    """Within a quarter: what a frozen norm does not keep for its gain is left in the plan."""
    config = SHAPES["llama"].resolve(64)
    adapter = AdapterSettings.model_validate({"kind": kind, "rank": 8, "dropout": dropout})
    element = 2 if bf16 else 4
    whole = engine_activations(config, ROWS, element, False, MAX_LOGITS["cpu"], copied=dropout > 0)
    sizes, tokens = linear_layers(config).values(), ROWS * config.context
    told = whole.layers + adapter_activations(sizes, 8, tokens, element, kind == "dora", dropout > 0)
    casts = adapter_parameters(adapter, config) * element if bf16 else 0
    kept = _kept(config, "sdpa", bf16, False, adapter)
    assert 0.97 * kept < told + casts < 1.25 * kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["llama", "grouped", "isolated"])
def test_f2_activations_are_what_our_functions_keep(name: str, dtype: torch.dtype) -> None:
    """Of the blocks in C++: what each of them holds for its backward pass, and what the head does."""
    if not cpu_train.available(dtype):
        pytest.skip("no such vectors, or no C++ compiler")
    config = SHAPES[name].resolve(65)  # rows of logits are filled up
    ids, documents = torch.randint(65, (ROWS, config.context)), torch.arange(config.context).repeat(ROWS, 1) // 20
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        forward = compiled(build(config, seed=0), "native")
        out = forward(ids, documents_BT=documents if name == "isolated" else None)
        cost = out.head.nll(out.hidden.flatten(0, 1), ids.flatten()).sum()
    blocks, behind = out.hidden.grad_fn.kept
    held = [behind, *(tensor for kept in blocks for tensor in kept)]
    (head, _), *_ = cost.grad_fn.next_functions
    rounded, _, _, excess = head.saved_tensors
    seen = {(s := t.untyped_storage()).data_ptr(): s.nbytes() for t in (*held, rounded, excess)}
    told = native_activations(config, ROWS, dtype.itemsize, MAX_LOGITS["cpu"], LANES)
    assert told.layers + told.logits == sum(seen.values())
    assert told.scores == told.casts == 0


def test_d7_source_error_16_bits_do_not_halve_even_what_a_layer_keeps() -> None:
    """The residual stream stays fp32 under autocast: 16 bits keep more than half of it, and copies of the weights."""
    config = SHAPES["llama"].resolve(64)
    full, half = (engine_activations(config, ROWS, b, plain=False, max_logits=MAX_LOGITS["cpu"]) for b in (4, 2))
    assert 0.5 * full.layers < half.layers < 0.75 * full.layers
    assert half.casts > 0 == full.casts


def test_f2_logits_are_bounded_whatever_the_batch() -> None:
    config = ModelSettings(depth=1, context=1024).resolve(50_257)
    sizes = [
        engine_activations(config, rows, 2, plain=False, max_logits=MAX_LOGITS["cpu"]).logits for rows in (1, 8, 64)
    ]
    assert sizes[0] < sizes[1] == sizes[2] == 2 * MAX_LOGITS["cpu"]
