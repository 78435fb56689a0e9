"""Checkpoints: whole or absent, checked on loading, the newest good one wins."""

import json
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.core.artifact import checkpoint_problem
from ingot.core.errors import UserError
from ingot.distributed import checkpoint
from tests.imports import assert_not_imported


def _save(root: Path, step: int) -> dict[str, torch.Tensor]:
    tensors = {
        "model.w": torch.randn(4, 3),
        "optim.w.step": torch.tensor(float(step)),
        "model.d": torch.rand(2).double(),
    }
    checkpoint.save(checkpoint.checkpoint_path(root, step), tensors, {"step": step}, {"model": {"width": 3}})
    return tensors


def test_round_trip_to_the_bit(tmp_path: Path) -> None:
    tensors = _save(tmp_path, 7)
    back = {n: torch.zeros_like(t) for n, t in tensors.items()}
    assert checkpoint.load(checkpoint.checkpoint_path(tmp_path, 7), back) == {"step": 7}
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)


def test_equal_tensors_are_equal_files(tmp_path: Path) -> None:
    tensors = {f"w{n}": torch.full((2,), float(n)) for n in range(20)}
    for name in ("a", "b"):
        checkpoint.save(tmp_path / name, tensors, {}, {})
    a, b = ((tmp_path / name / checkpoint.WEIGHTS).read_bytes() for name in ("a", "b"))
    assert a == b


def test_a_tensor_of_another_shape_does_not_load(tmp_path: Path) -> None:
    """Not even one that could be stretched to it."""
    checkpoint.save(tmp_path / "c", {"w": torch.ones(1)}, {}, {})
    with pytest.raises(UserError, match=r"found \[1\] as w, expected \[3\]"):
        checkpoint.load(tmp_path / "c", {"w": torch.zeros(3)})


def test_saving_and_loading_alone_import_no_compiler(tmp_path: Path) -> None:
    code = (
        "import pathlib, torch; from ingot.distributed import checkpoint\n"
        "path = pathlib.Path(sys.argv[1]) / 'c'; checkpoint.save(path, {'w': torch.ones(3)}, {}, {})\n"
        "w = torch.zeros(3); checkpoint.load(path, {'w': w}); assert w.sum() == 3"
    )
    assert_not_imported(code, "torch._dynamo", "sympy", "torch.distributed.checkpoint", argument=str(tmp_path))


def test_D12_the_config_is_inside(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    assert json.loads((checkpoint.checkpoint_path(tmp_path, 1) / "config.json").read_text()) == {"model": {"width": 3}}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_falls_back_and_says_so(tmp_path: Path, damage: str) -> None:
    for step in (10, 20):
        _save(tmp_path, step)
    (file,) = checkpoint.checkpoint_path(tmp_path, 20).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-3] ^= 1
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(data[:-5])
    else:
        file.unlink()
    said: list[str] = []
    assert checkpoint.newest_intact(tmp_path, said.append) == checkpoint.checkpoint_path(tmp_path, 10)
    assert len(said) == 1
    assert said[0].startswith("skipped a damaged checkpoint: ")
    assert file.name in said[0]


def _edit_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest = change(manifest) or manifest
    (path / "manifest.json").write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "empty": (lambda m: m.clear(), "config.json: not named in manifest.json"),
    "without the tensors": (lambda m: m.pop("model.safetensors") and None, "model.safetensors: not named in"),
    "without the state": (lambda m: m.pop("state.json") and None, "state.json: not named in"),
    "a list": (lambda m: "[]", "not named in|no readable manifest.json"),
    "a number": (lambda m: "3", "no readable manifest.json"),
    "nested": (lambda m: "[" * 100_000, "no readable manifest.json"),
    "a file elsewhere": (lambda m: m.update({"../x": m["state.json"]}), r"found '../x', expected names of files"),
    "no digest": (lambda m: m["state.json"].pop("blake2b") and None, "no readable manifest.json"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_names_all_files_and_every_byte_is_checked(tmp_path: Path, case: str) -> None:
    _save(tmp_path, 10)
    path = checkpoint.checkpoint_path(tmp_path, 10)
    assert checkpoint_problem(path) is None
    change, problem = MANIFESTS[case]
    _edit_manifest(path, change)
    assert re.search(problem, str(checkpoint_problem(path)))
    with pytest.raises(UserError, match="all 1 checkpoints are damaged"):
        checkpoint.newest_intact(tmp_path, lambda text: None)


@pytest.mark.parametrize("name", ["extra.safetensors", "model-2.safetensors", "state.json", "model.safetensors"])
def test_files_that_the_manifest_does_not_name_or_that_are_gone_are_damage(tmp_path: Path, name: str) -> None:
    _save(tmp_path, 10)
    path = checkpoint.checkpoint_path(tmp_path, 10)
    if (path / name).exists():
        (path / name).unlink()
        _edit_manifest(path, lambda m: m.pop(name) and None)
        assert re.search(r": no (state\.json|tensors)$", str(checkpoint_problem(path)))
    else:
        (path / name).write_bytes(b"x")
        assert f"{name}: not named in manifest.json" in str(checkpoint_problem(path))
    (path / "model.safetensors").unlink(missing_ok=True)
    os.mkfifo(path / "model.safetensors")
    assert checkpoint_problem(path) is not None, "a pipe is not waited for"


def test_all_damaged_is_an_error_and_none_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest_intact(tmp_path, print) is None
    _save(tmp_path, 10)
    (checkpoint.checkpoint_path(tmp_path, 10) / "state.json").write_text("{}")
    with pytest.raises(UserError, match="all 1 checkpoints are damaged"):
        checkpoint.newest_intact(tmp_path, lambda text: None)


def test_old_ones_are_dropped(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        _save(tmp_path, step)
    checkpoint.prune(tmp_path, keep=2)
    assert checkpoint.checkpoint_steps(tmp_path) == [4, 3]


@dataclass
class _Config:
    width: int = 3


def test_D12_source_error_a_pickled_config_does_not_load(tmp_path: Path) -> None:
    """003 pickles its config object with the weights, and torch reads such a file only where it may run its code."""
    torch.save({"config": _Config()}, tmp_path / "theirs.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(tmp_path / "theirs.pt", weights_only=True)
    _save(tmp_path, 1)
    assert {f.suffix for f in checkpoint.checkpoint_path(tmp_path, 1).iterdir()} == {".safetensors", ".json"}
