"""How many rows each step has: a constant, or a ramp that grows with what has been trained on.

GPT-3 went from 32K to 3.2M tokens a step, linearly in tokens, over its first 4 to 12 billion (Brown et al. 2020,
arXiv:2005.14165, appendix B): small batches are worth more per token while the gradient is still far above its noise.
The size of a step then depends on the sizes of all steps before it, so there is no closed form. But sizes are whole
rows, so a ramp is a few runs of equal steps, at most one for each size it passes: the table of those runs is exact, in
integers, as short for a million steps as for a thousand, and searched in O(log runs).

Rejected: adding steps up at each call (a million additions to look at the last step), and a float formula of the
exponential that the ramp approximates (two machines could then disagree about a row).
"""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizes:
    """Rows of every 1-based step, as runs of equal steps: (first step, rows of all steps before it, rows a step)."""

    runs: tuple[tuple[int, int, int], ...]

    def rows(self, step: int) -> int:
        """Rows in a step."""
        return self._run(step, 0)[2]

    def before(self, step: int) -> int:
        """Rows of all steps before this one: the 0-based number of its first row."""
        first, rows, each = self._run(step, 0)
        return rows + (step - first) * each

    def step_of(self, row: int) -> int:
        """The step which holds a 0-based row number."""
        first, rows, each = self._run(row, 1)
        return first + (row - rows) // each

    def _run(self, value: int, column: int) -> tuple[int, int, int]:
        """The last run whose first step (column 0) or first row (column 1) is not after `value`."""
        return self.runs[bisect_right(self.runs, value, key=lambda run: run[column]) - 1]


def constant(rows: int) -> BatchSizes:
    """The same number of rows in every step."""
    return BatchSizes(((1, 0, rows),))


def ramp(start: int, end: int, over: int, by_step: bool, done: int = 0) -> BatchSizes:
    """From `start` rows to `end`, linearly in the rows trained on so far (or in steps), then `end` for good.

    A step has start + floor((end - start) * p / over) rows, where p is what was done before that step.

    Args:
        start: rows of the very first step.
        end: rows of every step from progress `over` on; more than `start`.
        over: length of the ramp, in rows (in steps where `by_step`).
        by_step: whether progress is counted in steps.
        done: progress made before step 1, where the ramp began earlier.
    """
    runs, step, row, progress = [], 1, 0, done
    while progress < over:
        size = start + (end - start) * progress // over
        change = -(-(size + 1 - start) * over // (end - start))  # the least progress at which a step has more rows
        steps = -(-(change - progress) // (1 if by_step else size))
        runs.append((step, row, size))
        step, row = step + steps, row + steps * size
        progress += steps if by_step else steps * size
    return BatchSizes((*runs, (step, row, end)))
