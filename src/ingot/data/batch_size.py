"""The batch size of each step in rows: constant, or a linear warmup (ramp).

GPT-3 increased the batch size from 32K to 3.2M tokens, linearly in tokens, over its first 4 to 12 billion tokens (Brown
et al. 2020, arXiv:2005.14165, appendix B). The size of a step then depends on all earlier sizes, without a closed form.
Since sizes are integers, the ramp consists of runs of steps with equal sizes, at most one run per size. A table of
these runs is exact, independent of the number of steps, and searched in O(log runs).
"""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes of all steps. Steps count from 1, rows from 0.

    Args:
        runs: runs of steps with equal sizes: (first step, rows in all earlier steps, rows per step).
    """

    runs: tuple[tuple[int, int, int], ...]

    def rows(self, step: int) -> int:
        """Number of rows in a step."""
        return self._run(step, 0)[2]

    def rows_before(self, step: int) -> int:
        """Number of rows in all earlier steps, which is the number of the step's first row."""
        first, rows, size = self._run(step, 0)
        return rows + (step - first) * size

    def step_of(self, row: int) -> int:
        """The step that contains a row."""
        first, rows, size = self._run(row, 1)
        return first + (row - rows) // size

    def _run(self, value: int, column: int) -> tuple[int, int, int]:
        """The last run whose first step (column 0) or first row (column 1) is at most `value`."""
        return self.runs[bisect_right(self.runs, value, key=lambda run: run[column]) - 1]


def constant(rows: int) -> BatchSizes:
    """The same number of rows in every step."""
    return BatchSizes(((1, 0, rows),))


def ramp(start: int, end: int, over: int, by_step: bool, done: int = 0) -> BatchSizes:
    """Increase the batch size linearly from `start` to `end` rows, in rows (or steps) of progress; constant afterwards.

    A step has start + floor((end - start) * progress / over) rows, with the progress before the step.

    Args:
        start: rows of the first step.
        end: rows of each step after the ramp; more than `start`.
        over: length of the ramp in rows, or with `by_step` in steps.
        by_step: whether progress counts steps.
        done: progress before step 1, if the ramp began in an earlier phase.
    """
    runs, step, row, progress = [], 1, 0, done
    while progress < over:
        size = start + (end - start) * progress // over
        change = -(-(size + 1 - start) * over // (end - start))  # the least progress with a larger size
        steps = -(-(change - progress) // (1 if by_step else size))
        runs.append((step, row, size))
        step, row = step + steps, row + steps * size
        progress += steps if by_step else steps * size
    return BatchSizes((*runs, (step, row, end)))
