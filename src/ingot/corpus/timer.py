"""The cost of the steps of `prepare`, as a column: so it passes through any runner and needs no state.

The column is dropped before documents are written; no result depends on it.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

SECONDS = "_seconds"
"""Column with the seconds that each step took for a document: those of its batch, divided evenly."""


class Timer:
    """Measures the steps of one batch: `with timer("clean"): ...`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[step] += time.perf_counter() - start

    def column(self, documents: int, steps: Sequence[str]) -> pa.Array:
        """The column `SECONDS` with a field for each step."""
        values = [np.full(documents, self._seconds[step] / max(1, documents), np.float32) for step in steps]
        return pa.StructArray.from_arrays([pa.array(each) for each in values], names=list(steps))
