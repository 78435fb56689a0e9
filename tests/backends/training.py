"""Engines and batches of small models that the tests of this directory train."""

from pathlib import Path
from typing import Any

import numpy as np

from ingot.data.batches import IGNORE, Batch
from ingot.distributed.mesh import Mesh
from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings
from ingot.model.backend import TORCH, Backend
from ingot.model.config import ModelSettings
from ingot.model.transformer import build
from ingot.objectives.lm import LanguageModel
from ingot.optim.schedule import Schedule
from ingot.optim.settings import OptimSettings
from ingot.train.engine import Engine, Plan
from ingot.train.execution import Execution
from ingot.train.settings import LoopSettings


def rows(
    step: int, shape: tuple[int, int] = (4, 24), vocab: int = 50, documents: int = 0, unlabelled: float = 0.0
) -> Batch:
    """A batch of random ids, different in every step."""
    draw = np.random.default_rng(step)
    ids, labels = draw.integers(vocab, size=(2, *shape))
    labels[draw.random(shape) < unlabelled] = IGNORE
    documents_BT = np.sort(draw.integers(documents, size=shape), 1) if documents else None
    positions_BT = np.broadcast_to(np.arange(shape[1]), shape).copy()
    return Batch(ids, labels, positions_BT, documents_BT, np.zeros(shape[0], np.int64), np.arange(shape[0]))


def engine(
    backend: Backend = TORCH,
    device: str = "cpu",
    precision: str = "fp32",
    micro: int = 4,
    cuda_graphs: bool = False,
    vocab: int = 50,
    adapter: AdapterSettings | None = None,
    **settings: Any,
) -> Engine:
    """An engine of a model of two blocks.

    Args:
        settings: of the model.
    """
    shape = {"depth": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "context": 24}
    config = ModelSettings(**{**shape, **settings}).resolve(vocab)
    execution = Execution(device, precision, 1, micro, "as set", config.context, cuda_graphs=cuda_graphs)
    model = build(config, 1, device, execution.parameter_dtype)
    model.backend = backend
    if adapter is not None:
        lora.add_adapters(model, adapter, 0)
    plan = Plan(100, 1, Schedule("constant", 1e-3, 0, 0, 1), OptimSettings(), LoopSettings(), 100)
    return Engine(model, LanguageModel(), plan, execution, Mesh(), Path("."))
