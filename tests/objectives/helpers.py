"""Batches of pairs and engines over them, in fp64."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ingot.data.batches import IGNORE, Batch
from ingot.distributed.mesh import Mesh
from ingot.model.config import ModelSettings
from ingot.model.transformer import Transformer, build
from ingot.optim.settings import OptimSettings
from ingot.train.engine import Engine, Plan
from ingot.train.execution import Execution
from ingot.train.objective import Objective
from ingot.train.settings import LoopSettings

V, T = 24, 16


def model(seed: int = 1, precision: str = "fp64") -> Transformer:
    shape = ModelSettings(depth=2, width=32, heads=2, context=T).resolve(V)
    return build(shape, seed, dtype=torch.float64 if precision == "fp64" else torch.float32)


def pairs(count: int = 8, seed: int = 0, column: bool = False) -> Batch:
    """Ragged pairs: prompts of 1 to 4 tokens, answers of 1 to 9; with a made-up column of what a reference says."""
    draw = np.random.default_rng(seed)
    ids, labels = np.zeros((2 * count, T), np.int64), np.full((2 * count, T), IGNORE)
    lengths = np.zeros(2 * count, np.int64)
    for pair in range(count):
        prompt = draw.integers(1, V, draw.integers(1, 5))
        for row in (2 * pair, 2 * pair + 1):
            document = np.concatenate([prompt, draw.integers(1, V, draw.integers(1, 10))])
            n = lengths[row] = len(document)
            ids[row, :n] = document
            labels[row, len(prompt) - 1 : n - 1] = document[len(prompt) :]
    columns: dict[str, np.ndarray] = {"lengths_B": lengths}
    if column:
        columns["reference_logps_B"] = draw.normal(-8, 2, 2 * count)
    place = np.broadcast_to(np.arange(T), ids.shape).copy()
    rows = np.arange(2 * count) // 2
    return Batch(ids, labels, place, None, np.zeros_like(rows), rows, columns=columns, group=2)


@dataclass(frozen=True)
class _Constant:
    peak: float

    def lr(self, step: int) -> float:
        return self.peak


def engine(
    directory: Path,
    objective: Objective,
    precision: str = "fp64",
    micro: int = 4,
    companions: dict[str, torch.nn.Module] | None = None,
    steps: int = 10,
    lr: float = 1e-2,
    replay: Objective | None = None,
) -> Engine:
    plan = Plan(steps, 1, _Constant(lr), OptimSettings(lr=lr, clip=1e9), LoopSettings(), 100)
    execution = Execution("cpu", precision, 1, micro, "as set", T)
    return Engine(model(1, precision), objective, plan, execution, Mesh(), directory, companions, replay=replay)


def gradient(engine: Engine, batch: Batch) -> torch.Tensor:
    """The gradient of a whole step's batch, as one vector."""
    engine.gradients(batch)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in engine.trained.values()]
    return torch.cat([g.flatten() for g in grads]).clone()


def rows(batch: Batch, keep: np.ndarray) -> Batch:
    """Some rows of a batch."""
    return batch._map(lambda array: array[keep])
