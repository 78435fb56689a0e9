"""From documents to rows: which tokens stand in which row of a batch, decided once and before training.

A row holds `context + 1` token ids, because the targets are the inputs moved by one. A plan answers two questions for
any row: which token indices (`index`), and which documents (`slices`). `Concatenated` slides over the whole stream and
wastes nothing; `BestFit` never splits a document that fits, pads the rest, and is what conversations need; `OnePerRow`
gives each document a row of its own, and is what pairs and prompts need.

Rejected: cropping documents to fill a row (a third of a small corpus is never shown), first-fit (more padding).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.core.artifact import atomic_open
from ingot.core.errors import UserError

PAD = -1
"""Token index of a padded place."""

Mask = Callable[[int, int], np.ndarray]
"""Tokens `start` to `stop` of a store -> nonzero where one is learned (the `read` of its mask column)."""


@dataclass(frozen=True)
class Slice:
    """Tokens `start` to `stop` of the store, all of one document."""

    document: int
    start: int
    stop: int


class Concatenated:
    """Row `r` is the stream from `r * stride`; with `tail`, a last padded row covers what is left over."""

    dropped = dropped_tokens = 0
    group = 1

    def __init__(self, ends: np.ndarray, context: int, stride: int | None = None, tail: bool = False):
        self.context, self.stride = context, stride or context
        self._ends = np.asarray(ends).astype(np.int64)  # one type with the indices, or each search converts it
        self._tokens = int(ends[-1]) if len(ends) else 0
        whole = max(0, (self._tokens - context - 1) // self.stride + 1)
        covered = (whole - 1) * self.stride + context if whole else 0
        self.rows = whole + (tail and covered < self._tokens - 1)

    @property
    def targets(self) -> int:
        """Different targets the rows cover (an epoch is counted in tokens, so overlapping rows count once)."""
        return min(self._tokens - 1, (self.rows - 1) * self.stride + self.context) if self.rows else 0

    @property
    def row_targets(self) -> float:
        """Targets of a row, on average."""
        return float(self.context)

    def index(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token indices (PAD where there is none) and document numbers, both (rows, context + 1) int64."""
        index = rows[:, None] * self.stride + np.arange(self.context + 1)
        document = np.searchsorted(self._ends, index, side="right")
        outside = index >= self._tokens
        return np.where(outside, PAD, index), np.where(outside, PAD, document)

    def slices(self, row: int) -> list[Slice]:
        return _slices(*self.index(np.array([row])))

    def rows_of(self, document: int) -> range:
        """The rows in which a document stands: `slices` backwards."""
        start = int(self._ends[document - 1]) if document else 0
        first = max(0, -(-(start - self.context) // self.stride))
        return range(first, min(self.rows, (int(self._ends[document]) - 1) // self.stride + 1))


class BestFit:
    """Whole documents, longest first, each into the fullest row that still has room (best-fit decreasing).

    A document longer than a row is cut into pieces that share one token, so that no target is lost. With a `mask`
    (conversations: an answer without its question teaches nothing) only its first piece is kept, and where nothing in
    that is learned, the document is left out: `dropped` of them, `dropped_tokens` in all.
    """

    group = 1

    def __init__(self, ends: np.ndarray, context: int, mask: Mask | None = None):
        self.context = context
        pieces = _pieces(ends, context, truncate=mask is not None)
        learned = np.ones(len(pieces), bool) if mask is None else _learned(pieces, ends, mask)
        self.dropped = int((~learned).sum())
        pieces = pieces[learned]
        shown = int((pieces[:, 2] - pieces[:, 1]).sum())
        self.dropped_tokens = int(ends[-1]) - shown if mask and len(ends) else 0
        row_of, self.rows = _best_fit(pieces[:, 2] - pieces[:, 1], context + 1)
        order = np.argsort(row_of, kind="stable")
        self._pieces = pieces[order]
        self._first = np.searchsorted(row_of[order], np.arange(self.rows + 1))
        self.targets = int((self._pieces[:, 2] - self._pieces[:, 1] - 1).sum())

    @property
    def row_targets(self) -> float:
        """Targets of a row, on average (labels that a mask removes included)."""
        return self.targets / self.rows

    def index(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token indices (PAD where there is none) and document numbers, both (rows, context + 1) int64."""
        index = np.full((len(rows), self.context + 1), PAD, np.int64)
        document = np.full_like(index, PAD)
        for i, row in enumerate(rows):
            place = 0
            for doc, start, stop in self._pieces[self._first[row] : self._first[row + 1]]:
                end = place + stop - start
                index[i, place:end] = np.arange(start, stop)
                document[i, place:end] = doc
                place = end
        return index, document

    def slices(self, row: int) -> list[Slice]:
        return [Slice(*map(int, p)) for p in self._pieces[self._first[row] : self._first[row + 1]]]

    def rows_of(self, document: int) -> list[int]:
        """The rows in which a document stands: `slices` backwards."""
        pieces = np.flatnonzero(self._pieces[:, 0] == document)
        return np.unique(np.searchsorted(self._first, pieces, side="right") - 1).tolist()

    def save(self, path: Path) -> None:
        """Write the row index as an artifact: pieces (document, start, stop) and each row's first piece."""
        with atomic_open(path) as file:
            np.savez(file, pieces=self._pieces, first=self._first)


class OnePerRow:
    """Documents in rows of their own, adjacent ones of a group together: pairs (groups of 2) and prompts.

    None is ever cut: a pair without the end of one answer says something else than people said. A group in which a
    document has more than `context` tokens is left out and counted. So much, and not one token more, because the last
    token must be an input too: it is what a reward model reads. Where other plans say row, this one says group: row `r`
    is the r-th group that is kept, and `index` gives `group` arrays for it, one after another.

    Rows are as wide as the longest document asked for, rounded up to `WIDTH`: padding to the context would make short
    pairs several times as expensive.
    """

    WIDTH = 16

    def __init__(self, ends: np.ndarray, context: int, group: int = 1):
        self.context, self.group = context, group
        ends = np.asarray(ends).astype(np.int64)
        self._bounds = np.concatenate([[0], ends])
        lengths = np.diff(self._bounds).reshape(-1, group)
        fits = (lengths <= context).all(1)
        self._kept = np.flatnonzero(fits)
        self.rows = len(self._kept)
        self.dropped = len(lengths) - self.rows
        """Groups left out."""
        self.dropped_tokens = int(lengths[~fits].sum())
        self.targets = int((lengths[fits] - 1).sum())

    @property
    def row_targets(self) -> float:
        """Targets of a group, on average (labels that a mask removes included)."""
        return self.targets / self.rows

    def index(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token indices (PAD where there is none) and document numbers, both (rows * group, width + 1) int64."""
        documents = (self._kept[rows][:, None] * self.group + np.arange(self.group)).reshape(-1)
        starts, lengths = self._bounds[documents], np.diff(self._bounds)[documents]
        width = min(self.context, -(-int(lengths.max(initial=1)) // self.WIDTH) * self.WIDTH)
        place = np.arange(width + 1)
        inside = place < lengths[:, None]
        return np.where(inside, starts[:, None] + place, PAD), np.where(inside, documents[:, None], PAD)

    def slices(self, row: int) -> list[Slice]:
        first = int(self._kept[row]) * self.group
        bounds = self._bounds[first : first + self.group + 1].tolist()
        return [Slice(first + i, bounds[i], bounds[i + 1]) for i in range(self.group)]

    def rows_of(self, document: int) -> list[int]:
        """The rows in which a document stands: `slices` backwards."""
        return np.flatnonzero(self._kept == document // self.group).tolist()


RowPlan = Concatenated | BestFit | OnePerRow


def make_row_plan(
    kind: str, ends: np.ndarray, context: int, stride: int | None, mask: Mask | None, what: str, group: int = 1
) -> RowPlan:
    """The training plan of one store.

    Args:
        kind: `concat`, `best-fit` or `whole`.
        ends: cumulative document ends of the store, (documents,).
        mask: of a store with a mask column (long documents are then truncated, not cut in pieces).
        what: names the store in errors.
        group: documents that belong together, of `whole`.

    Raises:
        UserError: the store does not fill one row, tokens lie between rows, or nothing that is learned is within the
            context.
    """
    if kind == "whole":
        whole = OnePerRow(ends, context, group)
        if whole.rows == 0:
            name, end = ("pairs have a side", "") if group == 2 else ("prompts are", " or a smaller objective.max_new")
            raise UserError(
                f"{what}: all {whole.dropped:,} {name} longer than the {context:,} tokens there are for them, and none "
                f"is cut; set a larger context{end}"
            )
        return whole
    if kind == "concat" and stride and stride > context:
        raise UserError(
            f"packing.stride: found {stride}, expected at most the context of {context} (in every phase): the tokens "
            "between two rows would never be learned from"
        )
    tokens = int(ends[-1]) if len(ends) else 0
    plan = Concatenated(ends, context, stride) if kind == "concat" else BestFit(ends, context, mask)
    if plan.rows == 0 and plan.dropped:
        raise UserError(
            f"{what}: each of its {plan.dropped:,} documents is longer than the context of {context} and its "
            "answer begins behind that, so nothing is left to learn; use a longer context or shorten the prompts"
        )
    if plan.rows == 0:
        raise UserError(
            f"{what}: holds {tokens:,} tokens, fewer than one row of context {context} needs ({context + 1:,}); "
            "give it more text or set a smaller model.context"
        )
    return plan


def _learned(pieces: np.ndarray, ends: np.ndarray, mask: Mask) -> np.ndarray:
    """Whether each piece has a target. Only a document that was cut can have lost its own, so only those are read."""
    learned = np.ones(len(pieces), bool)
    for n in np.flatnonzero(pieces[:, 2] < ends.astype(np.int64)[pieces[:, 0]]).tolist():
        learned[n] = mask(int(pieces[n, 1]) + 1, int(pieces[n, 2])).any()
    return learned


def _pieces(ends: np.ndarray, context: int, truncate: bool) -> np.ndarray:
    """(pieces, 3) of document, start, stop, in document order."""
    ends = ends.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    lengths = ends - starts
    counts = np.ones_like(lengths) if truncate else np.maximum(1, -(-(lengths - 1) // context))
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = starts[document] + number * context
    stop = np.minimum(start + context + 1, ends[document])
    keep = stop - start >= 2  # one token has no target
    return np.stack([document, start, stop], 1)[keep]


def _best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Row of each piece. `free` has bit `s` set while some row has `s` places left."""
    row_of = np.empty(len(lengths), np.int64)
    by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    free = rows = 0
    for piece in np.argsort(-lengths, kind="stable"):
        length = int(lengths[piece])
        if fitting := free >> length:
            space = length + (fitting & -fitting).bit_length() - 1
            row = by_space[space].pop()
            if not by_space[space]:
                free &= ~(1 << space)
        else:
            row, space = rows, capacity
            rows += 1
        row_of[piece] = row
        if left := space - length:
            by_space[left].append(row)
            free |= 1 << left
    return row_of, rows


def _slices(index: np.ndarray, document: np.ndarray) -> list[Slice]:
    index, document = index[0][index[0] != PAD], document[0][index[0] != PAD]
    cuts = np.flatnonzero(np.diff(document)) + 1
    return [
        Slice(int(d[0]), int(i[0]), int(i[-1]) + 1)
        for i, d in zip(np.split(index, cuts), np.split(document, cuts), strict=True)
    ]
