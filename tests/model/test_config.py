"""The dial: what follows from a depth, and what is refused."""

import pytest
from pydantic import ValidationError

from ingot.core.errors import UserError
from ingot.core.settings import settings_tree
from ingot.model.config import FAMILIES, ModelConfig, ModelSettings
from tests.imports import assert_not_imported

SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 64}


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
        ({"depth": 2, "head_size": 15}, ["heads of 15", "head_size"]),
        ({"depth": 2, "family": "gpt2", "rope_scaling": SCALING}, ["rope_scaling", "learned"]),
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
    assert_not_imported("import ingot.model.config, ingot.plan.flops", "torch")


def test_a_family_is_a_row_of_defaults():
    """What families differ in, and nothing else; sizes stay those of the dial."""
    llama = ModelSettings(depth=4).resolve(65)
    expected = {
        "gpt2": {
            **{"positions": "learned", "norm": "layer", "activation": "gelu-tanh", "bias": "all", "tied": True},
            "ffn": 1024,
        },
        "mistral": {"window": 4096},
        "qwen2": {"bias": "qkv", "rope_theta": 1e6, "norm_eps": 1e-6},
        "qwen3": {"qk_norm": True, "rope_theta": 1e6, "norm_eps": 1e-6},
    }
    assert {"llama", *expected} == set(FAMILIES)
    for family, changes in expected.items():
        assert ModelSettings(depth=4, family=family).resolve(65) == llama.model_copy(update=changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_default_of_a_family_can_be_overridden(family):
    chosen = {
        **{"positions": "learned", "rope_theta": 5e5, "window": 7, "norm": "layer", "norm_eps": 1e-3},
        **{"qk_norm": True, "activation": "gelu", "bias": "all", "tied": True, "dropout": 0.1, "head_size": 10},
    }
    config = ModelSettings(depth=4, family=family, **chosen).resolve(65)
    assert config.model_dump(include=set(chosen)) == chosen
    off = {"positions": "rope", "norm": "rms", "qk_norm": False, "activation": "swiglu", "bias": "none", "tied": False}
    config = ModelSettings(depth=4, family=family, **off).resolve(65)
    assert config.model_dump(include=set(off)) == off


def test_a_head_size_of_its_own():
    """Qwen3's heads are wider than its stream over their number; without a number they fill the stream."""
    config = ModelSettings(depth=2, width=1024, heads=16, head_size=128).resolve(65)
    assert (config.heads, config.head_size) == (16, 128)
    assert ModelSettings(depth=2, width=256, head_size=32).resolve(65).heads == 8
    assert ModelSettings(depth=2, width=50, heads=3, head_size=16).resolve(65).head_size == 16


@pytest.mark.parametrize("change", [{"low_freq_factor": 4.0}, {"factor": 0.5}, {"original_context": 0}])
def test_rope_scaling_out_of_range_is_refused(change):
    with pytest.raises(ValidationError):
        ModelSettings(depth=2, rope_scaling={**SCALING, **change})
