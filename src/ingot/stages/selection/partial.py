"""Arrays that a stage fills bit by bit, saved once a minute, so that a killed stage continues."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.artifact import atomic_open

SAVE_SECONDS = 60.0


class Partial:
    """Arrays and how much of them is filled, as an earlier process of the stage left them.

    Args:
        path: the .npz file.
        arrays: name -> array as it is at the beginning; filled in place.
    """

    def __init__(self, path: Path, arrays: dict[str, np.ndarray]):
        self._path, self._arrays = path, arrays
        self._saved = time.monotonic()
        self.done = 0
        """Documents or rows, from the first one on."""
        if path.exists():
            with np.load(path) as file:
                self.done = int(file["done"])
                for name, array in arrays.items():
                    array[...] = file[name]

    def add(self, number: int) -> None:
        """Count what has been filled; now and then save it."""
        self.done += number
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the file."""
        content: dict[str, Any] = {"done": self.done, **self._arrays}
        with atomic_open(self._path) as file:
            np.savez(file, **content)
        self._saved = time.monotonic()
