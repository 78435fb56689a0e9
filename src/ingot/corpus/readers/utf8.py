"""The texts of a batch as one array of bytes, for what numpy does to all of them faster than a regular expression does
to each: looking for single bytes, and moving them.
"""

import numpy as np
import polars as pl
import pyarrow as pa


def flatten(texts: pl.Series) -> tuple[np.ndarray, np.ndarray]:
    """UTF-8 of all texts one after another [bytes] (read-only), and where each begins [n + 1], the end included."""
    array = texts.to_arrow().cast(pa.large_string())
    _, offsets, values = array.buffers()
    starts = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    data = np.frombuffer(values if values is not None else b"", np.uint8)[starts[0] : starts[-1]]
    return data, starts - starts[0]


def rows_at(places: np.ndarray, starts: np.ndarray, rows: int) -> np.ndarray:
    """Which of the texts [rows] (bool) hold one of the byte positions."""
    found = np.zeros(rows, dtype=bool)
    found[np.searchsorted(starts, places, side="right") - 1] = True
    return found


def followed_by(data: np.ndarray, lead: int, known: list[int]) -> np.ndarray:
    """Positions of a lead byte whose character goes on with one of the known values: one byte, or two as a number."""
    place = np.flatnonzero(data == lead)
    rest = data[place + 1].astype(np.uint16)
    if known[0] > 0xFF:
        rest = rest * 256 + data[place + 2]
    return place[np.isin(rest, known)]
