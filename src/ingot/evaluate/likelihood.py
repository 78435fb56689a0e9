"""How well a model predicts held-out text: nats per token, perplexity, bits per byte, with intervals over documents.

Windows overlap, so that a target sees at least a share of the context and is counted once. Bits per byte = nats of all
predicted tokens (end of text included) / ln 2 / UTF-8 bytes of the cleaned text: the one figure that compares models
with different tokenizers, and models with gzip.
"""

import gzip
import lzma
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ingot.data.batches import IGNORE, Batch, Source, all_rows
from ingot.data.packing import BestFit, Concatenated
from ingot.evaluate.bootstrap import ratio
from ingot.model.losses import kl_divergence, token_logps
from ingot.model.transformer import Transformer
from ingot.store.reader import Store
from ingot.tokenizer.byte_bpe import Tokenizer

_MOST = 709.0
"""Nats whose exponential is a number still; tables have no infinity."""


@dataclass(frozen=True)
class Likelihood:
    """Sums per held-out document: nats and predicted tokens, and its bytes."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray
    whole: bool
    """Whether every token was predicted (text), or only labelled ones (responses)."""

    def rows(self) -> Iterator[dict]:
        """Table rows: metric, value, and a 95 % interval."""
        loss = ratio(self.nats, self.tokens)
        yield {"metric": "loss_nats" if self.whole else "response_loss_nats", **loss}
        yield {"metric": "perplexity", **{k: math.exp(min(v, _MOST)) if k != "n" else v for k, v in loss.items()}}
        if self.whole:
            yield {"metric": "bits_per_byte", **ratio(self.nats / math.log(2), self.bytes)}


def likelihood(
    model: Transformer,
    store: Store,
    overlap: float,
    rows_per_batch: int,
    advance: Callable[[int], None] = lambda n: None,
    context: int | None = None,
) -> Likelihood:
    """Score every held-out token of a store once.

    Args:
        model: read in its own precision, and left in evaluation mode.
        store: the held-out split.
        overlap: share of a window that is context only (text); conversations are scored one by one.
        rows_per_batch: rows of a forward pass.
        advance: told the number of rows done.
        context: tokens of a window; default: the model's context.
    """
    model.eval()

    def nll(batch: Batch) -> torch.Tensor:
        out = model(**batch.inputs)
        return -token_logps(out.hidden, out.head, batch.labels_BT)

    sums, tokens = _by_document(nll, model, store, overlap, rows_per_batch, advance, context)
    lengths = store.columns["bytes"].read(0, store.documents)
    return Likelihood(sums, tokens, np.asarray(lengths, np.float64), whole="mask" not in store.columns)


def divergence(
    old: Transformer,
    new: Transformer,
    store: Store,
    overlap: float,
    rows_per_batch: int,
    advance: Callable[[int], None] = lambda n: None,
    context: int | None = None,
) -> dict[str, float]:
    """KL(old || new) of the next token in nats, over all that `likelihood` scores, with its interval; exact over the
    vocabulary, which is the same for both. `context`: tokens of a window; default: of the shorter of both contexts."""
    context = context or min(old.config.context, new.config.context)
    models = old.eval(), new.eval()

    def kl(batch: Batch) -> torch.Tensor:
        before, after = (model(**batch.inputs) for model in models)
        return kl_divergence(after.hidden, after.head, before.hidden, before.head, batch.labels_BT)

    return ratio(*_by_document(kl, new, store, overlap, rows_per_batch, advance, context))


def _by_document(
    measure: Callable[[Batch], torch.Tensor],
    model: Transformer,
    store: Store,
    overlap: float,
    rows_per_batch: int,
    advance: Callable[[int], None],
    context: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of a measure (rows as tensors to B x T) per document, and counted targets per document."""
    context = context or int(model.config.context)
    masked = "mask" in store.columns
    ends = np.asarray(store.ends)
    stride = max(1, round(context * (1 - overlap)))
    mask = store.columns["mask"].read if masked else None
    plan = BestFit(ends, context, mask) if mask else Concatenated(ends, context, stride, tail=True)
    source = Source("held out", store, plan, isolate=masked)
    sums = np.zeros(store.documents)
    tokens = np.zeros(store.documents, np.int64)
    device = next(model.parameters()).device
    with torch.inference_mode():
        for batch in all_rows(source, rows_per_batch):
            if not masked:
                batch = _once(batch, context - stride)
            document_BT = plan.index(batch.row_B)[1][:, 1:]
            measured_BT = measure(batch.to(device)).double().cpu().numpy()
            counted = batch.labels_BT != IGNORE
            np.add.at(sums, document_BT[counted], measured_BT[counted])
            np.add.at(tokens, document_BT[counted], 1)
            advance(len(batch))
    return sums, tokens


def _once(batch: Batch, seen: int) -> Batch:
    """Leave out targets that the window before has counted."""
    labels = batch.labels_BT.copy()
    labels[batch.row_B > 0, :seen] = IGNORE
    return replace(batch, labels_BT=labels)


def compressors(store: Store, tokenizer: Tokenizer) -> dict[str, float]:
    """Bits per byte of general compressors on the same held-out text, the yardstick that needs no model."""
    skip = {tokenizer.eot}
    ids = store.ids.read(0, store.tokens)
    text = tokenizer.decode_bytes([int(i) for i in ids if int(i) not in skip])
    return {
        "gzip -9": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz -9": 8 * len(lzma.compress(text, preset=9)) / len(text),
    }
