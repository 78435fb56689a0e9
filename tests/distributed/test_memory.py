"""What ranks allocate and send, against the formulas of `ingot plan`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ingot.data.batches import Batch
from ingot.distributed import mesh as meshes
from ingot.distributed.mesh import Mesh
from ingot.model.config import ModelConfig, ModelSettings
from ingot.model.transformer import build
from ingot.objectives.lm import LanguageModel
from ingot.optim.schedule import Schedule
from ingot.optim.settings import OptimSettings
from ingot.plan.memory import state_bytes
from ingot.plan.sharding import sharded_state, wire_bytes
from ingot.stages.models.parts import shard_model
from ingot.train.engine import Engine, Plan
from ingot.train.execution import Execution
from ingot.train.settings import LoopSettings
from ingot.train.weights import BUCKET_ELEMENTS
from tests.distributed.ranks import Peak, on_ranks

RANKS, MICRO_BATCHES, BLOCKS, WIDTH, VOCAB, T = 4, 3, 8, 128, 256, 4


class Sent(TorchDispatchMode):
    """Bytes that ring algorithms send for the collectives of a step; scalars are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            tensors = [t for t in tree_flatten(args)[0] if isinstance(t, torch.Tensor)]
            largest = max((t.numel() * t.element_size() for t in tensors), default=0)
            group = next(torch.distributed.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            ring = (group.size() - 1) / group.size()
            times = 2 if "allreduce" in name else 1
            if largest > 64 and any(kind in name for kind in ("allreduce", "allgather", "reduce_scatter")):
                self.bytes += times * ring * largest
        return func(*args, **(kwargs or {}))


def _config() -> ModelConfig:
    return ModelSettings(depth=BLOCKS, width=WIDTH, heads=4, context=T, tied=True).resolve(VOCAB)


def _engine(mesh: Mesh, path: Path) -> Engine:
    model = build(_config(), 1)
    shard_model(model, mesh)
    plan = Plan(9, 1, Schedule("constant", 1e-3, 1e-4, 0, 9), OptimSettings(), LoopSettings(), 5)
    return Engine(model, LanguageModel(), plan, Execution("cpu", "fp32", 1, 1, "test", T), mesh, path)


def _batch() -> Batch:
    ids = np.random.default_rng(0).integers(0, VOCAB, (MICRO_BATCHES, T))
    place = np.broadcast_to(np.arange(T), ids.shape).copy()
    return Batch(ids, ids, place, None, np.zeros(MICRO_BATCHES, np.int64), np.arange(MICRO_BATCHES))


def _measure(watch: Any, mesh: Mesh, path: Path) -> int:
    """What `watch` finds in the second step, in which the moments exist."""
    engine = _engine(mesh, path)
    engine.step(_batch())
    with watch:
        for tensor in [*engine.weights.local.values(), *engine.training_state.tensors().values()]:
            getattr(tensor, "_local_tensor", tensor).view(-1)  # what exists before the step is alive in it
        engine.step(_batch())
    return round(watch.bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicate", "parts", "zero"),
    [
        *(pytest.param(1, 4, zero, marks=pytest.mark.long) for zero in (1, 2, 3)),
        *((2, 2, 1), (2, 2, 2), (2, 2, 3), (4, 1, 3)),
    ],
)
def test_D11_ranks_allocate_and_send_what_the_plan_says(replicate: int, parts: int, zero: int, tmp_path: Path) -> None:
    """Replicas also hold the bucket of gradients that they sum; replicated groups sums on their way, not counted."""
    torch.set_num_threads(1)
    config = _config()
    modules = config.parameters_by_module()
    rest = 1 - (modules["attention"] + modules["feed-forward"]) / config.parameters
    whole = state_bytes(config.parameters)
    memory = sharded_state(whole, BLOCKS, rest, parts, zero).total
    memory += min(whole.gradients, 4 * BUCKET_ELEMENTS) if parts == 1 else 0
    wire = wire_bytes(whole.weights, whole.gradients, rest, replicate, parts, zero, MICRO_BATCHES)

    def rank(number: int) -> None:
        mesh = meshes.current(parts, zero)
        allocated, sent = _measure(Peak(), mesh, tmp_path), _measure(Sent(), mesh, tmp_path)
        if number == 0:
            found = f"memory {allocated / whole.weights:.3f} P, planned {memory / whole.weights:.3f}"
            print(f"{replicate} x {parts}, ZeRO-{zero}: {found}; sent {sent / wire:.4f} of the plan")
        assert sent == pytest.approx(wire, rel=0.05)
        if 1 in (replicate, parts):
            assert allocated == pytest.approx(memory, rel=0.1)

    on_ranks(RANKS, rank)
