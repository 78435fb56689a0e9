"""A tiny policy, prompts made by hand, and engines around them."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.data.batches import Batch
from ingot.distributed.mesh import Mesh
from ingot.model.config import ModelSettings
from ingot.model.transformer import Transformer, build
from ingot.objectives.grpo import GRPO
from ingot.objectives.on_policy import OnPolicyObjective
from ingot.objectives.on_policy_settings import GRPOSettings, PPOSettings
from ingot.objectives.ppo import PPO
from ingot.optim.schedule import Schedule
from ingot.optim.settings import OptimSettings
from ingot.tokenizer.base import Tokenizer
from ingot.train.engine import Engine, Plan
from ingot.train.execution import Execution
from ingot.train.settings import LoopSettings

V, CONTEXT = 8, 24
STOP = 0


class Letters(Tokenizer):
    """Ids 1 to 7 are the letters a to g; 0 ends a text."""

    kind = "letters"
    vocab = V
    special_tokens_map = {"eos_token": "<|end|>"}  # noqa: RUF012
    specials = {"<|end|>": STOP}  # noqa: RUF012

    def decode_bytes(self, ids):
        return "".join("." if i == STOP else chr(96 + i) for i in np.asarray(ids).tolist()).encode()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32) - 96

    def definition(self):
        return {"type": self.kind}


class Endless(Letters):
    """No id ends a text."""

    special_tokens_map = {}  # noqa: RUF012
    specials = {}  # noqa: RUF012


def prompts(ids: Sequence[Sequence[int]], extra: Sequence[str | None] | None = None) -> Batch:
    """Rows of one prompt each, padded on the right, as a store of prompts gives them."""
    width = max(map(len, ids))
    padded = np.zeros((len(ids), width), np.int64)
    for row, prompt in enumerate(ids):
        padded[row, : len(prompt)] = prompt
    columns = {"lengths_B": np.array([len(p) for p in ids])}
    if extra is not None:
        columns["extra_B"] = np.array(extra, dtype=object)
    place = np.broadcast_to(np.arange(width), padded.shape).copy()
    rows = np.arange(len(ids))
    return Batch(padded, np.full_like(padded, -100), place, None, np.zeros_like(rows), rows, columns=columns)


def ragged_prompts(n: int = 16, seed: int = 0) -> Batch:
    draw = np.random.default_rng(seed)
    return prompts([draw.integers(1, V, draw.integers(1, 6)).tolist() for _ in range(n)])


def policy(seed: int = 3, dtype: torch.dtype = torch.float32, **settings: Any) -> Transformer:
    shape = {"depth": 1, "width": 32, "heads": 2, "context": CONTEXT, "tied": False, **settings}
    model = build(ModelSettings(**shape).resolve(V), seed=seed, dtype=dtype)
    with torch.no_grad():
        model.head.weight.mul_(20)  # far from uniform, so that nothing holds by accident
    return model


def ppo(**settings: Any) -> PPO:
    return PPO(PPOSettings(**{"reward": "judge", **settings}))


def grpo(**settings: Any) -> GRPO:
    return GRPO(GRPOSettings(**{"reward": "judge", **settings}))


def count_a(rollout, ctx) -> torch.Tensor:
    """The number of a's (id 1) in each completion."""
    return torch.tensor([float((c.ids == 1).sum()) for c in rollout.completions])


def play(
    objective: OnPolicyObjective,
    path: Path,
    model: Transformer | None = None,
    precision: str = "fp32",
    micro: int = 1024,
    steps: int = 20,
    lr: float = 1e-2,
    scorer: Any = count_a,
    reference: Transformer | None = None,
    tokenizer: Tokenizer | None = None,
    schedule: str = "constant",
    **loop: Any,
) -> Engine:
    """An engine; the reference is a copy of the model where none is given, the tokenizer `Letters`."""
    model = model or policy(dtype=torch.float64 if precision == "fp64" else torch.float32)
    reference = copy.deepcopy(reference or model).eval().requires_grad_(False)
    objective.scorer = scorer
    optim = OptimSettings(weight_decay=0.0)
    plan = Plan(steps, 1, Schedule(schedule, lr, lr / 10, 0, steps), optim, LoopSettings(**loop), 5)
    execution = Execution("cpu", precision, 1, micro, "test")
    return Engine(
        model, objective, plan, execution, Mesh(), path, {"reference": reference}, tokenizer=tokenizer or Letters()
    )
