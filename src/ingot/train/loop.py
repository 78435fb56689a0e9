"""A run from its first step to its last: train, log, evaluate, save.

A step never waits for the device. Its numbers stay there until a moment that may wait (twice a second, and before each
evaluation and checkpoint); then all of them are read in order, every gradient norm is checked, and the steps that are
due become log lines. So what is logged depends on the steps alone, not on when numbers were read.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from ingot.core.errors import UserError
from ingot.core.events import EventLog
from ingot.data.batches import Batch
from ingot.train import health
from ingot.train.engine import Engine
from ingot.train.metrics import StepMetrics

_READ_EVERY_S = 0.5
"""Seconds after which the numbers of steps are read again."""

Evaluation = Callable[[int, bool], dict[str, float]]
"""(step, all held-out rows?) -> flat numbers, among them val_ and the objective's best metric."""


def train(
    engine: Engine,
    batches: Iterator[Batch],
    evaluation: Evaluation,
    log: EventLog,
    progress: Callable[[StepMetrics, float], None],
    notify: Callable[[str], None] = lambda message: None,
) -> dict[str, float]:
    """Run the engine to the end of its plan.

    Args:
        progress: receives a step's numbers and tokens per second.
        notify: receives messages for people.

    Returns:
        The numbers of the final evaluation.

    Raises:
        UserError: the loss or a gradient became NaN or infinite; nothing was saved since.
    """
    if engine.state["step"] == 0:
        log.write("evaluation", step=0, **evaluation(0, False))
    run = _Run(engine, evaluation, log, progress, notify)
    with engine.signals:
        run.remaining(batches)
    rate = run.throughput.mean()
    run.evaluate()
    return {**evaluation(engine.plan.steps, True), **rate}


class _Run:
    """The steps of a run, and what is due after each."""

    def __init__(
        self,
        engine: Engine,
        evaluation: Evaluation,
        log: EventLog,
        progress: Callable[[StepMetrics, float], None],
        notify: Callable[[str], None],
    ):
        self.engine, self.evaluation, self.log, self.progress, self.notify = engine, evaluation, log, progress, notify
        self.metrics, self.throughput = MetricsBuffer(engine, log, notify), Throughput()
        self._saved_at = time.monotonic()

    def remaining(self, batches: Iterator[Batch]) -> None:
        """All steps that are left. A request to end is handled between two of them, when they are saved."""
        saved = self.engine.saved
        try:
            if self._evaluation_due():  # one that was interrupted
                self.evaluate()
            for raw in batches:
                self.engine.signals.check()
                self.step(raw)
        except KeyboardInterrupt:
            if saved.unsaved:
                self.save()
                self.notify(f"saved after step {saved.saved_step:,}")
            raise

    def step(self, raw: Batch) -> None:
        """One step, and what is due after it."""
        plan, loop = self.engine.plan, self.engine.plan.loop
        try:
            step = self.engine.step(raw)
        except UserError:
            self.metrics.write(self.throughput.recent)  # so that the log has the steps before
            raise
        self.metrics.add(step)
        self.throughput.add(step.tokens)
        late = time.monotonic() - self._saved_at > 60 * loop.save_minutes
        saves = late or step.step == plan.steps or step.step % loop.save_every == 0
        if self.throughput.due() or self._evaluation_due() or saves:
            self.metrics.write(self.throughput.recent)
            self.progress(step, self.throughput.recent())
        if self._evaluation_due():
            with self.throughput.paused():
                self.evaluate()
        if saves:
            self.save()

    def _evaluation_due(self) -> bool:
        """Whether an evaluation is due after this step; the last step's is made at the end."""
        plan, state = self.engine.plan, self.engine.state
        return state["evaluated"] < state["step"] < plan.steps and state["step"] % plan.evaluate_every == 0

    def evaluate(self) -> None:
        """Evaluate, and save the weights if they are the best so far."""
        update_best(self.engine, self.evaluation(self.engine.state["step"], False), self.log)

    def save(self) -> None:
        """Write a checkpoint, of steps whose numbers were all checked."""
        self.metrics.write(self.throughput.recent)
        with self.throughput.paused():
            self.log.flush()
            self.engine.saved.save()
        self._saved_at = time.monotonic()


