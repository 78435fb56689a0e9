"""Measures a train stage on this machine before it runs: `python -m ingot.stages.training.measure`, job on stdin.

The stage's own engine (model, adapter, optimizer, precision, backend, micro-batch) trains for a few steps on random
ids, so neither data nor initial weights are needed. A step of one micro-batch and one of two give the seconds of any
step (`plan/cost.py: update_seconds`). A micro-batch that would take longer than `MAX_MICRO_S` is measured with fewer
rows. Peak memory is that of all tensors, during a step that is not timed.
"""

import contextlib
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.core.errors import UserError, print_message
from ingot.data.batches import Batch
from ingot.distributed.mesh import Mesh
from ingot.infer.generate import generate
from ingot.infer.sampling import Sampling
from ingot.model import lora
from ingot.model.config import ModelConfig
from ingot.model.transformer import build
from ingot.optim.schedule import Schedule
from ingot.plan.cost import Speed, update_seconds
from ingot.stages.models.backend import backend_for
from ingot.stages.models.load import build_objective
from ingot.stages.training.settings import TrainSettings
from ingot.train.engine import Engine, Plan
from ingot.train.execution import choose
from ingot.train.gemm import gemm_flops
from ingot.train.settings import rows_per_pass

MAX_MICRO_S = 20.0
"""Seconds of the longest micro-batch that is measured with all of its rows."""
ENOUGH_S, MIN_REPEATS, MAX_REPEATS = 3.0, 3, 100
"""Repetitions of a step end after this many seconds, within these numbers of them."""
GEMM_S = 0.3
"""Seconds of the measurement of each kind of matrix product."""
SAMPLE_TOKENS = 2, 10
"""Lengths of the two samples from which the seconds of a sampled token follow."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Measurement:
    """What was measured."""

    speed: Speed
    peak_bytes: int
    """Most bytes of tensors during a step."""
    rows: int
    """Rows of the micro-batch that was measured: fewer than the stage's if these take too long or do not fit."""
    fits: int
    """Rows of the largest micro-batch that was tried and fits."""
    gemm_flops: float
    """FLOP/s of the fastest matrix product in the precision of the run."""
    execution: str


def measure(job: dict[str, Any], clock: Clock = time.time) -> Measurement:
    """Measure a stage.

    Args:
        job: settings, config (of the initial model), rows of a step, context, micro_batch, flops of the run, documents
            (whether attention is isolated), directory (on the disk of the run), largest (the largest micro-batch that
            the plan expects to fit, or 0 to try none), started (when the process was started, by `clock`).
        clock: seconds.
    """
    settings, config = TrainSettings.model_validate(job["settings"]), ModelConfig.model_validate(job["config"])
    with tempfile.TemporaryDirectory(prefix=".measure-", dir=job["directory"]) as directory:
        engine = make_engine(settings, config, job, Path(directory))
        make = random_batches(config.vocab, job["context"], job["documents"])
        built_s = clock() - job["started"]
        rows, first_s = _warm_up(engine, make, job["micro_batch"], clock)
        steps = job["rows"] / rows
        one_s = _repeat(lambda: _step(engine, make(rows)), clock)
        step_s = one_s
        if steps > 1:
            step_s = update_seconds(one_s, _repeat(lambda: _step(engine, make(2 * rows)), clock), steps)
        peak = tensor_peak(engine, lambda: engine.step(make(rows * (2 if steps > 1 else 1))))
        token_s = _token_seconds(engine, make, min(rows, rows_per_pass(job["context"])), clock)
        speed = Speed(
            step_s=step_s,
            token_s=token_s,
            sample_s=_sample_seconds(engine, settings, clock),
            byte_s=_save_seconds(engine, clock),
            start_s=built_s + max(0.0, first_s - one_s),
        )
        fits = max(rows, _largest(engine, make, job.get("largest", 0)))
        peak_flops = gemm_flops(engine.execution.product_dtype, GEMM_S)
        return Measurement(speed, peak, rows, fits, peak_flops, engine.execution.summary())


def make_engine(settings: TrainSettings, config: ModelConfig, job: dict[str, Any], directory: Path) -> Engine:
    """The stage's engine with random weights and a constant learning rate."""
    execution = choose(settings.loop, settings.precision, job["context"], job["rows"])
    execution = replace(execution, micro_batch=job["micro_batch"])
    execution.prepare()
    model = build(config, 0, dtype=execution.parameter_dtype)
    if settings.adapter:
        lora.add_adapters(model, settings.adapter, 0)
        lora.cast_frozen(model, execution.product_dtype)
    model.to(execution.device)
    model.checkpointing = settings.loop.checkpointing
    training = {"shape": execution.shape, "flops": job["flops"]}
    model.backend = backend_for(
        model,
        execution.device,
        execution.product_dtype,
        name=execution.backend,
        training=training,
        notify=print_message,
    )
    execution = replace(execution, backend=model.backend.name)
    plan = Plan(10**9, 0, Schedule("constant", 1e-5, 0, 0, 1), settings.optim, settings.loop, 10**9)
    return Engine(model, build_objective(settings.objective), plan, execution, Mesh(), directory)


