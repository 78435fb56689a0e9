"""Building blocks of the proofs: small models, rows and prompts from lists of ids, and the training engine.

Shapes: B rows, T positions, P pairs.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.data.batches import IGNORE, Batch, append_answers
from ingot.distributed.mesh import Mesh
from ingot.model.config import ModelSettings
from ingot.model.transformer import Transformer, build
from ingot.optim.grad_terms import Anchor
from ingot.optim.schedule import Schedule
from ingot.optim.settings import OptimSettings
from ingot.tokenizer.base import Tokenizer
from ingot.train.engine import Engine, Plan
from ingot.train.execution import Execution
from ingot.train.objective import Objective
from ingot.train.penalties import Penalties
from ingot.train.settings import LoopSettings

ROWS = 1024
"""Rows of a forward pass, more than any step of a proof has."""


class Letters(Tokenizer):
    """A tokenizer whose ids are letters; with `ends`, id 0 is the end of a text."""

    kind = "letters"

    def __init__(self, vocab: int, ends: bool = True):
        self.vocab = vocab
        self.special_tokens_map, self.specials = ({"eos_token": "<|end|>"}, {"<|end|>": 0}) if ends else ({}, {})

    def decode_bytes(self, ids: Any) -> bytes:
        return "".join(chr(64 + i) for i in np.asarray(ids).tolist()).encode()

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(letter) - 64 for letter in text], np.uint32)

    def definition(self) -> dict[str, Any]:
        return {"type": self.kind, "vocab": self.vocab, "names": self.special_tokens_map}


def model(vocab: int, context: int, seed: int, depth: int = 2, width: int = 64, uniform: bool = False) -> Transformer:
    """A small model; with `uniform` its head is 0, so every token has exactly the same probability."""
    settings = ModelSettings(depth=depth, width=width, heads=4, context=context, tied=False)
    transformer = build(settings.resolve(vocab), seed)
    if uniform:
        with torch.no_grad():
            transformer.head.weight.zero_()  # pyright: ignore
    return transformer


def frozen(model: Transformer) -> Transformer:
    """A frozen copy in evaluation mode."""
    return copy.deepcopy(model).eval().requires_grad_(False)


def engine(
    model: Transformer,
    objective: Objective,
    steps: int,
    lr: float,
    seed: int,
    *,
    companions: Mapping[str, torch.nn.Module] | None = None,
    tokenizer: Tokenizer | None = None,
    warmup: int = 0,
    anchor: Anchor | None = None,
    weight_decay: float = 0.0,
    precision: str = "fp32",
) -> Engine:
    """The training engine on the CPU; it writes no files."""
    schedule = Schedule("cosine", lr, lr / 10, warmup, steps)
    plan = Plan(steps, seed, schedule, OptimSettings(weight_decay=weight_decay), LoopSettings(), 10**9)
    penalties = Penalties((), (anchor,) if anchor else (), lambda: dict(model.named_parameters()))
    execution = Execution("cpu", precision, torch.get_num_threads(), ROWS, "a proof")
    unused = Path("nothing is written")
    return Engine(model, objective, plan, execution, Mesh(), unused, companions, penalties, tokenizer)


def prompts(ids: Sequence[Sequence[int]]) -> Batch:
    """A batch with a prompt in each row, padded on the right."""
    width = max(map(len, ids))
    padded = np.zeros((len(ids), width), np.int64)
    for row, prompt in enumerate(ids):
        padded[row, : len(prompt)] = prompt
    positions = np.broadcast_to(np.arange(width), padded.shape).copy()
    rows, columns = np.arange(len(ids)), {"lengths_B": np.array([len(p) for p in ids])}
    return Batch(padded, np.full_like(padded, IGNORE), positions, None, np.zeros_like(rows), rows, columns=columns)


def rows(prompt_ids: Sequence[Sequence[int]], answers: Sequence[Sequence[int] | np.ndarray], group: int = 1) -> Batch:
    """A batch of prompts with labelled answers; with `group` = 2 of pairs, the chosen answer first."""
    return replace(append_answers(prompts(prompt_ids), [np.asarray(a) for a in answers], 1), group=group)


@torch.no_grad()
def logits(model: Transformer, batch: Batch) -> torch.Tensor:
    """Logits of a batch, [B, T, V]."""
    tensors = batch.to("cpu")
    return model(tensors.ids_BT, positions_BT=tensors.positions_BT, documents_BT=tensors.documents_BT).logits


def bradley_terry_choices(margin_P: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Whether the first answer of each pair is chosen, bool: drawn with probability s(margin) (Bradley and Terry).

    Args:
        margin_P: reward of the first answer minus that of the second.
    """
    return draw.random(len(margin_P)) < 1 / (1 + np.exp(-margin_P))
