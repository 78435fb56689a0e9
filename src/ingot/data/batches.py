"""Batches: one fancy index into the store, and the one place where targets are inputs moved by one.

A row of `context + 1` ids becomes `context` inputs and as many labels; a label is the ignore index where the row is
padded, where the store's mask says that the token is not trained on, and where it would be predicted from another
document.
No other file shifts labels for training (a test greps for it); `evaluate/continuations.py`, which scores single
answers, lays out rows of its own.

Shapes: B rows, T context, L = T + 1.
"""

import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from ingot.data.packing import PAD, OnePerRow, RowPlan
from ingot.store.reader import Store

IGNORE = -100
"""Label of a target that counts for nothing, where no other is set."""
SWITCH_S = 0.001


@dataclass(frozen=True)
class Batch:
    """Rows of one step (or one micro-batch of it): numpy arrays from the loader, torch tensors after `to`."""

    ids_BT: Any
    """Inputs, int64."""
    labels_BT: Any
    """Targets, int64, `ignore` where there is none."""
    positions_BT: Any
    """Place in the document (isolated rows) or in the row, int64."""
    documents_BT: Any
    """Number of the document a place belongs to, for the attention mask; None where no row is isolated."""
    source_B: Any
    """Which source of the mixture each row is from."""
    row_B: Any
    """Which row of that source's plan."""
    ignore: int = IGNORE
    """The label of a target that counts for nothing."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further arrays, rows first, named with their shape: `lengths_B` (tokens of the document in a row that holds one
    alone), columns of the store, what an objective's `expand` adds."""
    group: int = 1
    """Adjacent rows that belong together: 2 in batches of pairs, the chosen one first."""
    replay: "Batch | None" = None
    """Rows of the same step that are learned as they are, whatever the objective does with the others."""
    replayed: bool = False
    """Whether these are such rows."""

    def __len__(self) -> int:
        return len(self.ids_BT)

    @property
    def context(self) -> int:
        """Places in a row."""
        return self.ids_BT.shape[1]

    @property
    def inputs(self) -> dict[str, Any]:
        """What a model's forward is given of it, by the names of its arguments.

        Positions that count from 0 in every row are the model's own: angles of one row are those of all.
        """
        positions_BT = None if self.documents_BT is None else self.positions_BT
        return {"ids_BT": self.ids_BT, "positions_BT": positions_BT, "documents_BT": self.documents_BT}

    def counts(self) -> dict[str, int]:
        """How many of each unit the batch holds: the denominators of every loss term.

        `replay` counts the targets of replayed rows together with those of the others, so that each of them weighs as
        much as it would in a mixture where all rows were learned alike; `replay_token` counts the former alone.
        """
        labelled = self.labels_BT != self.ignore
        counts = {"token": int(labelled.sum()), "sequence": int(labelled.any(1).sum())}
        if self.group == 2:
            counts["pair"] = int(self.whole().sum())
        again = self if self.replayed else self.replay
        if again is not None:
            counts["replay_token"] = int((again.labels_BT != again.ignore).sum())
            counts["replay"] = counts["replay_token"] + (0 if self.replayed else counts["token"])
        return counts

    def whole(self) -> Any:
        """Which groups have labels in each of their rows, (rows / group,) bool; a skipped one keeps its place."""
        return (self.labels_BT != self.ignore).any(1).reshape(-1, self.group).all(1)

    def micro(self, rows: int) -> Iterator["Batch"]:
        """The batch in pieces of at most `rows` rows, but never less than a group; of replayed rows at the end, pieces
        of no more tokens."""
        rows = max(1, rows // self.group) * self.group
        alone = replace(self, replay=None)
        starts = range(0, len(self), rows)
        for start in starts:
            part = slice(start, start + rows)
            yield alone if len(starts) == 1 else alone._map(lambda array, part=part: array[part])
        if self.replay is not None:
            yield from self.replay.micro(max(1, rows * self.context // self.replay.context))

    def take(self, rows: np.ndarray) -> "Batch":
        """The given rows, in that order."""
        return self._map(lambda array: array[rows])

    def to(self, device: Any) -> "Batch":
        """The same batch as torch tensors on `device`; the copy overlaps with compute on a GPU (pinned memory).

        Columns of Python objects (texts) stay as they are.
        """
        import torch

        pin = torch.device(device).type == "cuda"

        def move(array: Any) -> Any:
            if array.dtype == object:
                return array
            tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
            return (tensor.pin_memory() if pin and tensor.device.type == "cpu" else tensor).to(device, non_blocking=pin)

        moved = self._map(move)
        if pin and moved.labels_BT is not self.labels_BT:  # what can be asked without waiting for the device
            moved.labels_BT.on_host = torch.as_tensor(self.labels_BT)
        return moved

    def arrays(self) -> list[Any]:
        """All of them, in one order."""
        found: list[Any] = []
        self._map(found.append)
        return found

    def _map(self, function: Callable[[Any], Any]) -> "Batch":
        """The same batch with a function applied to every array."""
        arrays = {f.name: v for f in fields(self) if "_B" in f.name and (v := getattr(self, f.name)) is not None}
        columns = {name: function(array) for name, array in self.columns.items()}
        return replace(self, **{name: function(array) for name, array in arrays.items()}, columns=columns)


@dataclass(frozen=True)
class Source:
    """One member of a mixture: a store, its plan of rows, and whether attention stops at document borders."""

    name: str
    store: Store
    plan: RowPlan
    isolate: bool
    pad_id: int = 0
    ignore: int = IGNORE
    replay: bool = False
    """Whether its rows are learned as they are, under an objective that learns from others."""


Sources = Sequence[Source] | Mapping[int, Source]
"""The sources of a mixture by number; all have groups of one size, and rows of one context."""


def make_batch(sources: Sources, source_B: np.ndarray, row_B: np.ndarray) -> Batch:
    """The batch of the given rows (both (B,) int64); of pairs, B is the number of pairs."""
    present = [int(s) for s in np.unique(source_B)]
    found = {s: sources[s].plan.index(row_B[source_B == s]) for s in present}
    group, ignore = sources[present[0]].plan.group, sources[present[0]].ignore
    source_B, row_B = np.repeat(source_B, group), np.repeat(row_B, group)
    ids_BL = np.empty((len(row_B), max(index.shape[1] for index, _ in found.values())), np.int64)
    keep_BL = np.zeros(ids_BL.shape, bool)
    document_BL = np.zeros_like(ids_BL)
    columns: dict[str, np.ndarray] = {}
    for s, (index, document) in found.items():
        here, source = source_B == s, sources[s]
        padded, width = index == PAD, index.shape[1]
        ids = source.store.ids.gather(np.where(padded, 0, index)).astype(np.int64)
        ids[padded] = source.pad_id
        keep = ~padded
        if "mask" in source.store.columns:
            keep &= source.store.columns["mask"].gather(np.where(padded, 0, index)) != 0
        ids_BL[here] = source.pad_id
        ids_BL[here, :width], keep_BL[here, :width] = ids, keep
        if source.isolate:
            document_BL[here, :width] = document
        if isinstance(source.plan, OnePerRow):
            for name, values in _document_columns(source.store, document[:, 0], (~padded).sum(1)).items():
                columns.setdefault(name, np.zeros(len(row_B), values.dtype))[here] = values
        for name, values in _token_columns(source.store, index[:, 1:], padded[:, 1:]).items():
            shape = (*ids_BL[:, 1:].shape, *values.shape[2:])
            columns.setdefault(name, np.zeros(shape, values.dtype))[here, : width - 1] = values
    isolated = any(sources[s].isolate for s in present)
    batch = _shift(ids_BL, keep_BL, document_BL, isolated, ignore, source_B, row_B)
    return replace(batch, columns=columns, group=group, replayed=sources[present[0]].replay)


def _token_columns(store: Store, index_BT: np.ndarray, padded_BT: np.ndarray) -> dict[str, np.ndarray]:
    """The store's columns per token beside the labels, 0 in padding; the mask decides which labels there are."""
    known = {name: column for name, column in store.columns.items() if column.per == "token" and name != "mask"}
    found = {}
    for name, column in known.items():
        values = column.gather(np.where(padded_BT, 0, index_BT))
        values[padded_BT] = 0
        found[f"{name}_BT"] = values
    return found


def _document_columns(store: Store, document_B: np.ndarray, length_B: np.ndarray) -> dict[str, np.ndarray]:
    """Columns of rows that are one document each: its length, the store's values per document, and of prompts the
    further fields of their row (`extra_B`, a JSON object or None).
    """
    known = {name: c for name, c in store.columns.items() if c.per == "document" and name != "bytes"}
    columns = {"lengths_B": length_B, **{f"{name}_B": column.gather(document_B) for name, column in known.items()}}
    return columns | ({"extra_B": store.extra(document_B)} if store.content == "prompts" else {})


def answered(prompts: Batch, answers: Sequence[np.ndarray], samples: int) -> Batch:
    """Each prompt `samples` times, with its answers behind it: number i * samples + j is answer j of prompt i.

    Args:
        prompts: rows that are one prompt each (column `lengths_B`).
        answers: ids, at least one each; they are what is labelled.

    Returns:
        B rows as wide as the longest of them, every token an input; of columns only `lengths_B`, of the whole.
    """
    start_B = np.repeat(prompts.columns["lengths_B"], samples)
    length_B = start_B + np.array([len(ids) for ids in answers])
    place_L = np.arange(int(length_B.max()) + 1)
    keep_BL = (place_L >= start_B[:, None]) & (place_L < length_B[:, None])
    width = min(len(place_L), prompts.context)
    ids_BL = np.zeros(keep_BL.shape, np.int64)
    ids_BL[:, :width] = np.repeat(prompts.ids_BT[:, :width], samples, axis=0)
    ids_BL[keep_BL] = np.concatenate(answers)
    source_B, row_B = np.repeat(prompts.source_B, samples), np.repeat(prompts.row_B, samples)
    batch = _shift(ids_BL, keep_BL, np.zeros_like(ids_BL), False, prompts.ignore, source_B, row_B)
    return replace(batch, columns={"lengths_B": length_B})


def _shift(
    ids_BL: np.ndarray,
    keep_BL: np.ndarray,
    document_BL: np.ndarray,
    isolated: bool,
    ignore: int,
    source_B: np.ndarray,
    row_B: np.ndarray,
) -> Batch:
    """Inputs are ids without the last, labels are ids without the first: the only shift in the house."""
    same = document_BL[:, 1:] == document_BL[:, :-1]
    labels = np.where(keep_BL[:, 1:] & same, ids_BL[:, 1:], ignore)
    place = np.broadcast_to(np.arange(same.shape[1]), same.shape)
    starts = np.concatenate([np.ones_like(same[:, :1]), ~same[:, :-1]], 1)
    positions = place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)
    return Batch(
        ids_BT=np.ascontiguousarray(ids_BL[:, :-1]),
        labels_BT=labels,
        positions_BT=positions,
        documents_BT=np.ascontiguousarray(document_BL[:, :-1]) if isolated else None,
        source_B=source_B,
        row_B=row_B,
        ignore=ignore,
    )


class Loader:
    """Batches of consecutive steps, made ahead on one background thread; its errors surface at the consumer.

    One thread is enough: a batch is one fancy index into a memory map, so there is no work for more of them to share.
    While it is there Python hands over between threads every millisecond, not every five: a step of 20 ms waits.

    Args:
        make: step -> its batch.
        first, last: the steps, both included.
        ahead: batches kept ready.
    """

    def __init__(self, make: Callable[[int], Batch], first: int, last: int, ahead: int = 2):
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._switched = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._thread = threading.Thread(target=self._work, args=(make, first, last), daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        self._stop.set()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._thread.join(timeout=5)
        sys.setswitchinterval(self._switched)

    def _work(self, make: Callable[[int], Batch], first: int, last: int) -> None:
        try:
            for step in range(first, last + 1):
                if self._stop.is_set():
                    return
                self._put(make(step))
            self._put(None)
        except BaseException as error:  # handed to the consumer, which raises it
            self._put(error)

    def _put(self, item: Batch | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue


def all_rows(source: Source, rows_per_batch: int, limit: int | None = None, first: int = 0) -> Iterator[Batch]:
    """Every row of a source once, in order, from row `first` on. With a `limit`, that many rows, evenly spaced."""
    rows = np.arange(first, source.plan.rows)
    if limit is not None and limit < len(rows):
        rows = rows[np.arange(limit) * len(rows) // limit]
    each = max(1, rows_per_batch // source.plan.group)
    for start in range(0, len(rows), each):
        row_B = rows[start : start + each]
        yield make_batch([source], np.zeros_like(row_B), row_B)
