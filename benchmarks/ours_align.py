"""Our side of `python -m benchmarks align`: training steps with dpo, grpo and ppo, built as in a stage."""

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
from ingot.data.batches import IGNORE, Batch, append_answers
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
"""Code point of id 0. Each id is one character, so that the speed of a tokenizer is not measured."""
REWARD = f"""
def share(prompts, completions):
    return [text.count(chr({FIRST + 3})) / len(text) for text in completions]
"""


def align(job: dict[str, Any]) -> dict[str, Any]:
    """Repeated steps on one batch of pairs (dpo) or of prompts (grpo, ppo)."""
    config, method = ModelConfig.model_validate(job["config"]), job["method"]
    rows = 2 * job["pairs"] if method == "dpo" else job["rollouts"]
    batch = _batch(job)
    longest = batch.context if method == "dpo" else config.context
    tokenizer = Char("".join(map(chr, range(FIRST, FIRST + config.vocab))))
    engine = engine_for(job, _objective(job), rows, longest, _companions(config), tokenizer)
    execution = engine.execution
    if method == "dpo" and job.get("annotated", True):  # a stage writes these columns before training
        columns = {f"{name}_B": column.numpy() for name, column in engine.annotate(batch).items()}
        batch = replace(batch, columns={**batch.columns, **columns})
    clock, updates, running, tokens = Clock(job), _record_updates(engine.optimizer), True, 0
    while running:
        metrics = engine.step(batch)
        tokens, running = metrics.tokens, clock.tick(metrics.loss)
    result, updates_per_step = clock.result(), len(updates) / clock.steps
    return {
        **result,
        "losses": result["losses"] if method == "dpo" else [],
        "parameters": config.parameters,
        "updates": updates_per_step,
        "learned": tokens / updates_per_step,
        "peak_bytes": peak_bytes(),
        "precision": execution.precision,
        "execution": execution.summary(),
        "versions": versions(),
    }


def _record_updates(optimizer: Optimizer) -> list[float | Tensor]:
    """A list to which every future update of the optimizer appends its learning rate."""
    rates: list[float | Tensor] = []
    update = optimizer.step

    def step(
        lr: float | Tensor, clip: float = math.inf, norm: Tensor | None = None, skipped: Tensor | None = None
    ) -> None:
        update(lr, clip, norm, skipped)
        rates.append(lr)

    optimizer.step = step
    return rates


def _objective(job: dict[str, Any]) -> Objective:
    """The objective of the method; grpo uses a reward function in a file, ppo a reward model."""
    if job["method"] == "dpo":
        return Preference(PreferenceSettings())
    if job["method"] == "ppo":
        return PPO(PPOSettings(reward="rm", max_new=job["new"], epochs=job["epochs"]))
    file = Path(job["directory"]) / "reward.py"
    file.write_text(REWARD)
    return GRPO(GRPOSettings(reward=f"{file}:share", group=job["group"], max_new=job["new"]))


def _companions(config: ModelConfig) -> dict[str, nn.Module]:
    """A reference with the initial weights, and a reward model of the same shape."""
    reference = build(config, SEED).eval().requires_grad_(False)
    reward = RewardModel(build(config, SEED), RewardHead(config.width), 0.0, 1.0).eval().requires_grad_(False)
    return {"reference": reference, "reward": reward}


def _prompts(job: dict[str, Any], rows: int) -> Batch:
    """A batch with a prompt in each row."""
    ids_BT = np.array(questions(job, rows), np.int64)
    positions_BT = np.broadcast_to(np.arange(ids_BT.shape[1]), ids_BT.shape).copy()
    row_B, columns = np.arange(rows), {"lengths_B": np.full(rows, ids_BT.shape[1])}
    return Batch(ids_BT, np.full_like(ids_BT, IGNORE), positions_BT, None, np.zeros_like(row_B), row_B, columns=columns)


def _batch(job: dict[str, Any]) -> Batch:
    """The batch of a step: pairs for dpo, prompts for grpo and ppo."""
    if job["method"] == "dpo":
        answers = [np.array(side[job["prompt"] :]) for pair in preferences(job) for side in pair]
        return replace(append_answers(_prompts(job, job["pairs"]), answers, 2), group=2)
    return _prompts(job, job["rollouts"] // (job["group"] if job["method"] == "grpo" else 1))
