"""Builds batches from stores: gathers the ids of rows, and shifts them to inputs and labels.

A row of `context + 1` ids becomes `context` inputs and labels. A label is the ignore index for padding, for tokens that
the store's mask excludes, and for the first token of an isolated document. `_shift` is the only place that shifts
labels for training (a test checks it); `evaluate/continuations.py` builds rows of its own to score single answers.

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
"""Default label of positions without a target."""
SWITCH_INTERVAL_S = 0.001


@dataclass(frozen=True)
class Batch:
    """The rows of a step or a micro-batch: numpy arrays from the loader, torch tensors after `to`."""

    ids_BT: Any
    """Inputs, int64."""
    labels_BT: Any
    """Targets, int64; `ignore` for none."""
    positions_BT: Any
    """Position in the document (isolated rows) or in the row, int64."""
    documents_BT: Any
    """Document number of each token, for the attention mask; None if no row is isolated."""
    source_B: Any
    """Number of each row's source in the mixture."""
    row_B: Any
    """Number of each row in its source's plan."""
    ignore: int = IGNORE
    """Label of positions without a target."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Additional arrays [B, ...], named with their shape: `lengths_B` (document length, for plans with one document per
    row), columns of the store, and those that an objective's `expand` adds."""
    group: int = 1
    """Number of adjacent rows in a group: 2 for pairs, the chosen one first."""
    replay: "Batch | None" = None
    """Additional rows of the step that are trained with the language modelling loss, whatever the objective."""
    replayed: bool = False
    """Whether this batch is the `replay` of another one."""

    def __len__(self) -> int:
        return len(self.ids_BT)

    @property
    def is_sampled(self) -> bool:
        """Whether the model in training wrote its rows (`objectives/rollout.py`)."""
        return "sampled_logps_BT" in self.columns

    @property
    def context(self) -> int:
        """Number of inputs per row."""
        return self.ids_BT.shape[1]

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward pass.

        Without isolated rows, positions are None: they count from 0 in each row, so all rows share their RoPE angles.
        """
        positions_BT = None if self.documents_BT is None else self.positions_BT
        return {"ids_BT": self.ids_BT, "positions_BT": positions_BT, "documents_BT": self.documents_BT}

    def counts(self) -> dict[str, int]:
        """Number of each unit in the batch: the denominators of the loss terms.

        `replay` counts the targets of replayed rows plus those of the others, so that each target has the weight that
        it would have in a mixture with one loss for all rows. `replay_token` counts the targets of replayed rows only.
        """
        labelled = self.labels_BT != self.ignore
        counts = {"token": int(labelled.sum()), "sequence": int(labelled.any(1).sum())}
        if self.group == 2:
            counts["pair"] = int(self.complete_groups().sum())
        replay = self if self.replayed else self.replay
        if replay is not None:
            counts["replay_token"] = int((replay.labels_BT != replay.ignore).sum())
            counts["replay"] = counts["replay_token"] + (0 if self.replayed else counts["token"])
        return counts

    def complete_groups(self) -> Any:
        """Boolean mask [B / group] of the groups whose rows all have a target."""
        return (self.labels_BT != self.ignore).any(1).reshape(-1, self.group).all(1)

    def micro_batches(self, rows: int) -> Iterator["Batch"]:
        """Split the batch into micro-batches of at most `rows` rows, but at least one group.

        Micro-batches of the replayed rows follow, with at most the same number of tokens each.
        """
        rows = max(1, rows // self.group) * self.group
        without_replay = replace(self, replay=None)
        starts = range(0, len(self), rows)
        for start in starts:
            part = slice(start, start + rows)
            yield without_replay if len(starts) == 1 else without_replay._map(lambda array, part=part: array[part])
        if self.replay is not None:
            yield from self.replay.micro_batches(max(1, rows * self.context // self.replay.context))

    def take(self, rows: np.ndarray) -> "Batch":
        """The given rows, in the given order."""
        return self._map(lambda array: array[rows])

    def share(self, rank: int, size: int) -> "Batch":
        """The rows of one of `size` ranks, whole groups, also of the replayed rows.

        All ranks get equally many: rows that fill up the last ones have no labels, so they count 0.
        """
        if size == 1:
            return self
        groups, filled = share(len(self) // self.group, rank, size)
        rows = (groups[:, None] * self.group + np.arange(self.group)).reshape(-1)
        replay = None if self.replay is None else self.replay.share(rank, size)
        return replace(self.take(rows), replay=replay).without_labels(np.repeat(filled, self.group))

    def without_labels(self, dropped_B: np.ndarray) -> "Batch":
        """The batch with all labels of the dropped rows ignored; the rows stay, so that shapes do not change."""
        return replace(self, labels_BT=np.where(dropped_B[:, None], self.ignore, self.labels_BT))

    def to(self, device: Any) -> "Batch":
        """The batch as torch tensors on `device`. On a GPU the copy is asynchronous (pinned memory).

        Columns of Python objects (texts) are unchanged.
        """
        import torch

        pin = torch.device(device).type == "cuda"

        def move(array: Any) -> Any:
            if array.dtype == object:
                return array
            tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
            return (tensor.pin_memory() if pin and tensor.device.type == "cpu" else tensor).to(device, non_blocking=pin)

        moved = self._map(move)
        if pin and moved.labels_BT is not self.labels_BT:  # labels that can be read without a device synchronisation
            moved.labels_BT.on_host = torch.as_tensor(self.labels_BT)
        return moved

    def arrays(self) -> list[Any]:
        """All arrays, in a fixed order."""
        arrays: list[Any] = []
        self._map(arrays.append)
        return arrays

    def _map(self, function: Callable[[Any], Any]) -> "Batch":
        """The batch with a function applied to every array."""
        arrays = {f.name: v for f in fields(self) if "_B" in f.name and (v := getattr(self, f.name)) is not None}
        columns = {name: function(array) for name, array in self.columns.items()}
        return replace(self, **{name: function(array) for name, array in arrays.items()}, columns=columns)


def share(count: int, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the items of one of `size` ranks among `count`, and which of them only fill up.

    All ranks get equally many, in order; the last item fills up the last ranks.
    """
    each = -(-count // size)
    index = rank * each + np.arange(each)
    return np.minimum(index, count - 1), index >= count


@dataclass(frozen=True)
class Source:
    """A source of a mixture."""

    name: str
    store: Store
    plan: RowPlan
    isolate: bool
    """Whether attention stops at document borders."""
    pad_id: int = 0
    ignore: int = IGNORE
    """Label of positions without a target."""
    replay: bool = False
    """Whether its rows are trained with the language modelling loss, whatever the objective."""


Sources = Sequence[Source] | Mapping[int, Source]
"""The sources of a mixture by number. All have the same group size and context."""


def make_batch(sources: Sources, source_B: np.ndarray, row_B: np.ndarray) -> Batch:
    """The batch of the given rows.

    Args:
        sources: the sources of the mixture.
        source_B: source of each row, int64; for pairs, B is the number of pairs.
        row_B: row number in the source's plan, int64.
    """
    present = [int(s) for s in np.unique(source_B)]
    indices = {s: sources[s].plan.index(row_B[source_B == s]) for s in present}
    group, ignore = sources[present[0]].plan.group, sources[present[0]].ignore
    source_B, row_B = np.repeat(source_B, group), np.repeat(row_B, group)
    ids_BL = np.empty((len(row_B), max(index.shape[1] for index, _ in indices.values())), np.int64)
    is_target_BL = np.zeros(ids_BL.shape, bool)
    document_BL = np.zeros_like(ids_BL)
    columns: dict[str, np.ndarray] = {}
    for s, (index, document) in indices.items():
        of_source, source = source_B == s, sources[s]
        padded, width = index == PAD, index.shape[1]
        ids = source.store.ids.gather(np.where(padded, 0, index)).astype(np.int64)
        ids[padded] = source.pad_id
        is_target = ~padded
        if "mask" in source.store.columns:
            is_target &= source.store.columns["mask"].gather(np.where(padded, 0, index)) != 0
        ids_BL[of_source] = source.pad_id
        ids_BL[of_source, :width], is_target_BL[of_source, :width] = ids, is_target
        if source.isolate:
            document_BL[of_source, :width] = document
        if isinstance(source.plan, OnePerRow):
            for name, values in _document_columns(source.store, document[:, 0], (~padded).sum(1)).items():
                columns.setdefault(name, np.zeros(len(row_B), values.dtype))[of_source] = values
        for name, values in _token_columns(source.store, index[:, 1:], padded[:, 1:]).items():
            shape = (*ids_BL[:, 1:].shape, *values.shape[2:])
            columns.setdefault(name, np.zeros(shape, values.dtype))[of_source, : width - 1] = values
    isolated = any(sources[s].isolate for s in present)
    batch = _shift(ids_BL, is_target_BL, document_BL, isolated, ignore, source_B, row_B)
    return replace(batch, columns=columns, group=group, replayed=sources[present[0]].replay)


def _token_columns(store: Store, index_BT: np.ndarray, padded_BT: np.ndarray) -> dict[str, np.ndarray]:
    """The store's columns per token except `mask`, aligned with the labels; 0 for padding."""
    columns = {}
    for name, column in store.columns.items():
        if column.per == "token" and name != "mask":
            values = column.gather(np.where(padded_BT, 0, index_BT))
            values[padded_BT] = 0
            columns[f"{name}_BT"] = values
    return columns


def _document_columns(store: Store, document_B: np.ndarray, length_B: np.ndarray) -> dict[str, np.ndarray]:
    """Columns for rows of one document: `lengths_B`, the store's columns per document, and for prompts `extra_B`.

    `extra_B` holds the extra fields of the prompt's row as a JSON object, or None.
    """
    stored = {name: c for name, c in store.columns.items() if c.per == "document" and name != "bytes"}
    columns = {"lengths_B": length_B, **{f"{name}_B": column.gather(document_B) for name, column in stored.items()}}
    return columns | ({"extra_B": store.extra(document_B)} if store.content == "prompts" else {})


def append_answers(prompts: Batch, answers: Sequence[np.ndarray], samples: int) -> Batch:
    """Rows of a prompt and one of its answers each; row i * samples + j has answer j of prompt i.

    Args:
        prompts: rows of one prompt each (with the column `lengths_B`).
        answers: ids of each answer, at least one id; they are the targets.
        samples: answers per prompt.

    Returns:
        B = prompts x samples rows as wide as the longest one, in which every token is an input. The only column is
        `lengths_B`, the length of prompt and answer.
    """
    start_B = np.repeat(prompts.columns["lengths_B"], samples)
    length_B = start_B + np.array([len(ids) for ids in answers])
    position_L = np.arange(int(length_B.max()) + 1)
    is_target_BL = (position_L >= start_B[:, None]) & (position_L < length_B[:, None])
    width = min(len(position_L), prompts.context)
    ids_BL = np.zeros(is_target_BL.shape, np.int64)
    ids_BL[:, :width] = np.repeat(prompts.ids_BT[:, :width], samples, axis=0)
    ids_BL[is_target_BL] = np.concatenate(answers)
    source_B, row_B = np.repeat(prompts.source_B, samples), np.repeat(prompts.row_B, samples)
    batch = _shift(ids_BL, is_target_BL, np.zeros_like(ids_BL), False, prompts.ignore, source_B, row_B)
    return replace(batch, columns={"lengths_B": length_B})


def _shift(
    ids_BL: np.ndarray,
    is_target_BL: np.ndarray,
    document_BL: np.ndarray,
    isolated: bool,
    ignore: int,
    source_B: np.ndarray,
    row_B: np.ndarray,
) -> Batch:
    """The inputs are the ids without the last one, the labels the ids without the first one."""
    same_document = document_BL[:, 1:] == document_BL[:, :-1]
    labels = np.where(is_target_BL[:, 1:] & same_document, ids_BL[:, 1:], ignore)
    column = np.broadcast_to(np.arange(same_document.shape[1]), same_document.shape)
    is_start = np.concatenate([np.ones_like(same_document[:, :1]), ~same_document[:, :-1]], 1)
    positions = column - np.maximum.accumulate(np.where(is_start, column, 0), axis=1)
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
    """Iterator of the batches of consecutive steps, prefetched by a background thread; its exceptions are re-raised.

    One thread suffices, because a batch is a gather from memory maps. Until `close`, Python switches threads every
    1 ms instead of every 5 ms, because a short training step would wait that long for the loader.

    Args:
        make: step -> batch.
        first, last: first and last step, inclusive.
        prefetch: maximum number of batches in the queue.
    """

    def __init__(self, make: Callable[[int], Batch], first: int, last: int, prefetch: int = 2):
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=prefetch)
        self._stop = threading.Event()
        self._previous_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
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
        sys.setswitchinterval(self._previous_interval)

    def _work(self, make: Callable[[int], Batch], first: int, last: int) -> None:
        try:
            for step in range(first, last + 1):
                if self._stop.is_set():
                    return
                self._put(make(step))
            self._put(None)
        except BaseException as error:  # re-raised by `__iter__`
            self._put(error)

    def _put(self, item: Batch | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue


def all_rows(source: Source, rows_per_batch: int, limit: int | None = None, first: int = 0) -> Iterator[Batch]:
    """Batches of all rows of a source in order, from row `first` on, or of `limit` evenly spaced ones."""
    rows = np.arange(first, source.plan.rows)
    if limit is not None and limit < len(rows):
        rows = rows[np.arange(limit) * len(rows) // limit]
    size = max(1, rows_per_batch // source.plan.group)
    for start in range(0, len(rows), size):
        row_B = rows[start : start + size]
        yield make_batch([source], np.zeros_like(row_B), row_B)
