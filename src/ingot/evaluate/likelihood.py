"""Likelihood of held-out text: nats per token, perplexity and bits per byte, with intervals over documents.

Windows overlap so that every target has at least some context; each target is counted once. Bits per byte are the nats
of all predicted tokens (end and begin of text included) / ln 2 / UTF-8 bytes of the cleaned text, without text that
became an unknown token (`tokenizer/round_trip.py`). They are comparable between models with different tokenizers, and
with general compressors.
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

MAX_EXPONENT = 709.0
"""Largest exponent whose exponential is a finite float64; tables must not contain infinity."""


@dataclass(frozen=True)
class Likelihood:
    """Per held-out document: the sum of nats, the number of predicted tokens, and the number of bytes."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray
    all_tokens: bool
    """Whether every token was predicted (text), or only the labelled ones (responses)."""

    def rows(self) -> Iterator[dict]:
        """Table rows: metric, value, and a 95 % interval."""
        loss = ratio(self.nats, self.tokens)
        yield {"metric": "loss_nats" if self.all_tokens else "response_loss_nats", **loss}
        perplexity = {k: v if k == "n" else math.exp(min(v, MAX_EXPONENT)) for k, v in loss.items()}
        yield {"metric": "perplexity", **perplexity}
        if self.all_tokens:
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
        model: runs in its own precision; it is left in evaluation mode.
        store: the held-out split.
        overlap: fraction of a text window that only serves as context; conversations are scored one by one.
        rows_per_batch: rows of a forward pass.
        advance: called with the number of rows done since the last call.
        context: tokens of a window; default: the model's context.
    """
    model.eval()

    def nll(batch: Batch) -> torch.Tensor:
        out = model(**batch.inputs)
        return -token_logps(out.hidden, out.head, batch.labels_BT)

    sums, tokens = _by_document(nll, model, store, overlap, rows_per_batch, advance, context)
    lengths = store.columns["bytes"].read(0, store.documents)
    return Likelihood(sums, tokens, np.asarray(lengths, np.float64), all_tokens="mask" not in store.columns)


def divergence(
    old: Transformer,
    new: Transformer,
    store: Store,
    overlap: float,
    rows_per_batch: int,
    advance: Callable[[int], None] = lambda n: None,
    context: int | None = None,
    limit: int | None = None,
) -> dict[str, float]:
    """KL(old || new) of the next-token distributions, in nats per token, with its interval.

    The sum over the vocabulary, which both models share, is exact. Tokens and arguments are those of `likelihood`;
    `context` defaults to the shorter of both contexts, and `limit` rows, evenly spaced, are read (default: all).
    """
    context = context or min(old.config.context, new.config.context)
    models = old.eval(), new.eval()

    def kl(batch: Batch) -> torch.Tensor:
        before, after = (model(**batch.inputs) for model in models)
        return kl_divergence(after.hidden, after.head, before.hidden, before.head, batch.labels_BT)

    nats, tokens = _by_document(kl, new, store, overlap, rows_per_batch, advance, context, limit)
    return ratio(nats[tokens > 0], tokens[tokens > 0])


def row_count(store: Store, overlap: float, context: int) -> int:
    """Number of rows that `likelihood` reads."""
    return _held_out(store, overlap, context)[0].plan.rows


def _held_out(store: Store, overlap: float, context: int) -> tuple[Source, int]:
    """All rows of a held-out split, and how many tokens of a text window repeat the window before it."""
    ends = np.asarray(store.ends)
    if "mask" in store.columns:
        return Source("held out", store, BestFit(ends, context, store.columns["mask"].read), isolate=True), 0
    stride = max(1, round(context * (1 - overlap)))
    return Source("held out", store, Concatenated(ends, context, stride, tail=True), isolate=False), context - stride


def _by_document(
    measure: Callable[[Batch], torch.Tensor],
    model: Transformer,
    store: Store,
    overlap: float,
    rows_per_batch: int,
    advance: Callable[[int], None],
    context: int | None,
    limit: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of a measure per document, and the number of targets per document.

    Args:
        measure: a batch of tensors -> a value for each target, [B, T].
    """
    source, repeated = _held_out(store, overlap, context or int(model.config.context))
    sums = np.zeros(store.documents)
    tokens = np.zeros(store.documents, np.int64)
    device = next(model.parameters()).device
    with torch.inference_mode():
        for batch in all_rows(source, rows_per_batch, limit):
            if repeated:
                batch = _without_overlap(batch, repeated)
            document_BT = source.plan.index(batch.row_B)[1][:, 1:]
            measured_BT = measure(batch.to(device)).double().cpu().numpy()
            counted = batch.labels_BT != IGNORE
            np.add.at(sums, document_BT[counted], measured_BT[counted])
            np.add.at(tokens, document_BT[counted], 1)
            advance(len(batch))
    return sums, tokens


def _without_overlap(batch: Batch, overlap: int) -> Batch:
    """The batch without labels in the first `overlap` positions, which the window before has predicted."""
    labels_BT = batch.labels_BT.copy()
    labels_BT[batch.row_B > 0, :overlap] = IGNORE
    return replace(batch, labels_BT=labels_BT)


def compressors(store: Store, tokenizer: Tokenizer) -> dict[str, float]:
    """Bits per byte of general compressors on the same held-out text, as baselines."""
    ids = store.ids.read(0, store.tokens)
    text = tokenizer.decode_bytes(ids[~np.isin(ids, list(tokenizer.specials.values()))])
    return {
        "gzip -9": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz -9": 8 * len(lzma.compress(text, preset=9)) / len(text),
    }
