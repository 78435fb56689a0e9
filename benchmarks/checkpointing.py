"""`python -m benchmarks.checkpointing`: memory and time of each mode of activation checkpointing.

Memory is the most bytes of tensors that a forward and backward pass of a micro-batch has at once, parameters and their
gradients aside; the same on every machine. Beside it stands what `ingot plan` says. Time is that of complete training
steps, as a ratio to `none`: each turn times all modes one after another, in an order that rotates, so other load on the
machine affects them alike, and ratios are those within a turn.
"""

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.ours_engine import SEED, engine_for
from benchmarks.shapes import SHAPES, Shape
from benchmarks.tensor_bytes import TensorBytes
from ingot.data.batches import Batch
from ingot.model.config import Checkpointing
from ingot.model.transformer import Transformer
from ingot.objectives.lm import LanguageModel
from ingot.plan.machine import Device
from ingot.report.terminal import print_rows
from ingot.stages.training.forecast import ForecastInputs, forecast
from ingot.stages.training.settings import TrainSettings
from ingot.train.engine import Engine

MODES: tuple[Checkpointing, ...] = ("none", "selective", "sqrt", "full")


class Bench:
    """A shape with a backend and a precision."""

    def __init__(self, shape: Shape, backend: str, precision: str, threads: int):
        self.shape, self.backend, self.precision, self.threads = shape, backend, precision, threads
        self.config = shape.config()
        ids_BL = np.random.default_rng(SEED).integers(0, shape.vocab, (shape.rows, shape.context + 1))
        place_BT = np.broadcast_to(np.arange(shape.context), (shape.rows, shape.context)).copy()
        row_B = np.arange(shape.rows)
        self.batch = Batch(ids_BL[:, :-1].copy(), ids_BL[:, 1:].copy(), place_BT, None, np.zeros_like(row_B), row_B)

    def loop(self, mode: Checkpointing) -> dict[str, object]:
        rows = self.shape.rows
        return {"threads": self.threads, "backend": self.backend, "checkpointing": mode, "micro_batch": rows}

    def engine(self, mode: Checkpointing) -> Engine:
        job = {"config": self.config.model_dump(), "precision": self.precision, "loop": self.loop(mode)}
        return engine_for(job, LanguageModel(), self.shape.rows, self.shape.context)

    def measured(self, engine: Engine) -> int:
        """Bytes of tensors in a micro-batch, without parameters and gradients."""
        model, rows = engine.model, self.batch.to(engine.execution.device)
        assert isinstance(model, Transformer)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with TensorBytes() as found:
            with engine.execution.forward():
                out = model(**rows.inputs)
                loss = out.head.nll(out.hidden.flatten(0, 1), torch.as_tensor(rows.labels_BT).flatten()).sum()
            del out
            loss.backward()
        return found.peak

    def planned(self, mode: Checkpointing, precision: str) -> int:
        """The same by `ingot plan`."""
        table = {
            "data": {"text": 1.0},
            "tokenizer": "t",
            "model": {"depth": 1},
            "duration": "100 steps",
            "batch": self.shape.rows,
            "precision": precision,
            "loop": self.loop(mode),
        }
        inputs = ForecastInputs(self.config, Device("CPU", 0))
        memory = forecast(TrainSettings.model_validate(table), inputs)["memory"]
        return sum(memory[name] for name in ("activations", "attention", "casts", "logits", "recomputed"))


def timed(engines: dict[Checkpointing, Engine], batch: Batch, turns: int, seconds: float) -> Iterator[dict]:
    """Wall seconds of a step of each mode, in each turn."""
    repeats = {}
    for mode, engine in engines.items():
        engine.step(batch)
        start = time.perf_counter()
        engine.step(batch)
        repeats[mode] = max(1, round(seconds / (time.perf_counter() - start)))
    modes = list(engines)
    for turn in range(turns):
        found = {}
        for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
            start = time.perf_counter()
            for _ in range(repeats[mode]):
                float(engines[mode].step(batch).loss)
            found[mode] = (time.perf_counter() - start) / repeats[mode]
        yield found


def rows(bench: Bench, turns: int, seconds: float) -> list[dict[str, str]]:
    """A table: a mode a row."""
    engines: dict[Checkpointing, Engine] = {mode: bench.engine(mode) for mode in MODES}
    turns_s = list(timed(engines, bench.batch, turns, seconds))
    table = []
    for mode, engine in engines.items():
        measured, planned = bench.measured(engine), bench.planned(mode, engine.execution.precision)
        ratios = [turn[mode] / turn["none"] for turn in turns_s]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        table.append(
            {
                "shape": f"{bench.shape.name}, {engine.execution.precision}",
                "backend": engine.execution.backend,
                "checkpointing": str(mode),
                "memory": f"{measured / 1e6:,.1f} MB",
                "plan / measured": f"{planned / measured:.3f}",
                "time / none": spread,
            }
        )
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated; default: S3")
    parser.add_argument("--backend", action="append", choices=("torch", "cpu", "compiled"), help="default: torch, cpu")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0, help="time of a mode in a turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    for shape in options.shape or ["S3"]:
        for backend in options.backend or ["torch", "cpu"]:
            bench = Bench(SHAPES[shape], backend, options.precision, options.threads)
            print_rows(rows(bench, options.turns, options.seconds))


if __name__ == "__main__":
    main()
