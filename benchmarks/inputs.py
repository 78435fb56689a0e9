"""What a measurement reads: the same token ids for everybody, as our store and as a plain file; free of torch.

Ids follow Zipf's law (Zipf 1949), as words do: p(id) ~ 1 / (id + 3). So a loss falls from ln V towards the entropy of
that distribution within the few steps that are compared, which uniform ids would not show.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.shapes import Shape
from ingot.store.writer import IDENTITY, StoreWriter

IDS = 1 << 20


def write_ids(shape: Shape, directory: Path, ids: int = IDS) -> dict[str, str]:
    """Write `ids` token ids; returns the paths `ids` (little-endian int32) and `store`."""
    weight = 1 / (np.arange(shape.vocab) + 3)
    draw_N = np.random.default_rng(1).choice(shape.vocab, ids, p=weight / weight.sum())
    plain, store = directory / "ids.bin", directory / "store"
    draw_N.astype("<i4").tofile(plain)
    row: dict[str, Any] = {"source": "made", "path": "ids", "offset": 0, "bytes": ids, "group": "", "cluster": 0}
    with StoreWriter(store, tokenizer="bench", vocab=shape.vocab) as writer:
        identity = pa.RecordBatch.from_pylist([row], schema=IDENTITY)
        writer.append(draw_N.astype(np.uint32), np.array([ids]), np.array([ids]), identity)
    return {"ids": str(plain), "store": str(store)}
