"""Runs side by side: their final numbers, the settings that differ, and whether a difference is more than luck.

Train stages that differ in nothing but the seed, in themselves and in all they stand on, are one group: it has a mean,
a 95 % t-interval and n. Two groups with the same seeds are compared seed by seed, because what a seed does to both
(the order of the data, the first weights) cancels in the difference; that interval is the test to look at.

A stage that has not finished is shown with the numbers of its last evaluation, says so, and is in no mean.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ingot.core.artifact import digest_json
from ingot.core.errors import UserError, nearest
from ingot.core.events import METRICS, read_events
from ingot.core.statistics import Interval, mean_interval, paired_difference
from ingot.core.sweep import SEED, SWEEP, short_names, spell
from ingot.report import reading
from ingot.report.finding import place, root_of, stages_at
from ingot.stages.job import corpus_of, in_role

LOSS, BITS = "val_loss_nats", "bits_per_byte"


class Entry:
    """One train stage as it stands now."""

    def __init__(self, path: Path):
        self.path = path
        self.run, self.name = place(path)
        self.stage = self.name.rpartition("/")[2]
        self.record = reading.record(path)
        self.result, self.facts = reading.result(path), reading.facts(path)
        self.steps, self.evaluations = reading.events(path, "step"), reading.evaluations(path)
        self.lineage = dict(_lineage(self.record, root_of(path)))
        self.label = f"{self.run}/{self.name}"

    @property
    def finished(self) -> bool:
        return bool(self.result)

    @cached_property
    def failure(self) -> str:
        """The words it ended with, if it ended by itself before its time."""
        last = read_events(self.path / METRICS)[-1:]
        return last[0]["why"] if last and last[0]["event"] == "failed" else ""

    @property
    def step(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    @cached_property
    def numbers(self) -> dict[str, float]:
        """Final numbers by name, and `TASK/METRIC` of an evaluate stage; of an unfinished stage those of its last
        evaluation, and its best so far.
        """
        judged = {name: row["value"] for name, row in self.evaluated.items()}
        if self.finished:
            return {k: float(v) for k, v in self.result.items() if isinstance(v, int | float)} | judged
        losses = [e[LOSS] for e in self.evaluations if LOSS in e]
        last = {k: v for k, v in (self.evaluations[-1] if self.evaluations else {}).items() if k != "step"}
        known = {"parameters": self.facts.get("parameters"), f"best_{LOSS}": min(losses, default=None)}
        newest = self.steps[-1] if self.steps else {}
        known |= {"tokens": newest.get("tokens_seen"), "tok_s": newest.get("tok_s")}
        return last | {k: v for k, v in known.items() if v is not None} | judged

    @cached_property
    def evaluated(self) -> dict[str, dict[str, Any]]:
        """What evaluate stages of the same run say of this model: `TASK/METRIC` -> {value, low, high, n}."""
        found = {}
        for other in sorted(p for p in self.path.parent.glob("*") if p.is_symlink()):
            inputs = reading.record(other).get("inputs", {})
            names = {name for name, i in in_role(inputs, "model").items() if i["key"] == self.key}
            found |= {f"{r['task']}/{r['metric']}": r for r in reading.table(other) if r["model"] in names}
        return found

    @property
    def key(self) -> str:
        return self.record["key"]

    @cached_property
    def group(self) -> str:
        """The same for all stages that differ in nothing but seeds."""
        return digest_json({name: _seedless(r) for name, r in self.lineage.items()})

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that the result depends on, each once: this stage's own first."""
        return tuple(dict.fromkeys(r["seed"] for r in self.lineage.values() if r["seed"] is not None))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting behind the result: `optim.lr` of this stage, `bpe.vocab` of one that it stands on."""
        out: dict[str, Any] = {}
        for name, record in self.lineage.items():
            prefix = f"{name}." if name else ""
            if "@" not in name:  # a derived store has no settings of its own
                out |= {prefix + k: v for k, v in _flat(record["canonical"]).items() if k != "seed"}
            out[f"{prefix}code version"], out[f"{prefix}source files"] = record["version"], record["raw"]
        return out

    @cached_property
    def tokenizer(self) -> str:
        """Key of the tokenizer, and of all corpora: what a loss in nats depends on besides the model."""
        return next((r["key"] for r in self.lineage.values() if r["kind"] == "tokenizer"), "")

    @cached_property
    def corpora(self) -> frozenset[str]:
        data = {corpus_of(i["name"]) for role, i in self.record["inputs"].items() if role.startswith("data:")}
        return frozenset(r["key"] for name, r in self.lineage.items() if r["kind"] == "corpus" and name in data)

    @cached_property
    def values(self) -> dict[str, Any] | None:
        """This point's values, if it is one of a sweep."""
        points = reading.read_json(self.path.parent.parent / SWEEP).get("points", ())
        return next((p["values"] for p in points if p["label"] == self.path.parent.name), None)


