"""A step on a GPU: the same numbers as on a CPU, and never waiting for the device. Skipped where there is none."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.data.batches import IGNORE, Batch
from ingot.distributed.mesh import Mesh
from ingot.model.config import ModelSettings
from ingot.model.transformer import build
from ingot.objectives.lm import LanguageModel
from ingot.optim.schedule import Schedule
from ingot.optim.settings import OptimSettings
from ingot.train.engine import Engine, Plan
from ingot.train.execution import Execution
from ingot.train.settings import LoopSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

B, T, VOCAB = 4, 128, 1003


def _batch(step: int, isolated: bool) -> Batch:
    rng = np.random.default_rng(step)
    ids, labels = rng.integers(VOCAB, size=(2, B, T))
    if isolated:
        labels[rng.random((B, T)) < 0.3] = IGNORE
    documents = np.sort(rng.integers(3, size=(B, T)), 1) if isolated else None
    positions = np.broadcast_to(np.arange(T), (B, T)).copy()
    return Batch(ids, labels, positions, documents, np.zeros(B, np.int64), np.arange(B))


def _engine(device: str, precision: str, compile: str, family: str = "llama") -> Engine:
    config = ModelSettings(depth=2, width=128, heads=2, context=T, family=family).resolve(VOCAB)
    execution = Execution(device, precision, 1, B, "as set", T, compile, replay=device == "cuda")
    plan = Plan(100, 1, Schedule("constant", 1e-3, 0, 0, 1), OptimSettings(), LoopSettings(), 100)
    return Engine(build(config, 1, device), LanguageModel(), plan, execution, Mesh(), Path("."))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("isolated", [False, True])
def test_the_same_numbers_as_on_a_cpu(isolated: bool, family: str) -> None:
    exact = _engine("cpu", "fp32", "", family)
    told = [exact.step(_batch(s, isolated)) for s in range(8)]
    for precision, compile, bound in (
        ("fp32", "", 1e-4),
        ("bf16", "", 0.01),
        ("bf16", "whole", 0.01),
        ("bf16", "blocks", 0.01),
    ):
        engine = _engine("cuda", precision, compile, family)
        for step, right in enumerate(told):
            found = engine.step(_batch(step, isolated))
            assert abs(float(found.loss) - float(right.loss)) < bound, (precision, compile, step)
            assert abs(float(found.grad_norm) / float(right.grad_norm) - 1) < 5 * bound, (precision, compile, step)


@pytest.mark.parametrize("compile", ["", "whole"])
def test_a_replayed_update_is_the_same_update(compile: str) -> None:
    """Rate by rate; a shape that is not the usual one is updated plainly in between."""
    plain, replayed = (_engine("cuda", "bf16", compile) for _ in range(2))
    plain._recorder = None
    for step in range(14):
        batch = _batch(step, False)
        batch = batch.take(np.arange(2)) if step == 9 else batch
        if step == 12:  # the rate is read anew each time
            before = {name: p.clone() for name, p in replayed.trained.items()}
            replayed.plan = replace(replayed.plan, schedule=Schedule("constant", 0.0, 0, 0, 1))
        told, found = plain.step(batch), replayed.step(batch)
        if step == 12:
            assert all(torch.equal(p, before[name]) for name, p in replayed.trained.items())
            break
        assert abs(float(told.loss) - float(found.loss)) < 2e-3, step
        assert abs(float(told.grad_norm) / float(found.grad_norm) - 1) < 2e-2, step
    assert replayed._recorder is not None
    assert replayed._recorder._recording is not None


@pytest.mark.parametrize("compile", ["", "whole"])
@pytest.mark.parametrize("isolated", [False, True])
def test_a_step_never_waits_for_the_device(compile: str, isolated: bool) -> None:
    engine = _engine("cuda", "bf16", compile)
    for step in range(6):
        engine.step(_batch(step, isolated))
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step(_batch(3, isolated))
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()  # what it would have raised
    finally:
        torch.cuda.set_sync_debug_mode("default")
