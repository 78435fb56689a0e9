"""`python -m benchmarks.guard`: what the checks for flipped bits add to a training step (`ingot/train/bit_flips.py`).

Every step is checked, whatever its size, so that its cost is seen by size. The checks are timed inside the steps, so
other load on the machine lengthens both; the fraction is the median over the steps. On a GPU each check is waited for.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.ours_engine import engine_for
from ingot.data.batches import Batch
from ingot.model.config import ModelSettings
from ingot.objectives.lm import LanguageModel
from ingot.train import bit_flips

SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "0.9M, 768 tokens": (65, 12, {"depth": 4, "width": 128, "heads": 4, "context": 64}),
    "0.9M, 4,096 tokens": (65, 64, {"depth": 4, "width": 128, "heads": 4, "context": 64}),
    "11M, 4,096 tokens": (65, 16, {"depth": 6, "width": 384, "heads": 6, "context": 256}),
    "124M, 4,096 tokens": (50_257, 4, {"family": "gpt2", "depth": 12, "context": 1024}),
}
"""Vocabulary, rows of a step, model."""


def measure(vocab: int, rows: int, settings: dict[str, Any], steps: int, device: str) -> dict[str, float]:
    """Milliseconds of a step and of its checks, and the fraction of the checks."""
    bit_flips.TOKENS_APART = dict.fromkeys(bit_flips.TOKENS_APART, 0)
    config = ModelSettings.model_validate(settings).resolve(vocab)
    job = {"config": config.model_dump(), "precision": "auto", "loop": {"device": device}}
    engine = engine_for(job, LanguageModel(), rows, config.context)
    shape = rows, config.context
    ids, labels = np.random.default_rng(0).integers(0, vocab, (2, *shape))
    positions = np.broadcast_to(np.arange(config.context), shape).copy()
    batch = Batch(ids, labels, positions, None, np.zeros(rows, np.int64), np.arange(rows))
    checks: list[float] = []

    def timed(function: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            start = _now()
            function()
            checks[-1] += _now() - start

        return call

    flips = engine.bit_flips
    flips.before_update, flips.after_update = timed(flips.before_update), timed(flips.after_update)
    whole = []
    for _ in range(steps + 2):
        checks.append(0.0)
        start = _now()
        engine.step(batch)
        whole.append(_now() - start)
    fractions = [a / b for a, b in zip(checks[2:], whole[2:], strict=True)]  # the first ones compile
    milliseconds = {"step_ms": 1e3 * statistics.median(whole[2:]), "checks_ms": 1e3 * statistics.median(checks[2:])}
    return {**milliseconds, "fraction": statistics.median(fractions)}


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    arguments = parser.parse_args()
    for name in arguments.shapes:
        found = measure(*SHAPES[name], arguments.steps, arguments.device)
        print(json.dumps({"shape": name, **{key: round(value, 5) for key, value in found.items()}}))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
