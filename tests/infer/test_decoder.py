"""The contract of decoding: for every model, adapter and precision the logits of the full forward pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ingot.infer.decoder import Decoder
from ingot.infer.generate import generate
from ingot.infer.kv_cache import KVCache
from ingot.infer.ops import TorchOps
from ingot.infer.sampling import Sampling
from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings
from ingot.model.backend import TORCH, Backend
from ingot.model.config import FAMILIES
from tests.infer.cpu import HAS_BACKENDS, cpu_backend, cpu_ops, cpu_params
from tests.infer.decoding import BF16, CASES, FP32, FP64, RAGGED, Case, WithOps, broken, logits, make

_SCALING = {"factor": 4, "low_freq_factor": 1, "high_freq_factor": 4, "original_context": 16}
MODELS: dict[str, dict[str, Any]] = {
    **{family: {"family": family, "kv_heads": 2} for family in FAMILIES},
    "mistral": {"family": "mistral", "kv_heads": 2, "window": 7},
    "gpt2": {"family": "gpt2"},
    "no groups": {"tied": True},
    "window of one": {"family": "mistral", "window": 1},
    "layer norm of heads": {"norm": "layer", "qk_norm": True, "bias": "all"},
    "learned positions": {"norm": "layer", "qk_norm": True, "positions": "learned", "kv_heads": 3},
    "exact gelu, wide heads": {"head_size": 16, "activation": "gelu"},
    "odd heads": {"positions": "learned", "head_size": 7, "width": 41, "ffn": 53},
    "stretched positions": {"rope_scaling": _SCALING},
}


WAYS = [
    pytest.param(TORCH, FP32, id="torch, fp32"),
    pytest.param(TORCH, BF16, id="torch, bf16"),
    pytest.param(TORCH, FP64, id="torch, fp64"),
    *cpu_params(lambda dtype: (cpu_backend(), dtype)),
]
each_way = pytest.mark.parametrize(("backend", "dtype"), WAYS)


@pytest.fixture
def not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches begin as NaN, so a slot that is read before it was written shows."""
    begin = KVCache.__init__

    def with_nan(self: KVCache, *arguments: Any) -> None:
        begin(self, *arguments)
        self.keys_LBKCD.fill_(torch.nan)
        self.values_LBKCD.fill_(torch.nan)

    monkeypatch.setattr(KVCache, "__init__", with_nan)


def _model(backend: Backend, dtype: torch.dtype, **settings: Any) -> Any:
    model = make(FP64 if dtype == FP64 else FP32, **settings)
    model.backend = backend
    return model


@each_way
@pytest.mark.parametrize("name", MODELS)
def test_G2_decoding_gives_the_logits_of_the_full_forward(
    not_zeroed: None, name: str, backend: Backend, dtype: torch.dtype
) -> None:
    """Ragged prompts, several samples of a prompt, rows that are dropped, windows."""
    model = _model(backend, dtype, **MODELS[name])
    decoder = Decoder(model, dtype)
    assert type(decoder.ops) is (TorchOps if backend is TORCH else type(cpu_ops(dtype)))
    assert decoder.ops.dtype == dtype
    for case in CASES:
        assert broken(decoder, model, case, dtype) == [], case


@each_way
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("kind", "modules"), [("lora", ()), ("dora", ()), ("lora", ("embedding", "head"))])
def test_G2_an_adapter_is_decoded_with_unless_it_is_removed_or_merged(
    kind: str, modules: tuple[str, ...], family: str, backend: Backend, dtype: torch.dtype
) -> None:
    model = _model(backend, dtype, family=family, depth=1)
    frozen = logits(model, torch.arange(12)[None])
    lora.add_adapters(model, AdapterSettings(kind=kind, rank=3, modules_to_save=modules), seed=0)
    with torch.no_grad():
        for layer in lora.adapters(model):
            layer.lora_B.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
        for module in lora.saved_modules(model):
            module.weight.add_(0.1 * torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(2)))
    model.eval()
    adapted = logits(model, torch.arange(12)[None])
    assert not torch.allclose(frozen, adapted, atol=1e-2)
    reference = lora.reference(model)
    assert torch.equal(logits(reference, torch.arange(12)[None]), frozen)
    for some in (model, reference):
        assert broken(Decoder(some, dtype), some, RAGGED, dtype) == []
    lora.merge(model)
    torch.testing.assert_close(logits(model, torch.arange(12)[None]), adapted, rtol=1e-3, atol=1e-3)
    assert broken(Decoder(model, dtype), model, RAGGED, dtype) == []


