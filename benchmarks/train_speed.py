"""Tokens per second of the whole training step (batch in memory to updated weights) at fixed shapes.

python benchmarks/train_speed.py [--seconds 8] [--precision auto|fp32|bf16] [--json]

Each shape is measured after two warm-up steps; the median step counts, with the tenth and ninetieth percentile beside
it. GFLOP/s are 6 N + 12 L d T per token, to be read against the matrix product measured in the same process.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from ingot.pipeline.run import ALLOCATOR

if not set(ALLOCATOR) <= set(os.environ):  # read once, when a process starts
    import sys

    os.execve(sys.executable, [sys.executable, *sys.argv], {**ALLOCATOR, **os.environ})

import numpy as np
import torch

from ingot.data.batches import Batch
from ingot.dist.mesh import Mesh
from ingot.model.settings import ModelSettings
from ingot.model.transformer import build
from ingot.objectives.lm import LanguageModel
from ingot.optim.schedule import Schedule
from ingot.optim.settings import OptimSettings
from ingot.plan.flops import training_flops_per_token
from ingot.train.engine import Engine, Plan
from ingot.train.execution import choose
from ingot.train.settings import LoopSettings

SHAPES = {
    # name: vocab, depth, width, heads, context, rows
    "S1": (65, 4, 128, 4, 64, 64),
    "S2": (65, 4, 128, 4, 64, 12),
    "S3": (65, 6, 384, 6, 256, 16),
}


def measure(step: Callable[[], object], seconds: float) -> list[float]:
    """Durations of steps for about that many seconds, at least five."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def shape(name: str, precision: str, seconds: float) -> dict[str, float | str | int]:
    """One shape's figures."""
    vocab, depth, width, heads, context, rows = SHAPES[name]
    config = ModelSettings(depth=depth, width=width, heads=heads, context=context, tied=True).resolve(vocab)
    loop = LoopSettings()
    execution = choose(loop, precision, context, rows)  # type: ignore[arg-type]
    plan = Plan(10**6, 1, Schedule("constant", 1e-3, 0, 0, 1), OptimSettings(), loop, 10**6)
    model = build(config, seed=1, device=execution.device)
    engine = Engine(model, LanguageModel(), plan, execution, Mesh(), Path("."))
    draw = np.random.default_rng(0)
    ids, labels = draw.integers(0, vocab, (2, rows, context))
    positions = np.broadcast_to(np.arange(context), ids.shape).copy()
    batch = Batch(ids, labels, positions, None, np.zeros(rows, np.int64), np.arange(rows))

    def step() -> float:
        return float(engine.step(batch).loss)

    measure(step, 0)
    times = sorted(measure(step, seconds))
    middle = statistics.median(times)
    tokens = rows * context
    return {
        "shape": name,
        "precision": execution.precision,
        "tok_s": round(tokens / middle),
        "step_ms": round(1000 * middle, 2),
        "p10_ms": round(1000 * times[len(times) // 10], 2),
        "p90_ms": round(1000 * times[len(times) * 9 // 10], 2),
        "steps": len(times),
        "gflop_s": round(training_flops_per_token(config) * tokens / middle / 1e9, 1),
        "gemm_gflop_s": round(_gemm(torch.bfloat16 if execution.precision == "bf16" else torch.float32)),
    }


def _gemm(dtype: torch.dtype) -> float:
    a, b = torch.randn(2, 2048, 2048).to(dtype)
    return 2 * 2048**3 / min(measure(lambda: a @ b, 0.5)) / 1e9


def main() -> None:
    """Measure all shapes and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for name in SHAPES:
        rows.append(shape(name, arguments.precision, arguments.seconds))
        if not arguments.json:
            print("  ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
    if arguments.json:
        print(json.dumps({"shapes": {str(r["shape"]): r for r in rows}}, indent=1))


if __name__ == "__main__":
    main()
