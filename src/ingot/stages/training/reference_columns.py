"""Columns that frozen models compute, once for all rows.

The log-probabilities of a reference model, or the outputs of a teacher, are the same in every epoch. So they are
computed before training and written as an overlay of the store (`store/columns.py`) in the stage's directory. They
depend only on the stage's key and its precision, so they stay valid when the stage resumes. A killed process resumes
after its last checkpoint of the columns.

For a corpus of which the run does not use every row, `expand` computes the columns of each batch instead.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from ingot.core.errors import UserError
from ingot.data.batches import Batch, Source, all_rows
from ingot.data.packing import PAD, Concatenated, OnePerRow
from ingot.distributed.mesh import Mesh
from ingot.store.columns import ColumnFiller
from ingot.store.reader import MANIFEST, ColumnSpec
from ingot.train.objective import Column
from ingot.train.settings import rows_per_pass

CHECKPOINT_ROWS = 4096
"""Rows between two checkpoints of the columns."""


def add_columns(
    columns: tuple[Column, ...],
    annotate: Callable[[Batch], Mapping[str, Tensor]],
    ranks: Mesh,
    source: Source,
    directory: Path,
    advance: Callable[[int], None],
) -> None:
    """Add columns to a source's store; computes them unless `directory` has them already.

    All ranks compute them together; the first one writes them.

    Args:
        columns: what is computed.
        annotate: batch -> values of the columns by name, on all ranks alike.
        ranks: the ranks.
        source: the rows of a store.
        directory: directory of this source's columns.
        advance: called with the number of rows of each batch.

    Raises:
        UserError: the row plan gives a token or a document several values.
    """
    _check(source, columns)
    if not ranks.first((directory / MANIFEST).exists):
        specs = {column.name: ColumnSpec(column.per, column.dtype, column.width) for column in columns}
        filler = ColumnFiller(directory, source.store, specs) if ranks.leads else None
        rows = saved = ranks.first(lambda: filler.done if filler else 0)
        advance(rows * source.plan.group)
        for batch in all_rows(source, rows_per_pass(source.plan.context), first=rows):
            values = annotate(batch)
            rows += len(batch) // batch.group
            advance(len(batch))
            if filler is None:
                continue
            for column in columns:
                _write(filler, column, values[column.name].cpu().numpy(), batch, source)
            if rows - saved >= CHECKPOINT_ROWS:
                filler.checkpoint(rows)
                saved = rows
        if filler:
            filler.publish()
        ranks.wait()
    source.store.add_overlay(directory)


def _write(filler: ColumnFiller, column: Column, values: np.ndarray, batch: Batch, source: Source) -> None:
    """Write a column's values for the documents or the labels of a batch."""
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
                f"data.{source.name}: found rows of several documents, expected one document each, because the "
                f"column '{column.name}' has one value per document; name a corpus of pairs or prompts"
            )
        if column.per == "token" and isinstance(plan, Concatenated) and plan.stride != plan.context:
            raise UserError(
                f"packing.stride: found {plan.stride}, expected the context of {plan.context:,}, because the "
                f"column '{column.name}' has one value per token; leave stride out"
            )
