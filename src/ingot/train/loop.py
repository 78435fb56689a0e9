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
from ingot.train import bit_flips, guard, health
from ingot.train.engine import Engine
from ingot.train.guard import Rollback, begin, endless, is_left_out, reason, record
from ingot.train.metrics import StepMetrics
from ingot.train.settings import FIRST_SAVE
from ingot.train.throughput import Throughput, straggler

Evaluation = Callable[[int, bool], dict[str, float]]
"""(step, whether to use all validation rows) -> metrics by name, among them val_ + the objective's best metric."""
MAX_DOCUMENTS = 100
"""Documents of a skipped step or of the steps that are left out that are logged."""


def train(
    engine: Engine,
    batches: Callable[[int], Iterator[Batch]],
    evaluation: Evaluation,
    log: EventLog,
    progress: Callable[[StepMetrics, Throughput], None],
    notify: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Run the engine to the end of its plan.

    Args:
        batches: the batches of all steps from a given one on.
        progress: receives a step's metrics, and the run's speed and time left.
        notify: receives messages for the user.

    Returns:
        The metrics of the final evaluation, the mean tokens per second, and with several ranks the fraction of the time
        in which each waited for the others.

    Raises:
        UserError: too many steps were skipped (`train/guard.py`), and there is no checkpoint to go back to.
    """
    run = _Run(engine, evaluation, log, progress, notify)
    if engine.state["evaluated"] is None:
        with run.throughput.paused("evaluation"):  # a run that gets worse keeps its start
            update_best(engine, evaluation(engine.state["step"], False), log)
    try:
        with engine.signals:
            while rollback := run.run(batches(engine.state["step"] + 1)) or run.finish():
                go_back(engine, rollback, log, notify)
                run = _Run(engine, evaluation, log, progress, notify)
    finally:
        engine.training_state.finish_saving()
    rate = run.throughput.mean()
    seconds, waited = run.throughput.waiting()
    waiting = engine.mesh.objects(round(waited / max(1e-9, seconds), 3))
    if sentence := straggler(waiting, seconds):
        notify(sentence)
    log.write("speed", seconds=run.throughput.seconds())
    log.write("final", step=engine.plan.steps, **run.final)  # `evaluation` events have the same names for fewer rows
    return {**run.final, **rate, **({"waiting": waiting} if len(waiting) > 1 else {})}


def go_back(engine: Engine, rollback: Rollback, log: EventLog, notify: Callable[[str], None]) -> None:
    """Load a checkpoint from before a trouble, and leave its steps out if their rows may be to blame.

    Raises:
        UserError: there is no such checkpoint, or the run went back too often.
    """
    if not rollback.leave_out:
        return _reload(engine, rollback, log, notify)
    first, last, times = rollback.first, rollback.step, len(engine.state["guard"]["left_out"])
    why = "" if engine.guard.spikes else "this objective does not go back"
    if times == guard.MAX_ROLLBACKS:
        why = f"the run went back {times} times already"
    elif engine.guard.spikes and not engine.training_state.roll_back(first, last, notify):
        why = f"there is no checkpoint from before step {first:,}"
    if why:
        log.write("health", step=last, health="critical")
        log.flush()
        raise UserError(f"{rollback.why}; {why}; lower optim.lr, or look at a skipped batch with `ingot trace`")
    engine.bit_flips.forget()
    to = engine.state["step"]
    log.write("rollback", step=last, to=to, first=first, why=rollback.why, documents=_documents(engine, first, last))
    notify(f"{rollback.why}; back to step {to:,}, and steps {first:,} to {last:,} are left out")
    log.flush()
    engine.training_state.save()  # a killed run need not find the trouble again


def _reload(engine: Engine, rollback: Rollback, log: EventLog, notify: Callable[[str], None]) -> None:
    """Load a checkpoint from before a bit flipped."""
    reloads, why = engine.bit_flips.reloads, ""
    if reloads[-bit_flips.MAX_RELOADS :].count(engine.training_state.saved_step) == bit_flips.MAX_RELOADS:
        why = f"the run went back to step {reloads[-1]:,} {len(reloads)} times; test the memory of this machine"
    elif not rollback.reloads:
        why = "frozen weights are in no checkpoint; run the same command again, which loads them and resumes"
    elif not engine.training_state.roll_back(rollback.first, rollback.step, notify, leave_out=False):
        why = f"there is no checkpoint from before step {rollback.first:,}; run the same command again"
    log.flush()
    if why:
        raise UserError(f"{rollback.why}; {why}")
    to = engine.state["step"]
    engine.bit_flips.forget()
    reloads.append(to)
    log.write("rollback", step=rollback.step, to=to, why=rollback.why)
    notify(f"{rollback.why}; back to step {to:,}")
    log.flush()


def _documents(engine: Engine, first: int, last: int) -> list[str]:
    """The documents of some steps, each once, at most `MAX_DOCUMENTS`."""
    names: dict[str, None] = {}
    for step in range(first, last + 1):
        names |= dict.fromkeys(engine.plan.documents(step))
        if len(names) >= MAX_DOCUMENTS:
            break
    return list(names)[:MAX_DOCUMENTS]


def _flipped(engine: Engine, step: int, first: int, name: str, frozen: bool = False) -> Rollback:
    """Going back because a bit of a tensor flipped; checkpoints from before step `first` do not have it."""
    rank = f" of rank {engine.mesh.rank}" if engine.mesh.size > 1 else ""
    why = f"step {step:,}: a bit flipped in the memory{rank}, in {name}"
    return Rollback(step, first, why, leave_out=False, reloads=not frozen)


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
        self.final: dict[str, float] = {}
        """The final evaluation, after `finish`."""

    def run(self, batches: Iterator[Batch]) -> Rollback | None:
        """Run all remaining steps. Signals are handled between steps: the run saves a checkpoint and ends.

        Returns:
            None at the end of the plan; otherwise why the run has to go back to a checkpoint.
        """
        state = self.engine.training_state
        try:
            if self._evaluation_due():  # the interrupted run did not finish it
                with self.throughput.paused("evaluation"):
                    self.evaluate()
            for raw in batches:
                longest = min(self._save_after, 60 * self.engine.plan.loop.save_minutes)
                late, trouble = time.monotonic() - self._saved_at > longest, self.metrics.rollback is not None
                self._late, trouble = self.engine.signals.check(late, trouble)
                if trouble:
                    self.metrics.write()  # on a rank that has not read its metrics yet
                    break
                self.step(raw)
            self._intact()  # a trouble may come from a frozen weight
            return self.metrics.rollback
        except KeyboardInterrupt:
            if state.unsaved and self.save():
                state.finish_saving()
                self.notify(f"saved after step {state.saved_step:,}")
            raise

    def finish(self) -> Rollback | None:
        """Evaluate after the last step. Returns why the run has to go back instead."""
        with self.throughput.paused("evaluation"):
            self.evaluate()
        if not self.metrics.rollback:
            with self.throughput.paused("final evaluation"):
                self.final = self.evaluation(self.engine.plan.steps, True)
                self._intact()
        return self.metrics.rollback

    def step(self, raw: Batch) -> None:
        """Run one step, and log, evaluate and save if due."""
        plan, loop = self.engine.plan, self.engine.plan.loop
        number = self.engine.state["step"] + 1
        HEARTBEAT.move(number, "training")
        metrics = None
        if is_left_out(self.engine.state["guard"], number):
            if number in plan.phases:
                self.engine.guard.forget()  # losses of another phase say nothing about this one
            self.engine.state["step"] = number
        else:
            try:
                metrics = self.engine.step(raw)
            except UserError:
                self.metrics.write()  # log the steps before the failing one
                raise
            self.metrics.add(metrics)
        self.throughput.add(metrics.tokens if metrics else 0)
        regular = any(every and number % every == 0 for every in (loop.save_every, loop.keep_every))
        save_due = self._late or number == plan.steps or regular
        if self.throughput.due() or self._evaluation_due() or save_due:
            self.metrics.write()
            if metrics:
                self.progress(metrics, self.throughput)
        if self._evaluation_due() and not self._agree():
            with self.throughput.paused("evaluation"):
                self.evaluate()
        if save_due:
            self.save()

    def _evaluation_due(self) -> bool:
        """Whether an evaluation is due after the current step; `train` evaluates after the last one."""
        plan, state = self.engine.plan, self.engine.state
        return (state["evaluated"] or 0) < state["step"] < plan.steps and state["step"] % plan.evaluate_every == 0

    def evaluate(self) -> None:
        """Evaluate, and save the weights if they are the best so far, unless a bit has flipped until then."""
        numbers = self.evaluation(self.engine.state["step"], False)
        if self._intact():
            update_best(self.engine, numbers, self.log)

    def _intact(self) -> bool:
        """Whether no bit has flipped since the last update; if one has, the run has to go back. Waits for the device.

        All ranks call it.
        """
        step = self.engine.state["step"]
        trained, frozen = self.engine.bit_flips.now()
        if frozen:
            self.metrics.rollback = _flipped(self.engine, step, step + 1, frozen, frozen=True)
        elif trained and not self.metrics.rollback:
            self.metrics.rollback = _flipped(self.engine, step, step + 1, trained)
        return self._agree() is None

    def _agree(self) -> Rollback | None:
        """The first reason of any rank to go back, above all one that ends the run; None if there is none.

        All ranks call it.
        """
        found = [rollback for rollback in self.engine.mesh.objects(self.metrics.rollback) if rollback]
        self.metrics.rollback = min(found, key=lambda rollback: (rollback.reloads, rollback.step), default=None)
        return self.metrics.rollback

    def save(self) -> bool:
        """Check and log all pending metrics, then write a checkpoint. Returns whether it was written.

        It is not if the run has to go back.
        """
        self.metrics.write()
        if not self._intact():
            return False
        with self.throughput.paused("save"):
            self.log.flush()
            self.engine.training_state.save()
            if not self._intact():  # a bit that flipped meanwhile may be in it
                self.engine.training_state.discard()
                return False
        self._saved_at = time.monotonic()
        self._save_after *= 2
        return True


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
        self.rollback: Rollback | None = None
        """Why the run has to go back. Later steps are not logged."""

    def add(self, step: StepMetrics) -> None:
        self._pending.append(step)

    def write(self) -> None:
        """Read, check and log all pending steps. Only this method waits for the device.

        Raises:
            UserError: without the guard, a loss or a gradient norm is not finite.
        """
        values = [(m, float(m.loss), float(m.grad_norm)) for m in self._pending]
        speed = {"tok_s": round(self._throughput.recent())}  # measured after the synchronisation
        left = self._throughput.seconds_left(self._engine.state["step"])
        speed |= {} if left is None else {"eta_s": round(left, 1)}
        for m, loss, norm in values:
            if name := next(filter(None, (check.flipped() for check in m.checks)), None):
                self.rollback = self.rollback or _flipped(self._engine, m.step, m.step, name)
            if self.rollback:
                break
            if int(m.skipped):
                self._log_skipped(m, loss, norm)
            self._watch(m, loss, norm)
            if bool(m.lost):
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

    def _log_skipped(self, m: StepMetrics, loss: float, norm: float) -> None:
        """Log the skipped updates of a step and its documents; tell the user about the first step of a trouble."""
        state, documents = self._engine.state, _documents(self._engine, m.step, m.step)
        why = reason(loss, norm, self._engine.execution.precision)
        self._log.write(
            "skipped",
            step=m.step,
            loss_nats=loss,
            grad_norm=norm,
            updates=int(m.skipped),
            why=why,
            documents=documents,
        )
        state["skipped_steps"] += int(m.skipped)
        if not state["guard"]["first"]:
            self._notify(f"step {m.step:,}: skipped, because {why}; `ingot trace` shows its documents")

    def _watch(self, m: StepMetrics, loss: float, norm: float) -> None:
        """Count the step, and find out whether the run has to go back."""
        finite, plan = math.isfinite(loss) and math.isfinite(norm), self._engine.plan
        state = self._engine.state["guard"] = record(self._engine.state["guard"], m.step, bool(m.lost), finite)
        if endless(state, plan.steps):
            found = f"step {m.step}: loss {loss}, gradient norm {norm}, expected "
            found += "finite numbers" if not finite else "a loss like that of earlier steps"
            why = f"{found}, and {state['skipped']} steps since step {state['first']:,} were skipped"
            self.rollback = Rollback(m.step, begin(state, m.step), why)

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
