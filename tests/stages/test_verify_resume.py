"""`ingot verify-resume`: a killed run is compared with an undisturbed one, and a difference is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot.pipeline import verify_resume
from ingot.pipeline.graph import load_graph
from tests.stages.conftest import RUNS


def _checkpoint(path: Path) -> Path:
    path.mkdir()
    save_file({"model.a": torch.arange(6.0), "optim.a.m": torch.ones(2, 2)}, path / "model.safetensors")
    (path / "state.json").write_text(json.dumps({"step": 4}))
    return path


def test_one_flipped_bit_and_another_number_are_named(tmp_path: Path) -> None:
    a, b = _checkpoint(tmp_path / "a"), tmp_path / "b"
    shutil.copytree(a, b)
    names, size = verify_resume._compare(a, b)
    assert (set(names), all(names.values()), size) == ({"state.json", "model.a", "optim.a.m"}, True, 40)
    tensors = load_file(b / "model.safetensors")
    tensors["model.a"].view(torch.int32)[3] ^= 1
    save_file(tensors, b / "model.safetensors")
    (b / "state.json").write_text(json.dumps({"step": 5}))
    names, _ = verify_resume._compare(a, b)
    assert [name for name, same in names.items() if not same] == ["state.json", "model.a"]


@pytest.mark.slow
@pytest.mark.usefixtures("world")
def test_a_stage_is_proved_to_resume_to_the_bit() -> None:
    """The stage itself is not touched."""
    graph = load_graph(Path("grid.toml"), ["stage.base.duration='400 steps'"], RUNS)
    verdict = verify_resume.verify_resume(graph, "base", 31, 2, print)  # no multiple of the steps between saves
    assert (verdict.steps, verdict.differences, len(verdict.resumed_from)) == (31, [], 2)
    assert verdict.tensors > 10
    assert verdict.resumed_from[-1] > 0
    assert not graph.stage(graph.nodes["base"]).exists()