def random_batches(vocab: int, context: int, documents: bool) -> Callable[[int], Batch]:
    """A function from a number of rows to a batch of random ids. With `documents`, each row has four of them."""
    random = np.random.default_rng(0)

    def make(rows: int) -> Batch:
        ids_BT = random.integers(vocab, size=(rows, context))
        position_T = np.arange(context)
        document_T = position_T * 4 // context
        if documents:
            position_T = position_T - np.searchsorted(document_T, document_T)
        return Batch(
            ids_BT,
            np.roll(ids_BT, -1, 1),
            np.broadcast_to(position_T, ids_BT.shape).copy(),
            np.broadcast_to(document_T, ids_BT.shape).copy() if documents else None,
            np.zeros(rows, np.int64),
            np.arange(rows),
        )

    return make


def _step(engine: Engine, batch: Batch) -> None:
    """A step, to its end also on a GPU."""
    engine.step(batch)
    _synchronize(engine)


def _synchronize(engine: Engine) -> None:
    if engine.execution.device == "cuda":
        torch.cuda.synchronize()


def _warm_up(engine: Engine, make: Callable[[int], Batch], rows: int, clock: Clock) -> tuple[int, float]:
    """Run a first step, which compiles, and choose the rows that are measured.

    Returns:
        The rows of a micro-batch, and the seconds of the first step of so many rows.

    Raises:
        UserError: a single row does not fit the device's memory.
    """
    start = clock()
    _step(engine, make(1))
    compile_s, start = clock() - start, clock()
    _step(engine, make(1))
    row_s = clock() - start
    rows = max(1, min(rows, math.floor(MAX_MICRO_S / max(row_s, 1e-9))))
    while True:
        engine.execution = engine.runner.execution = replace(engine.execution, micro_batch=rows)
        start = clock()
        try:
            _step(engine, make(rows))
            return rows, compile_s + clock() - start
        except torch.OutOfMemoryError:
            _free(engine)
            if rows == 1:
                raise UserError("a row does not fit the GPU's memory; take a smaller model or context") from None
            rows //= 2


def _repeat(call: Callable[[], object], clock: Clock) -> float:
    """The mean seconds of a call: a run's time is a sum, to which slow steps add all of theirs."""
    times: list[float] = []
    while len(times) < MIN_REPEATS or (sum(times) < ENOUGH_S and len(times) < MAX_REPEATS):
        start = clock()
        call()
        times.append(clock() - start)
        if times[0] > ENOUGH_S:
            break
    return statistics.fmean(times)


def tensor_peak(engine: Engine, call: Callable[[], object]) -> int:
    """Most bytes of tensors that exist at a time during a call: on a CPU from the profiler's events of torch's
    allocator. What is there before it are weights and the optimizer's moments."""
    if engine.execution.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        call()
        _synchronize(engine)
        return torch.cuda.max_memory_allocated()
    engine.weights.clear()
    gc.collect()  # garbage of earlier steps that is freed during the call would be taken off its peak
    held = [*engine.model.parameters(), *engine.model.buffers(), *engine.modules.parameters()]
    held += [*engine.optimizer.tensors().values(), *engine.average.tensors().values()]
    before = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with _silent_stderr(), profile as profiler:
        call()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = before
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        peak = max(peak, now)
    return peak


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Without what the profiler's C++ code writes to standard error."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _token_seconds(engine: Engine, make: Callable[[int], Batch], rows: int, clock: Clock) -> float:
    """Seconds of an evaluated token."""
    batch = make(rows)
    engine.evaluate([batch])
    return _repeat(lambda: engine.evaluate([batch]), clock) / batch.ids_BT.size


def _sample_seconds(engine: Engine, settings: TrainSettings, clock: Clock) -> float:
    """Seconds of a sample during training."""
    length = settings.evaluate.sample_tokens
    if settings.evaluate.sample is False or not engine.objective.needs.generates_text:
        return 0.0
    seconds = []
    for tokens in (SAMPLE_TOKENS[0], *SAMPLE_TOKENS):  # the first one compiles
        start = clock()
        with engine.eval_mode():
            generate(engine.model, [[0]], Sampling(max_new=tokens, temperature=0.8))  # type: ignore[arg-type]
        seconds.append(clock() - start)
    _, short_s, long_s = seconds
    token_s = max(0.0, long_s - short_s) / (SAMPLE_TOKENS[1] - SAMPLE_TOKENS[0])
    return short_s + (length - SAMPLE_TOKENS[0]) * token_s


def _save_seconds(engine: Engine, clock: Clock) -> float:
    """Seconds that training waits for each byte of a checkpoint."""
    start = clock()
    engine.training_state.save()
    seconds = clock() - start
    engine.training_state.finish_saving()
    return seconds / sum(t.untyped_storage().nbytes() for t in engine.training_state.tensors().values())


def _largest(engine: Engine, make: Callable[[int], Batch], rows: int) -> int:
    """Rows of the largest micro-batch, at most `rows`, whose forward and backward pass fit; 0 if none is tried."""
    while rows > 0:
        engine.execution = engine.runner.execution = replace(engine.execution, micro_batch=rows)
        try:
            engine.gradients(make(rows))
            _synchronize(engine)
            return rows
        except torch.OutOfMemoryError:
            _free(engine)
            rows = rows * 7 // 8
    return 0


def _free(engine: Engine) -> None:
    engine.weights.clear()
    torch.cuda.empty_cache()


def main() -> int:
    """Measure the job on standard input, and print the measurement as JSON."""
    try:
        print(json.dumps(asdict(measure(json.load(sys.stdin)))))
    except UserError as error:
        print_message(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
