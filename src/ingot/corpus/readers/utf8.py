"""UTF-8 bytes of a batch of texts as one numpy array.

numpy searches and moves single bytes of the complete batch faster than a regular expression processes each text.
"""

import numpy as np
import polars as pl
import pyarrow as pa


def flatten(texts: pl.Series) -> tuple[np.ndarray, np.ndarray]:
    """Concatenated UTF-8 of all texts [bytes] (read-only), and the start of each text plus the final end [n + 1]."""
    array = texts.to_arrow().cast(pa.large_string())
    _, offsets, values = array.buffers()
    starts = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    data = np.frombuffer(values if values is not None else b"", np.uint8)[starts[0] : starts[-1]]
    return data, starts - starts[0]


def rows_with(positions: np.ndarray, starts: np.ndarray, rows: int) -> np.ndarray:
    """Boolean mask [rows] of the texts that contain at least one of the byte positions."""
    mask = np.zeros(rows, dtype=bool)
    mask[np.searchsorted(starts, positions, side="right") - 1] = True
    return mask


def find_sequences(data: np.ndarray, lead: int, continuations: list[int]) -> np.ndarray:
    """Positions of the characters that consist of a lead byte and one of the continuations.

    Args:
        data: UTF-8 [bytes].
        lead: the lead byte.
        continuations: the bytes after the lead byte: one byte each, or two as a big-endian number.
    """
    positions = np.flatnonzero(data == lead)
    rest = data[positions + 1].astype(np.uint16)
    if continuations[0] > 0xFF:
        rest = rest * 256 + data[positions + 2]
    return positions[np.isin(rest, continuations)]
