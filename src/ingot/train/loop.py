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
from ingot.train import health
from ingot.train.engine import Engine
from ingot.train.metrics import StepMetrics

MOMENT = 0.5
"""Seconds after which the numbers of steps are read again."""

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
    if engine.state["step"] == 0:
        log.write("evaluation", step=0, **evaluation(0, False))
    run = _Run(engine, evaluation, log, progress, say)
    with engine.interruptions:
        run.go_on(batches)
    rate = run.clock.mean()
    run.judge()
    return {**evaluation(engine.plan.steps, True), **rate}


class _Run:
    """Its steps, and what is due after each."""

    def __init__(
        self,
        engine: Engine,
        evaluation: Evaluation,
        log: EventLog,
        progress: Callable[[StepMetrics, float], None],
        say: Callable[[str], None],
    ):
        self.engine, self.evaluation, self.log, self.progress, self.say = engine, evaluation, log, progress, say
        self.journal, self.clock = _Journal(engine, log, say), _Clock()
        self._saved = time.monotonic()

    def go_on(self, batches: Iterator[Batch]) -> None:
        """All steps that are left; one who asks to end is heard between two of them, when they are saved."""
        try:
            if self._to_be_judged():  # an evaluation that was interrupted
                self.judge()
            for raw in batches:
                self.engine.interruptions.check()
                self.step(raw)
        except KeyboardInterrupt:
            if self.engine.unsaved:
                self.save()
                self.say(f"saved after step {self.engine.saved_step:,}")
            raise

    def step(self, raw: Batch) -> None:
        """One step, and what is due after it."""
        plan, loop = self.engine.plan, self.engine.plan.loop
        try:
            metrics = self.engine.step(raw)
        except UserError:
            self.journal.write(self.clock.lately)  # which step broke what this one could not do
            raise
        self.journal.add(metrics)
        self.clock.tick(metrics.tokens)
        late = time.monotonic() - self._saved > 60 * loop.save_minutes
        saved = late or metrics.step == plan.steps or metrics.step % loop.save_every == 0
        if self.clock.due() or self._to_be_judged() or saved:
            self.journal.write(self.clock.lately)
            self.progress(metrics, self.clock.lately())
        if self._to_be_judged():
            with self.clock.paused():
                self.judge()
        if saved:
            self.save()

    def _to_be_judged(self) -> bool:
        """Whether this step's evaluation is due; the last one's has a place of its own."""
        plan, state = self.engine.plan, self.engine.state
        return state["evaluated"] < state["step"] < plan.steps and state["step"] % plan.evaluate_every == 0

    def judge(self) -> None:
        """Evaluate, and keep the best."""
        _note_best(self.engine, self.evaluation(self.engine.state["step"], False), self.log)

    def save(self) -> None:
        """Write a checkpoint, of numbers that were all judged."""
        self.journal.write(self.clock.lately)
        with self.clock.paused():
            self.log.flush()
            self.engine.save()
        self._saved = time.monotonic()


def _note_best(engine: Engine, numbers: dict[str, float], log: EventLog) -> None:
    state = engine.state
    log.write("evaluation", step=state["step"], **numbers)
    judged_by = engine.objective.judged_by
    best, now = state["best_val"], numbers.get(f"val_{judged_by}", math.nan)  # no reward where nothing was scored
    better = best is None or (now > best if judged_by == "reward" else now < best)
    if math.isfinite(now) and better:
        state["best_step"], state["best_val"] = state["step"], now
        engine.save_best()
    state["evaluated"] = state["step"]


class _Journal:
    """Steps whose numbers are still on the device, until they are read, judged and written down."""

    def __init__(self, engine: Engine, log: EventLog, say: Callable[[str], None]):
        self._engine, self._log, self._say = engine, log, say
        self._pending: list[StepMetrics] = []

    def add(self, metrics: StepMetrics) -> None:
        self._pending.append(metrics)

    def write(self, rate: Callable[[], float]) -> None:
        """Read all that is pending: the one thing that waits for the device.

        Args:
            rate: tokens a second, asked for when the device is done.
        """
        read = [(m, float(m.loss), float(m.grad_norm)) for m in self._pending]
        tok_s = round(rate())
        for m, loss, norm in read:
            if m.skipped:
                self._log.write("skipped", step=m.step, loss_nats=loss, why="gradient overflow in fp16")
                continue
            self._judge(m.step, norm)
            plan = self._engine.plan
            broken = not (math.isfinite(loss) and math.isfinite(norm))
            if broken or m.step in (1, plan.steps) or m.step % plan.loop.log_every == 0:
                others = {name: float(value) for name, value in m.others.items()}
                tokens = {"tokens": m.tokens, "tokens_seen": m.tokens_seen, "tok_s": tok_s}
                name = "loss_nats" if self._engine.objective.judged_by == "loss_nats" else "loss"
                numbers = {name: loss, **others, "grad_norm": norm, "lr": m.lr, **tokens}
                self._log.write("step", step=m.step, **numbers, **plan.label(m.step))
            if broken:
                self._refuse(m.step, loss, norm)
        self._pending.clear()

    def _judge(self, step: int, norm: float) -> None:
        """Tell of a changed verdict, once: it is part of a checkpoint."""
        state, clip = self._engine.state, self._engine.plan.optim.clip
        before, state["health"] = state["health"]["now"], health.watch(state["health"], norm, clip)
        now: health.Health = state["health"]["now"]
        if now != before:
            self._log.write("health", step=step, health=now)
            if now != "critical":  # the error says it
                self._say(f"step {step:,}: {now}, was {before}: {health.ADVICE[now]}")

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
        self._asked = self._spoke = time.monotonic()
        self._first: float | None = None  # when the first step, which compiles, had ended
        self._since_asked = self._since_first = 0
        self._rate = 0.0

    def tick(self, tokens: int) -> None:
        """Another step."""
        self._since_asked += tokens
        if self._first is None:
            self._first = time.monotonic()
        else:
            self._since_first += tokens

    def lately(self) -> float:
        """Since this was asked before, if that is a moment ago."""
        now = time.monotonic()
        if now - self._asked >= MOMENT or not self._rate:
            self._rate = self._since_asked / max(1e-9, now - self._asked)
            self._asked, self._since_asked = now, 0
        return self._rate

    def mean(self) -> dict[str, int]:
        """Since the end of the first step; nothing where there were no others."""
        if self._first is None or not self._since_first:
            return {}
        return {"tok_s": round(self._since_first / max(1e-9, time.monotonic() - self._first))}

    def due(self) -> bool:
        now = time.monotonic()
        if now - self._spoke < MOMENT:
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
            waited = time.monotonic() - began
            self._asked += waited
            self._first = self._first and self._first + waited
