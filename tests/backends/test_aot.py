"""Compiled ahead: the same step as the plain model's, by machine code that another process made and that is kept."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.backends import aot
from ingot.backends.aot import Ahead, Job
from ingot.backends.select import compiled
from ingot.core.errors import UserError
from ingot.model.adapter_config import AdapterSettings
from ingot.model.config import ModelConfig, ModelSettings
from ingot.model.lora import adapt
from ingot.model.transformer import build
from ingot.train.engine import Engine
from tests.imports import assert_not_imported
from tests.train.test_engine import _engine, _gradient, _ragged


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache for this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INGOT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield aot.cache() / "compiled"


def _programs(kept: Path) -> list[Path]:
    return sorted(path for path in kept.glob("*") if path.is_dir())


def _compiled(path: Path, what: Any, **more: Any) -> tuple[Engine, Engine]:
    batch, plain = _ragged(), _engine(path, "fp32")
    execution = replace(plain.execution, compile=what, micro_batch=len(batch), context=batch.context)
    return plain, Engine(plain.model, plain.objective, plain.plan, execution, plain.mesh, path, **more)


def test_D10_a_compiled_step_is_the_same_step_and_names_stay(kept: Path, tmp_path: Path) -> None:
    """Two blocks, alike, are one program; the process that made it, and every other, has no compiler in it."""
    said: list[str] = []
    batch = _ragged()
    plain, engine = _compiled(tmp_path, "blocks", say=said.append)
    before = _programs(kept)
    expected = _gradient(plain, batch)
    for _ in range(2):
        torch.testing.assert_close(_gradient(engine, batch), expected, rtol=1e-4, atol=1e-6)
    assert len(_programs(kept)) == len(before) + 1
    assert len(said) == 1
    assert said[0].startswith("compiling the model, once")
    assert engine.evaluate([batch]) == plain.evaluate([batch])
    assert engine.tensors().keys() == plain.tensors().keys()
    engine.step(batch)
    assert (_gradient(engine, batch) - expected).abs().max() > 1e-3, "weights that moved are not seen"


def test_what_is_kept_is_used_again_by_a_process_without_a_compiler(kept: Path, tmp_path: Path, monkeypatch) -> None:
    _, engine = _compiled(tmp_path, "blocks")
    loss = engine.step(_ragged()).loss.item()  # made by the test above, or here
    monkeypatch.setattr(aot, "_compile", None)
    _, again = _compiled(tmp_path, "blocks")
    assert again.step(_ragged()).loss.item() == loss
    code = (
        "import pathlib; from ingot.train import ahead; ahead._compile = None\n"
        "from tests.backends.test_aot import _compiled; from tests.train.test_engine import _ragged\n"
        f"_, engine = _compiled(pathlib.Path('nowhere'), 'blocks'); assert engine.step(_ragged()).loss.item() == {loss}"
    )
    assert_not_imported(code, "torch._dynamo", "torch._inductor.compile_fx", "sympy")


def test_what_was_damaged_on_disk_is_made_again(kept: Path, tmp_path: Path, monkeypatch) -> None:
    _, engine = _compiled(tmp_path, "blocks")
    loss = engine.step(_ragged()).loss.item()
    shutil.copytree(kept, tmp_path / "compiled")
    for library in tmp_path.rglob("*.so"):
        library.write_bytes(b"nothing")
    made: list[str] = []

    def again(directory: Path) -> None:
        made.append(directory.name.split(".")[1])
        shutil.copytree(kept / made[-1], directory, dirs_exist_ok=True)

    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    monkeypatch.setattr(aot, "_compile", again)
    _, engine = _compiled(tmp_path, "blocks")
    assert engine.step(_ragged()).loss.item() == loss
    assert len(made) == 1


def test_adapters_taps_and_documents_in_bf16(kept: Path) -> None:
    """Frozen weights get no gradient; a tap that is an input comes out; a mask is an input like others."""
    config = ModelSettings(depth=1, width=32, heads=2, context=12, qk_norm=True).resolve(32)
    model: Any = build(config, seed=1).train()
    adapt(model, AdapterSettings(rank=2, targets=("q", "down")), seed=1)
    ids = torch.arange(24).view(2, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    taps = frozenset(("hidden.0", "hidden.1", "attention.0"))
    found = []
    for forward in (model, compiled(model, "whole")):
        with torch.autocast("cpu", torch.bfloat16):
            out = forward(ids, documents_BT=documents, taps=taps)
        draw = torch.Generator().manual_seed(1)
        outputs = {"hidden": out.hidden, **out.taps}
        sum((x.float() * torch.randn(x.shape, generator=draw)).sum() for x in outputs.values()).backward()  # pyright: ignore[reportAttributeAccessIssue]
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({**outputs, **gradients})
        model.zero_grad(set_to_none=True)
    assert found[0].keys() == found[1].keys()
    assert any("lora" in name for name in found[0])
    assert not any("attention.k" in name for name in found[0])
    for name, expected in found[0].items():
        error = (found[1][name].double() - expected.double()).norm()
        assert error <= 0.03 * expected.double().norm(), (name, error)


def test_keys_gradients_in_bf16_where_gcc_makes_garbage_of_them(kept: Path) -> None:
    """Of this size torch's transpose is called by two kernels, which GCC 12.2 vectorizes wrongly if it is let."""
    model: Any = build(ModelSettings(depth=2, width=128, heads=4, context=64).resolve(65), seed=1)
    ids, found = torch.randint(65, (12, 64), generator=torch.Generator().manual_seed(1)), []
    for forward in (model, compiled(model, "whole")):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = forward(ids_BT=ids).hidden
        hidden.float().square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)
    for name, expected in found[0].items():
        assert (found[1][name] - expected).norm() <= 0.03 * expected.norm(), name


