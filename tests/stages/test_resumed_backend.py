"""A run that is resumed on a machine without its backend."""

from types import SimpleNamespace

import pytest

from ingot.core.errors import UserError
from ingot.distributed.mesh import Mesh
from ingot.model.backend import TORCH
from ingot.model.config import ModelSettings
from ingot.model.transformer import build as build_model
from ingot.stages.training import build
from ingot.train.execution import Execution


def resumed(monkeypatch: pytest.MonkeyPatch, chosen: str, notices: list[str]) -> tuple[Execution, str]:
    """Select the backend of a run that started with `cpu`; this machine has PyTorch only."""

    def backend_for(model, device, dtype, *, name, **options):
        if name == "cpu":
            raise UserError("no C++ compiler")
        return TORCH

    monkeypatch.setattr(build, "backend_for", backend_for)
    model = build_model(ModelSettings(depth=1, width=8, heads=1, context=8).resolve(16), seed=1)
    execution = Execution("cpu", "fp32", 1, 2, "", 8, "cpu", False)
    job = SimpleNamespace(display=SimpleNamespace(notify=notices.append))
    settings = SimpleNamespace(loop=SimpleNamespace(backend=chosen), objective=SimpleNamespace(reads_layers=False))
    return build._select_backend(job, settings, model, execution, 1.0, Mesh()), model.backend.name  # type: ignore[arg-type]


def test_it_continues_with_another_backend_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    execution, used = resumed(monkeypatch, "auto", notices)
    assert execution.backend == used == "torch"
    assert [("cpu" in notice, "torch" in notice) for notice in notices] == [(True, True)]


def test_a_backend_that_the_recipe_names_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no C\\+\\+ compiler"):
        resumed(monkeypatch, "cpu", [])
