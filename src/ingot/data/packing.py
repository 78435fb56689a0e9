"""Row plans: the assignment of a store's tokens to rows of a batch, fixed before training.

A row has `context + 1` token ids, because the targets are the inputs shifted by one. A plan maps a row to its token
indices (`index`) and its documents (`slices`). `Concatenated` slides a window over the token stream without padding.
`BestFit` (for conversations) splits no document that fits into a row, and pads. `OnePerRow` (for pairs and prompts)
puts each document into its own row.

No plan crops documents to avoid padding, because that excludes much of a small corpus from training.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.core.artifact import atomic_open
from ingot.core.errors import UserError

PAD = -1
"""Token index and document number of padding."""

Mask = Callable[[int, int], np.ndarray]
"""(start, stop) of tokens in a store -> nonzero for targets: the method `read` of its mask column."""


@dataclass(frozen=True)
class Slice:
    """Tokens `start` to `stop` (exclusive) of a document in the store."""

    document: int
    start: int
    stop: int


class Concatenated:
    """Row r is a window of the token stream from token r * stride.

    Args:
        ends: cumulative document ends [documents].
        context: targets per row.
        stride: distance between the starts of rows; None: the context.
        tail: whether a padded last row covers the remaining tokens.
    """

    dropped = dropped_tokens = 0
    group = 1

    def __init__(self, ends: np.ndarray, context: int, stride: int | None = None, tail: bool = False):
        self.context, self.stride = context, stride or context
        self._ends = np.asarray(ends).astype(np.int64)  # the type of the indices, so that searchsorted does not convert
        self._tokens = int(ends[-1]) if len(ends) else 0
        full_rows = max(0, (self._tokens - context - 1) // self.stride + 1)
        covered = (full_rows - 1) * self.stride + context if full_rows else 0
        self.rows = full_rows + (tail and covered < self._tokens - 1)

    @property
    def targets(self) -> int:
        """Number of distinct targets in all rows, which is the length of an epoch; overlapping rows count once."""
        return min(self._tokens - 1, (self.rows - 1) * self.stride + self.context) if self.rows else 0

    @property
    def row_targets(self) -> float:
        """Mean number of targets per row."""
        return float(self.context)

    def index(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token indices and document numbers of the rows, both [rows, context + 1] int64 with PAD for padding."""
        index = rows[:, None] * self.stride + np.arange(self.context + 1)
        document = np.searchsorted(self._ends, index, side="right")
        outside = index >= self._tokens
        return np.where(outside, PAD, index), np.where(outside, PAD, document)

    def slices(self, row: int) -> list[Slice]:
        return _slices(*self.index(np.array([row])))

    def rows_of(self, document: int, tokens: tuple[int, int] | None = None) -> range:
        """The rows that contain a document, or some of its `tokens` [start, stop); the inverse of `slices`."""
        start, stop = tokens or (int(self._ends[document - 1]) if document else 0, int(self._ends[document]))
        first = max(0, -(-(start - self.context) // self.stride))
        return range(first, min(self.rows, (stop - 1) // self.stride + 1))


class BestFit:
    """Best-fit decreasing: documents in order of descending length, each into the fullest row with enough space.

    A document longer than a row is split into pieces that overlap by one token, so that no target is lost. With a
    `mask` (conversations) only the first piece is used, because an answer without its question is no training example;
    if that piece has no target, the document is dropped.

    Args:
        ends: cumulative document ends [documents].
        context: targets per row.
        mask: reads the store's mask column; None if all tokens are targets.

    `dropped` is the number of dropped documents, `dropped_tokens` the number of tokens in no row.
    """

    group = 1

    def __init__(self, ends: np.ndarray, context: int, mask: Mask | None = None):
        self.context = context
        pieces = _pieces(ends, context, truncate=mask is not None)
        has_target = np.ones(len(pieces), bool) if mask is None else _has_target(pieces, ends, mask)
        self.dropped = int((~has_target).sum())
        pieces = pieces[has_target]
        used_tokens = int((pieces[:, 2] - pieces[:, 1]).sum())
        self.dropped_tokens = int(ends[-1]) - used_tokens if mask and len(ends) else 0
        row_of, self.rows = _best_fit(pieces[:, 2] - pieces[:, 1], context + 1)
        order = np.argsort(row_of, kind="stable")
        self._pieces = pieces[order]
        self._first = np.searchsorted(row_of[order], np.arange(self.rows + 1))
        self.targets = int((self._pieces[:, 2] - self._pieces[:, 1] - 1).sum())

    @property
    def row_targets(self) -> float:
        """Mean number of targets per row, including those that a mask excludes."""
        return self.targets / self.rows

    def index(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token indices and document numbers of the rows, both [rows, context + 1] int64 with PAD for padding."""
        index = np.full((len(rows), self.context + 1), PAD, np.int64)
        document = np.full_like(index, PAD)
        for i, row in enumerate(rows):
            column = 0
            for doc, start, stop in self._pieces[self._first[row] : self._first[row + 1]]:
                end = column + stop - start
                index[i, column:end] = np.arange(start, stop)
                document[i, column:end] = doc
                column = end
        return index, document

    def slices(self, row: int) -> list[Slice]:
        return [Slice(*map(int, p)) for p in self._pieces[self._first[row] : self._first[row + 1]]]

    def rows_of(self, document: int, tokens: tuple[int, int] | None = None) -> list[int]:
        """The rows that contain a document, or some of its `tokens` [start, stop); the inverse of `slices`."""
        start, stop = tokens or (0, np.inf)
        documents, starts, stops = self._pieces.T
        pieces = np.flatnonzero((documents == document) & (starts < stop) & (stops > start))
        return np.unique(np.searchsorted(self._first, pieces, side="right") - 1).tolist()

    def save(self, path: Path) -> None:
        """Write the plan to an .npz file: pieces (document, start, stop) and the index of each row's first piece."""
        with atomic_open(path) as file:
            np.savez(file, pieces=self._pieces, first=self._first)


class OnePerRow:
    """One document per row: pairs (groups of 2 adjacent documents) and prompts.

    Documents are never truncated, because that changes what a preference compares. A group with a document of more than
    `context` tokens is dropped. The limit is not `context + 1`, because the last token must be an input: a reward model
    reads it. A "row" of this plan is a group: row r is the r-th group that is not dropped, and `index` returns `group`
    rows for it.

    The width is that of the longest requested document, rounded up to `WIDTH_MULTIPLE`, since padding to the context
    would make short pairs several times as expensive.

    Args:
        ends: cumulative document ends [documents].
        context: maximum number of tokens of a document.
        group: documents per group.
    """

    WIDTH_MULTIPLE = 16

    def __init__(self, ends: np.ndarray, context: int, group: int = 1):
        self.context, self.group = context, group
        ends = np.asarray(ends).astype(np.int64)
        self._bounds = np.concatenate([[0], ends])
        lengths = np.diff(self._bounds).reshape(-1, group)
        fits = (lengths <= context).all(1)
        self._groups = np.flatnonzero(fits)
        self.rows = len(self._groups)
        self.dropped = len(lengths) - self.rows
        """Number of dropped groups."""
        self.dropped_tokens = int(lengths[~fits].sum())
        self.targets = int((lengths[fits] - 1).sum())

    @property
    def row_targets(self) -> float:
        """Mean number of targets per group, including those that a mask excludes."""
        return self.targets / self.rows

    def index(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token indices and document numbers of the groups, both [rows * group, width + 1] int64 with PAD."""
        documents = (self._groups[rows][:, None] * self.group + np.arange(self.group)).reshape(-1)
        starts, lengths = self._bounds[documents], np.diff(self._bounds)[documents]
        width = -(-int(lengths.max(initial=1)) // self.WIDTH_MULTIPLE) * self.WIDTH_MULTIPLE
        column = np.arange(min(self.context, width) + 1)
        inside = column < lengths[:, None]
        return np.where(inside, starts[:, None] + column, PAD), np.where(inside, documents[:, None], PAD)

    def slices(self, row: int) -> list[Slice]:
        first = int(self._groups[row]) * self.group
        bounds = self._bounds[first : first + self.group + 1].tolist()
        return [Slice(first + i, bounds[i], bounds[i + 1]) for i in range(self.group)]

    def rows_of(self, document: int, tokens: tuple[int, int] | None = None) -> list[int]:
        """The rows that contain a document, and with it all of its `tokens`; the inverse of `slices`."""
        return np.flatnonzero(self._groups == document // self.group).tolist()


RowPlan = Concatenated | BestFit | OnePerRow


def make_row_plan(
    kind: str, ends: np.ndarray, context: int, stride: int | None, mask: Mask | None, what: str, group: int = 1
) -> RowPlan:
    """The plan of a store for training.

    Args:
        kind: `concat`, `best-fit` or `one-per-row`.
        ends: cumulative document ends of the store [documents].
        context: targets per row.
        stride: distance between the starts of `concat` rows; None: the context.
        mask: reads the mask column of a store that has one; long documents are then truncated and not split.
        what: name of the store in errors.
        group: documents per group, for `one-per-row`.

    Raises:
        UserError: the store has no row, a stride that skips tokens, or no target within the context.
    """
    if kind == "one-per-row":
        one_per_row = OnePerRow(ends, context, group)
        if one_per_row.rows == 0:
            name, end = ("pairs have a side", "") if group == 2 else ("prompts are", " or a smaller objective.max_new")
            raise UserError(
                f"{what}: all {one_per_row.dropped:,} {name} longer than the maximum of {context:,} tokens, and they "
                f"are not truncated; set a larger context{end}"
            )
        return one_per_row
    if kind == "concat" and stride and stride > context:
        raise UserError(
            f"packing.stride: found {stride}, expected at most the context of {context} (in every phase), because "
            "tokens between two rows would be skipped; set a smaller stride"
        )
    tokens = int(ends[-1]) if len(ends) else 0
    plan = Concatenated(ends, context, stride) if kind == "concat" else BestFit(ends, context, mask)
    if plan.rows == 0 and plan.dropped:
        raise UserError(
            f"{what}: each of its {plan.dropped:,} documents is longer than the context of {context}, and its answer "
            "begins after that, so no target is left; use a longer context or shorten the prompts"
        )
    if plan.rows == 0:
        raise UserError(
            f"{what}: found {tokens:,} tokens, expected at least one row of context {context} ({context + 1:,}); "
            "add text or set a smaller model.context"
        )
    return plan


def _has_target(pieces: np.ndarray, ends: np.ndarray, mask: Mask) -> np.ndarray:
    """Whether each piece has a target. Reads the mask of truncated documents only, because others have one."""
    has_target = np.ones(len(pieces), bool)
    for n in np.flatnonzero(pieces[:, 2] < ends.astype(np.int64)[pieces[:, 0]]).tolist():
        has_target[n] = mask(int(pieces[n, 1]) + 1, int(pieces[n, 2])).any()
    return has_target


def _pieces(ends: np.ndarray, context: int, truncate: bool) -> np.ndarray:
    """(document, start, stop) of each piece [pieces, 3], in document order."""
    ends = ends.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    lengths = ends - starts
    counts = np.ones_like(lengths) if truncate else np.maximum(1, -(-(lengths - 1) // context))
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = starts[document] + number * context
    stop = np.minimum(start + context + 1, ends[document])
    has_target = stop - start >= 2  # a single token has no target
    return np.stack([document, start, stop], 1)[has_target]


def _best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """The row of each piece, and the number of rows. Bit s of `free` is set while a row has s tokens of free space."""
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
