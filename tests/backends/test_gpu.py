"""Training on a GPU: the numbers of a CPU, replayed updates, and no waits for the device. Skipped without a GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ingot.backends.compiled import CompiledBackend
from ingot.backends.cuda import CUDABackend
from ingot.data.batches import Batch
from ingot.model.backend import Backend
from ingot.optim.schedule import Schedule
from ingot.train.engine import Engine
from tests.backends.training import engine, rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE, VOCAB = (4, 128), 1003


def _batch(step: int, isolated: bool = False) -> Batch:
    return rows(step, SHAPE, VOCAB, documents=3, unlabelled=0.3) if isolated else rows(step, SHAPE, VOCAB)


def _engine(backend: str, device: str = "cuda", precision: str = "bf16", family: str = "llama") -> Engine:
    """With the named backend: "torch", "cuda", or blocks compiled as a "whole" or one by one ("blocks")."""
    backends = {
        "torch": Backend,
        "cuda": CUDABackend,
        "whole": lambda: CompiledBackend(CUDABackend(), "cuda", 2, SHAPE),
        "blocks": lambda: CompiledBackend(CUDABackend(), "cuda", 99, SHAPE),
    }
    settings = {"width": 128, "heads": 2, "kv_heads": 2, "context": SHAPE[1], "family": family, "ffn": 384}
    return engine(backends[backend](), device, precision, cuda_graphs=device == "cuda", vocab=VOCAB, **settings)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("isolated", [False, True])
def test_the_same_numbers_as_on_a_cpu(isolated: bool, family: str) -> None:
    exact = _engine("torch", "cpu", "fp32", family)
    expected = [exact.step(_batch(s, isolated)) for s in range(8)]
    for precision, backend, bound in (("fp32", "cuda", 1e-4), ("bf16", "cuda", 0.01), ("bf16", "whole", 0.01)):
        trained = _engine(backend, precision=precision, family=family)
        for step, right in enumerate(expected):
            found = trained.step(_batch(step, isolated))
            assert abs(float(found.loss) - float(right.loss)) < bound, (precision, backend, step)
            assert abs(float(found.grad_norm) / float(right.grad_norm) - 1) < 5 * bound, (precision, backend, step)


@pytest.mark.parametrize("backend", ["cuda", "blocks"])
def test_a_replayed_update_is_the_same_update(backend: str) -> None:
    """The learning rate is read each time; a batch of another shape is not replayed."""
    plain, replayed = (_engine(backend) for _ in range(2))
    plain._recorder = None
    for step in range(13):
        batch = _batch(step)
        batch = batch.take(np.arange(2)) if step == 9 else batch
        if step == 12:
            before = {name: p.clone() for name, p in replayed.trained.items()}
            replayed.plan = replace(replayed.plan, schedule=Schedule("constant", 0.0, 0, 0, 1))
        expected, found = plain.step(batch), replayed.step(batch)
        if step == 12:
            assert all(torch.equal(p, before[name]) for name, p in replayed.trained.items())
            break
        assert abs(float(expected.loss) - float(found.loss)) < 2e-3, step
        assert abs(float(expected.grad_norm) / float(found.grad_norm) - 1) < 2e-2, step
    assert replayed._recorder is not None
    assert replayed._recorder._recording is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", ["cuda", "whole"])
@pytest.mark.parametrize("isolated", [False, True])
def test_a_step_never_waits_for_the_device(backend: str, isolated: bool) -> None:
    """Batches go through pinned memory, and labels are counted on the host."""
    trained = _engine(backend)
    for step in range(6):
        trained.step(_batch(step, isolated))
    torch.cuda.set_sync_debug_mode("error")
    try:
        trained.step(_batch(3, isolated))
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()  # a control
    finally:
        torch.cuda.set_sync_debug_mode("default")
