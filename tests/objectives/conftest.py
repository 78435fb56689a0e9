"""Small pairs, and a run over them from a file to a reward model and a policy."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ingot.data.batches import Batch, Source, all_rows
from ingot.data.packing import OnePerRow

RECIPE = """
[run]
name = "prefs"
seed = 3

[stage.preferences]
kind = "corpus"
sources = ["pairs.jsonl"]
format = "pairs"
holdout = { fraction = 0.2 }

[stage.bpe]
kind = "tokenizer"
from = "preferences"
vocab = 300

[stage.base]
kind = "train"
data = { notes = 1.0 }
tokenizer = "bpe"
model = { depth = 2, width = 32, heads = 2, context = 48 }
batch = 8
duration = "5 steps"
precision = "fp32"
evaluate = { every = 5, tokens = 256, sample_tokens = 5 }
loop = { log_every = 1, threads = 1 }

[stage.notes]
kind = "corpus"
sources = ["notes.txt"]
holdout = { fraction = 0.2, by = "tail" }
quality = "none"

[stage.tuned]
kind = "train"
init = "base"
data = { preferences = 1.0 }
batch = 8
duration = "12 steps"
precision = "fp32"
objective = OBJECTIVE
optim = { lr = 3e-3, warmup = 2 }
evaluate = { every = 6, tokens = 512, sample_tokens = 5 }
loop = { log_every = 1, save_every = 5, threads = 1 }
"""
WORDS = ["cat", "dog", "hill", "sun", "mill", "red", "old", "sea"]


def make_work(path: Path, objective: str) -> Path:
    """A directory with `prefs.toml`, 80 pairs in which the polite answer was chosen, and a few notes."""
    draw = random.Random(0)
    with (path / "pairs.jsonl").open("w") as file:
        for i in range(80):
            word, other = draw.sample(WORDS, 2)
            chosen, rejected = f"please see the {word}", f"go away {other} {word}"
            file.write(json.dumps({"prompt": f"say {word} {i}", "chosen": chosen, "rejected": rejected}) + "\n")
    (path / "notes.txt").write_text("\n".join(" ".join(draw.choices(WORDS, k=12)) for _ in range(120)))
    (path / "prefs.toml").write_text(RECIPE.replace("OBJECTIVE", objective))
    return path


@pytest.fixture
def make_pairs(make_store) -> Callable[..., Batch]:
    """Pairs of (prompt, chosen, rejected) lists of ids -> one batch of all of them."""

    def make(pairs: list[tuple[list[int], list[int], list[int]]], vocab: int = 64) -> Batch:
        documents, masks = [], []
        for prompt, *sides in pairs:
            for side in sides:
                documents.append(prompt + side)
                masks.append([0] * len(prompt) + [1] * len(side))
        store = make_store(documents, masks=masks, vocab=vocab)
        (batch,) = all_rows(Source("pairs", store, OnePerRow(np.asarray(store.ends), 64, 2), isolate=False), 1000)
        return batch

    return make
