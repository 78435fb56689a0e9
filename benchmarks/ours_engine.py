"""The training engine for our side of a measurement, built as in a stage."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.peers.common import BETAS, CLIP, EPS, LR, WEIGHT_DECAY
from ingot.distributed.mesh import Mesh
from ingot.model.config import ModelConfig
from ingot.model.transformer import Transformer, build
from ingot.optim.schedule import Schedule
from ingot.optim.settings import OptimSettings
from ingot.stages.models.backend import backend_for
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train.engine import Engine, Plan
from ingot.train.execution import choose
from ingot.train.objective import Objective
from ingot.train.settings import LoopSettings

SEED = 1
"""Seed of the initial weights of all contenders."""


def engine_for(
    job: dict[str, Any],
    objective: Objective,
    rows: int,
    longest: int,
    companions: Mapping[str, nn.Module] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Engine:
    """An engine with the peers' optimizer and a constant learning rate, without an end and without evaluations.

    Args:
        rows: rows of an update.
        longest: tokens of the longest row.
        companions: frozen models by role, on any device.
    """
    config = ModelConfig.model_validate(job["config"])
    loop = LoopSettings.model_validate(job.get("loop", {}))
    optim = OptimSettings(betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip=CLIP)
    plan = Plan(10**6, SEED, Schedule("constant", LR, 0, 0, 1), optim, loop, 10**6)
    execution = choose(loop, job["precision"], longest, rows)
    execution.prepare()
    model = build(config, SEED, dtype=execution.parameter_dtype).to(execution.device)
    model.checkpointing = loop.checkpointing
    model.backend = backend_for(
        model,
        execution.device,
        execution.product_dtype,
        name=execution.backend,
        training={"shape": execution.shape, "flops": math.inf},
    )
    execution = replace(execution, backend=model.backend.name)
    on_device = {name: companion.to(execution.device) for name, companion in (companions or {}).items()}
    for companion in on_device.values():  # as in stages/models/load.py
        for module in companion.modules():
            if isinstance(module, Transformer):
                module.backend = backend_for(module, execution.device, module.embedding.weight.dtype)
    return Engine(model, objective, plan, execution, Mesh(), Path("."), on_device, tokenizer=tokenizer)
