"""Columns that an objective's frozen companions compute, once for all rows, kept beside the stage.

A reference's log-probabilities or a teacher's outputs for a row are the same in every epoch. So they are computed
before training and written as an overlay of the store (`store/columns.py`) in the stage's own directory. The stage's
key fixes the model, the data and the settings that they follow from, and the precision is remembered with the stage, so
the file is never another run's. A killed process goes on where it was. Rows are read as in training: same types, same
attention.

A corpus of which the run does not see every row is left to `expand`, which computes the columns of the rows it gets.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ingot.core.errors import UserError
from ingot.data.batches import Batch, Source, all_rows
from ingot.data.packing import PAD, Concatenated, OnePerRow
from ingot.store.columns import ColumnFiller
from ingot.store.reader import MANIFEST, ColumnSpec
from ingot.train.engine import Engine
from ingot.train.objective import Column
from ingot.train.settings import rows_per_pass

CHECKPOINT_ROWS = 4096
"""Rows after which progress is kept."""


def add_columns(engine: Engine, source: Source, directory: Path, advance: Callable[[int], None]) -> None:
    """Give the source's store the objective's columns, from `directory` or computed into it.

    Args:
        engine: with the companions still loaded.
        directory: of this source alone.
        advance: called with the number of rows done.

    Raises:
        UserError: a row plan in which a token or document has several values.
    """
    columns = engine.objective.needs.columns
    _check(source, columns)
    if not (directory / MANIFEST).exists():
        specs = {column.name: ColumnSpec(column.per, column.dtype, column.width) for column in columns}
        filler = ColumnFiller(directory, source.store, specs)
        rows = saved = filler.done
        advance(rows * source.plan.group)
        for batch in all_rows(source, rows_per_pass(source.plan.context), first=rows):
            values = engine.annotate(batch)
            for column in columns:
                _put(filler, column, values[column.name].cpu().numpy(), batch, source)
            rows += len(batch) // batch.group
            advance(len(batch))
            if rows - saved >= CHECKPOINT_ROWS:
                filler.checkpoint(rows)
                saved = rows
        filler.publish()
    source.store.add_overlay(directory)


def _put(filler: ColumnFiller, column: Column, values: np.ndarray, batch: Batch, source: Source) -> None:
    """Write the values of a batch's documents or labels."""
    index_BL, document_BL = source.plan.index(batch.row_B[:: batch.group])
    if column.per == "document":
        filler.put(column.name, document_BL[:, 0], values)
    else:
        labelled_BT = (batch.labels_BT != batch.ignore) & (index_BL[:, 1:] != PAD)
        filler.put(column.name, index_BL[:, 1:][labelled_BT], values[labelled_BT])


def _check(source: Source, columns: tuple[Column, ...]) -> None:
    plan = source.plan
    for column in columns:
        if column.per == "document" and not isinstance(plan, OnePerRow):
            raise UserError(
                f"data.{source.name}: the objective's column '{column.name}' has a value for each document, expected "
                "rows of one document each; give a corpus of pairs or prompts"
            )
        if column.per == "token" and isinstance(plan, Concatenated) and plan.stride != plan.context:
            raise UserError(
                f"packing.stride: found {plan.stride}, expected the context of {plan.context:,}: the objective's "
                f"column '{column.name}' has one value for each token, and each token must be a target once"
            )
