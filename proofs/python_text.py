"""Python's own documentation as text for proofs, and small models trained on it.

Shapes: B rows, T positions.
"""

import functools
import hashlib

import numpy as np

from ingot.corpus.readers.python_library import docs_texts, library_files
from ingot.data.batches import Batch
from ingot.model.transformer import Transformer
from ingot.objectives.lm import LanguageModel
from proofs.worlds import engine, model

ROWS, MIN_WORDS = 12, 40
"""Rows of a step, and words of the shortest documents."""


@functools.cache
def documents() -> list[str]:
    """Documents of some length, in an order that does not depend on the machine's files."""
    texts = {text for group, file in library_files() for text, _ in docs_texts(file, group)}
    return sorted((t for t in texts if len(t.split()) >= MIN_WORDS), key=lambda t: hashlib.md5(t.encode()).digest())


def learn(stream: np.ndarray, vocab: int, context: int, width: int, seed: int, steps: int) -> Transformer:
    """A model trained on random windows of a stream of ids."""
    draw = np.random.default_rng([seed, 1])
    trained = model(vocab, context, seed, width=width)
    learner = engine(trained, LanguageModel(), steps, 3e-3, seed, warmup=steps // 20)
    for _ in range(steps):
        learner.step(windows(stream, draw.integers(0, len(stream) - context - 1, ROWS), context))
    return trained


def windows(stream: np.ndarray, starts_B: np.ndarray, context: int) -> Batch:
    """Rows of a stream of ids, each id labelled with the next one."""
    ids = stream[starts_B[:, None] + np.arange(context + 1)]
    positions, row_B = np.broadcast_to(np.arange(context), (len(ids), context)).copy(), np.arange(len(ids))
    return Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), positions, None, np.zeros_like(row_B), row_B)
