"""The dial: what follows from a depth, and what is refused."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from ingot.core.errors import UserError
from ingot.core.recipe import settings_tree
from ingot.model.settings import ModelConfig, ModelSettings


def test_every_width_follows_from_the_depth():
    config = ModelSettings(depth=4).resolve(4096)
    assert (config.width, config.heads, config.kv_heads, config.ffn, config.context) == (256, 4, 4, 704, 256)
    assert not config.tied
    assert ModelConfig.model_validate(settings_tree(config)) == config


@pytest.mark.parametrize(
    ("width", "heads"), [(128, 4), (64, 4), (192, 6), (384, 6), (512, 8), (768, 12), (1024, 16), (72, 9), (16, 2)]
)
def test_default_heads(width, heads):
    assert ModelSettings(depth=2, width=width).resolve(65).heads == heads


def test_F5_feed_forward_of_the_full_size():
    assert ModelSettings(depth=32, width=4096).resolve(128_000).ffn == 11_008
    assert ModelSettings(depth=32, width=5120).resolve(128_000).ffn == 13_824
    assert ModelSettings(depth=2, width=128).resolve(65).ffn == 384


@pytest.mark.parametrize(("size", "vocab", "depth"), [("5M", 4096, 4), ("162M", 50_257, 12), ("0.5M", 65, 2)])
def test_size_takes_the_closest_depth(size, vocab, depth):
    config = ModelSettings(size=size).resolve(vocab)
    assert config.depth == depth
    target = float(size[:-1]) * 1e6
    for other in (depth - 1, depth + 1):
        distance = abs(ModelSettings(depth=other).resolve(vocab).parameters - target)
        assert distance > abs(config.parameters - target)


def test_size_skips_depths_that_do_not_fit():
    assert ModelSettings(size="4M", heads=3).resolve(4096).depth % 3 == 0


@pytest.mark.parametrize(
    ("table", "numbers"),
    [
        ({}, ["neither"]),
        ({"depth": 2, "size": "4M"}, ["depth = 2", "size = '4M'"]),
        ({"depth": 2, "heads": 3}, ["width 128", "heads 3"]),
        ({"depth": 2, "heads": 4, "kv_heads": 3}, ["heads 4", "kv_heads 3"]),
        ({"depth": 2, "width": 36, "heads": 4}, ["width 36", "heads 4", "9"]),
        ({"depth": 2, "width": 100}, ["width 100", "8"]),
        ({"size": "4X"}, ["'4X'"]),
    ],
)
def test_misfits_are_one_sentence_with_both_numbers(table, numbers):
    with pytest.raises(ValidationError) as caught:
        ModelSettings.model_validate(table)
    (error,) = caught.value.errors()
    assert error["type"] == "value_error"
    assert "\n" not in error["msg"]
    for number in numbers:
        assert number in error["msg"]


@pytest.mark.parametrize(
    "table", [{"size": "10K"}, {"size": "4M", "width": 100}, {"size": "4M", "width": 64, "heads": 3}]
)
def test_a_size_that_cannot_be_met_is_the_users_error(table):
    with pytest.raises(UserError) as caught:
        ModelSettings.model_validate(table).resolve(4096)
    assert "\n" not in str(caught.value)


def test_settings_do_not_import_torch():
    code = "import sys, ingot.model.settings, ingot.plan.flops; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
