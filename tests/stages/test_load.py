"""A directory that is no train stage, or one of another version, is refused in one sentence."""

import json

import pytest

from ingot.core.errors import UserError
from ingot.model.config import ModelSettings
from ingot.stages.models.load import evaluation_context, read_config


def test_a_shape_is_read_back(tmp_path):
    config = ModelSettings(depth=2, family="qwen3").resolve(65)
    (tmp_path / "model.json").write_text(config.model_dump_json())
    assert read_config(tmp_path) == config


def test_a_model_is_measured_within_its_learned_positions():
    learned, turned = (ModelSettings(depth=1, family=f, context=64).resolve(65) for f in ("gpt2", "llama"))
    assert evaluation_context(None, learned) == evaluation_context(64, learned) == 64
    assert evaluation_context(128, turned) == 128
    with pytest.raises(UserError, match="context: found 65, expected at most 64"):
        evaluation_context(65, learned)


@pytest.mark.parametrize("change", ["older", "newer", "garbage"])
def test_a_shape_of_another_version_is_one_sentence(tmp_path, change):
    table = ModelSettings(depth=2).resolve(65).model_dump()
    table = {**table, "depht": 3} if change == "newer" else {k: v for k, v in table.items() if k != "head_size"}
    (tmp_path / "model.json").write_text("{" if change == "garbage" else json.dumps(table))
    with pytest.raises(UserError, match=r"model\.json: found a configuration that this version cannot read") as caught:
        read_config(tmp_path)
    assert {"older": "head_size", "newer": "depht", "garbage": "the object"}[change] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_shape_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="expected the directory of a train stage"):
        read_config(tmp_path)
