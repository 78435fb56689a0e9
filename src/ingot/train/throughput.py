"""The speed of training steps, and the time until the end of a run."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Literal

from ingot.core.heartbeat import HEARTBEAT
from ingot.train.engine import Plan

_READ_EVERY_S = 0.5
"""Seconds between two synchronisations."""
_UNEVEN = 0.1
"""Difference of the fractions of time that ranks wait, from which the slowest is named."""
_SHORT_S = 60
"""Seconds of training below which none is named."""


class Throughput:
    """Speed of the training steps, without evaluations and saves; and when the next report is due.

    The first step may compile, so it counts only until there are others.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._read_at = self._reported_at = time.monotonic()
        self._first: float | None = None  # end of the first step
        self._since_read = self._since_first = 0
        self._steps = 0  # number of steps so far
        self._rate, self._rate_of_first = 0.0, True
        self._waited_before = 0.0  # of the heartbeat's time, what is not in steps after the first
        self._first_s = 0.0
        self._pause_s = {"evaluation": 0.0, "final evaluation": 0.0, "save": 0.0}  # the last one of each
        self._pauses: dict[str, list[float]] = {name: [] for name in self._pause_s}

    def add(self, tokens: int) -> None:
        """Count a step."""
        now = time.monotonic()
        self._steps += 1
        if self._first is None:
            self._first_s = now - self._read_at
            self._rate = tokens / max(1e-9, self._first_s)
            self._read_at = self._first = now
            self._waited_before = HEARTBEAT.waited_s
        else:
            self._since_read += tokens
            self._since_first += tokens

    def recent(self) -> float:
        """Tokens per second since the last call, if at least `_READ_EVERY_S` ago; else the last value."""
        now = time.monotonic()
        if self._since_read and (self._rate_of_first or now - self._read_at >= _READ_EVERY_S):
            self._rate, self._rate_of_first = self._since_read / max(1e-9, now - self._read_at), False
            self._read_at, self._since_read = now, 0
        return self._rate

    def mean(self) -> dict[str, int]:
        """Tokens per second since the end of the first step; empty if there was only one."""
        if self._first is None or not self._since_first:
            return {}
        return {"tok_s": round(self._since_first / max(1e-9, time.monotonic() - self._first))}

    def seconds(self) -> dict[str, float]:
        """Mean seconds of a step of the run's last size (of the steps after the first), of the first step, and of
        evaluations and saves; those that are known.
        """
        seconds = {name: sum(times) / len(times) for name, times in self._pauses.items() if times}
        if self._first is not None and self._steps > 1:
            plan, last = self._plan, self._plan.steps
            done = plan.work(last) - plan.work(last - self._steps + 1)
            per_work = (time.monotonic() - self._first) / done
            seconds |= {"step": per_work * (plan.work(last) - plan.work(last - 1)), "first": self._first_s}
        return seconds

    def waiting(self) -> tuple[float, float]:
        """Seconds of the steps after the first, and how many of them this rank waited for others."""
        if self._first is None:
            return 0.0, 0.0
        return time.monotonic() - self._first, HEARTBEAT.waited_s - self._waited_before

    def seconds_left(self, step: int) -> float | None:
        """Estimated seconds from the end of `step`, the newest one, to the end of the run; None after one step.

        Each remaining evaluation and save is expected to take as long as the last one.
        """
        if self._first is None or self._steps < 2:
            return None
        plan = self._plan
        done = plan.work(step) - plan.work(step - self._steps + 1)
        steps_s = (plan.work(plan.steps) - plan.work(step)) * (time.monotonic() - self._first) / done
        every, save_every = plan.evaluate_every, plan.loop.save_every
        evaluations = (plan.steps - 1) // every - (step - 1) // every + 2  # two after the last step
        saves = (plan.steps - 1) // save_every - (step - 1) // save_every + 1
        return steps_s + evaluations * self._pause_s["evaluation"] + saves * self._pause_s["save"]

    def due(self) -> bool:
        """Whether the next report is due; if so, restarts its interval."""
        now = time.monotonic()
        if now - self._reported_at < _READ_EVERY_S:
            return False
        self._reported_at = now
        return True

    @contextlib.contextmanager
    def paused(self, work: Literal["evaluation", "final evaluation", "save"]) -> Iterator[None]:
        """Exclude the time inside the context, which does other work."""
        start, waited = time.monotonic(), HEARTBEAT.waited_s
        try:
            with HEARTBEAT.during(work):
                yield
        finally:
            self._waited_before += HEARTBEAT.waited_s - waited
            self._pause_s[work] = elapsed = time.monotonic() - start
            self._pauses[work].append(elapsed)
            self._read_at += elapsed
            self._first = self._first and self._first + elapsed


def straggler(waiting: Sequence[float], seconds: float) -> str | None:
    """A sentence about the rank that the others wait for; None if all wait alike, or the run was short.

    Args:
        waiting: for each rank the fraction of the time that it waited for others.
        seconds: the duration of the run.
    """
    slowest, least, most = waiting.index(min(waiting)), min(waiting), max(waiting)
    if most - least < _UNEVEN or seconds < _SHORT_S:
        return None
    return (
        f"rank {slowest} is the slowest: it waited {least:.0%} of the time for the others, and one of them {most:.0%}; "
        "look at what else its machine does"
    )
