"""Two tasks on strings of letters, distinguished by a tag: task A reverses the letters, task B sorts them.

A row is: tag, noise, letters, separator, answer, end. The noise is a predictable part of the prompt (each letter is one
or two after the last, so its entropy is ln 2 nats). A model that predicts it well was trained on prompts.

Shapes: B rows, T positions.
"""

import functools
from collections.abc import Mapping

import numpy as np
import torch

from ingot.data.batches import IGNORE, Batch
from ingot.infer.generate import generate
from ingot.infer.sampling import Sampling
from ingot.model.transformer import Transformer
from ingot.objectives.lm import LanguageModel
from ingot.optim.grad_terms import Anchor
from proofs.worlds import engine, logits, model, rows

REVERSE, SORT, SEPARATOR, FIRST = 1, 2, 3, 4
"""Ids: the tags of tasks A and B, the separator, the first letter."""
END = 0
LETTERS, NOISE = 16, 4
V = FIRST + LETTERS
SORT_CAPITALS, V_WITH_CAPITALS = -SORT, V + LETTERS
"""Task B with letters of its own, whose ids follow the others; and the number of ids with them."""
ROWS = 128
LENGTH, STEPS, FORGETTING_ROWS = 4, 400, 100
"""Letters, steps and rows per step in the proofs of forgetting."""
WRONG = 0.01
"""Fraction of wrong letters in the answers that `reverser` learns."""


def strings(task: int, n: int, length: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """n prompts and n answers (with their end) of a task, [n, ...] each."""
    tag, first = (SORT, V) if task == SORT_CAPITALS else (task, FIRST)
    start, hops = draw.integers(0, LETTERS, (n, 1)), draw.integers(1, 3, (n, NOISE))
    noise = first + (start + hops.cumsum(1)) % LETTERS
    letters = first + draw.integers(0, LETTERS, (n, length))
    answer = letters[:, ::-1] if task == REVERSE else np.sort(letters, 1)
    tags, separators, ends = (np.full((n, 1), id) for id in (tag, SEPARATOR, END))
    return np.concatenate([tags, noise, letters, separators], 1), np.concatenate([answer, ends], 1)


def batch(mix: Mapping[int, int], length: int, draw: np.random.Generator) -> Batch:
    """A batch of several tasks with labelled answers.

    Args:
        mix: task -> number of rows.
    """
    parts = [strings(task, n, length, draw) for task, n in mix.items()]
    return rows(np.concatenate([p for p, _ in parts]), np.concatenate([a for _, a in parts]))  # type: ignore[arg-type]


def learn(
    trained: Transformer,
    mix: Mapping[int, int],
    length: int,
    steps: int,
    seed: int,
    lr: float = 3e-3,
    warmup: int = 20,
    anchor: Anchor | None = None,
    wrong: float = 0.0,
    scrambled: bool = False,
    unmasked: bool = False,
) -> None:
    """Train a model on new rows of a mixture of tasks.

    Args:
        trained: the model, changed in place.
        mix: task -> rows per step.
        wrong: fraction of the answers' letters that are replaced by random ones.
        scrambled: give each row the answer of another row.
        unmasked: train on prompts too.
    """
    learner = engine(trained, LanguageModel(), steps, lr, seed, warmup=warmup, anchor=anchor)
    draw = np.random.default_rng([seed, 1])
    for _ in range(steps):
        rows = batch(mix, length, draw)
        if wrong:
            hit = (rows.labels_BT >= FIRST) & (draw.random(rows.labels_BT.shape) < wrong)
            rows.labels_BT[hit] = draw.integers(FIRST, V, hit.sum())
        if scrambled:
            answers = rows.labels_BT != IGNORE
            rows.labels_BT[answers] = np.roll(rows.labels_BT, 1, 0)[answers]
        if unmasked:
            rows.labels_BT[:, :-1] = rows.ids_BT[:, 1:]
        learner.step(rows)


@functools.cache
def reverser(seed: int, vocab: int = V) -> Transformer:
    """A model trained on task A, the start of the proofs of forgetting. It is cached: copy it before training.

    One letter in a hundred of its data is wrong, so it predicts each letter with probability .99 instead of becoming
    ever more confident with the number of steps. The model is wide, so that it has capacity for a second task: at width
    64 and depth 2 replay needs 300 to more than 1,200 steps (by seed) to recover task A.
    """
    trained = model(vocab, 24, seed, depth=3, width=128)
    learn(trained, {REVERSE: FORGETTING_ROWS}, LENGTH, STEPS, seed, lr=2e-3, warmup=100, wrong=WRONG)
    return trained


def score(model: Transformer, task: int, length: int, n: int = 1000) -> dict[str, float]:
    """Greedy answers to new prompts: the fraction that is exactly right, and the fraction that ends."""
    prompts, answers = strings(task, n, length, np.random.default_rng(99))
    sampling = Sampling(max_new=length + 3, temperature=0.0, stop=frozenset({END}))
    completions = [c.ids for c in generate(model, list(prompts), sampling)]
    right = [np.array_equal(c, a) for c, a in zip(completions, answers, strict=True)]
    return {"right": float(np.mean(right)), "ended": float(np.mean([c[-1] == END for c in completions]))}


def prompt_nll(model: Transformer, task: int, length: int, n: int = 1000) -> float:
    """Loss of the noise in nats per letter, without its first letter; ln 2 at best."""
    rows = batch({task: n}, length, np.random.default_rng(98))
    logp_BTV = logits(model, rows).log_softmax(-1)[:, 1:NOISE]
    return -float(logp_BTV.gather(-1, torch.from_numpy(rows.ids_BT[:, 2 : NOISE + 1])[..., None]).mean())
