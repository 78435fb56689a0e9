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
from typing import Any, NamedTuple

import numpy as np
import torch

from ingot.data.batches import IGNORE, Batch, Source, all_rows
from ingot.data.packing import BestFit, Concatenated
from ingot.evaluate.bootstrap import ratio
from ingot.model.losses import at_labels, chunked, token_logps
from ingot.model.precision import at_least_fp32
from ingot.model.transformer import Transformer
from ingot.store.reader import Store
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train.divergences import kl

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
    dropped: int = 0
    """Conversations of which no response is within the context."""
    dropped_tokens: int = 0
    """Tokens of conversations beyond the context, those of dropped ones included."""

    def rows(self) -> Iterator[dict]:
        """Table rows: metric, value, and a 95 % interval over the documents with a predicted token.

        Nothing but the number of dropped conversations and tokens where no token was predicted.
        """
        measured = self.tokens > 0
        documents = int(measured.sum())
        for metric, value in (("left_out_conversations", self.dropped), ("left_out_tokens", self.dropped_tokens)):
            if value:
                yield {"metric": metric, "value": value, "low": value, "high": value, "n": documents}
        if not documents:
            return
        loss = ratio(self.nats[measured], self.tokens[measured])
        yield {"metric": "loss_nats" if self.all_tokens else "response_loss_nats", **loss}
        perplexity = {k: v if k == "n" else math.exp(min(v, MAX_EXPONENT)) for k, v in loss.items()}
        yield {"metric": "perplexity", **perplexity}
        if self.all_tokens:
            yield {"metric": "bits_per_byte", **ratio(self.nats / math.log(2), self.bytes)}


class Sums(NamedTuple):
    """Sums over the targets of each document."""

    nats: np.ndarray
    """float64; of several values for each target a row of a document."""
    tokens: np.ndarray
    """int64"""

    @classmethod
    def zero(cls, store: Store, *values: int) -> "Sums":
        """No sums yet of one value for each target, or of several."""
        return cls(np.zeros((store.documents, *values)), np.zeros(store.documents, np.int64))


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
    source, repeated = _held_out(store, overlap, context or model.config.context)
    sums, tokens = _by_document(_nll(model), model, source, repeated, rows_per_batch, advance)
    dropped = (source.plan.dropped, source.plan.dropped_tokens) if isinstance(source.plan, BestFit) else (0, 0)
    return Likelihood(sums, tokens, _sizes(store), "mask" not in store.columns, *dropped)


def by_itself(
    model: Transformer,
    store: Store,
    rows_per_batch: int,
    advance: Callable[[int], None] = lambda n: None,
    sums: Sums | None = None,
    first: int = 0,
) -> Likelihood:
    """The likelihood of each document of a text store alone, which does not depend on its neighbours.

    Attention stops at the ends of documents. A document that is longer than the model's context is cut into pieces,
    which overlap by one token.

    Args:
        model, store, rows_per_batch, advance: as in `likelihood`.
        sums: what earlier rows add up to; changed in place before each call of `advance`. Default: nothing.
        first: the number of these rows, a multiple of `rows_per_batch`.
    """
    model.eval()
    source = _documents(store, model.config.context)
    nats, tokens = _by_document(
        _nll(model), model, source, 0, rows_per_batch, advance, sums=sums or Sums.zero(store), first=first
    )
    return Likelihood(nats, tokens, _sizes(store), all_tokens=True)


def document_rows(store: Store, context: int) -> int:
    """Number of rows that `by_itself` reads."""
    return _documents(store, context).plan.rows


def _documents(store: Store, context: int) -> Source:
    return Source("documents", store, BestFit(np.asarray(store.ends), context), isolate=True)


def _nll(model: Transformer) -> Callable[[Batch], torch.Tensor]:
    def nll(batch: Batch) -> torch.Tensor:
        out = model(**batch.inputs)
        return -token_logps(out.hidden, out.head, batch.labels_BT)

    return nll


def _sizes(store: Store) -> np.ndarray:
    return np.asarray(store.columns["bytes"].read(0, store.documents), np.float64)


class Comparison(NamedTuple):
    """Means over tokens with their intervals, as `bootstrap.ratio` gives them."""

    kl: dict[str, float]
    """KL(old || new) of the next-token distributions in nats; the sum over the shared vocabulary is exact."""
    agreement: dict[str, float]
    """The fraction of tokens for which both models have the same most likely token."""


def comparison(
    old: Transformer,
    new: Transformer,
    store: Store,
    overlap: float,
    rows_per_batch: int,
    advance: Callable[[int], None] = lambda n: None,
    context: int | None = None,
    limit: int | None = None,
) -> Comparison:
    """How closely two models predict the same.

    Tokens and arguments are those of `likelihood`; `context` defaults to the shorter of both contexts, and `limit`
    rows, evenly spaced, are read (default: all).
    """
    context = context or min(old.config.context, new.config.context)
    models = old.eval(), new.eval()

    def both(batch: Batch) -> torch.Tensor:
        before, after = (model(**batch.inputs) for model in models)
        return _compared(before, after, batch.labels_BT)

    rows, zero = _held_out(store, overlap, context), Sums.zero(store, len(Comparison._fields))
    sums, tokens = _by_document(both, new, *rows, rows_per_batch, advance, limit, zero)
    return Comparison(*(ratio(column[tokens > 0], tokens[tokens > 0]) for column in sums.T))


def _compared(before: Any, after: Any, labels_BT: torch.Tensor) -> torch.Tensor:
    """The values of a `Comparison` for each target, [B, T, 2]."""
    vocab = min(len(out.head.weight) for out in (before, after))

    def values(after_nV: torch.Tensor, hidden_nD: torch.Tensor) -> torch.Tensor:
        before_nV, after_nV = (at_least_fp32(x[:, :vocab]) for x in (before.head(hidden_nD), after_nV))
        same_n = before_nV.argmax(-1) == after_nV.argmax(-1)
        return torch.stack((kl(before_nV.log_softmax(-1), after_nV.log_softmax(-1)), same_n), -1)

    return torch.stack(at_labels(chunked(values, after.head, None), after.hidden, labels_BT, IGNORE, before.hidden), -1)


def held_out_rows(store: Store, overlap: float, context: int, number: int) -> Iterator[Batch]:
    """`number` rows of a held-out split, evenly spaced, one at a time."""
    source, repeated = _held_out(store, overlap, context)
    for batch in all_rows(source, 1, min(number, source.plan.rows)):
        yield _without_overlap(batch, repeated) if repeated else batch


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
    source: Source,
    repeated: int,
    rows_per_batch: int,
    advance: Callable[[int], None],
    limit: int | None = None,
    sums: Sums | None = None,
    first: int = 0,
) -> Sums:
    """Sums of a measure per document, and the number of targets per document.

    Args:
        measure: a batch of tensors -> a value for each target, [B, T], or several, [B, T, values].
        source: all rows of a store.
        repeated: tokens of a row that repeat the row before it, which has predicted them.
        sums: of the rows before row `first`; changed in place.
    """
    sums = sums or Sums.zero(source.store)
    device = next(model.parameters()).device
    with torch.inference_mode():
        for batch in all_rows(source, rows_per_batch, limit, first):
            if repeated:
                batch = _without_overlap(batch, repeated)
            document_BT = source.plan.index(batch.row_B)[1][:, 1:]
            measured_BT = measure(batch.to(device)).double().cpu().numpy()
            counted = batch.labels_BT != IGNORE
            np.add.at(sums.nats, document_BT[counted], measured_BT[counted])
            np.add.at(sums.tokens, document_BT[counted], 1)
            advance(len(batch))
    return sums


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
