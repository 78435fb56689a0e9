"""A run from its first step to its last: train, log, judge, evaluate, save.

A step never waits for the device. Its numbers stay there until a moment that may wait (twice a second, and before each
evaluation and checkpoint), when all of them are read in order: every gradient norm is judged, and those steps that are
due become log lines. So what is logged depends on the steps alone, not on when somebody looked.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from ingot.core.errors import UserError
from ingot.core.events import EventLog
from ingot.data.batches import Batch
from ingot.train import guard
from ingot.train.engine import Engine
from ingot.train.metrics import StepMetrics

Evaluation = Callable[[int, bool], dict[str, float]]
"""(step, whole split?) -> flat numbers, among them the `val_` one that the objective is judged by; passed in by the
stage."""


def train(
    engine: Engine,
    batches: Iterator[Batch],
    evaluation: Evaluation,
    log: EventLog,
    progress: Callable[[StepMetrics, float], None],
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, float]:
    """Run the engine to the end of its plan. Returns the numbers of the final evaluation.

    Raises:
        UserError: the loss or a gradient became NaN or infinite; nothing was saved since.
    """
    plan, loop = engine.plan, engine.plan.loop
    if engine.state["step"] == 0:
        log.write("evaluation", step=0, **evaluation(0, False))
    journal = _Journal(engine, log, say)
    clock = _Clock()
    for raw in batches:
        try:
            metrics = engine.step(raw)
        except UserError:
            journal.write(clock.rate)  # which step broke what this one could not do
            raise
        step = metrics.step
        last = step == plan.steps
        journal.add(metrics)
        rate = clock.tick(metrics.tokens)
        if clock.due() or last:
            journal.write(rate)
            progress(metrics, rate)
        if not last and step % plan.evaluate_every == 0:
            with clock.paused():
                journal.write(rate)
                _note_best(engine, evaluation(step, False), log)
        if last or step % loop.save_every == 0:
            with clock.paused():
                journal.write(rate)
                log.flush()
                engine.save()
    _note_best(engine, evaluation(plan.steps, False), log)
    return {**evaluation(plan.steps, True), "tok_s": round(clock.rate)}


def _note_best(engine: Engine, numbers: dict[str, float], log: EventLog) -> None:
    state = engine.state
    log.write("evaluation", step=state["step"], **numbers)
    judged_by = engine.objective.judged_by
    best, now = state["best_val"], numbers.get(f"val_{judged_by}", math.nan)  # no reward where nothing was scored
    better = best is None or (now > best if judged_by == "reward" else now < best)
    if math.isfinite(now) and better:
        state["best_step"], state["best_val"] = state["step"], now
        engine.save_best()


class _Journal:
    """Steps whose numbers are still on the device, until they are read, judged and written down."""

    def __init__(self, engine: Engine, log: EventLog, say: Callable[[str], None]):
        self._engine, self._log, self._say = engine, log, say
        self._pending: list[StepMetrics] = []

    def add(self, metrics: StepMetrics) -> None:
        self._pending.append(metrics)

    def write(self, rate: float) -> None:
        """Read all that is pending: the one thing that waits for the device."""
        for m in self._pending:
            loss, norm = float(m.loss), float(m.grad_norm)
            if m.skipped:
                self._log.write("skipped", step=m.step, loss_nats=loss, why="gradient overflow in fp16")
                continue
            self._judge(m.step, norm)
            plan = self._engine.plan
            broken = not (math.isfinite(loss) and math.isfinite(norm))
            if broken or m.step in (1, plan.steps) or m.step % plan.loop.log_every == 0:
                others = {name: float(value) for name, value in m.others.items()}
                tokens = {"tokens": m.tokens, "tokens_seen": m.tokens_seen, "tok_s": round(rate)}
                name = "loss_nats" if self._engine.objective.judged_by == "loss_nats" else "loss"
                numbers = {name: loss, **others, "grad_norm": norm, "lr": m.lr, **tokens}
                self._log.write("step", step=m.step, **numbers, **plan.label(m.step))
            if broken:
                self._refuse(m.step, loss, norm)
        self._pending.clear()

    def _judge(self, step: int, norm: float) -> None:
        """Tell of a changed verdict, once: it is part of a checkpoint."""
        state, clip = self._engine.state, self._engine.plan.optim.clip
        before, state["health"] = state["health"]["now"], guard.watch(state["health"], norm, clip)
        now: guard.Health = state["health"]["now"]
        if now != before:
            self._log.write("health", step=step, health=now)
            if now != "critical":  # the error says it
                self._say(f"step {step:,}: {now}, was {before}: {guard.ADVICE[now]}")

    def _refuse(self, step: int, loss: float, norm: float) -> None:
        """Stop before broken weights are saved; the checkpoints on disk are from before the break."""
        self._log.flush()
        raise UserError(
            f"step {step}: loss {loss}, gradient norm {norm}, expected finite numbers; "
            "lower optim.lr, or look at that batch with `ingot trace`"
        )


class _Clock:
    """Tokens per second of training proper (evaluation and saving excluded), and when to speak next."""

    def __init__(self) -> None:
        self._start = self._spoke = time.monotonic()
        self._tokens = 0
        self.rate = 0.0

    def tick(self, tokens: int) -> float:
        self._tokens += tokens
        self.rate = self._tokens / max(1e-9, time.monotonic() - self._start)
        return self.rate

    def due(self) -> bool:
        now = time.monotonic()
        if now - self._spoke < 0.5:
            return False
        self._spoke = now
        return True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time that does not count."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._start += time.monotonic() - began