@each_way
def test_prompts_are_read_a_part_at_a_time(
    backend: Backend, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.infer.decoder._PREFILL_TOKENS", 25)
    model = _model(backend, dtype, family="mistral", window=7)
    assert broken(Decoder(model, dtype), model, Case((12, 3, 1, 9, 5), 4, samples=3), dtype) == []


# -- controls: the comparison notices what is wrong --------------------------------------------------------------------


class _NoHoles(TorchOps):
    def attend(self, qkv_BND: Tensor, rope_BE: Any, keys: Tensor, values: Tensor, bias_BS: Any, *more: Any) -> Tensor:
        return super().attend(qkv_BND, rope_BE, keys, values, None, *more)


class _NoWindow(TorchOps):
    def attend_prompts(self, qkv: Tensor, rope: Any, keys: Tensor, values: Tensor, window: Any, samples: int) -> Tensor:
        return super().attend_prompts(qkv, rope, keys, values, None, samples)


class _WrongSamples(TorchOps):
    def attend_prompts(self, qkv: Tensor, rope: Any, keys: Tensor, values: Tensor, window: Any, samples: int) -> Tensor:
        out = super().attend_prompts(qkv, rope, keys, values, window, samples)
        for table in (keys, values):
            table.copy_(table.roll(1, 0))
        return out


class _NoRope(TorchOps):
    def attend(self, qkv_BND: Tensor, rope_BE: Any, *more: Any) -> Tensor:
        return super().attend(qkv_BND, None, *more)


class _NoBias(TorchOps):
    def linear(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Any:
        return super().linear(weight_OI)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("ops", "settings"),
    [
        (_NoHoles, {}),
        (_NoWindow, {"family": "mistral", "window": 7}),
        (_WrongSamples, {}),
        (_NoRope, {}),
        (_NoBias, {"family": "qwen2"}),
    ],
)
def test_a_control_wrong_operations_are_noticed(
    ops: Callable[..., TorchOps], settings: dict[str, Any], dtype: torch.dtype
) -> None:
    case = Case((12, 3, 9), 6, samples=2)
    right, wrong = _model(WithOps(TorchOps), dtype, **settings), _model(WithOps(ops), dtype, **settings)
    assert broken(Decoder(right, dtype), right, case, dtype) == []
    assert broken(Decoder(wrong, dtype), wrong, case, dtype) != []


# -- the precision -----------------------------------------------------------------------------------------------------


def test_autocast_and_the_models_own_precision_choose_that_of_products() -> None:
    model = make(depth=1)
    assert Decoder(model).dtype == FP32
    with torch.autocast("cpu", dtype=BF16):
        assert Decoder(model).dtype == BF16
        inside = generate(model, [[1, 2, 3]], Sampling(max_new=5, temperature=0))
    asked = generate(Decoder(model, BF16), [[1, 2, 3]], Sampling(max_new=5, temperature=0))
    assert inside[0].ids.tolist() == asked[0].ids.tolist()
    np.testing.assert_array_equal(inside[0].logps, asked[0].logps)
    assert Decoder(make(FP64)).stream == FP64


@pytest.mark.skipif(not HAS_BACKENDS, reason="PyTorch decodes everything")
def test_models_in_fp64_are_decoded_by_torch() -> None:
    decoder = Decoder(_model(cpu_backend(), FP64))
    assert type(decoder.ops) is TorchOps
    assert decoder.ops.key_dtype == decoder.ops.value_dtype == FP64
