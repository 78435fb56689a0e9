"""The rows of a file, whatever its kind."""

from collections.abc import Collection, Iterator

from ingot.corpus.readers import json_files, tables
from ingot.corpus.readers.content import Kind
from ingot.corpus.readers.files import Row, TextFile
from ingot.corpus.readers.tables import LostRows

ROWS_AT_ONCE = 1024


def file_rows(file: TextFile, kind: Kind, names: Collection[str] = frozenset()) -> Iterator[Row | LostRows] | None:
    """The rows of a file, or None if it has none: text, pages, a JSON object without rows.

    Args:
        file: as `content.identify` returns it.
        kind: as `content.content_kind` returns it.
        names: fields that tell which list of a JSON object has the rows.

    Raises:
        Damaged: where the file is damaged, or while its rows are read.
    """
    match kind:
        case "jsonl":
            return json_files.jsonl_rows(file)
        case "json":
            layout = json_files.scan(file, names)
            return None if layout.kind == "configuration" else json_files.json_rows(file, layout)
        case "csv" | "tsv":
            return tables.csv_rows(file, tabs=kind == "tsv")
        case "parquet":
            return tables.parquet_rows(file.path, ROWS_AT_ONCE, file.max_bytes)
        case _:
            return None
