"""Two tasks on the same letters, told apart by a tag: A writes them backwards, B writes them sorted.

A row is tag, noise, letters, sign, answer, end. The noise is part of the prompt and easy to predict (each letter is one
or two after the last, ln 2 nats), so that a model that was trained on prompts gives itself away.

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

REVERSE, SORT, SIGN, FIRST = 1, 2, 3, 4
END = 0
LETTERS, NOISE = 16, 4
V = FIRST + LETTERS
SORT_CAPITALS, WITH_CAPITALS = -SORT, V + LETTERS
"""Task B with letters of its own, which come after the others; and how many ids there are with them."""
ROWS = 128
LENGTH, STEPS, SHOWN = 4, 400, 100
"""Letters, steps and rows of a step where an old task meets a new one."""
WRONG = 0.01


def strings(task: int, n: int, length: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and answers (with their end) of a task, B x ... each."""
    tag, first = (SORT, V) if task == SORT_CAPITALS else (task, FIRST)
    start, hops = draw.integers(0, LETTERS, (n, 1)), draw.integers(1, 3, (n, NOISE))
    noise = first + (start + hops.cumsum(1)) % LETTERS
    given = first + draw.integers(0, LETTERS, (n, length))
    answer = given[:, ::-1] if task == REVERSE else np.sort(given, 1)
    ends = [np.full((n, 1), id) for id in (tag, SIGN, END)]
    return np.concatenate([ends[0], noise, given, ends[1]], 1), np.concatenate([answer, ends[2]], 1)


def batch(mix: Mapping[int, int], length: int, draw: np.random.Generator) -> Batch:
    """So many rows of each task, answers labelled."""
    parts = [strings(task, n, length, draw) for task, n in mix.items()]
    return rows(np.concatenate([p for p, _ in parts]), np.concatenate([a for _, a in parts]))  # type: ignore[arg-type]


def learn(
    start: Transformer,
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
    """Train a model on fresh rows of a mixture of tasks.

    Args:
        wrong: the share of answers' letters that are replaced by any.
        scrambled: answers belong to other rows.
        unmasked: prompts are learned too.
    """
    made = engine(start, LanguageModel(), steps, lr, seed, warmup=warmup, anchor=anchor)
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
        made.step(rows)


@functools.cache
def reverser(seed: int, vocab: int = V) -> Transformer:
    """A model that has learned A, on which proofs of forgetting begin; not to be trained further, but copied.

    One letter in a hundred was wrong, so that it is as sure as .99 of every letter, not as sure as it has had steps. It
    is wide, since a new task finds a place beside the old one where there is room: at width 64 and depth 2 replay needs
    from 300 to more than 1,200 steps to bring back five letters, by the seed, as B's first steps wipe out A.
    """
    made = model(vocab, 24, seed, depth=3, width=128)
    learn(made, {REVERSE: SHOWN}, LENGTH, STEPS, seed, lr=2e-3, warmup=100, wrong=WRONG)
    return made


def score(model: Transformer, task: int, length: int, n: int = 1000) -> dict[str, float]:
    """Of new items, answered greedily: the share that is right to the end, and the share that ends where it should."""
    prompts, answers = strings(task, n, length, np.random.default_rng(99))
    sampling = Sampling(max_new=length + 3, temperature=0.0, stop=frozenset({END}))
    found = [c.ids for c in generate(model, list(prompts), sampling)]
    right = [np.array_equal(f, a) for f, a in zip(found, answers, strict=True)]
    return {"right": float(np.mean(right)), "ended": float(np.mean([f[-1] == END for f in found]))}


def prompt_nll(model: Transformer, task: int, length: int, n: int = 1000) -> float:
    """Nats a letter of the noise, which can be predicted to ln 2 but for its first."""
    rows = batch({task: n}, length, np.random.default_rng(98))
    logp_BTV = logits(model, rows).log_softmax(-1)[:, 1:NOISE]
    return -float(logp_BTV.gather(-1, torch.from_numpy(rows.ids_BT[:, 2 : NOISE + 1])[..., None]).mean())
