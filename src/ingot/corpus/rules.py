"""Rules: a measure of a document, and the bounds that a document to keep does not cross.

Every rule is checked on every document that is measured, whatever another one says of it. So the funnel knows what each
would have removed alone, not only what it removed first.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

KEY = "_key"
"""Column with the fingerprint of a document."""
REASONS = "_reasons"
"""Column with all reasons to drop a document, in the order of the checks; the first is its `drop_reason`."""
MEASURES = "_measures"
"""Column with the measures of a document by name; null where it is not measured."""


class Rule(NamedTuple):
    """Drops a document whose measure is below `least` or above `most`."""

    measure: str
    least: float = -np.inf
    most: float = np.inf

    def broken(self, values: np.ndarray) -> np.ndarray:
        """Whether each value crosses a bound; NaN (no measure) crosses none."""
        return (values < self.least) | (values > self.most)


def reasons_column(broken: Mapping[str, np.ndarray], documents: int) -> pa.Array:
    """The column `REASONS`.

    Args:
        broken: reason -> whether it holds for each document (N bool), in the order of the checks.
        documents: N.
    """
    rows = [np.flatnonzero(mask) for mask in broken.values()]
    numbers = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    where = np.concatenate([np.zeros(0, np.int64), *rows])
    order = np.argsort(where, kind="stable")
    names = pa.array(list(broken), pa.string()).take(pa.array(numbers[order], pa.int64()))
    offsets = np.append(0, np.cumsum(np.bincount(where, minlength=documents))).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, names)


def first_reasons(reasons: pa.Array) -> pa.Array:
    """The first of the reasons of each document, or null."""
    offsets = reasons.offsets.to_numpy()
    return reasons.values.take(pa.array(offsets[:-1], mask=offsets[:-1] == offsets[1:])).cast(pa.large_string())


def measures_column(measures: Mapping[str, np.ndarray]) -> pa.Array:
    """The column `MEASURES`.

    Args:
        measures: name -> value for each document, NaN without one; at least one measure.
    """
    values = [pa.array(each.astype(np.float64), from_pandas=True) for each in measures.values()]
    return pa.StructArray.from_arrays(values, names=list(measures))
