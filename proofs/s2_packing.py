"""S2: training on packed documents equals training on the same documents in padded rows of their own.

A document has 4 to 20 ids, and each id repeats the one before last with probability 0.7. A step has 32 documents.
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


def make_documents(draw: np.random.Generator) -> list[np.ndarray]:
    documents = []
    for length in draw.integers(4, 21, DOCUMENTS):
        ids = draw.integers(0, V, length)
        for t in range(2, length):
            ids[t] = ids[t - 2] if draw.random() < 0.7 else ids[t]
        documents.append(ids)
    return documents


def write_store(documents: list[np.ndarray], path: Path) -> Store:
    lengths = np.array([len(d) for d in documents], np.int64)
    n = len(documents)
    columns = {"source": ["made"] * n, "path": [str(i) for i in range(n)], "offset": [0] * n, "group": ["g"] * n}
    columns |= {"cluster": list(range(n)), "bytes": lengths.tolist()}
    identity = pa.RecordBatch.from_pydict({name: columns[name] for name in IDENTITY.names}, schema=IDENTITY)
    with StoreWriter(path, tokenizer="made", vocab=V, columns={}) as writer:
        writer.append(np.concatenate(documents).astype(np.uint32), lengths, lengths, identity)
    return Store.open(path)


def batches(store: Store) -> tuple[Batch, Batch]:
    """All documents of a store, packed and one per row."""
    ends = np.asarray(store.ends)
    plans = BestFit(ends, T), OnePerRow(ends, T)
    (packed,), (one_per_row,) = (all_rows(Source("d", store, plan, isolate=True), 10**6) for plan in plans)
    return packed, one_per_row


def losses(model: Transformer, batch: Batch) -> np.ndarray:
    """The loss of each document, sorted, since the order of documents depends on the packing."""
    labels_BT = torch.from_numpy(batch.labels_BT)
    logp_BT = logits(model, batch).log_softmax(-1).gather(-1, labels_BT.clamp(min=0)[..., None])[..., 0]
    nll_BT = torch.where(labels_BT == IGNORE, 0.0, -logp_BT).double().numpy()
    starts = batch.positions_BT == 0
    number_BT = starts.cumsum(1) + 1000 * np.arange(len(batch))[:, None]
    return np.sort([nll_BT[number_BT == d].sum() for d in np.unique(number_BT[batch.labels_BT != IGNORE])])


def run(seed: int, arm: str, steps: int = STEPS) -> Numbers:
    draw, unmasked = np.random.default_rng(seed), arm == "documents see each other"
    initial = model(V, T, seed)
    learners = [engine(copy.deepcopy(initial), LanguageModel(), steps, 3e-3, seed) for _ in range(2)]
    gradient_difference = loss_difference = 0.0
    last_losses: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        for step in range(steps):
            pair = list(batches(write_store(make_documents(draw), Path(directory) / str(step))))
            if unmasked:
                pair[0] = replace(pair[0], documents_BT=None)
            if step == 0:
                loss_difference = float(np.abs(losses(initial, pair[0]) - losses(initial, pair[1])).max())
                gradients = []
                for learner, batch in zip(learners, pair, strict=True):
                    learner.gradients(batch)
                    gradients.append(torch.cat([p.grad.flatten().double() for p in learner.trained.values()]))  # type: ignore[union-attr]
                gradient_difference = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
            last_losses = [float(learner.step(batch).loss) for learner, batch in zip(learners, pair, strict=True)]
    return {
        "gradients apart": gradient_difference,
        "losses of a document apart": loss_difference,
        "last loss apart": abs(last_losses[0] / last_losses[1] - 1),
        "last loss": last_losses[1],
    }


GATES = [
    Gate("gradients apart", high=1e-5),
    Gate("losses of a document apart", high=1e-3),
    Gate("last loss apart", high=0.01),
]
PROOF = Proof(
    "S2",
    "Training on packed documents equals training on documents in rows of their own",
    "gradients equal to 1e-5, the last loss to 1 %; without the mask a document's loss changes by more than 1e-3",
    run,
    [Arm("packed", GATES), Arm("documents see each other", [GATES[1]], control=True)],
)