@dataclass(frozen=True)
class Group:
    """Entries that differ in nothing but the seed."""

    label: str
    entries: list[Entry]

    @property
    def finished(self) -> list[Entry]:
        return [e for e in self.entries if e.finished]

    def having(self, metric: str) -> list[Entry]:
        """The finished ones that have the number; where none has finished, the first, if it has."""
        return [e for e in self.finished or self.entries[:1] if metric in e.numbers]

    def mean(self, metric: str) -> Interval | None:
        """Over those that have it; of one stage alone the interval that an evaluate stage gave it, if any."""
        found = self.having(metric)
        if len(found) == 1 and (row := found[0].evaluated.get(metric)):
            return Interval(row["value"], row["low"], row["high"], row["n"])
        return mean_interval([e.numbers[metric] for e in found]) if found else None

    def by_seed(self, metric: str) -> dict[object, float]:
        return {e.seeds: e.numbers[metric] for e in self.finished if metric in e.numbers}


@dataclass(frozen=True)
class Comparison:
    """Stages that are compared with each other."""

    stage: str
    """Their name, where it is one."""
    groups: list[Group]
    metric: str
    warnings: list[str]

    @property
    def entries(self) -> list[Entry]:
        return [e for g in self.groups for e in g.entries]

    @property
    def root(self) -> Path:
        """The output root of the first."""
        return root_of(self.entries[0].path)

    @cached_property
    def differing(self) -> dict[str, list[Any]]:
        """Setting -> its value in each group, for those that are not the same in all; a stage on which not all of them
        stand is one row, with its kind.
        """
        first = [g.entries[0] for g in self.groups]
        stages = dict.fromkeys(name for e in first for name in e.lineage)
        some = [n for n in stages if not all(n in e.lineage for e in first)]
        theirs = tuple(f"{n}." for n in some)
        names = dict.fromkeys(name for e in first for name in e.settings if not name.startswith(theirs))
        rows = {name: [e.settings.get(name) for e in first] for name in names}
        rows |= {n: [e.lineage[n]["kind"] if n in e.lineage else None for e in first] for n in some if "@" not in n}
        return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}

    @cached_property
    def paired(self) -> list[tuple[Group, Group, Interval]]:
        """(first group, another, difference over the seeds that both have), where those are two or more."""
        first, *others = self.groups
        found = [(first, g, paired_difference(first.by_seed(self.metric), g.by_seed(self.metric))) for g in others]
        return [(a, b, interval) for a, b, interval in found if interval and interval.n > 1]


def compare(paths: list[Path], metric: str | None = None) -> list[Comparison]:
    """Compare train stages, by name where several runs have stages of the same name.

    Args:
        paths: stages, runs, or sweeps.
        metric: the number that means and differences are taken of; `val_loss_nats` where it compares.

    Raises:
        UserError: nothing to compare, or no such number.
    """
    there = {path: {p.absolute(): p for p in stages_at(path)} for path in paths}
    unique = {absolute: p for stages in there.values() for absolute, p in stages.items()}
    entries = [Entry(p) for p in unique.values() if reading.record(p)["kind"] == "train"]
    if not entries:
        raise UserError(f"{', '.join(map(str, paths))}: no train stage has started there; run the recipe first")
    by_stage: dict[str, list[Entry]] = {}
    for entry in entries:
        by_stage.setdefault(entry.stage, []).append(entry)
    trained = {e.path.absolute() for e in entries}
    untrained = [str(path) for path, stages in there.items() if not trained & stages.keys()]
    several = {name: found for name, found in by_stage.items() if len({e.key for e in found}) > 1}
    alone = [found[0].label for found in by_stage.values() if len(found) == 1]
    made = [_comparison(n, f, metric) for n, f in several.items()] or [_comparison("", entries, metric)]
    if several and alone:
        made[0].warnings.append(f"{', '.join(alone)}: no stage of that name elsewhere, so it is compared with nothing")
    if untrained:
        made[0].warnings.append(f"{', '.join(untrained)}: no train stage there; an evaluate stage compares such models")
    known = {name for e in entries for name in e.numbers}
    if metric and metric not in known:
        raise UserError(f"--metric {metric}: no run has it; {nearest(metric, known)}")
    return made


