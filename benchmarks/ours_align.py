"""Our side of `python -m benchmarks align`: the engine's steps with dpo, grpo and ppo, as a stage makes them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from benchmarks.ours_engine import SEED, engine_for
from benchmarks.peers.common import (
    Clock,
    peak_bytes,
    preferences,
    questions,
    versions,
)
from ingot.data.batches import IGNORE, Batch, answered
from ingot.model.config import ModelConfig
from ingot.model.transformer import build
from ingot.objectives.grpo import GRPO
from ingot.objectives.on_policy_settings import GRPOSettings, PPOSettings
from ingot.objectives.ppo import PPO
from ingot.objectives.preference import Preference
from ingot.objectives.reward import RewardHead, RewardModel
from ingot.objectives.settings import PreferenceSettings
from ingot.optim.optimizers import Optimizer
from ingot.tokenizer.byte_bpe import Char
from ingot.train.objective import Objective

FIRST = 0x4E00
"""An id is a character from here on, so that no tokenizer's speed is measured."""
REWARD = f"""
def share(prompts, completions):
    return [text.count(chr({FIRST + 3})) / len(text) for text in completions]
"""


def align(job: dict[str, Any]) -> dict[str, Any]:
    """Steps on one batch of pairs (dpo) or of prompts (grpo, ppo)."""
    config, method = ModelConfig.model_validate(job["config"]), job["method"]
    rows = 2 * job["pairs"] if method == "dpo" else job["rollouts"]
    batch = _batch(job)
    longest = batch.context if method == "dpo" else config.context
    words = Char("".join(map(chr, range(FIRST, FIRST + config.vocab))))
    engine = engine_for(job, _objective(job), rows, longest, _companions(config), words)
    execution = engine.execution
    if method == "dpo" and job.get("annotated", True):  # as a stage does that will see every row
        columns = {f"{name}_B": column.numpy() for name, column in engine.annotate(batch).items()}
        batch = replace(batch, columns={**batch.columns, **columns})
    clock, updates, going, tokens = Clock(job), _counted(engine.optimizer), True, 0
    while going:
        metrics = engine.step(batch)
        tokens, going = metrics.tokens, clock.tick(metrics.loss)
    result, each = clock.result(), len(updates) / clock.steps
    return {
        **result,
        "losses": result["losses"] if method == "dpo" else [],
        "parameters": config.parameters,
        "updates": each,
        "learned": tokens / each,
        "peak_bytes": peak_bytes(),
        "precision": execution.precision,
        "execution": execution.line(),
        "versions": versions(),
    }


def _counted(optimizer: Optimizer) -> list[float | Tensor]:
    """A list that grows by the learning rate of every update from now on."""
    rates: list[float | Tensor] = []
    update = optimizer.step

    def step(lr: float | Tensor, clip: float = math.inf, norm: Tensor | None = None) -> None:
        update(lr, clip, norm)
        rates.append(lr)

    optimizer.step = step
    return rates


def _objective(job: dict[str, Any]) -> Objective:
    """As a recipe builds it; the reward of grpo is a function's in a file, that of ppo a reward model's."""
    if job["method"] == "dpo":
        return Preference(PreferenceSettings())
    if job["method"] == "ppo":
        return PPO(PPOSettings(reward="judge", max_new=job["new"], epochs=job["epochs"]))
    file = Path(job["directory"]) / "reward.py"
    file.write_text(REWARD)
    return GRPO(GRPOSettings(reward=f"{file}:share", group=job["group"], max_new=job["new"]))


def _companions(config: ModelConfig) -> dict[str, nn.Module]:
    """A reference, which is the model at its start, and a reward model of the same shape."""
    reference = build(config, SEED).eval().requires_grad_(False)
    judge = RewardModel(build(config, SEED), RewardHead(config.width), 0.0, 1.0).eval().requires_grad_(False)
    return {"reference": reference, "reward": judge}


def _prompts(job: dict[str, Any], rows: int) -> Batch:
    """Rows of one prompt each, as a store gives them."""
    ids_BT = np.array(questions(job, rows), np.int64)
    place_BT = np.broadcast_to(np.arange(ids_BT.shape[1]), ids_BT.shape).copy()
    row_B, columns = np.arange(rows), {"lengths_B": np.full(rows, ids_BT.shape[1])}
    return Batch(ids_BT, np.full_like(ids_BT, IGNORE), place_BT, None, np.zeros_like(row_B), row_B, columns=columns)


def _batch(job: dict[str, Any]) -> Batch:
    """What is drawn for a step."""
    if job["method"] == "dpo":
        answers = [np.array(side[job["prompt"] :]) for pair in preferences(job) for side in pair]
        return replace(answered(_prompts(job, job["pairs"]), answers, 2), group=2)
    return _prompts(job, job["rollouts"] // (job["group"] if job["method"] == "grpo" else 1))