def update_best(engine: Engine, numbers: dict[str, float], log: EventLog) -> None:
    """Log an evaluation, and save the weights if its best metric is the best so far."""
    state, needs = engine.state, engine.objective.needs
    log.write("evaluation", step=state["step"], **numbers)
    best, now = state["best_val"], numbers.get(f"val_{needs.best_metric}", math.nan)  # none where nothing was scored
    better = best is None or (now > best if needs.higher_is_better else now < best)
    if math.isfinite(now) and better:
        state["best_step"], state["best_val"] = state["step"], now
        engine.saved.save_best()
    state["evaluated"] = state["step"]


class MetricsBuffer:
    """Numbers of steps that are still on the device, until they are read, checked and logged."""

    def __init__(self, engine: Engine, log: EventLog, notify: Callable[[str], None]):
        self._engine, self._log, self._notify = engine, log, notify
        self._pending: list[StepMetrics] = []

    def add(self, step: StepMetrics) -> None:
        self._pending.append(step)

    def write(self, rate: Callable[[], float]) -> None:
        """Read all that is pending: the one thing that waits for the device.

        Args:
            rate: tokens per second, called when the device is done.
        """
        read = [(m, float(m.loss), float(m.grad_norm)) for m in self._pending]
        tok_s = round(rate())
        for m, loss, norm in read:
            if m.skipped:
                self._log.write("skipped", step=m.step, loss_nats=loss, why="gradient overflow in fp16")
                continue
            self._check(m.step, norm)
            plan = self._engine.plan
            broken = not (math.isfinite(loss) and math.isfinite(norm))
            if broken or m.step in (1, plan.steps) or m.step % plan.loop.log_every == 0:
                others = {name: float(value) for name, value in m.others.items()}
                tokens = {"tokens": m.tokens, "tokens_seen": m.tokens_seen, "tok_s": tok_s}
                name = "loss_nats" if self._engine.objective.needs.best_metric == "loss_nats" else "loss"
                numbers = {name: loss, **others, "grad_norm": norm, "lr": m.lr, **tokens}
                self._log.write("step", step=m.step, **numbers, **plan.label(m.step))
            if broken:
                self._stop(m.step, loss, norm)
        self._pending.clear()

    def _check(self, step: int, norm: float) -> None:
        """Report a changed verdict on the run's health once: it is part of a checkpoint."""
        state, clip = self._engine.state, self._engine.plan.optim.clip
        before, state["health"] = state["health"]["now"], health.update(state["health"], norm, clip)
        now: health.Health = state["health"]["now"]
        if now != before:
            self._log.write("health", step=step, health=now)
            if now != "critical":  # which is followed by an error
                self._notify(f"step {step:,}: {now}, was {before}: {health.ADVICE[now]}")

    def _stop(self, step: int, loss: float, norm: float) -> None:
        """Stop before broken weights are saved; the checkpoints on disk are from before."""
        self._log.flush()
        raise UserError(
            f"step {step}: loss {loss}, gradient norm {norm}, expected finite numbers; "
            "lower optim.lr, or look at that batch with `ingot trace`"
        )


class Throughput:
    """Tokens per second of training alone (evaluation and saving excluded), and when to report next."""

    def __init__(self) -> None:
        self._read_at = self._reported_at = time.monotonic()
        self._first: float | None = None  # when the first step, which compiles, had ended
        self._since_read = self._since_first = 0
        self._rate = 0.0

    def add(self, tokens: int) -> None:
        """Another step."""
        self._since_read += tokens
        if self._first is None:
            self._first = time.monotonic()
        else:
            self._since_first += tokens

    def recent(self) -> float:
        """Since it was read before, if that is long enough ago."""
        now = time.monotonic()
        if now - self._read_at >= _READ_EVERY_S or not self._rate:
            self._rate = self._since_read / max(1e-9, now - self._read_at)
            self._read_at, self._since_read = now, 0
        return self._rate

    def mean(self) -> dict[str, int]:
        """Since the end of the first step; nothing where there were no others."""
        if self._first is None or not self._since_first:
            return {}
        return {"tok_s": round(self._since_first / max(1e-9, time.monotonic() - self._first))}

    def due(self) -> bool:
        now = time.monotonic()
        if now - self._reported_at < _READ_EVERY_S:
            return False
        self._reported_at = now
        return True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time that does not count."""
        began = time.monotonic()
        try:
            yield
        finally:
            waited = time.monotonic() - began
            self._read_at += waited
            self._first = self._first and self._first + waited
