"""A directory that is no train stage, of another version, or with a damaged checkpoint is refused in one sentence."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import api
from ingot.core.artifact import StageDir, atomic_json, checkpoint_path, checkpoint_steps
from ingot.core.errors import UserError
from ingot.distributed import checkpoint
from ingot.model.config import ModelSettings
from ingot.model.transformer import build
from ingot.stages.models.export import export_hf
from ingot.stages.models.load import evaluation_context, load_frozen, load_model, read_config, save_description
from ingot.tokenizer.byte_bpe import ByteBPE
from ingot.tokenizer.settings import SPECIALS


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


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A finished stage with checkpoints of the steps 10 and 20 and a best one, whose weights differ."""
    config = ModelSettings(depth=1, width=16, heads=2, context=16).resolve(256 + len(SPECIALS))
    save_description(tmp_path, config, ByteBPE([bytes([b]) for b in range(256)], r"\s+|\S+"))
    atomic_json(tmp_path / "inputs.json", {"name": "base", "kind": "import", "settings": {}, "inputs": {}})
    for step, path in (
        *((step, checkpoint_path(tmp_path / "checkpoints", step)) for step in (10, 20)),
        (10, tmp_path / "checkpoints/best"),
    ):
        tensors = {f"model.{n}": p.detach() for n, p in build(config, step).named_parameters()}
        checkpoint.save(path, tensors, {"step": step}, {})
    atomic_json(tmp_path / "result.json", {"steps": 20})
    StageDir(tmp_path).finish()
    return tmp_path


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a byte": lambda path: _flip(path / "model.safetensors"),
    "cut": lambda path: (path / "model.safetensors").write_bytes(b"x"),
    "no state": lambda path: (path / "state.json").unlink(),
    "an empty manifest": lambda path: (path / "manifest.json").write_text("{}"),
    "gone": shutil.rmtree,
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_final_checkpoint_is_never_replaced_by_an_older_model(stage: Path, case: str) -> None:
    assert torch.equal(_embedding(stage), _embedding(stage, step=20))
    DAMAGE[case](checkpoint_path(stage / "checkpoints", 20))
    users = {
        "load": lambda: load_model(stage, print, device="cpu"),
        "exact": lambda: load_model(stage, print, device="cpu", exact=True),
        "frozen": lambda: load_frozen(stage, print, "cpu", torch.float32),
        "the Python interface": lambda: api.load(stage, device="cpu"),
        "export": lambda: export_hf(stage, stage.parent / "out", "float32", False, print),
    }
    for name, use in users.items():
        with pytest.raises(UserError, match=r"the checkpoint of step 20 is damaged \(.*; delete .* run the") as caught:
            use()
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith(", or name another intact one with --step: 10") == (
            name not in ("exact", "frozen")
        )
    assert not (stage.parent / "out").exists()
    older = api.load(stage, device="cpu", step=10).loaded
    assert older.checkpoint == checkpoint_path(stage / "checkpoints", 10)
    assert torch.equal(_embedding(stage, step=10), _embedding(stage, best=True))


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("inputs.json", "[]", r"inputs\.json: not readable, expected the fields"),
        ("inputs.json", '{"kind": "import"}', r"inputs\.json: not readable, expected the fields"),
        ("result.json", "{}", r"result\.json: not readable, expected the number of steps"),
        ("result.json", '{"steps": "20"}', r"result\.json: not readable, expected the number of steps"),
        ("tokenizer.json", "[" * 100_000, r"tokenizer\.json: not a tokenizer file"),
    ],
)
def test_a_damaged_file_of_a_stage_is_one_sentence(stage: Path, file: str, content: str, sentence: str) -> None:
    (stage / file).write_text(content)
    with pytest.raises(UserError, match=sentence):
        load_model(stage, print, device="cpu")


@pytest.mark.parametrize("change", [{"depth": 2}, {"width": 32}, {"vocab": 300}])
def test_weights_of_another_shape_than_the_configuration_are_one_sentence(stage: Path, change: dict[str, Any]) -> None:
    config = json.loads((stage / "model.json").read_text())
    (stage / "model.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=r"checkpoints/00000020: found .* as model\..*, expected \["):
        load_model(stage, print, device="cpu")


@pytest.mark.parametrize("file", ["tokenizer.json", "result.json", "checkpoints/00000020/manifest.json"])
def test_a_pipe_in_a_stage_is_not_opened(stage: Path, file: str) -> None:
    (stage / file).unlink()
    os.mkfifo(stage / file)
    with pytest.raises(UserError, match=r"not a regular file|not readable|no readable manifest\.json"):
        load_model(stage, print, device="cpu")


def _embedding(stage: Path, **options: int) -> torch.Tensor:
    return load_model(stage, print, device="cpu", **options).model.embedding.weight


def test_a_checkpoint_that_is_asked_for_is_loaded_or_refused(stage: Path) -> None:
    assert not torch.equal(_embedding(stage, step=10), _embedding(stage))
    with pytest.raises(UserError, match=r"no checkpoint of step 15; leave --step out .* with --step: 20, 10"):
        load_model(stage, print, step=15)
    with pytest.raises(UserError, match="found both --best and --step, expected one"):
        load_model(stage, print, step=10, best=True)
    _flip(stage / "checkpoints/best/model.safetensors")
    with pytest.raises(UserError, match="its best checkpoint is damaged"):
        load_model(stage, print, best=True)
    _flip(checkpoint_path(stage / "checkpoints", 10) / "model.safetensors")
    with pytest.raises(UserError, match="the checkpoint of step 10 is damaged"):
        load_model(stage, print, step=10)
    shutil.rmtree(stage / "checkpoints")
    with pytest.raises(UserError, match="no checkpoint yet"):
        load_model(stage, print)


def test_an_unfinished_stage_gives_its_newest_checkpoint_or_an_error(stage: Path) -> None:
    (stage / "DONE").unlink()
    messages: list[str] = []
    load_model(stage, messages.append, device="cpu")
    assert messages == [f"{stage}: not done; these are its weights after step 20"]
    assert checkpoint_steps(stage / "checkpoints") == [20, 10]
    _flip(checkpoint_path(stage / "checkpoints", 20) / "model.safetensors")
    with pytest.raises(UserError, match="the checkpoint of step 20 is damaged"):
        load_model(stage, print)
