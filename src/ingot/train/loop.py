"""The training loop: steps, logging, evaluations, checkpoints.

A step never waits for the device. Its metrics stay on the device until a synchronisation: twice a second, and before
each evaluation and checkpoint. Then all pending steps are read in order, every gradient norm is checked, and the steps
that are due are logged. So the log depends on the steps alone, not on the times of synchronisation.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from ingot.core.errors import UserError
from ingot.core.events import EventLog
from ingot.core.heartbeat import HEARTBEAT
from ingot.data.batches import Batch
from ingot.train import health
from ingot.train.engine import Engine
from ingot.train.metrics import StepMetrics
from ingot.train.throughput import Throughput, straggler

Evaluation = Callable[[int, bool], dict[str, float]]
"""(step, whether to use all validation rows) -> metrics by name, among them val_ + the objective's best metric."""
FIRST_SAVE = 30.0
"""Seconds until the first checkpoint; each later one is due after twice as long, up to `save_minutes`. So a short run
that is killed loses no more than about half of its work, and a long one saves only a few times more."""


def train(
    engine: Engine,
    batches: Iterator[Batch],
    evaluation: Evaluation,
    log: EventLog,
    progress: Callable[[StepMetrics, Throughput], None],
    notify: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Run the engine to the end of its plan.

    Args:
        progress: receives a step's metrics, and the run's speed and time left.
        notify: receives messages for the user.

    Returns:
        The metrics of the final evaluation, the mean tokens per second, and with several ranks the fraction of the time
        in which each waited for the others.

    Raises:
        UserError: the loss or a gradient became NaN or infinite. No checkpoint contains its effect.
    """
    run = _Run(engine, evaluation, log, progress, notify)
    if engine.state["step"] == 0:
        with run.throughput.paused("evaluation"):
            update_best(engine, evaluation(0, False), log)  # a run that gets worse keeps its start
    try:
        with engine.signals:
            run.run(batches)
    finally:
        engine.training_state.finish_saving()
    rate = run.throughput.mean()
    seconds, waited = run.throughput.waiting()
    waiting = engine.mesh.objects(round(waited / max(1e-9, seconds), 3))
    if sentence := straggler(waiting, seconds):
        notify(sentence)
    run.evaluate()
    final = evaluation(engine.plan.steps, True)
    log.write("final", step=engine.plan.steps, **final)  # `evaluation` events have the same names for fewer rows
    return {**final, **rate, **({"waiting": waiting} if len(waiting) > 1 else {})}


class _Run:
    """The steps of a run, and the logging, evaluations and checkpoints between them."""

    def __init__(
        self,
        engine: Engine,
        evaluation: Evaluation,
        log: EventLog,
        progress: Callable[[StepMetrics, Throughput], None],
        notify: Callable[[str], None],
    ):
        self.engine, self.evaluation, self.log, self.progress, self.notify = engine, evaluation, log, progress, notify
        self.throughput = Throughput(engine.plan)
        self.metrics = MetricsBuffer(engine, log, notify, self.throughput)
        self._saved_at, self._late = time.monotonic(), False
        self._save_after = FIRST_SAVE

    def run(self, batches: Iterator[Batch]) -> None:
        """Run all remaining steps. Signals are handled between steps: the run saves a checkpoint and ends."""
        state = self.engine.training_state
        try:
            if self._evaluation_due():  # the interrupted run did not finish it
                with self.throughput.paused("evaluation"):
                    self.evaluate()
            for raw in batches:
                longest = min(self._save_after, 60 * self.engine.plan.loop.save_minutes)
                (self._late,) = self.engine.signals.check(time.monotonic() - self._saved_at > longest)
                self.step(raw)
        except KeyboardInterrupt:
            if state.unsaved:
                self.save()
                state.finish_saving()
                self.notify(f"saved after step {state.saved_step:,}")
            raise

    def step(self, raw: Batch) -> None:
        """Run one step, and log, evaluate and save if due."""
        plan, loop = self.engine.plan, self.engine.plan.loop
        try:
            HEARTBEAT.move(self.engine.state["step"] + 1, "training")
            step = self.engine.step(raw)
        except UserError:
            self.metrics.write()  # log the steps before the failing one
            raise
        self.metrics.add(step)
        self.throughput.add(step.tokens)
        save_due = self._late or step.step == plan.steps or step.step % loop.save_every == 0
        if self.throughput.due() or self._evaluation_due() or save_due:
            self.metrics.write()
            self.progress(step, self.throughput)
        if self._evaluation_due():
            with self.throughput.paused("evaluation"):
                self.evaluate()
        if save_due:
            self.save()

    def _evaluation_due(self) -> bool:
        """Whether an evaluation is due after the current step; `train` evaluates after the last one."""
        plan, state = self.engine.plan, self.engine.state
        return state["evaluated"] < state["step"] < plan.steps and state["step"] % plan.evaluate_every == 0

    def evaluate(self) -> None:
        """Evaluate, and save the weights if they are the best so far."""
        update_best(self.engine, self.evaluation(self.engine.state["step"], False), self.log)

    def save(self) -> None:
        """Check and log all pending metrics, then write a checkpoint."""
        self.metrics.write()
        with self.throughput.paused("save"):
            self.log.flush()
            self.engine.training_state.save()
        self._saved_at = time.monotonic()
        self._save_after *= 2


def update_best(engine: Engine, numbers: dict[str, float], log: EventLog) -> None:
    """Log an evaluation, and save the weights if its best metric is the best so far."""
    state, needs = engine.state, engine.objective.needs
    log.write("evaluation", step=state["step"], **numbers)
    best = state["best_val"]
    value = numbers.get(f"val_{needs.best_metric}", math.nan)  # absent if no row could be scored
    better = best is None or (value > best if needs.higher_is_better else value < best)
    if math.isfinite(value) and better:
        state["best_step"], state["best_val"] = state["step"], value
        engine.training_state.save_best()
    state["evaluated"] = state["step"]


class MetricsBuffer:
    """Metrics of steps that are still on the device. `write` reads, checks and logs them."""

    def __init__(self, engine: Engine, log: EventLog, notify: Callable[[str], None], throughput: Throughput):
        self._engine, self._log, self._notify, self._throughput = engine, log, notify, throughput
        self._pending: list[StepMetrics] = []

    def add(self, step: StepMetrics) -> None:
        self._pending.append(step)

    def write(self) -> None:
        """Read, check and log all pending steps. Only this method waits for the device.

        Raises:
            UserError: a loss or a gradient norm is not finite.
        """
        values = [(m, float(m.loss), float(m.grad_norm)) for m in self._pending]
        speed = {"tok_s": round(self._throughput.recent())}  # measured after the synchronisation
        left = self._throughput.seconds_left(self._engine.state["step"])
        speed |= {} if left is None else {"eta_s": round(left, 1)}
        for m, loss, norm in values:
            if m.skipped:
                self._log.write("skipped", step=m.step, loss_nats=loss, why="gradient overflow in fp16")
                continue
            self._check(m.step, norm)
            plan = self._engine.plan
            diverged = not (math.isfinite(loss) and math.isfinite(norm))
            if diverged or m.step in (1, plan.steps) or m.step % plan.loop.log_every == 0:
                others = {name: float(value) for name, value in m.others.items()}
                tokens = {"tokens": m.tokens, "tokens_seen": m.tokens_seen, **speed}
                name = "loss_nats" if self._engine.objective.needs.best_metric == "loss_nats" else "loss"
                numbers = {name: loss, **others, "grad_norm": norm, "lr": m.lr, **tokens}
                self._log.write("step", step=m.step, **numbers, **plan.label(m.step))
            if diverged:
                self._stop(m.step, loss, norm)
        self._pending.clear()

    def _check(self, step: int, norm: float) -> None:
        """Update the run's health, which is part of the checkpoint, and report a change."""
        state, clip = self._engine.state, self._engine.plan.optim.clip
        before, state["health"] = state["health"]["now"], health.update(state["health"], norm, clip)
        now: health.Health = state["health"]["now"]
        if now != before:
            self._log.write("health", step=step, health=now)
            if now != "critical":  # an error follows
                self._notify(f"step {step:,}: {now}, was {before}: {health.ADVICE[now]}")

    def _stop(self, step: int, loss: float, norm: float) -> None:
        """End the run before diverged weights are saved."""
        self._log.flush()
        raise UserError(
            f"step {step}: loss {loss}, gradient norm {norm}, expected finite numbers; "
            "lower optim.lr, or look at that batch with `ingot trace`"
        )
