"""What the proofs are made of: small models, rows and prompts made by hand, and the product's engine around them.

Shapes: B rows, T positions, P pairs.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.data.batches import IGNORE, Batch, answered
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
"""Rows of a forward pass: more than any step here has."""


class Letters(Tokenizer):
    """Ids as characters; id 0 ends a text where `ends` says so."""

    kind = "letters"

    def __init__(self, vocab: int, ends: bool = True):
        self.vocab = vocab
        self.names, self.specials = ({"eos_token": "<|end|>"}, {"<|end|>": 0}) if ends else ({}, {})

    def decode_bytes(self, ids: Any) -> bytes:
        return "".join(chr(64 + i) for i in np.asarray(ids).tolist()).encode()

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(letter) - 64 for letter in text], np.uint32)

    def definition(self) -> dict[str, Any]:
        return {"type": self.kind, "vocab": self.vocab, "names": self.names}


def model(vocab: int, context: int, seed: int, depth: int = 2, width: int = 64, uniform: bool = False) -> Transformer:
    """A small model; a `uniform` one gives every token the same chance, exactly, since its head is 0."""
    settings = ModelSettings(depth=depth, width=width, heads=4, context=context, tied=False)
    made = build(settings.resolve(vocab), seed)
    if uniform:
        with torch.no_grad():
            made.head.weight.zero_()  # pyright: ignore
    return made


def frozen(of: Transformer) -> Transformer:
    """A copy that stays as it is."""
    return copy.deepcopy(of).eval().requires_grad_(False)


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
    """The product's engine, on this machine's CPU; it writes nothing."""
    schedule = Schedule("cosine", lr, lr / 10, warmup, steps)
    plan = Plan(steps, seed, schedule, OptimSettings(weight_decay=weight_decay), LoopSettings(), 10**9)
    penalties = Penalties((), (anchor,) if anchor else (), lambda: dict(model.named_parameters()))
    execution = Execution("cpu", precision, torch.get_num_threads(), ROWS, "a proof")
    nowhere = Path("nothing is written")
    return Engine(model, objective, plan, execution, Mesh(), nowhere, companions, penalties, tokenizer)


def prompts(ids: Sequence[Sequence[int]]) -> Batch:
    """Rows of one prompt each, padded on the right."""
    width = max(map(len, ids))
    padded = np.zeros((len(ids), width), np.int64)
    for row, prompt in enumerate(ids):
        padded[row, : len(prompt)] = prompt
    place = np.broadcast_to(np.arange(width), padded.shape).copy()
    rows, columns = np.arange(len(ids)), {"lengths_B": np.array([len(p) for p in ids])}
    return Batch(padded, np.full_like(padded, IGNORE), place, None, np.zeros_like(rows), rows, columns=columns)


def rows(prompt_ids: Sequence[Sequence[int]], answers: Sequence[Sequence[int] | np.ndarray], group: int = 1) -> Batch:
    """Prompts with their answers, which are labelled; of pairs (group 2) the chosen side first."""
    return replace(answered(prompts(prompt_ids), [np.asarray(a) for a in answers], 1), group=group)


@torch.no_grad()
def logits(of: Transformer, batch: Batch) -> torch.Tensor:
    """B x T x V."""
    there = batch.to("cpu")
    return of(there.ids_BT, positions_BT=there.positions_BT, documents_BT=there.documents_BT).logits


def chances(win: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Whether each comes true, given what it is worth against the other side: Bradley and Terry's labels."""
    return draw.random(len(win)) < 1 / (1 + np.exp(-win))
