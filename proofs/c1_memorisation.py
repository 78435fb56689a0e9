"""C1: deduplication keeps a model from learning repeated sentences by heart.

The model reads words, so that a sentence is a few ids.
"""

import re

import numpy as np
import polars as pl

from ingot.corpus.dedup import fingerprints, squeeze
from ingot.infer.generate import generate
from ingot.infer.sampling import Sampling
from proofs.proof import Arm, Gate, Numbers, Proof
from proofs.python_text import documents, learn

PLANTED, REPEATS, WORDS, SHOWN = 50, 30, 10, 6
"""Planted sentences, how often each occurs, the words of each, and how many of these a model is shown."""
TEXT = 150_000
"""Characters of the text in which they are planted."""
CONTEXT, WIDTH, STEPS = 32, 64, 500


def run(seed: int, arm: str, steps: int = STEPS) -> Numbers:
    """Two models, of a text in which sentences are planted, and of the same text without repeated documents."""
    draw = np.random.default_rng([seed, 3])
    texts = [documents()[i] for i in draw.permutation(len(documents()))]
    texts = texts[: 1 + int(np.searchsorted(np.cumsum([len(text) for text in texts]), TEXT))]
    words = {word: number for number, word in enumerate(sorted({w for text in texts for w in _words(text)}), 1)}
    frequent = [word for word in words if len(word) > 3]
    sentences = [" ".join(draw.choice(frequent, WORDS)) for _ in range(PLANTED)]
    planted = texts + sentences * (1 if arm == "planted once" else REPEATS)
    keys = fingerprints(squeeze(pl.Series(planted)))
    first = sorted({key: number for number, key in reversed([*enumerate(keys)])}.values())
    completed = {}
    for name, part in (("without", planted), ("with", [planted[i] for i in first])):
        order = draw.permutation(len(part))
        stream = np.array([i for n in order for i in (0, *(words[w] for w in _words(part[n])))])
        trained = learn(stream, 1 + len(words), CONTEXT, WIDTH, seed, steps)
        prompts = [np.array([0, *(words[w] for w in _words(s))]) for s in sentences]
        sampling = Sampling(max_new=WORDS - SHOWN, temperature=0.0)
        found = generate(trained.eval(), [p[: 1 + SHOWN] for p in prompts], sampling)
        completed[name] = sum(np.array_equal(c.ids, p[1 + SHOWN :]) for c, p in zip(found, prompts, strict=True))
    ratio = completed["without"] / max(1, completed["with"])
    return {"ratio": ratio, "completed without": completed["without"], "completed with": completed["with"]}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


GATES = [Gate("ratio", low=3), Gate("completed without", low=25)]
PROOF = Proof(
    "C1",
    f"Of {PLANTED} sentences that occur {REPEATS} times each, a model trained without deduplication completes at least "
    "three times as many as one trained with it, after equally many words",
    "ratio 3 or more; of sentences that occur once, deduplication changes nothing",
    run,
    [
        Arm("planted 30 times", GATES),
        Arm("planted once", GATES, control=True),
    ],
)
