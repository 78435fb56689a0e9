"""What a train stage derives from its settings."""

import pytest

from ingot.model.config import ModelSettings
from ingot.optim.schedule import schedule
from ingot.stages.training.settings import TrainSettings


def _stage(**table):
    return TrainSettings.model_validate({"data": {"a": 1.0}, "duration": "5 steps", **table})


def schedule_of(stage, config, steps):
    return schedule(stage.optim, steps, config.width, finetune=stage.init is not None)


def test_D5_E1_what_a_stage_derives():
    config = ModelSettings(depth=12).resolve(50_257)
    fresh = schedule_of(_stage(tokenizer="t", model={"depth": 12}), config, 10_000)
    assert (fresh.peak, fresh.floor, fresh.warmup, fresh.end) == (6e-4, pytest.approx(6e-5), 200, 10_000)
    tuned = schedule_of(_stage(init="base"), config, 10_000)
    assert tuned.peak == pytest.approx(6e-5)  # E1: 10 times below pretraining
    for width, peak in ((4096, 3e-4), (8192, 1.5e-4)):
        big = ModelSettings(depth=32, width=width).resolve(50_257)
        assert schedule_of(_stage(tokenizer="t", model={"depth": 32}), big, 100).peak == pytest.approx(peak, rel=0.25)
    short = schedule_of(_stage(tokenizer="t", model={"depth": 12}, optim={"decay_steps": 4000}), config, 10_000)
    assert short.lr(4000) == short.lr(10_000) == pytest.approx(6e-5)
