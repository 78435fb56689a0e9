"""What each rule did to a corpus: what it removed first, alone and only, near misses, and how its measure is spread.

    removed   documents that no earlier check removed
    alone     documents that it would remove if it were the only rule
    only      documents that no other rule removes: what returns without it, duplicates aside

Documents without usable content, or in another language, are not measured; duplicates are searched for among documents
that no rule removed, so nothing is known of them alone. Counts are sums over documents and samples are chosen by the
distance to a bound and then by fingerprint, so nothing depends on batches.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute creates its functions at import time)

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingot.corpus.near_duplicates import SAMPLE_CHARACTERS
from ingot.corpus.rules import KEY, MEASURES, REASONS, Rule
from ingot.corpus.timer import SECONDS

NEAR, MAX_NEAR = 0.1, 3
"""Largest distance of a near miss to its bound, as a fraction of the bound; near misses that are kept of a rule."""


def edges(rules: list[Rule]) -> np.ndarray:
    """Where the bins of a measure's histogram begin, without the first.

    Linear from 0 to 1 for a fraction (no bound above 1), else 10 a decade; and every bound is an edge, so no bin has
    documents on both sides of one.
    """
    bounds = [b for rule in rules for b in (rule.least, np.nextafter(rule.most, np.inf)) if np.isfinite(b)]
    grid = np.linspace(0, 1, 51) if max(bounds) <= 1 + 1e-9 else np.round(10 ** np.linspace(0, 6, 61), 3)
    grid = grid[np.all([np.abs(grid - bound) > 1e-9 for bound in bounds], axis=0)]
    return np.unique(np.append(grid, bounds))


class RuleCounts:
    """Counts documents by rule.

    Args:
        rules: reason -> rule, in the order of the checks.
    """

    def __init__(self, rules: Mapping[str, Rule]):
        self._rules = rules
        self._alone: Counter[str] = Counter()
        self._only: Counter[str] = Counter()
        self._near: dict[str, list[tuple[Any, ...]]] = {reason: [] for reason in rules}
        self.seconds: dict[str, float] = defaultdict(float)
        """Step of `prepare` -> seconds of all workers."""
        self._edges: dict[str, np.ndarray] = {}
        for rule in rules.values():
            self._edges[rule.measure] = edges([r for r in rules.values() if r.measure == rule.measure])
        self._bins = {name: np.zeros(len(each) + 1, np.int64) for name, each in self._edges.items()}

    def count(self, documents: pa.Table) -> None:
        """Count a batch of documents as `prepare` returns them, with their final `drop_reason`."""
        reasons = documents[REASONS].combine_chunks()
        self._alone.update(reasons.flatten().to_pylist())
        self._only.update(reasons.filter(pc.equal(pc.list_value_length(reasons), 1)).flatten().to_pylist())
        seconds = documents[SECONDS].combine_chunks()
        for step in seconds.type:
            self.seconds[step.name] += pc.sum(seconds.field(step.name)).as_py() or 0.0
        if not self._rules or not documents.num_rows:
            return
        column = documents[MEASURES].combine_chunks()
        measures = {name: column.field(name).to_numpy(zero_copy_only=False) for name in self._edges}
        for name, values in measures.items():
            known = values[~np.isnan(values)]
            bins = np.searchsorted(self._edges[name], known, side="right")
            self._bins[name] += np.bincount(bins, minlength=len(self._bins[name]))
        kept = pc.is_null(documents["drop_reason"]).to_numpy()
        for reason, rule in self._rules.items():
            self._add_near(reason, measures[rule.measure], kept, documents)

    def _add_near(self, reason: str, values: np.ndarray, kept: np.ndarray, documents: pa.Table) -> None:
        rule = self._rules[reason]
        bound = rule.least if np.isfinite(rule.least) else rule.most
        if bound == 0:
            return  # nothing is near "none at all"
        distances = np.abs(values - bound) / abs(bound)
        rows = np.flatnonzero(kept & (distances <= NEAR))
        if not len(rows):
            return
        nearest = np.partition(distances[rows], min(MAX_NEAR, len(rows)) - 1)[min(MAX_NEAR, len(rows)) - 1]
        for row in rows[distances[rows] <= nearest].tolist():
            sample = documents.slice(row, 1).select(["path", "offset", "text", KEY]).to_pylist()[0]
            entry = (distances[row], sample[KEY], sample["path"], sample["offset"], values[row], sample["text"])
            self._near[reason].append((*entry[:5], entry[5][:SAMPLE_CHARACTERS]))
        self._near[reason] = heapq.nsmallest(MAX_NEAR, self._near[reason])

    def summary(self, removed: Mapping[str, int]) -> dict[str, Any]:
        """The counts as JSON data.

        Args:
            removed: reason -> documents that were removed for it, in the order of the checks.
        """
        names = dict.fromkeys([*self._rules, *removed])
        return {
            "rules": {name: self._rule(name, removed.get(name, 0)) for name in names},
            "measures": {
                name: {"edges": [_number(e) for e in each], "documents": self._bins[name].tolist()}
                for name, each in self._edges.items()
            },
        }

    def _rule(self, reason: str, removed: int) -> dict[str, Any]:
        known = reason in self._alone or reason in self._rules
        out: dict[str, Any] = {
            "removed": removed,
            "alone": self._alone[reason] if known else None,
            "only": self._only[reason] if known else None,
        }
        if rule := self._rules.get(reason):
            bounds = {name: float(bound) for name, bound in (("least", rule.least), ("most", rule.most))}
            near = [
                {"path": path, "offset": offset, "value": _number(value), "text": text}
                for _, _, path, offset, value, text in self._near[reason]
            ]
            finite = {name: bound for name, bound in bounds.items() if np.isfinite(bound)}
            out |= {"measure": rule.measure, **finite, "measured": int(self._bins[rule.measure].sum()), "near": near}
        return out


def _number(value: float) -> float:
    return float(f"{value:.6g}")
