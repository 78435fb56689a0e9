"""`python -m benchmarks.distill`: what a teacher adds to the time and the memory of a training step.

The same student takes steps on the same rows: on labels alone, with stored predictions (k = 64), and beside a live
teacher of about four times its size. Each turn times all sides one after another, in an order that rotates, so other
load on the machine affects them alike; ratios are those within a turn. CPU time is that of one thread.

Peak memory is that of a process for each side. `full logits` has the loss of TRL's GKDTrainer: the logits of both
models for all positions, divided by the temperature, and their log-softmaxes in fp32 (`generalized_jsd_loss`, beta = 0,
trl 1.10), in the same engine, so that the loss is all that differs.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ours_engine import SEED, engine_for
from benchmarks.peers.common import peak_bytes
from ingot.data.batches import Batch
from ingot.model.config import ModelConfig, ModelSettings
from ingot.model.transformer import Transformer, build
from ingot.objectives.distill import IDS, LOGITS, Distill, tail_name
from ingot.objectives.lm import LanguageModel
from ingot.objectives.settings import DistillSettings
from ingot.train.divergences import most_likely
from ingot.train.engine import Engine
from ingot.train.objective import Context, Needs, Objective, Term

K = 64
SHAPES: dict[str, tuple[int, int, int, dict[str, Any], dict[str, Any]]] = {
    "D1": (2048, 4, 256, {"depth": 2, "width": 96, "heads": 4}, {"depth": 3, "width": 192, "heads": 4}),
    "D2": (8192, 4, 256, {"depth": 4, "width": 192, "heads": 4}, {"depth": 6, "width": 384, "heads": 6}),
    "D3": (32768, 4, 256, {"depth": 6, "width": 384, "heads": 6}, {"depth": 12, "width": 768, "heads": 12}),
}
"""Vocabulary, rows and context of a batch, student, teacher. D1 is the size of the recipe `distill-stdlib`."""


class FullLogits(Objective):
    """KL(teacher, student) from the complete logits of both."""

    needs = Needs()

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        with torch.no_grad():
            teacher = ctx.companions["teacher"](**batch.inputs)
            teacher_BTV = F.log_softmax(teacher.head(teacher.hidden) / 1.0, -1, dtype=torch.float32)
        student_BTV = F.log_softmax(out.head(out.hidden) / 1.0, -1, dtype=torch.float32)
        kl_BTV = F.kl_div(student_BTV, teacher_BTV, reduction="none", log_target=True)
        return {"lm": Term(kl_BTV[torch.as_tensor(batch.labels_BT != batch.ignore)].sum(), "token")}


SIDES: dict[str, Callable[[], Objective]] = {
    "labels": LanguageModel,
    "stored": lambda: Distill(DistillSettings(teacher="t", alpha=0.3)),
    "live": lambda: Distill(DistillSettings(teacher="t", alpha=0.3)),
    "full logits": FullLogits,
}


class Bench:
    """The models and the batch of a shape."""

    def __init__(self, shape: str, precision: str):
        self.vocab, self.rows, self.context, student, teacher = SHAPES[shape]
        self.precision = precision
        self.student, self.teacher = (self._config(sizes) for sizes in (student, teacher))
        ids_BL = np.random.default_rng(SEED).integers(0, self.vocab, (self.rows, self.context + 1))
        place_BT = np.broadcast_to(np.arange(self.context), (self.rows, self.context)).copy()
        row_B = np.arange(self.rows)
        self.batch = Batch(ids_BL[:, :-1].copy(), ids_BL[:, 1:].copy(), place_BT, None, np.zeros_like(row_B), row_B)

    def _config(self, sizes: dict[str, Any]) -> ModelConfig:
        return ModelSettings(context=self.context, tied=True, **sizes).resolve(self.vocab)

    def step(self, side: str) -> tuple[Engine, Callable[[], object]]:
        """An engine, and one of its steps on the side's batch."""
        companions = {"teacher": self._frozen()} if side in ("live", "full logits") else {}
        job = {"config": self.student.model_dump(), "precision": self.precision, "loop": {"threads": 1}}
        engine = engine_for(job, SIDES[side](), self.rows, self.context, companions)
        batch = self._annotated() if side == "stored" else self.batch
        return engine, lambda: float(engine.step(batch).loss)

    def teacher_forward(self, like: Engine) -> Callable[[], object]:
        """A forward pass of the live teacher as the engine runs it, with all logits."""
        teacher, batch = like.companions["teacher"], self.batch.to("cpu")

        @torch.no_grad()
        def forward() -> Tensor:
            with like.execution.forward():
                out = teacher(**batch.inputs)
                return out.head(out.hidden)

        return forward

    def _frozen(self) -> Transformer:
        return build(self.teacher, SEED).eval().requires_grad_(False)

    def _annotated(self) -> Batch:
        """The batch with predictions as columns: of random logits, as a teacher here would be part of the peak."""
        shape = self.rows, self.context
        draw = torch.Generator().manual_seed(SEED)
        rows = (most_likely(torch.randn(1, self.vocab, generator=draw), K, (1.0,)) for _ in range(math.prod(shape)))
        ids, logits, tail = map(torch.cat, zip(*rows, strict=True))
        columns = {
            f"{IDS}_BT": ids.view(*shape, K).numpy().astype("<u2"),
            f"{LOGITS}_BT": logits.view(*shape, K).numpy(),
            f"{tail_name(1.0)}_BT": tail.view(shape).numpy(),
        }
        return replace(self.batch, columns=columns)