def _comparison(stage: str, entries: list[Entry], metric: str | None) -> Comparison:
    same: dict[str, list[Entry]] = {}
    for entry in entries:
        same.setdefault(entry.key, []).append(entry)
    kept = [found[0] for found in same.values()]
    _name(kept, stage)
    groups: dict[str, list[Entry]] = {}
    for entry in kept:
        groups.setdefault(entry.group, []).append(entry)
    made = [Group(_group_label(found), found) for found in groups.values()]
    by_bits = len({e.tokenizer for e in kept}) > 1 and all(BITS in e.numbers for e in kept)
    return Comparison(stage, made, metric or (BITS if by_bits else LOSS), list(_warnings(kept, same.values())))


def _warnings(kept: list[Entry], same: Iterable[list[Entry]]) -> Iterable[str]:
    if twice := [f"{e.label} as {first.label}" for first, *others in same for e in others]:
        yield f"the same results are shown once: {', '.join(twice[:3])}{', ...' if len(twice) > 3 else ''}"
    for e in kept:
        if not e.finished:
            at = f"at step {e.step:,} of {e.facts.get('steps', 0):,}"
            why = f"failed {at} ({e.failure})" if e.failure else f"not finished, {at}"
            yield f"{e.label}: {why}; the numbers are those of its last evaluation"
    objectives = dict.fromkeys(str(e.settings.get("objective.kind")) for e in kept)
    if len(objectives) > 1:
        yield f"the objectives differ ({', '.join(objectives)}), and with them what a loss is; a judge stage compares"
    if len({e.tokenizer for e in kept}) > 1:
        yield "the tokenizers differ: losses in nats per token do not compare, bits per byte do"
    if len({e.corpora for e in kept}) > 1:
        yield "the corpora differ, and with them the held-out text: compare on one text with an evaluate stage"


def _name(entries: list[Entry], stage: str) -> None:
    """The shortest labels that tell entries apart: without the stage's name and the run's where all share them."""
    runs = {e.run for e in entries}
    for e in entries:
        name = (e.name.removesuffix(stage).rstrip("/") if stage else e.name) or ("" if len(runs) > 1 else e.name)
        e.label = "/".join(filter(None, (e.run if len(runs) > 1 else "", name)))
    repeated = Counter(e.label for e in entries)
    for e in entries:
        if repeated[e.label] > 1:
            e.label = f"{e.label} ({e.key[:8]})"


def _group_label(entries: list[Entry]) -> str:
    first = entries[0]
    if len(entries) == 1:
        return first.label
    if all(e.values and e.run == first.run for e in entries):
        names = short_names(first.values or {})
        return ",".join(f"{names[n]}={spell(v)}" for n, v in (first.values or {}).items() if n != SEED) or first.run
    return f"{first.label} and {len(entries) - 1} more"


def _lineage(record: Mapping[str, Any], root: Path, name: str = "") -> Iterable[tuple[str, dict[str, Any]]]:
    """Name -> record of a stage (whose own name is "") and of all that it stands on."""
    yield name, dict(record)
    for source in record["inputs"].values():
        if found := reading.record(root / source["dir"]):
            yield from _lineage(found, root, source["name"])


def _seedless(record: Mapping[str, Any]) -> dict[str, Any]:
    canonical = {k: v for k, v in record["canonical"].items() if k != "seed"}
    return {"canonical": canonical, **{k: record[k] for k in ("kind", "version", "raw")}}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their whole names."""
    out: dict[str, Any] = {}
    for name, value in settings.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {prefix + name: value}
    return out
