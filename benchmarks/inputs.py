"""The input of a measurement: the same token ids for all contenders, as our store and as a plain file. No torch.

Ids follow Zipf's law (Zipf 1949), as words do: p(id) ~ 1 / (id + 3). The loss therefore falls from ln V towards the
entropy of that distribution within the few steps that are compared; with uniform ids it would not fall.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.shapes import Shape
from ingot.store.writer import IDENTITY, StoreWriter

DEFAULT_IDS = 1 << 20


def write_ids(shape: Shape, directory: Path, ids: int = DEFAULT_IDS) -> dict[str, str]:
    """Write `ids` random token ids to a directory.

    Returns:
        the paths `ids` (a file of little-endian int32) and `store`.
    """
    weight = 1 / (np.arange(shape.vocab) + 3)
    draw_N = np.random.default_rng(1).choice(shape.vocab, ids, p=weight / weight.sum())
    plain, store = directory / "ids.bin", directory / "store"
    draw_N.astype("<i4").tofile(plain)
    row: dict[str, Any] = {"source": "made", "path": "ids", "offset": 0, "bytes": ids, "group": "", "cluster": 0}
    with StoreWriter(store, tokenizer="bench", vocab=shape.vocab) as writer:
        identity = pa.RecordBatch.from_pylist([row], schema=IDENTITY)
        writer.append(draw_N.astype(np.uint32), np.array([ids]), np.array([ids]), identity)
    return {"ids": str(plain), "store": str(store)}