def _described(config: ModelConfig, *args: Any, threads: int = 1) -> bytes:
    return aot._pickled(Job(build(config, 1), "stack", args, None, threads, ()))


def test_a_program_is_known_by_what_was_traced_and_by_no_number() -> None:
    tree = ModelSettings(depth=1, width=16, heads=2, context=8).resolve(32)
    x = torch.zeros(2, 8, 16)
    one = _described(tree, x)
    assert _described(ModelConfig.model_validate(tree.model_dump()), torch.ones(2, 8, 16)) == one
    others = [
        _described(tree.model_copy(update={"norm_eps": 1e-3}), x),
        _described(tree, x, threads=2),
        _described(tree, x[:1]),
        _described(tree, x.bfloat16()),
        _described(tree, x.requires_grad_()),
    ]
    assert len({one, *others}) == 6
    assert len(one) < 20_000


def test_a_compiler_that_fails_is_told_of_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"loop\.compile: compiling the model failed \(.*\), expected a C\+\+ compiler"):
        Ahead(model)(torch.ones(1, 2))
    assert not _programs(tmp_path / "compiled")
    said: list[str] = []
    out = Ahead(model, say=said.append)(torch.ones(1, 2))
    assert torch.equal(out, model(torch.ones(1, 2)))
    assert said[-1].endswith("going on without, which is slower")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"file/compiled: Not a directory, expected .* INGOT_CACHE"):
        Ahead(torch.nn.Linear(2, 2))(torch.ones(1, 2))


def test_what_learns_nothing_is_not_compiled(monkeypatch) -> None:
    """Blocks below the first that an adapter changes."""
    monkeypatch.setattr(aot, "_compile", None)
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    assert torch.equal(Ahead(frozen)(torch.ones(1, 2)), frozen(torch.ones(1, 2)))


def test_the_one_that_was_not_used_for_longest_goes_first(tmp_path: Path, monkeypatch) -> None:
    kept: list[str] = []
    monkeypatch.setattr(aot, "KEPT", 2)
    monkeypatch.setattr(aot, "_compile", lambda directory: None)
    for day, name in enumerate("abc"):
        aot._make(tmp_path / name, b"", lambda text: None)
        os.utime(tmp_path / name, (day, day))
        kept = [path.name for path in _programs(tmp_path)]
    assert kept == ["b", "c"]
