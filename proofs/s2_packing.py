"""S2: documents packed into rows are learned as the same documents alone in their rows, padded.

Documents of 4 to 20 ids, of which each repeats the one before last with a high chance; the same 32 of them a step.
"""

import copy
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ingot.data.batches import IGNORE, Batch, Source, all_rows
from ingot.data.packing import BestFit, OnePerRow
from ingot.model.transformer import Transformer
from ingot.objectives.lm import LanguageModel
from ingot.store.reader import Store
from ingot.store.writer import IDENTITY, StoreWriter
from proofs.proof import Arm, Gate, Numbers, Proof
from proofs.worlds import engine, logits, model

V, T, DOCUMENTS, STEPS = 32, 40, 32, 60


def documents(draw: np.random.Generator) -> list[np.ndarray]:
    found = []
    for length in draw.integers(4, 21, DOCUMENTS):
        ids = draw.integers(0, V, length)
        for t in range(2, length):
            ids[t] = ids[t - 2] if draw.random() < 0.7 else ids[t]
        found.append(ids)
    return found


def stored(texts: list[np.ndarray], path: Path) -> Store:
    """The documents as a store of the product's."""
    lengths = np.array([len(t) for t in texts], np.int64)
    n = len(texts)
    known = {"source": ["made"] * n, "path": [str(i) for i in range(n)], "offset": [0] * n, "group": ["g"] * n}
    known |= {"cluster": list(range(n)), "bytes": lengths.tolist()}
    identity = pa.RecordBatch.from_pydict({name: known[name] for name in IDENTITY.names}, schema=IDENTITY)
    with StoreWriter(path, tokenizer="made", vocab=V, columns={}) as writer:
        writer.append(np.concatenate(texts).astype(np.uint32), lengths, lengths, identity)
    return Store.open(path)


def batches(store: Store) -> tuple[Batch, Batch]:
    """The documents packed, and alone."""
    ends = np.asarray(store.ends)
    plans = BestFit(ends, T), OnePerRow(ends, T)
    (packed,), (alone,) = (all_rows(Source("d", store, plan, isolate=True), 10**6) for plan in plans)
    return packed, alone


def losses(of: Transformer, batch: Batch) -> np.ndarray:
    """The loss of each document, sorted: rows are in another order."""
    labels_BT = torch.from_numpy(batch.labels_BT)
    logp_BT = logits(of, batch).log_softmax(-1).gather(-1, labels_BT.clamp(min=0)[..., None])[..., 0]
    nll_BT = torch.where(labels_BT == IGNORE, 0.0, -logp_BT).double().numpy()
    starts = batch.positions_BT == 0
    number_BT = starts.cumsum(1) + 1000 * np.arange(len(batch))[:, None]
    return np.sort([nll_BT[number_BT == d].sum() for d in np.unique(number_BT[batch.labels_BT != IGNORE])])


def run(seed: int, arm: str, steps: int = STEPS) -> Numbers:
    draw, contaminated = np.random.default_rng(seed), arm == "documents see each other"
    first = model(V, T, seed)
    engines = [engine(copy.deepcopy(first), LanguageModel(), steps, 3e-3, seed) for _ in range(2)]
    gradient = shift = 0.0
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        for step in range(steps):
            pair = list(batches(stored(documents(draw), Path(directory) / str(step))))
            if contaminated:
                pair[0] = replace(pair[0], documents_BT=None)
            if step == 0:
                shift = float(np.abs(losses(first, pair[0]) - losses(first, pair[1])).max())
                grads = []
                for made, batch in zip(engines, pair, strict=True):
                    made.gradients(batch)
                    grads.append(torch.cat([p.grad.flatten().double() for p in made.trained.values()]))  # type: ignore[union-attr]
                gradient = float((grads[0] - grads[1]).norm() / grads[1].norm())
            ends = [float(made.step(batch).loss) for made, batch in zip(engines, pair, strict=True)]
    return {
        "gradients apart": gradient,
        "losses of a document apart": shift,
        "last loss apart": abs(ends[0] / ends[1] - 1),
        "last loss": ends[1],
    }


GATES = [
    Gate("gradients apart", high=1e-5),
    Gate("losses of a document apart", high=1e-3),
    Gate("last loss apart", high=0.01),
]
PROOF = Proof(
    "S2",
    "Packed documents are learned as documents alone",
    "gradients equal to 1e-5, the last loss to 1 %; without the mask a document's loss moves by more than 1e-3",
    run,
    [Arm("packed", GATES), Arm("documents see each other", [GATES[1]], control=True)],
)
