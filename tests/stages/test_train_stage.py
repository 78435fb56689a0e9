"""What a train stage derives from its settings."""

import pytest
import torch

from ingot.model.settings import ModelSettings
from ingot.optim.groups import adamw
from ingot.optim.schedule import Schedule
from ingot.optim.settings import OptimSettings
from ingot.stages.settings import TrainSettings
from ingot.stages.train import _schedule


def test_D3_defaults_and_the_fused_kernel():
    settings = OptimSettings()
    assert (settings.betas, settings.eps, settings.weight_decay, settings.min_ratio) == ((0.9, 0.95), 1e-8, 0.1, 0.1)
    assert adamw({"w": torch.nn.Parameter(torch.zeros(2, 2))}, settings, 1e-3).defaults["fused"]


def _stage(**table):
    return TrainSettings.model_validate({"data": {"a": 1.0}, "duration": "5 steps", **table})


def test_D5_E1_what_a_stage_derives():
    config = ModelSettings(depth=12).resolve(50_257)
    fresh = _schedule(_stage(tokenizer="t", model={"depth": 12}), config, 10_000)
    assert (fresh.peak, fresh.floor, fresh.warmup, fresh.end) == (6e-4, pytest.approx(6e-5), 200, 10_000)
    tuned = _schedule(_stage(init="base"), config, 10_000)
    assert tuned.peak == pytest.approx(6e-5)  # E1: 10 times below pretraining
    for width, peak in ((4096, 3e-4), (8192, 1.5e-4)):
        big = ModelSettings(depth=32, width=width).resolve(50_257)
        assert _schedule(_stage(tokenizer="t", model={"depth": 32}), big, 100).peak == pytest.approx(peak, rel=0.25)
    short = _schedule(_stage(tokenizer="t", model={"depth": 12}, optim={"decay_steps": 4000}), config, 10_000)
    assert short.lr(4000) == short.lr(10_000) == pytest.approx(6e-5)


def test_D5_torchs_linear_warmup_from_zero_raises_and_ours_starts():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1)
    with pytest.raises(ValueError, match="Starting multiplicative factor"):
        torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.0)
    assert Schedule("linear", 3e-4, 0, 1000, 10_000).lr(0) == 0 < Schedule("linear", 3e-4, 0, 1000, 10_000).lr(1)