def timed(bench: Bench, turns: int, seconds: float) -> Iterator[dict[str, tuple[float, float]]]:
    """CPU and wall seconds of a step of each side, and of the teacher's forward pass, in each turn."""
    engines = {side: bench.step(side) for side in ("labels", "stored", "live")}
    steps = {side: step for side, (_, step) in engines.items()}
    steps["forward"] = bench.teacher_forward(engines["live"][0])
    repeats = {}
    for side, step in steps.items():
        for _ in range(3):
            step()
        start = time.process_time()
        step()
        repeats[side] = max(1, round(seconds / (time.process_time() - start)))
    names = list(steps)
    for turn in range(turns):
        found = {}
        for side in names[turn % len(names) :] + names[: turn % len(names)]:
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(repeats[side]):
                steps[side]()
            n = repeats[side]
            found[side] = ((time.process_time() - cpu) / n, (time.perf_counter() - wall) / n)
        yield found


def profile(bench: Bench, side: str) -> None:
    """Print where the time of five steps goes."""
    _, step = bench.step(side)
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            step()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


def peak(shape: str, side: str, precision: str) -> int:
    """Peak memory in bytes of a process that takes three steps."""
    words = ["--shape", shape, "--precision", precision, "--memory-of", side]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.distill", *words], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated; default: all")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5, help="CPU time of a side in a turn")
    parser.add_argument("--precision", default="auto")
    parser.add_argument(
        "--memory", action="store_true", help="measure the peaks alone, which other load does not change"
    )
    parser.add_argument("--profile", choices=SIDES, help="print a profile of this side instead")
    parser.add_argument("--memory-of", choices=SIDES, help="print the peak of this process after three steps")
    options = parser.parse_args()
    for shape in options.shape or SHAPES:
        bench = Bench(shape, options.precision)
        if options.profile:
            profile(bench, options.profile)
        elif options.memory_of:
            _, step = bench.step(options.memory_of)
            for _ in range(3):
                step()
            print(peak_bytes())
        else:
            sizes = f"{bench.student.parameters / 1e6:.2f}M, teacher {bench.teacher.parameters / 1e6:.2f}M"
            print(f"{shape}: student {sizes}, vocabulary {bench.vocab:,}, {bench.rows} x {bench.context} tokens")
            if not options.memory:
                report_times(bench, options)
            peaks = {side: peak(shape, side, options.precision) / 1e6 for side in SIDES}
            print("  peak memory: " + ", ".join(f"{side} {x:,.0f} MB" for side, x in peaks.items()), flush=True)


def report_times(bench: Bench, options: argparse.Namespace) -> None:
    """Print a line for each clock."""
    turns = list(timed(bench, options.turns, options.seconds))
    for clock, name in enumerate(("CPU", "wall")):
        s = {side: [turn[side][clock] for turn in turns] for side in turns[0]}
        stored = [b / a for a, b in zip(s["labels"], s["stored"], strict=True)]
        live = [c / (a + f) for a, c, f in zip(s["labels"], s["live"], s["forward"], strict=True)]
        medians = ", ".join(f"{side} {1e3 * statistics.median(x):.1f} ms" for side, x in s.items())
        print(f"  {name}: {medians}; stored / labels {spread(stored)}, live / (labels + forward) {spread(live)}")


def spread(ratios: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, n = {len(ratios)})"


if __name__ == "__main__":
    main()
