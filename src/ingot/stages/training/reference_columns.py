"""Columns that an objective's frozen companions decide, computed once for all rows and kept beside the stage.

What a reference says of an answer is the same in every epoch. So it is read before training and written as an overlay
of the store (`store/reader.py`), in the stage's own directory: the stage's key fixes the model, the data and the
settings that it follows from, and the precision is remembered with the stage, so the file is never another run's and a
resumed run finds it. Rows come in the order of the store, and with the passes of training: same types, same attention.

A corpus of which the run does not see every row is left to `expand`, which computes the columns of the rows it gets.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ingot.data.batches import Source, all_rows
from ingot.data.packing import Whole
from ingot.store.reader import MANIFEST
from ingot.train.engine import Engine
from ingot.train.settings import rows_per_pass


def add_columns(engine: Engine, source: Source, directory: Path, advance: Callable[[int], None]) -> None:
    """Give the source's store the objective's `overlays`, from `directory` or computed into it.

    Args:
        engine: with the companions still loaded.
        source: rows of one document each.
        directory: of this source alone.
        advance: told the number of rows done.
    """
    assert isinstance(source.plan, Whole), "columns per document are read where a row is one document"
    if not (directory / MANIFEST).exists():
        from ingot.store.writer import ColumnSpec, OverlayWriter  # reads pyarrow, which few runs need

        values = {name: np.full(source.store.documents, np.nan) for name in engine.objective.overlays}
        for batch in all_rows(source, rows_per_pass(source.plan.context)):
            document_B = source.plan.index(batch.row_B[:: batch.group])[1][:, 0]
            for name, value_B in engine.annotate(batch).items():
                values[name][document_B] = value_B.double().numpy()
            advance(len(batch))
        specs = {name: ColumnSpec("document", "<f8") for name in values}
        with OverlayWriter(directory, source.store, specs) as writer:
            writer.append(**values)
    source.store.add_overlay(directory)
