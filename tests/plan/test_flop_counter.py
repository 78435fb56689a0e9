"""F1: the plan's FLOPs, against those that torch counts of a real forward and backward pass."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings, low_rank_parameters
from ingot.model.config import ModelConfig, ModelSettings
from ingot.model.losses import cross_entropy
from ingot.model.transformer import build
from ingot.plan.flops import training_flops_per_token
from tests.model.helpers import set_impl

ROWS = 2
SMALL = {"depth": 2, "width": 64, "heads": 4, "context": 96}
SHAPES = {
    "swiglu": ModelSettings(**SMALL, ffn=192),
    "grouped queries": ModelSettings(**SMALL, ffn=192, kv_heads=1),
    "tied head": ModelSettings(**SMALL, ffn=192, tied=True),
    "untied head": ModelSettings(**SMALL, ffn=192, tied=False),
    "gelu, learned positions": ModelSettings(**SMALL, family="gpt2"),
    "wide heads": ModelSettings(**SMALL, family="qwen3", head_size=32),
}
VOCAB = 300


def _counted(config: ModelConfig, adapter: AdapterSettings | None = None) -> float:
    """FLOPs per token that torch counts; eager attention, whose products it sees one by one."""
    model = build(config, seed=0)
    if adapter:
        lora.add_adapters(model, adapter, seed=0)
        lora.cast_frozen(model, torch.float32)
    ids = torch.randint(config.vocab, (ROWS, config.context))
    with FlopCounterMode(display=False) as counter:
        out = model(ids)
        loss, _ = cross_entropy(out.hidden, out.head, ids)
        loss.backward()
    return counter.get_total_flops() / ids.numel()


@pytest.mark.parametrize("name", SHAPES)
def test_f1_training_flops_are_what_torch_counts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Exactly, but for vectors (gains, biases), which the plan counts as if they were matrices."""
    set_impl(monkeypatch, "eager")
    config = SHAPES[name].resolve(VOCAB)
    vectors = sum(p.numel() for p in build(config, seed=0).parameters() if p.dim() == 1)
    assert training_flops_per_token(config) - 6 * vectors == _counted(config)


def test_f1_e6_training_flops_of_an_adapter_are_what_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block's inputs need no gradient: 2 of the 4 N of its frozen projections that read the embedding."""
    set_impl(monkeypatch, "eager")
    config, adapter = SHAPES["swiglu"].resolve(VOCAB), AdapterSettings(rank=8)
    planned = training_flops_per_token(config, low_rank_parameters(adapter, config))
    counted = _counted(config, adapter)
    assert counted <= planned == pytest.approx(counted, rel=0.05)
    assert training_flops_per_token(config) > 1.15 * counted  # the control
